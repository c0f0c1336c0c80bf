"""Any full-attention causal LM of transformers, run over forests of tokens.

Linear layers run packed over all new tokens of all sequences; attention runs span by span (``attention``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.core.clock import Clock, Mark
from spec_lab.core.draft import Draft, Shape
from spec_lab.engine.attention import SPANS, Attention, Pack, Piece
from spec_lab.engine.kv_cache import Cells, Path, as_index


@dataclass(frozen=True, eq=False)
class Output:
    """What one forward over a forest gives.

    Args:
        logits: ``[R, V]``, heads first, then nodes.
        slots: for each tree the cells that its nodes hold until the caller keeps or drops them.
        attended: cells attended in total.
        marks: (start, end) of the module calls, on the model's clock.
    """

    logits: Tensor
    slots: list[np.ndarray]
    attended: int
    marks: list[tuple[Mark, Mark]]


class CausalLM:
    """A causal LM with cells of its own.

    Args:
        model: a transformers model with a language-modelling head, in eval mode.
        attention: span by span, or dense (the oracle, and the only way for models without ``AttentionInterface``).
        limit: most cells of one span.
        chunk: longest part of a prompt computed in one forward.
    """

    def __init__(
        self,
        model: Any,
        attention: Attention = "spans",
        limit: int | None = None,
        chunk: int = 512,
    ) -> None:
        self.model = model
        self.attention = attention
        wanted = SPANS if attention == "spans" else "sdpa"
        if attention == "dense" or getattr(model, "_can_set_attn_implementation", lambda: True)():
            model.set_attn_implementation(wanted)
        if attention == "spans" and model.config._attn_implementation != wanted:
            raise NotImplementedError("it does not take its attention from transformers' AttentionInterface")
        self.chunk = chunk
        self.cells = Cells(limit)
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.device
        self.clock = Clock(self.device)
        self.forwards = 0  # of the model, so far
        self._hidden: Tensor | None = None
        self._hook: Any = None

    def keep_hidden(self, wanted: bool) -> None:
        """Whether cells also keep the hidden states that enter the language-modelling head."""
        if wanted and self._hook is None:
            self._hook = self.model.base_model.register_forward_hook(self._catch)
        elif not wanted and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _catch(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._hidden = output[0][0]  # [N, width]

    @torch.inference_mode()
    def forward(self, paths: Sequence[Path], pending: Sequence[Sequence[int]], draft: Draft) -> Output:
        """Compute every sequence's pending tokens and the tree below each.

        Pending tokens are committed, so their cells are appended to the paths; nodes' cells are only held.

        Args:
            paths: ``[B]`` what is already computed.
            pending: ``[B]`` tokens that follow, at least one each.
            draft: the forest below the last pending tokens.

        Raises:
            SpanFull: a span would outgrow its limit.
        """
        marks: list[tuple[Mark, Mark]] = []
        rest = list(pending)
        while any(len(tokens) > self.chunk for tokens in rest):
            long = [b for b, tokens in enumerate(rest) if len(tokens) > self.chunk]
            some = [rest[b][: self.chunk] for b in long]
            self._run([paths[b] for b in long], some, None, marks)
            for b in long:
                rest[b] = rest[b][self.chunk :]
        logits, slots, attended = self._run(paths, rest, draft, marks)
        return Output(logits, slots, attended, marks)

    @torch.inference_mode()
    def extend(
        self, paths: Sequence[Path | None], shape: Shape, rows: np.ndarray, token: Tensor, slots: np.ndarray
    ) -> Output:
        """Compute nodes whose heads and ancestors are computed already: how a draft model grows a forest, by levels.

        Args:
            paths: ``[B]``, each ending with its tree's head; None for a tree without ``rows``.
            shape: the forest; it may hold nodes that are never computed.
            rows: ``[n]`` the nodes to compute, tree by tree, parents first.
            token: ``[n]`` their tokens.
            slots: ``[R]`` the cell that each computed node holds, -1 elsewhere; filled in for ``rows``.

        Returns:
            Logits ``[n, V]``; the slots taken for each tree.

        Raises:
            SpanFull: a span would outgrow its limit.
        """
        pieces, positions, taken, start = [], [], [], 0
        for tree, path in enumerate(paths):
            new = rows[shape.root[rows] == tree] if shape.roots > 1 else rows
            taken.append(np.empty(0, dtype=np.int64))
            if path is None or not len(new):
                continue
            held = shape.trees[tree]
            held = held[slots[held] >= 0]
            slots[new] = taken[-1] = self.cells.take(path, len(new))
            both = np.concatenate([held, new])
            sees = shape.ancestors[new][:, both]
            extent = max(path.extent, max(slots[both].tolist()) + 1)
            mask = None
            if len(new) > 1 or extent != len(path) + len(both) or not sees.all():
                bias = np.empty((len(new), extent), dtype=np.float32)
                bias[:] = path.bias(extent)
                bias[:, slots[both]] = np.where(sees, np.float32(0), np.float32(-np.inf))
                mask = torch.from_numpy(bias).to(self.device, self.dtype)
            index = as_index(taken[-1], self.device)
            pieces.append(Piece(path.span, start, start + len(new), index, extent, mask, False))
            positions.append(len(path) - 1 + shape.depth[new])
            start += len(new)
        marks: list[tuple[Mark, Mark]] = []
        logits = self._call(token, np.concatenate(positions), pieces, 0, marks)
        return Output(logits, taken, sum(piece.extent for piece in pieces), marks)

    def _run(
        self, paths: Sequence[Path], pending: Sequence[Sequence[int]], draft: Draft | None, marks: list
    ) -> tuple[Tensor, list[np.ndarray], int]:
        shape = None if draft is None or not draft.shape.nodes else draft.shape
        pieces, taken, positions, start = [], [], [], 0
        for tree, (path, tokens) in enumerate(zip(paths, pending, strict=True)):
            count = len(tokens) + (len(shape.trees[tree]) - 1 if shape else 0)
            slots = self.cells.take(path, count)
            taken.append(slots)
            positions.append(_positions(len(path), len(tokens), shape, tree))
            pieces.append(self._piece(path, slots, start, len(tokens), shape, tree))
            start += count
        keep: Tensor | int
        order, keep = _order([len(tokens) for tokens in pending], shape)
        ids = torch.tensor([token for tokens in pending for token in tokens], dtype=torch.long, device=self.device)
        if shape is not None and draft is not None:
            ids = torch.cat([ids, draft.token])
        if order is not None:
            ids = ids[order]
        if draft is None:  # a part of a prompt: only its cells are wanted
            keep = 1
        where = positions[0] if len(positions) == 1 else np.concatenate(positions)
        logits = self._call(ids, where, pieces, keep, marks)
        node_slots = []
        for path, tokens, slots in zip(paths, pending, taken, strict=True):
            self.cells.keep(path, slots[: len(tokens)])
            node_slots.append(slots[len(tokens) :])
        return logits, node_slots, sum(piece.extent for piece in pieces)

    def _piece(self, path: Path, slots: np.ndarray, start: int, pending: int, shape: Shape | None, tree: int) -> Piece:
        count = len(slots)
        extent = max(path.extent, int(slots[-1]) + 1)
        index = as_index(slots, self.device)
        columns = index if isinstance(index, slice) else slots
        whole = extent == len(path) + count  # the span's first cells are this sequence and nobody else's
        if whole and count == 1:
            return Piece(path.span, start, start + 1, index, extent, None, False)
        if whole and count == pending and not len(path) and self.attention == "spans":
            return Piece(path.span, start, start + count, index, extent, None, True)
        mask = np.empty((count, extent), dtype=np.float32)
        mask[:] = path.bias(extent)
        mask[:, columns] = _block(shape, tree, pending)
        additive = torch.from_numpy(mask).to(self.device, self.dtype)
        return Piece(path.span, start, start + count, index, extent, additive, False)

    def _call(self, ids: Tensor, positions: np.ndarray, pieces: list[Piece], keep: Tensor | int, marks: list) -> Tensor:
        pack = Pack(self.cells, pieces, self.device, self.attention == "dense")
        mask = self._dense_mask(pieces, len(ids)) if pack.dense else None
        where = torch.from_numpy(positions).to(self.device)[None]
        self.forwards += 1
        start = self.clock.mark()
        output = self.model(
            input_ids=ids[None],
            position_ids=where,
            attention_mask=mask,
            past_key_values=pack,
            use_cache=True,
            logits_to_keep=keep,
        )
        marks.append((start, self.clock.mark()))
        if self._hidden is not None:
            self.cells.write_hidden(self._hidden.to(self.device), pack.places)
            self._hidden = None
        return output.logits[0]

    def _dense_mask(self, pieces: list[Piece], rows: int) -> Tensor:  # [1, 1, N, S * C]
        """One additive mask over the whole pack and the whole store: quadratic, plain, the oracle."""
        store = torch.full((rows, self.cells.spans, self.cells.capacity), -torch.inf, dtype=self.dtype)
        for piece in pieces:
            visible = 0.0 if piece.mask is None else piece.mask.cpu()
            store[piece.start : piece.stop, piece.span, : piece.extent] = visible
        return store.flatten(1)[None, None].to(self.device)


def _positions(length: int, pending: int, shape: Shape | None, tree: int) -> np.ndarray:
    if shape is None:
        return np.arange(length, length + pending)
    nodes = length + pending - 1 + shape.tree_depths[tree]  # of the head, too
    return nodes if pending == 1 else np.concatenate([np.arange(length, length + pending - 1), nodes])


def _block(shape: Shape | None, tree: int, pending: int) -> np.ndarray:
    """Who sees whom among a tree's pending tokens and nodes, additive float32 ``[rows, rows]``."""
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
