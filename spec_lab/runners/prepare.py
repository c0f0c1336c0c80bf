"""The host's part of a forward over forests of tokens: cells, positions, attention masks, and their upload.

The rows of a forward are the new tokens of all sequences, sequence by sequence: pending tokens first, then the nodes of
the sequence's draft tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload
from spec_lab.runners.attention import FULL, AttentionKind, Pack, Segment, attention_mask
from spec_lab.runners.forward import Forward, ModelCall
from spec_lab.runners.kv_cache import NONE_HELD, Cells, CellSequence, as_slice

NOTHING_GIVEN: Mapping[int, np.ndarray] = {}


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared(Forward):
    """A forward in shapes as they come.

    Args:
        ids: ``[1, N]`` token ids; for a ``FeatureLM`` what it was given in their place.
        positions: ``[1, N]``.
        pack: cells and attention masks.
        keep: which rows get logits, as transformers' ``logits_to_keep``; on the host if the model is split over several
            devices.
        mask: of dense attention (``dense``).
    """

    ids: Tensor
    positions: Tensor
    pack: Pack
    keep: Tensor | int
    mask: Any = None
    early: Sequence[tuple[Prepared, list[int]]] = ()

    def compute(self, call: ModelCall) -> tuple[Tensor, Tensor | None]:
        """See ``forward.Forward``."""
        return call(self.ids, self.positions, self.pack, self.mask, self.keep)


class Uncommitted(NamedTuple):
    """The rows of one sequence in a forward, and the uncommitted tokens among which it attends.

    Args:
        start: its first row.
        sequence: as it was before the forward.
        taken: ``[n]`` the cells of its new rows.
        query: ``[n]`` their positions.
        slots: ``[m]`` cells of uncommitted tokens, the new rows' included.
        key: ``[m]`` positions of these tokens.
        mask: ``[n, m]`` additive, to which of them each row attends; None for all of them.
        causal: whether the sequence held nothing before, and each row attends to those before it.
        anchor: the last computed position, after which rows are drafted; None: no row is.
    """

    start: int
    sequence: CellSequence
    taken: np.ndarray
    query: np.ndarray
    slots: np.ndarray
    key: np.ndarray
    mask: np.ndarray | None
    causal: bool = False
    anchor: int | None = None

    @property
    def end(self) -> int:
        """The last cell attended to + 1."""
        return max(self.sequence.extent, max(self.slots.tolist()) + 1)

    def key_positions(self, end: int) -> np.ndarray:  # [end]
        """The positions of the tokens in the stream's first cells; of cells that are not attended to, any number."""
        key = np.zeros(end, dtype=np.int64)
        key[self.sequence.slots] = np.arange(len(self.sequence))
        key[self.slots] = self.key
        return key


class Planned(NamedTuple):
    """The rows of one forward, and their cells.

    Args:
        numbers: ``[2, N]`` token ids, 0 of nodes; positions.
        new: for each sequence with rows what it computes.
        pending: for each sequence the rows of its pending tokens.
        nodes: for each tree the rows of its nodes.
        roots: of each tree the root's row.
    """

    numbers: np.ndarray
    new: list[Uncommitted]
    pending: list[slice]
    nodes: list[slice]
    roots: list[int]

    def logits(self, draft: Draft | None) -> np.ndarray:  # [R]
        """The rows that get logits: the forest's, in its order."""
        roots = np.array(self.roots, dtype=np.int64)
        return roots if draft is None else roots[draft.shape.root] + draft.shape.places + 1


class Staged(NamedTuple):
    """A forward whose numbers are not uploaded yet.

    Args:
        host: what is uploaded.
        complete: returns the forward, given that on the device.
    """

    host: list[np.ndarray]
    complete: Callable[[Sequence[Tensor]], Prepared]


class LevelsAhead(NamedTuple):
    """The forwards of a forest of known shape below pending tokens. See ``Packer.levels_ahead``.

    Args:
        first: of the pending tokens.
        levels: of the nodes of each depth, from depth 1 on, with zeros for tokens.
        given: further arrays that were uploaded with them.
    """

    first: Prepared
    levels: list[Prepared]
    given: list[Tensor]


@dataclass(frozen=True, eq=False)
class Packer:
    """Prepares forwards of one model.

    Args:
        cells: where its keys and values are.
        kinds: of layers without full attention, by layer.
        layers: how many layers it has.
        dtype: of its weights.
        chunk: most tokens of a sequence that are appended by one forward: its attention mask has their square.
        split: whether its layers are on several devices.
        counting: of the model (``attention.counting_layers``).
        indexed: whether rows with logits must be named by an index. Where the last layers share keys and values
            (Gemma 4), transformers, given their number, computes those layers of these rows alone, and a ``Pack`` has
            masks for all rows.
    """

    cells: Cells
    kinds: Mapping[int, AttentionKind]
    layers: int
    device: torch.device
    dtype: torch.dtype
    chunk: int = 512
    split: bool = False
    counting: Mapping[int, torch.device] = field(default_factory=dict)
    indexed: bool = False
    dense = False  # see ``dense.DensePacker``

    def prepare(
        self,
        sequences: Sequence[CellSequence],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[CellSequence, Sequence[int]]] = (),
    ) -> Prepared:
        """``CausalLM.prepare``: ``forest``, with pending tokens beyond ``chunk`` in earlier forwards."""
        plain = sequences and not (draft.shape.nodes or prefill or self.dense)
        if plain and self.kinds:  # windows, chunks and biases are of positions, not of cells
            plain = all(sequence.in_order for sequence in sequences)
        if plain and all(len(tokens) == 1 for tokens in pending):
            cells = [self.cells.take_next(sequence) for sequence in sequences]
            if -1 not in cells:
                return self._one_token_each(sequences, pending, cells)
            for sequence, cell in zip(sequences, cells, strict=True):
                if cell >= 0:
                    self.cells.drop(sequence, cell)
        every = [*sequences, *(sequence for sequence, _ in prefill)]
        early, rest = self.early(every, [*pending, *(tokens for _, tokens in prefill)])
        return self.finish(self.plan(every, rest, draft, len(sequences)), draft, early)

    def early(
        self, sequences: Sequence[CellSequence], pending: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[Prepared, list[int]]], list[Sequence[int]]]:
        """Prepare forwards of pending tokens beyond ``chunk`` (``Forward.early``); return them and what is left."""
        early, rest, chunk = [], list(pending), self.chunk
        while long := [number for number, tokens in enumerate(rest) if len(tokens) > chunk]:
            early.append((self.append([sequences[number] for number in long], [rest[n][:chunk] for n in long]), long))
            for number in long:
                rest[number] = rest[number][chunk:]
        return early, rest

    def plan(
        self,
        sequences: Sequence[CellSequence],
        pending: Sequence[Sequence[int]],
        draft: Draft | None,
        trees: int,
        given: Mapping[int, np.ndarray] = NOTHING_GIVEN,
    ) -> Planned:
        """Take cells for pending tokens and nodes; the first ``trees`` sequences have trees.

        Args:
            given: for some sequences, by number, the cells ``[n]`` that their rows have already; -1 for none.
        """
        shape = None if draft is None or not draft.shape.nodes else draft.shape
        total = sum(map(len, pending)) + (0 if shape is None else shape.nodes)
        numbers = np.zeros((2, total), dtype=np.int64)
        new, pending_rows, node_rows, roots = [], [], [], []
        start = 0
        for tree, (sequence, tokens) in enumerate(zip(sequences, pending, strict=True)):
            computed, count = len(sequence), len(tokens)
            tree_shape = shape if tree < trees else None
            stop = start + count + (0 if tree_shape is None else len(tree_shape.trees[tree]) - 1)
            numbers[0, start : start + count] = tokens
            query = numbers[1, start:stop]
            query[:count] = computed if count == 1 else np.arange(computed, computed + count)
            if tree_shape is not None:
                np.add(tree_shape.tree_depths[tree][1:], computed + count - 1, out=query[count:])
            if tree in given:
                slots = given[tree]
                slots[slots < 0] = self.cells.take(sequence, int((slots < 0).sum()))
            else:
                slots = self.cells.take(sequence, stop - start)
            mask = None if stop == start + 1 else forest_mask(tree_shape, tree, count)
            causal = mask is not None and not computed and stop == start + count
            new.append(Uncommitted(start, sequence, slots, query, slots, query, mask, causal))
            pending_rows.append(slice(start, start + count))
            if tree < trees:
                node_rows.append(slice(start + count, stop))
                roots.append(start + count - 1)
            start = stop
        return Planned(numbers, new, pending_rows, node_rows, roots)

    def keep(self, planned: Planned) -> None:
        """Append the pending tokens' cells to their sequences, and hold those of nodes.

        Only when nothing can fail any more: if memory runs out while cells are taken, no sequence has grown.
        """
        for tree, (new, rows) in enumerate(zip(planned.new, planned.pending, strict=True)):
            count = rows.stop - rows.start
            self.cells.keep(new.sequence, new.taken[:count].tolist())
            if tree < len(planned.roots):
                new.sequence.held = new.taken[count:]

    def give_back(self, planned: Planned) -> None:
        """Free the cells of a plan that is not carried out."""
        for new in planned.new:
            self.cells.drop(new.sequence, new.taken)

    def append(self, sequences: Sequence[CellSequence], pending: Sequence[Sequence[int]]) -> Prepared:
        """Prepare a forward that appends tokens to sequences, without logits."""
        return self.finish(self.plan(sequences, pending, None, 0), None)

    def finish(
        self, planned: Planned, draft: Draft | None, early: Sequence[tuple[Prepared, list[int]]] = ()
    ) -> Prepared:
        """Prepare a forward of rows that are planned, after ``early`` ones; sequences without trees get no logits."""
        staged = self.stage(planned, draft, early)
        there = upload(self.device, *staged.host)
        self.keep(planned)
        return staged.complete(there)

    def stage(self, planned: Planned, draft: Draft | None, early: Sequence[tuple[Prepared, list[int]]] = ()) -> Staged:
        """``finish`` without its upload. The forward holds the tokens of a draft where these are on the device."""
        numbers, roots, trees = planned.numbers, planned.roots, len(planned.roots)
        keep: Tensor | int = 0
        rows: np.ndarray | None = None
        if not trees:
            keep = 1  # a part of a prompt: only its cells are needed
        elif len(planned.new) == 1:
            keep = numbers.shape[1] - roots[0]
        elif numbers.shape[1] != trees:
            rows = planned.logits(draft)
        drafted = None if draft is None or not draft.shape.nodes else draft
        if drafted is not None and drafted.array is not None:
            numbers[0, planned.nodes[0] if rows is None else rows[trees:]] = drafted.array
        segments, attended, host = self._packed(planned, *((numbers,) if rows is None else (numbers, rows)))

        def complete(there: Sequence[Tensor]) -> Prepared:
            given, kept = there[0], keep
            if rows is not None:
                kept = torch.from_numpy(rows) if self.split else there[1]  # of hidden states, perhaps on another device
            if drafted is not None and drafted.array is None:
                given[0, planned.nodes[0] if rows is None else there[1][trees:]] = drafted.token
            if self.indexed and isinstance(kept, int):
                kept = torch.arange(numbers.shape[1] - kept if kept else 0, numbers.shape[1], device=self.device)
            return self._prepared(
                given[:1], given[1:], _on_device(segments, there, self.dtype), kept, attended=attended,
                pending=planned.pending, nodes=planned.nodes, early=early,
            )  # fmt: skip

        return Staged(host, complete)

    def levels_ahead(
        self, planned: Planned, sequences: Sequence[CellSequence | None], shape: Shape, arrays: Sequence[np.ndarray]
    ) -> LevelsAhead:
        """Prepare pending tokens that are planned, and all levels of a forest below, whose tokens are drawn later.

        All of it is uploaded at once. If memory runs out, no sequence has grown.

        Args:
            planned: pending tokens, of the sequences that have trees or of all.
            sequences: ``[B]`` as in ``CausalLM.extend``.
            shape: the forest; its last level is not computed.
            arrays: what else is uploaded.
        """
        lengths = [len(new.sequence) for new in planned.new]
        staged = [self.stage(planned, None)]
        self.keep(planned)
        try:
            for level in shape.levels[1:]:
                rows = self.plan_level(sequences, shape, level.parents)
                staged.append(self._stage_level(rows, rows.numbers[0]))
            there = upload(self.device, *arrays, *(array for part in staged for array in part.host))
        except BaseException:
            for new, length in zip(planned.new, lengths, strict=True):
                new.sequence.accept()
                new.sequence.truncate(length)
            raise
        given, there = there[: len(arrays)], there[len(arrays) :]
        forwards = []
        for part in staged:
            forwards.append(part.complete(there[: len(part.host)]))
            there = there[len(part.host) :]
        return LevelsAhead(forwards[0], forwards[1:], given)

    def _one_token_each(
        self, sequences: Sequence[CellSequence], pending: Sequence[Sequence[int]], cells: list[int]
    ) -> Prepared:
        """Prepare, as ``finish``, one token of each sequence in the cell after its others, in half the time.

        So the step of autoregressive decoding, whose host work is a visible share of it, is not slowed down by what
        only trees need.
        """
        given = np.array([[tokens[0] for tokens in pending], cells], dtype=np.int64)  # positions are cells here
        (numbers,) = upload(self.device, given)
        segments = self._no_segments()
        for kind, kind_segments in segments.items():
            for row, (sequence, cell) in enumerate(zip(sequences, cells, strict=True)):
                first, end = kind.first(cell), cell + 1
                kind_segments.append(Segment(sequence.stream, row, row + 1, slice(cell, end), first, end, None, False))
        for sequence, cell in zip(sequences, cells, strict=True):
            self.cells.keep_next(sequence, cell)
            sequence.held = NONE_HELD
        rows, keep = range(len(cells)), 1 if len(cells) == 1 else 0
        pending_rows, no_nodes = [slice(row, row + 1) for row in rows], [slice(row + 1, row + 1) for row in rows]
        return self._prepared(
            numbers[:1], numbers[1:], segments, keep, attended=sum(cells) + len(cells), pending=pending_rows,
            nodes=no_nodes,
        )  # fmt: skip

    def plan_level(
        self, sequences: Sequence[CellSequence | None], shape: Shape, rows: np.ndarray, ahead: bool = False
    ) -> Planned:
        """Take cells for nodes whose ancestors are computed already. See ``CausalLM.extend``.

        Args:
            sequences, shape, rows: as there.
            ahead: whether the nodes follow pending tokens that are computed ahead (``CellSequence.ahead``).
        """
        new, start, places, depths = list[Uncommitted](), 0, shape.places[rows], shape.depth[rows]
        ends = [0, len(rows)]  # of each tree: rows come tree by tree
        if len(sequences) != 1:
            ends = np.searchsorted(shape.root[rows], np.arange(len(sequences) + 1)).tolist()
        positions = np.zeros((2, len(rows)), dtype=np.int64)
        for tree, (sequence, (first, stop)) in enumerate(zip(sequences, pairwise(ends), strict=True)):
            holder: Any = sequence if sequence is None or not ahead else sequence.ahead
            if sequence is None or holder is None or first == stop:
                continue
            before, count, nodes = holder.slots if ahead else NONE_HELD, stop - first, places[first:stop]
            held = holder.held = lengthened(holder.held, len(shape.trees[tree]) - 1)
            root, mask = len(sequence) + len(before) - 1, None
            query = np.add(depths[first:stop], root, out=positions[1, start : start + count])
            if count == 1 and not shape.branches:  # all that is held is above it
                held[nodes] = taken = self.cells.take(sequence, 1)
                slots = held[: query.item() - root]
                key = np.arange(root + 1, root + 1 + len(slots))
            else:
                both = np.concatenate([(held >= 0).nonzero()[0], nodes])
                held[nodes] = taken = self.cells.take(sequence, count)
                slots, rest = held[both], both + 1
                key, mask = shape.tree_depths[tree][rest] + root, shape.tree_masks[tree][nodes[:, None] + 1, rest]
            if len(before):
                slots = np.concatenate([before, slots])
                key = np.concatenate([np.arange(len(sequence), root + 1), key])
                mask = None if mask is None else np.pad(mask, ((0, 0), (len(before), 0)))
            mask = None if mask is None or not mask.any() else mask
            new.append(Uncommitted(start, sequence, taken, query, slots, key, mask, anchor=root))
            start += count
        return Planned(positions[:, :start], new, [], [], [])

    def level(
        self, sequences: Sequence[CellSequence | None], shape: Shape, rows: np.ndarray, token: Tensor | np.ndarray
    ) -> Prepared:
        """Prepare nodes whose ancestors are computed already. See ``CausalLM.extend``."""
        return self.finish_level(self.plan_level(sequences, shape, rows), token)

    def blocks(self, sequences: Sequence[CellSequence], lengths: Sequence[int], size: int) -> Prepared:
        """Prepare rows that are appended to sequences, and after those of each a block of rows that is held.

        The rows of a block attend to everything before them and, in both directions, to each other. So do those that
        are appended: they are for layers that use only their keys and values. ``Prepared.nodes`` are the blocks' rows.

        Args:
            sequences: ``[B]``.
            lengths: ``[B]`` how many rows are appended to each, perhaps none.
            size: the number of rows of a block, at least 1.
        """
        planned = self.plan(sequences, [[0] * (length + size) for length in lengths], None, 0)
        starts = [rows.start + length for rows, length in zip(planned.pending, lengths, strict=True)]
        appended = [slice(rows.start, start) for rows, start in zip(planned.pending, starts, strict=True)]
        blocks = [slice(start, start + size) for start in starts]
        both_ways = [
            new._replace(mask=None, causal=False, anchor=len(new.sequence) + length - 1)
            for new, length in zip(planned.new, lengths, strict=True)
        ]
        planned = planned._replace(new=both_ways, pending=appended, nodes=blocks, roots=starts)
        segments, attended, host = self._packed(planned, planned.numbers[1])
        there = upload(self.device, *host)
        self.keep(planned)
        rows = {"attended": attended, "pending": appended, "nodes": blocks}
        return self._prepared(there[0][None], there[0][None], _on_device(segments, there, self.dtype), 0, **rows)

    def finish_level(self, planned: Planned, token: Tensor | np.ndarray, keep: np.ndarray | int = 0) -> Prepared:
        """``level`` of rows that are planned, with logits of the rows ``keep`` (``Prepared``)."""
        staged = self._stage_level(planned, token, keep)
        return staged.complete(upload(self.device, *staged.host))

    def _stage_level(self, planned: Planned, token: Tensor | np.ndarray, keep: np.ndarray | int = 0) -> Staged:
        """``finish_level`` without its upload."""
        given = [array for array in (token, keep) if isinstance(array, np.ndarray)]
        segments, attended, host = self._packed(planned, planned.numbers[1], *given)

        def complete(there: Sequence[Tensor]) -> Prepared:
            ids = token if isinstance(token, Tensor) else there[1]
            rows = keep if isinstance(keep, int) else there[len(given)]
            return self._prepared(
                ids[None], there[0][None], _on_device(segments, there, self.dtype), rows, attended=attended
            )

        return Staged(host, complete)

    def _no_segments(self) -> dict[AttentionKind, list[Segment]]:
        if not self.kinds:
            return {FULL: []}
        return {self.kinds.get(layer, FULL): [] for layer in range(self.layers)}

    def _packed(
        self, planned: Planned, *arrays: np.ndarray
    ) -> tuple[dict[AttentionKind, list[Segment]], int, list[np.ndarray]]:
        """Return the rows and cells of every kind of layer, the cells attended to, and what is uploaded.

        These are the given arrays, and then masks and indices, whose numbers stand for them (``_on_device``).
        """
        segments, host = self._no_segments(), list(arrays)
        attended = sum(self._add(segments, new, host) for new in planned.new)
        return segments, attended, host

    def _add(self, segments: dict[AttentionKind, list[Any]], new: Uncommitted, host: list[np.ndarray]) -> int:
        """Append the sequence's rows to the segments of every kind of layer; return the cells attended to.

        Unless they are on the CPU already, masks and indices are appended to ``host``, whose numbers stand for them
        until they are uploaded.
        """
        start, sequence, rows, end = new.start, new.sequence, len(new.taken), new.end
        index = as_slice(new.taken)
        alone = end == len(sequence.slots) + len(new.slots)  # all cells up to there belong to this sequence
        causal = alone and new.causal and not self.dense
        full = None
        if not causal and (not alone or new.mask is not None):
            full = np.empty((rows, end), dtype=np.float32)
            full[:] = sequence.bias(end)
            columns = index if index is not None and len(new.slots) == rows else new.slots
            full[:, columns] = 0.0 if new.mask is None else new.mask
        here = self.device.type == "cpu"
        slots: Any = index
        if index is None:
            slots = torch.from_numpy(new.taken) if here else len(host)
            if not here:
                host.append(new.taken)
        for kind, kind_segments in segments.items():
            first, mask, simple = (0, full, causal) if kind == FULL else _nearby(kind, new, end, full, causal)
            additive: Any = None
            if mask is not None:
                additive = torch.from_numpy(mask).to(self.dtype) if here else len(host)
                if not here:
                    host.append(mask)
            kind_segments.append(Segment(sequence.stream, start, start + rows, slots, first, end, additive, simple))
        return end

    def _prepared(
        self, ids: Tensor, positions: Tensor, segments: dict[AttentionKind, list[Segment]], keep: Tensor | int,
        **rows: Any,
    ) -> Prepared:  # fmt: skip
        """A forward; ``rows`` are the fields of ``forward.Forward``."""
        pack = Pack(self.cells, self.kinds, segments, self.device, positions, self.counting)
        return Prepared(ids=ids, positions=positions, pack=pack, keep=keep, **rows)


def _on_device(
    segments: dict[AttentionKind, list[Segment]], there: Sequence[Tensor], dtype: torch.dtype
) -> dict[AttentionKind, list[Segment]]:
    """Put masks and indices that are uploaded in the place of their numbers."""
    masks: dict[int, Tensor] = {}
    for kind_segments in segments.values():
        for number, segment in enumerate(kind_segments):
            slots, mask = segment.slots, segment.mask
            if isinstance(mask, int) and mask not in masks:
                masks[mask] = there[mask].to(dtype)
            if isinstance(slots, int) or isinstance(mask, int):
                slots = there[slots] if isinstance(slots, int) else slots
                mask = masks[mask] if isinstance(mask, int) else mask
                kind_segments[number] = segment._replace(slots=slots, mask=mask)
    return segments


def lengthened(cells: np.ndarray, count: int) -> np.ndarray:
    """The cells of nodes, or their rows, with -1 for those up to ``count`` that are not computed."""
    return np.concatenate([cells, np.full(count - len(cells), -1, dtype=np.int64)]) if len(cells) < count else cells


def forest_mask(shape: Shape | None, tree: int, pending: int) -> np.ndarray:
    """The additive mask among a tree's pending tokens (the last one is its root) and nodes, float32 ``[n, n]``.

    Args:
        shape: None if there are no nodes.
    """
    nodes = ROOT if shape is None else shape.tree_masks[tree]
    if pending == 1:
        return nodes
    mask = np.triu(np.full((pending - 1 + len(nodes),) * 2, -np.inf, dtype=np.float32), 1)
    mask[pending - 1 :, pending - 1 :] = nodes
    return mask


ROOT = np.zeros((1, 1), dtype=np.float32)


def _nearby(
    kind: AttentionKind, new: Uncommitted, end: int, full: np.ndarray | None, causal: bool
) -> tuple[int, np.ndarray | None, bool]:
    """Narrow down what rows attend to in a layer with full attention to what they attend to in one of this kind.

    Args:
        end: last cell + 1.
        full: the additive mask with full attention; None if everything is visible, or causal.

    Returns:
        The first cell that is attended to, and ``full`` and ``causal`` from there on.
    """
    earliest = int(new.query.min())
    if kind.anchored and new.anchor is not None:
        earliest = max(0, min(earliest, new.anchor))
    oldest = kind.first(earliest)  # no row attends to an earlier position
    committed = new.sequence.slots[oldest:]
    start = min(int(new.slots.min()), int(committed.min(initial=end)))
    if full is not None:
        plain = full[:, start:]
    else:
        plain = np.zeros((len(new.query), end - start), dtype=np.float32)
        if causal:
            plain[:, new.slots] = new.mask
    mask = attention_mask(kind, new.query, new.key_positions(end)[start:], plain, new.anchor)
    if not start and np.array_equal(mask, plain):
        return 0, full, causal
    hidden = int((mask == 0).any(0).argmax())
    return start + hidden, mask[:, hidden:] if mask[:, hidden:].any() else None, False
