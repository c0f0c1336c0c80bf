"""Any full-attention causal LM of transformers, run over forests of tokens.

Linear layers run packed over all new tokens of all sequences; attention runs span by span (``attention``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft, Shape, empty
from spec_lab.engine.attention import SPANS, Attention, Pack, Piece
from spec_lab.engine.kv_cache import GRAIN, Cells, CellSequence, as_index
from spec_lab.engine.runner import Capabilities, Output


@dataclass(frozen=True, eq=False)
class Prepared:
    """The tensors of one forward, and what its result means.

    Args:
        ids: ``[N]`` token ids of the pack, or
        embeds: ``[N, H]`` input embeddings in their place.
        positions: ``[1, N]``.
        pack: cells and attention masks.
        keep: which packed tokens get logits, as transformers' ``logits_to_keep``; on the host if the model is split
            over several devices.
        mask: of dense attention, ``[1, 1, N, S * C]``.
        pending: for each sequence, those that only prefill last, the places of its pending tokens in the pack.
        nodes: for each tree the places of its nodes.
        early: chunks of long prompts that are computed first.
    """

    ids: Tensor | None
    embeds: Tensor | None
    positions: Tensor
    pack: Pack
    keep: Tensor | int
    mask: Tensor | None
    pending: list[slice]
    nodes: list[slice]
    early: tuple[tuple[Prepared, list[int]], ...] = ()

    @property
    def attended(self) -> int:
        """Attended cells."""
        return sum(piece.extent for piece in self.pack.pieces)


class Extended(NamedTuple):
    """What ``CausalLM.extend`` returns: logits ``[n, V]``, and captured hidden states ``[n, layers * H]``."""

    logits: Tensor
    hidden: Tensor | None


class CausalLM:
    """A causal LM of transformers with a KV cache of its own. A ``runner.Runner``.

    Args:
        model: a transformers model with a language-modelling head, in eval mode.
        attention: span by span, or dense (the oracle, and the only way for models without ``AttentionInterface``).
        limit: most cells of one span.
        chunk: longest part of a prompt computed in one forward.
        phase: the name under which module calls are timed on the clock.
    """

    def __init__(
        self,
        model: Any,
        attention: Attention = "spans",
        limit: int | None = None,
        chunk: int = 512,
        phase: str = "target_forward",
    ) -> None:
        self.model = model
        self.attention = attention
        wanted = SPANS if attention == "spans" else "sdpa"
        if attention == "dense" or getattr(model, "_can_set_attn_implementation", lambda: True)():
            model.set_attn_implementation(wanted)
        if attention == "spans" and model.config._attn_implementation != wanted:
            raise NotImplementedError("it does not take its attention from transformers' AttentionInterface")
        self.chunk = chunk
        self.phase = phase
        self.cells = Cells(limit)
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.device
        places = getattr(model, "hf_device_map", None) or {}
        self._split = len({str(place) for place in places.values()}) > 1
        self.clock = Clock(self.device)
        self.forwards = 0  # of the model, so far
        self._asked: tuple[int, ...] = ()
        self._layers: tuple[int, ...] = ()
        self._final: Tensor | None = None
        self._hook: Any = None

    @property
    def capabilities(self) -> Capabilities:
        """See ``runner.Runner``."""
        return Capabilities(hidden_layers=int(self.model.config.num_hidden_layers))

    def open(self, reserve: int = GRAIN) -> CellSequence:
        """An empty sequence with room for ``reserve`` cells (it grows on demand).

        Raises:
            SpanFull: ``reserve`` exceeds the limit.
        """
        return self.cells.open(reserve)

    def capture(self, layers: tuple[int, ...] = ()) -> None:
        """Return these hidden states from now on. Numbers as in ``runner.Capabilities``.

        The state after the final norm, which enters the language-modelling head, is caught by a hook; for others
        transformers keeps all states of a forward.

        Raises:
            ValueError: a layer that the model does not have.
        """
        if layers == self._asked:
            return
        last = self.capabilities.hidden_layers
        if wrong := [layer for layer in layers if not -last - 1 <= layer <= last]:
            raise ValueError(f"hidden state {wrong[0]} does not exist: the model has states 0 to {last}")
        self._asked, layers = layers, tuple(layer % (last + 1) for layer in layers)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._layers = layers
        if layers == (last,):
            self._hook = self.model.get_decoder().register_forward_hook(self._catch)  # OPT never calls its base_model

    def _catch(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._final = output[0][0]  # [N, H]

    @torch.inference_mode()
    def forward(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> Output:
        """``prepare`` and ``run``. Errors as there."""
        return self.run(self.prepare(sequences, pending, draft, prefill))

    @torch.inference_mode()
    def forward_embeds(self, sequences: Sequence[Any], lengths: Sequence[int], embeds: Tensor) -> Output:
        """``forward`` of input embeddings in place of pending tokens, for drafters that read features.

        Args:
            sequences: ``[B]``.
            lengths: ``[B]`` how many embeddings each has, at least one.
            embeds: ``[sum of lengths, H]``, sequence by sequence.

        Returns:
            Logits ``[B, V]`` after each sequence's last embedding, and the captured hidden states of all.

        Raises:
            SpanFull: a span would outgrow its limit.
        """
        pending = [[0] * length for length in lengths]
        nothing = empty(len(sequences), self.device)
        return self.run(replace(self._prepare(sequences, pending, nothing, len(sequences)), ids=None, embeds=embeds))

    def prepare(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> Prepared:
        """See ``runner.Runner``. The cells of pending tokens are appended to their sequences, those of nodes are held.

        Raises:
            SpanFull: a span would outgrow its limit.
        """
        every = [*sequences, *(one for one, _ in prefill)]
        rest = [*pending, *(tokens for _, tokens in prefill)]
        early = []
        while any(len(tokens) > self.chunk for tokens in rest):
            long = [b for b, tokens in enumerate(rest) if len(tokens) > self.chunk]
            parts = [rest[b][: self.chunk] for b in long]
            early.append((self._prepare([every[b] for b in long], parts, None, 0), long))
            for b in long:
                rest[b] = rest[b][self.chunk :]
        last = self._prepare(every, rest, draft, len(sequences))
        return replace(last, early=tuple(early)) if early else last

    @torch.inference_mode()
    def run(self, prepared: Prepared) -> Output:
        """See ``runner.Runner``."""
        parts: list[list[Tensor]] = [[] for _ in prepared.pending]
        for chunk, places in prepared.early:
            _, hidden = self._call(chunk)
            if hidden is not None:
                for place, rows in zip(places, chunk.pending, strict=True):
                    parts[place].append(hidden[rows])
        logits, hidden = self._call(prepared)
        if hidden is None:
            return Output(logits, prepared.attended)
        own = [hidden[rows] for rows in prepared.pending]
        joined = [torch.cat([*more, last]) if more else last for more, last in zip(parts, own, strict=True)]
        return Output(logits, prepared.attended, joined, [hidden[rows] for rows in prepared.nodes])

    @torch.inference_mode()
    def extend(self, sequences: Sequence[Any], shape: Shape, rows: np.ndarray, token: Tensor) -> Extended:
        """Compute nodes whose root and ancestors are computed already: how a draft model grows a forest, by levels.

        Args:
            sequences: ``[B]``, each ending with its tree's root; None for a tree without ``rows``. The nodes are held.
            shape: the forest; it may hold nodes that are never computed, and may have grown since the last call.
            rows: ``[n]`` the nodes to compute, tree by tree, parents first.
            token: ``[n]`` their tokens, or ``[n, H]`` input embeddings in their place.

        Raises:
            SpanFull: a span would outgrow its limit.
        """
        pieces, positions, start = [], [], 0
        for tree, sequence in enumerate(sequences):
            new = rows[shape.root[rows] == tree] if shape.roots > 1 else rows
            if sequence is None or not len(new):
                continue
            nodes, places = shape.trees[tree][1:], shape.places
            if len(sequence.held) < len(nodes):
                more = np.full(len(nodes) - len(sequence.held), -1, dtype=np.int64)
                sequence.held = np.concatenate([sequence.held, more])
            before = nodes[sequence.held >= 0]
            taken = self.cells.take(sequence, len(new))
            sequence.held[places[new]] = taken
            both = np.concatenate([before, new])
            slots = sequence.held[places[both]]
            sees = shape.ancestors[new][:, both]
            extent = max(sequence.extent, max(slots.tolist()) + 1)
            mask = None
            if len(new) > 1 or extent != len(sequence) + len(both) or not sees.all():
                bias = np.empty((len(new), extent), dtype=np.float32)
                bias[:] = sequence.bias(extent)
                bias[:, slots] = np.where(sees, np.float32(0), np.float32(-np.inf))
                mask = torch.from_numpy(bias).to(self.device, self.dtype)
            index = as_index(taken, self.device)
            pieces.append(Piece(sequence.span, start, start + len(new), index, extent, mask, False))
            positions.append(len(sequence) - 1 + shape.depth[new])
            start += len(new)
        return Extended(*self._call(self._packed(token, np.concatenate(positions), pieces, 0)))

    def _prepare(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft | None,
        trees: int,
    ) -> Prepared:
        """One forward; the first ``trees`` sequences have trees, the others get no logits."""
        shape = None if draft is None or not draft.shape.nodes else draft.shape
        pieces, taken, positions, start = [], [], [], 0
        pending_places, node_places = [], []
        for tree, (sequence, tokens) in enumerate(zip(sequences, pending, strict=True)):
            own = shape if tree < trees else None
            count = len(tokens) + (len(own.trees[tree]) - 1 if own else 0)
            slots = self.cells.take(sequence, count)
            taken.append(slots)
            positions.append(_positions(len(sequence), len(tokens), own, tree))
            pieces.append(self._piece(sequence, slots, start, len(tokens), own, tree))
            pending_places.append(slice(start, start + len(tokens)))
            if tree < trees:
                node_places.append(slice(start + len(tokens), start + count))
            start += count
        keep: Tensor | int
        order, keep = _order([len(tokens) for tokens in pending[:trees]], shape)
        if trees < len(pending):  # only the first trees have rows
            rows = sum(map(len, pending[:trees])) + (shape.nodes if shape else 0)
            if trees and not isinstance(keep, Tensor):
                keep = torch.arange(rows)
            elif not trees:
                keep = 1  # a part of a prompt: only its cells are needed
            if order is not None:
                order = torch.cat([order, torch.arange(rows, start)])
        flat = [token for tokens in pending[:trees] for token in tokens]
        ids = torch.tensor(flat, dtype=torch.long, device=self.device)
        if shape is not None and draft is not None:
            ids = torch.cat([ids, draft.token])
        if trees < len(pending):
            more = [token for tokens in pending[trees:] for token in tokens]
            ids = torch.cat([ids, torch.tensor(more, dtype=torch.long, device=self.device)])
        if order is not None:
            ids = ids[order]
        where = positions[0] if len(positions) == 1 else np.concatenate(positions)
        prepared = self._packed(ids, where, pieces, keep, pending_places, node_places)
        for tree, (sequence, tokens, slots) in enumerate(zip(sequences, pending, taken, strict=True)):
            self.cells.keep(sequence, slots[: len(tokens)])
            if tree < trees:
                sequence.held = slots[len(tokens) :]
        return prepared

    def _piece(
        self, sequence: CellSequence, slots: np.ndarray, start: int, pending: int, shape: Shape | None, tree: int
    ) -> Piece:
        count = len(slots)
        extent = max(sequence.extent, int(slots[-1]) + 1)
        index = as_index(slots, self.device)
        columns = index if isinstance(index, slice) else slots
        whole = extent == len(sequence) + count  # the span's first cells are this sequence and nobody else's
        if whole and count == 1:
            return Piece(sequence.span, start, start + 1, index, extent, None, False)
        if whole and count == pending and not len(sequence) and self.attention == "spans":
            return Piece(sequence.span, start, start + count, index, extent, None, True)
        mask = np.empty((count, extent), dtype=np.float32)
        mask[:] = sequence.bias(extent)
        mask[:, columns] = _block(shape, tree, pending)
        additive = torch.from_numpy(mask).to(self.device, self.dtype)
        return Piece(sequence.span, start, start + count, index, extent, additive, False)

    def _packed(
        self,
        given: Tensor,
        positions: np.ndarray,
        pieces: list[Piece],
        keep: Tensor | int,
        pending: list[slice] | None = None,
        nodes: list[slice] | None = None,
    ) -> Prepared:
        pack = Pack(self.cells, pieces, self.device, self.attention == "dense")
        mask = self._dense_mask(pieces, len(given)) if pack.dense else None
        where = torch.from_numpy(positions).to(self.device)[None]
        if (
            isinstance(keep, Tensor) and not self._split
        ):  # indexes hidden states, which may be elsewhere in a split model
            keep = keep.to(self.device)
        ids, embeds = (given, None) if given.ndim == 1 else (None, given)
        return Prepared(ids, embeds, where, pack, keep, mask, pending or [], nodes or [])

    def _call(self, prepared: Prepared) -> tuple[Tensor, Tensor | None]:
        """Logits ``[R, V]``, and the captured hidden states ``[N, layers * H]``."""
        self.forwards += 1
        given = {"input_ids": prepared.ids} if prepared.embeds is None else {"inputs_embeds": prepared.embeds}
        given = {name: None if value is None else value[None] for name, value in given.items()}
        more: dict[str, Any] = {"output_hidden_states": True} if self._layers and self._hook is None else {}
        with self.clock.phase(self.phase):
            output = self.model(
                **given,
                position_ids=prepared.positions,
                attention_mask=prepared.mask,
                past_key_values=prepared.pack,
                use_cache=True,
                logits_to_keep=prepared.keep,
                **more,
            )
        hidden = None
        if self._hook is not None:
            hidden, self._final = self._final, None
        elif self._layers:
            hidden = torch.cat([output.hidden_states[layer][0].to(self.device) for layer in self._layers], -1)
        return output.logits[0], None if hidden is None else hidden.to(self.device)

    def _dense_mask(self, pieces: list[Piece], rows: int) -> Tensor:  # [1, 1, N, S * C]
        """One additive mask over the whole pack and the whole store: quadratic, plain, the oracle."""
        size = rows, self.cells.spans, self.cells.capacity
        store = torch.full(size, -torch.inf, dtype=self.dtype, device=self.device)
        for piece in pieces:
            store[piece.start : piece.stop, piece.span, : piece.extent] = 0.0 if piece.mask is None else piece.mask
        return store.flatten(1)[None, None]


def _positions(length: int, pending: int, shape: Shape | None, tree: int) -> np.ndarray:
    if shape is None:
        return np.arange(length, length + pending)
    nodes = length + pending - 1 + shape.tree_depths[tree]  # of the head, too
    return nodes if pending == 1 else np.concatenate([np.arange(length, length + pending - 1), nodes])


def _block(shape: Shape | None, tree: int, pending: int) -> np.ndarray:
    """The attention mask among a tree's pending tokens and nodes, additive float32 ``[rows, rows]``."""
    if shape is None:
        return np.triu(np.full((pending, pending), -np.inf, dtype=np.float32), 1)
    nodes = _tree_block(shape, tree)
    if pending == 1:
        return nodes
    block = np.full((pending - 1 + len(nodes),) * 2, -np.inf, dtype=np.float32)
    block[np.tril_indices(len(block), 0)] = 0.0  # each after all before it
    block[pending - 1 :, pending - 1 :] = nodes
    return block


@lru_cache(maxsize=256)
def _tree_block(shape: Shape, tree: int) -> np.ndarray:
    """``_block`` of a tree's head and nodes."""
    rows = shape.trees[tree]
    return np.where(shape.ancestors[np.ix_(rows, rows)], np.float32(0), np.float32(-np.inf))


def _order(pending: list[int], shape: Shape | None) -> tuple[Tensor | None, Tensor | int]:
    """How to go from (all pending, then all nodes) to the pack, and from the pack to rows (heads, then nodes).

    None, and 0 as transformers' ``logits_to_keep`` has it, stand for the identity.
    """
    heads = len(pending)
    if shape is None:
        if sum(pending) == heads:
            return None, 0
        return None, torch.from_numpy(np.cumsum(pending) - 1)
    if heads == 1:
        return None, 0 if pending[0] == 1 else torch.arange(pending[0] - 1, pending[0] + shape.nodes)
    ends = np.cumsum(pending)
    order, keep, packed = [], np.empty(shape.rows, dtype=np.int64), 0
    for tree, rows in enumerate(shape.trees):
        order.append(np.arange(ends[tree] - pending[tree], ends[tree]))
        order.append(ends[-1] + rows[1:] - heads)
        keep[rows] = packed + pending[tree] - 1 + np.arange(len(rows))
        packed += pending[tree] - 1 + len(rows)
    return torch.from_numpy(np.concatenate(order)), torch.from_numpy(keep)
