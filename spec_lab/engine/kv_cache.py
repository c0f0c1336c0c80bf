"""Keys and values as cells in spans. Bookkeeping moves; keys and values never do.

Each request owns one span of cells; its forks share the span and their common prefix. A cell holds one token's key and
value in every layer. Which cells make up a sequence, and in which order, is a ``CellSequence``: accepting, rejecting,
forking and backtracking only edit these lists and reference counts. A cell in use is never handed out again, so nothing
is ever overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

GRAIN = 256  # cells; spans grow to multiples of it


class CellSequence:
    """The KV cache of one sequence: cell ``slots[i]`` holds the keys and values of the token at position i.

    After a forward over a draft tree its nodes' cells are *held*, until ``accept`` keeps some of them and frees the
    others. A ``runner.KVSequence``.
    """

    def __init__(self, store: Cells, span: int, slots: np.ndarray, bias: np.ndarray) -> None:
        self.store = store
        self.span = span
        self._slots = slots  # [>= length], the rest unused
        self._length = 0
        self._bias = bias  # [>= extent] float32
        self.extent = 0  # one past the highest own cell
        self.open = True
        self.held = NONE_HELD  # [nodes of the tree], the cell of each node; -1 where it is not computed
        self.ahead: Ahead | None = None
        self.states: SequenceStates | None = None  # of a model with recurrent layers

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> np.ndarray:  # [length]
        """Cell numbers in order of position. A view."""
        return self._slots[: self._length]

    def bias(self, extent: int) -> np.ndarray:  # [extent]
        """The additive mask of a later token over the span's first cells: 0 at own cells, -inf elsewhere. A view."""
        if extent > len(self._bias):
            more = np.full(extent + GRAIN - len(self._bias), -np.inf, dtype=np.float32)
            self._bias = np.concatenate([self._bias, more])
        return self._bias[:extent]

    def accept(self, nodes: Sequence[int] | np.ndarray = ()) -> None:
        """Append the tokens of held ``nodes``, numbered within their tree, and free the cells of all others."""
        if not len(self.held):
            return
        if self.states is not None:
            self.states.accept(nodes)
        held, self.held = self.held.tolist(), NONE_HELD
        kept = [held[node] for node in nodes]
        for cell in held:  # for a few cells faster than NumPy's indexing
            if cell >= 0 and cell not in kept:
                self.store.drop(self, cell)
        if kept:
            self.store.keep(self, kept)

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on, and held nodes."""
        self.accept()
        self.forget_ahead()
        self.store.backtrack(self, length)
        if self.states is not None:
            self.states.truncate(length)

    def fork(self) -> CellSequence:
        """A second sequence with the same past, whose cells it shares."""
        twin = self.store.fork(self)
        twin.states = None if self.states is None else self.states.fork()
        return twin

    def close(self) -> None:
        """Free everything. Harmless when repeated."""
        if self.open:
            self.accept()
            self.forget_ahead()
            self.store.close(self)
            if self.states is not None:
                self.states.close()

    def forget_ahead(self, clear: bool = False) -> None:
        """Free the cells of what was computed ahead. Harmless when repeated.

        Args:
            clear: whether to overwrite them with zeros, as of ``Cells.open``.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            cells = np.concatenate([ahead.slots, ahead.nodes[ahead.nodes >= 0]])
            if clear:
                self.store.clear(self, cells)
            self.store.drop(self, cells)


NONE_HELD = np.empty(0, dtype=np.int64)


class SequenceStates(Protocol):
    """The states of one sequence's recurrent layers. They follow what its ``CellSequence`` does."""

    def accept(self, nodes: Sequence[int] | np.ndarray = ()) -> None:
        """Keep the first nodes of the held chain, and forget all others."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on; no nodes are held."""
        ...

    def fork(self) -> SequenceStates:
        """The same states for a second sequence."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(eq=False)
class Ahead:
    """Tokens of a sequence that some of the model's layers have computed ahead of the forward that appends them.

    Args:
        owner: the draft pass that computed them.
        tokens: pending tokens of the sequence.
        slots: their cells, which are not part of the sequence.
        first: the first of their rows in ``owner``.
        nodes: ``[m]`` the cells of nodes, -1 of those that are not computed, and ``rows`` their rows in ``owner``.
        parents: of each computed node, numbered within the tree, its parent (-1 for the root) and its token.
    """

    owner: Any
    tokens: list[int]
    slots: np.ndarray
    first: int
    nodes: np.ndarray = field(default_factory=lambda: NONE_HELD)
    rows: np.ndarray = field(default_factory=lambda: NONE_HELD)
    parents: dict[int, tuple[int, int]] = field(default_factory=dict)


class Cells:
    """The store: ``keys`` and ``values`` of each layer ``[S, heads, C, dim]``, allocated when written.

    ``views`` has them by layer and span, since a view costs time in every layer of every forward.

    Args:
        unused: layers that have no keys and values; no memory is allocated for them.

    Attributes:
        generation: how often memory was allocated anew; a captured graph knows the old addresses.
    """

    def __init__(self, unused: frozenset[int] = frozenset()) -> None:
        self.unused = unused
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.views: list[tuple[list[Tensor], list[Tensor]]] = []  # [layer] ([1, heads, C, dim] of each span) twice
        self.generation = 0
        self.references = np.zeros((0, 0), dtype=np.int32)  # [S, C]
        self._users: list[int] = []  # open sequences of each span

    @property
    def spans(self) -> int:
        """S, allocated spans."""
        return self.references.shape[0]

    @property
    def capacity(self) -> int:
        """C, allocated cells of each span."""
        return self.references.shape[1]

    # Sequences -------------------------------------------------------------------------------------------------------

    def open(self, reserve: int = GRAIN, clear: bool = False) -> CellSequence:
        """A new, empty sequence in a span of its own with room for ``reserve`` cells (it grows beyond on demand).

        Args:
            reserve: how many cells.
            clear: whether to overwrite what an earlier sequence left there with zeros, for attention that reads cells
                beyond its own: a mask does not remove NaN (0 x NaN).
        """
        span = next((number for number, users in enumerate(self._users) if users == 0), self.spans)
        if span == self.spans or reserve > self.capacity:
            self._grow(max(self.spans, span + 1), max(reserve, self.capacity, 1))
        elif clear:
            with torch.inference_mode():
                for store in (*self.keys, *self.values):
                    store[span].zero_()
        self._users[span] += 1
        return CellSequence(
            self, span, np.empty(self.capacity, dtype=np.int64), np.full(self.capacity, -np.inf, dtype=np.float32)
        )

    def take(self, sequence: CellSequence, count: int) -> np.ndarray:
        """``count`` free cells of the sequence's span, lowest first. They are held until kept or dropped."""
        used, end = self.references[sequence.span], sequence.extent
        if end == len(sequence) and end + count <= len(used) and not np.count_nonzero(used[end : end + count]):
            used[end : end + count] = 1  # no hole below: what the search would find
            return np.arange(end, end + count)
        free = np.flatnonzero(used == 0)[:count]
        if len(free) < count:
            self._grow(self.spans, self.capacity + count - len(free))
            free = np.flatnonzero(self.references[sequence.span] == 0)[:count]
        self.references[sequence.span, free] = 1
        return free

    def take_next(self, sequence: CellSequence) -> int:
        """``take`` of the one cell after all others of a sequence without holes; -1 if there are some or it is used."""
        end = sequence.extent
        if end != sequence._length or end >= self.references.shape[1] or self.references.item(sequence.span, end):
            return -1
        self.references[sequence.span, end] = 1
        return end

    def keep_next(self, sequence: CellSequence, cell: int) -> None:
        """``keep`` of the cell that ``take_next`` returned."""
        if cell == len(sequence._slots):
            return self.keep(sequence, [cell])
        sequence._slots[cell] = cell
        sequence._length = sequence.extent = cell + 1
        sequence.bias(cell + 1)[cell] = 0.0

    def keep(self, sequence: CellSequence, slots: Sequence[int]) -> None:
        """Append held cells to the sequence: their tokens are committed."""
        end = len(sequence) + len(slots)
        if end > len(sequence._slots):
            sequence._slots = np.concatenate([sequence._slots, np.empty(max(self.capacity, end), dtype=np.int64)])
        sequence._slots[len(sequence) : end] = slots
        sequence._length = end
        if len(slots):
            sequence.extent = max(sequence.extent, max(slots) + 1)
            sequence.bias(sequence.extent)[slots] = 0.0

    def drop(self, sequence: CellSequence, slots: np.ndarray | int) -> None:
        """Give up held cells: their tokens were rejected."""
        self.references[sequence.span, slots] -= 1

    def clear(self, sequence: CellSequence, slots: np.ndarray) -> None:
        """Overwrite cells with zeros."""
        with torch.inference_mode():
            for store in (*self.keys, *self.values):
                store[sequence.span].index_fill_(1, torch.from_numpy(slots).to(store.device), 0)

    def backtrack(self, sequence: CellSequence, length: int) -> None:
        """Shorten the sequence to its first ``length`` cells."""
        if not 0 <= length <= len(sequence):
            raise ValueError(f"cannot shorten a sequence of {len(sequence)} cells to {length}")
        gone = sequence.slots[length:]
        self.references[sequence.span, gone] -= 1
        sequence.bias(sequence.extent)[gone] = -np.inf
        sequence._length = length
        sequence.extent = int(sequence.slots.max()) + 1 if length else 0

    def fork(self, sequence: CellSequence) -> CellSequence:
        """A second sequence over the same cells, which it shares."""
        self.references[sequence.span, sequence.slots] += 1
        self._users[sequence.span] += 1
        twin = CellSequence(self, sequence.span, sequence._slots.copy(), sequence._bias.copy())
        twin._length, twin.extent = len(sequence), sequence.extent
        return twin

    def close(self, sequence: CellSequence) -> None:
        """Give up the sequence and all its cells. Its span is free once every fork is closed."""
        if sequence.open:
            self.backtrack(sequence, 0)
            self._users[sequence.span] -= 1
            sequence.open = False
            if not self._users[sequence.span]:  # cells held by a forward that failed go with the span
                self.references[sequence.span] = 0

    def reserve(self, spans: int, capacity: int) -> None:
        """Grow to at least ``spans`` spans of ``capacity`` cells, for callers that keep the references elsewhere."""
        if spans > self.spans or capacity > self.capacity:
            self._grow(max(spans, self.spans), max(capacity, self.capacity))

    # Contents ------------------------------------------------------------------------------------------------------

    def write(self, layer: int, key: Tensor, value: Tensor, places: list[tuple[int, int, int, slice | Tensor]]) -> None:
        """Write a packed layer's new keys and values ``[1, heads, N, dim]`` into their cells.

        Args:
            places: for each sequence of the forward (span, first row, last row + 1, cells).
        """
        if len(self.keys) <= layer:
            self.allocate(layer, key, value)
        keys, values = self.views[layer]
        for span, start, stop, cells in places:
            if len(places) > 1:
                new_keys, new_values = key[:, :, start:stop], value[:, :, start:stop]
            else:
                new_keys, new_values = key, value
            if isinstance(cells, slice):
                keys[span].narrow(2, cells.start, stop - start).copy_(new_keys)
                values[span].narrow(2, cells.start, stop - start).copy_(new_values)
            else:
                keys[span].index_copy_(2, cells, new_keys)
                values[span].index_copy_(2, cells, new_values)

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Allocate the memory of the layers up to this one, for keys and values ``[.., heads, .., dim]`` like these."""
        while len(self.keys) <= layer:  # zeros, not empty: a dead cell must never hold NaN
            heads = 0 if len(self.keys) in self.unused else key.shape[1]
            for store, like in ((self.keys, key), (self.values, value)):
                store.append(like.new_zeros(self.spans, heads, self.capacity, like.shape[-1]))
            self.views.append((_by_span(self.keys[-1]), _by_span(self.values[-1])))
        self.generation += 1

    def _grow(self, spans: int, capacity: int) -> None:
        """Grow layer by layer; where memory runs out, some layers are larger than needed, and nothing else changes.

        Each growth copies everything, so spans grow by half at least.
        """
        capacity = max(self.capacity, -(-capacity // GRAIN) * GRAIN)
        old_spans, old_capacity = self.references.shape
        if spans > old_spans:
            spans = max(spans, old_spans * 3 // 2)
        self.generation += 1
        for layer in range(len(self.keys)):
            for store in (self.keys, self.values):
                old = store[layer]
                store[layer] = old.new_zeros(spans, old.shape[1], capacity, old.shape[-1])
                store[layer][: old.shape[0], :, : old.shape[2]] = old
            self.views[layer] = (_by_span(self.keys[layer]), _by_span(self.values[layer]))
        references = np.zeros((spans, capacity), dtype=np.int32)
        references[:old_spans, :old_capacity] = self.references
        self.references = references
        self._users += [0] * (spans - old_spans)


def _by_span(store: Tensor) -> list[Tensor]:  # [S, ..] -> S views [1, ..]
    return [store.narrow(0, span, 1) for span in range(store.shape[0])]


def as_index(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """The cheapest index for ``slots``: a slice where each follows the one before."""
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and (count < 3 or not (np.diff(slots) != 1).any()):
        return slice(first, first + count)
    return torch.from_numpy(slots).to(device)
