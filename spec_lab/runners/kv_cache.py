"""Keys and values as cells in streams. Bookkeeping moves; keys and values never do.

A stream, as in llama.cpp, is an array of cells: each request owns one, with as many cells as it may need; its forks
share the stream and their common prefix. A cell holds one token's key and value in every layer. Which cells make up a
sequence, and in which order, is a ``CellSequence``: accepting, rejecting, forking and backtracking only edit these
lists and reference counts. A cell in use is never handed out again, so nothing is ever overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.upload import upload

if TYPE_CHECKING:
    from spec_lab.runners.recurrent import RecurrentStates

GRAIN = 256  # cells; streams grow to multiples of it


class CellSequence:
    """The KV cache of one sequence: cell ``slots[i]`` holds the keys and values of the token at position i.

    After a forward over a draft tree its nodes' cells are *held*, until ``accept`` keeps some of them and frees the
    others. A ``runner.KVSequence``.

    A small cache of a long text (``sparse_kv``) has no cells of ``left_out`` positions, which follow its first ``gap``
    cells: after these, ``slots[i]`` holds position i + ``left_out``.
    """

    def __init__(self, store: Cells, stream: int, slots: np.ndarray, bias: np.ndarray) -> None:
        self.store = store
        self.stream = stream
        self._slots = slots  # [>= length], the rest unused
        self._length = 0
        self._bias = bias  # [>= extent] float32
        self.extent = 0  # one past the highest own cell
        self.in_order = True  # whether cell i is known to hold position i
        self.gap = self.left_out = 0
        self.exact = False  # see ``Cells.open``
        self.open = True
        self.held = NONE_HELD  # [nodes of the tree], the cell of each node; -1 where it is not computed
        self.ahead: Ahead | None = None
        self.states: RecurrentStates | None = None  # of a model with recurrent layers

    def __len__(self) -> int:
        return self._length + self.left_out

    @property
    def slots(self) -> np.ndarray:  # [length]
        """Cell numbers in order of position. A view."""
        return self._slots[: self._length]

    def bias(self, extent: int) -> np.ndarray:  # [extent]
        """The additive mask of a later token over the stream's first cells: 0 at own cells, -inf elsewhere. A view."""
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
            clear: whether to overwrite them with zeros, as in ``Cells.open``.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            cells = np.concatenate([ahead.slots, ahead.held[ahead.held >= 0]])
            if clear:
                self.store.clear(self, cells)
            self.store.drop(self, cells)


NONE_HELD = np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class Ahead:
    """Keys and values of a sequence's tokens in the model's first layers, computed by a proposer that drafts with them.

    The target's forward appends the tokens to the sequence, and reuses these cells for the layers that have them.

    Args:
        owner: the draft pass that computed them.
        tokens: pending tokens of the sequence.
        slots: cells of the pending tokens, which are not part of the sequence yet.
        first: row in ``owner`` of the first pending token.
        held: ``[m]`` cells of the nodes of the draft tree; -1 for a node that was not computed.
        rows: ``[m]`` rows of the nodes in ``owner``.
        parents: parent and token of each computed node, by its number in the tree; the root's number is -1.
    """

    owner: Any
    tokens: list[int]
    slots: np.ndarray
    first: int
    held: np.ndarray = field(default_factory=lambda: NONE_HELD)
    rows: np.ndarray = field(default_factory=lambda: NONE_HELD)
    parents: dict[int, tuple[int, int]] = field(default_factory=dict)


class Cells:
    """The store: keys and values of each layer and stream ``[1, heads, C, dim]``, allocated when written.

    Each stream has a capacity C of its own, so that a batch of requests of different lengths takes what each of them
    needs. ``views`` has the streams by layer, since making a view costs time in every layer of every forward.

    Args:
        unused: layers that have no keys and values; no memory is allocated for them.
        uniform: whether all streams have the largest capacity and lie in one tensor for each layer, ``keys`` and
            ``values`` ``[S, heads, C, dim]``: dense masks and forwards of fixed shapes read all of them at once.
        dtype: in which keys and values are stored; None: in that in which they are computed.

    Attributes:
        generation: how often memory was allocated anew; a captured graph knows the old addresses.
    """

    def __init__(
        self, unused: frozenset[int] = frozenset(), uniform: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.unused, self.uniform, self.dtype = unused, uniform, dtype
        self.keys: list[Tensor] = []  # of each layer, of a uniform store
        self.values: list[Tensor] = []
        self.views: list[tuple[list[Tensor], list[Tensor]]] = []  # [layer] ([1, heads, C, dim] of each stream) twice
        self.generation = 0
        self.references = np.zeros((0, 0), dtype=np.int32)  # [S, largest C]
        self.capacities: list[int] = []  # [S]
        self._users: list[int] = []  # open sequences of each stream

    @property
    def streams(self) -> int:
        """S, allocated streams."""
        return len(self.capacities)

    @property
    def capacity(self) -> int:
        """Allocated cells of the largest stream."""
        return max(self.capacities, default=0)

    # Sequences -------------------------------------------------------------------------------------------------------

    def open(self, reserve: int = GRAIN, clear: bool = False, exact: bool = False) -> CellSequence:
        """A new, empty sequence in a stream of its own with room for ``reserve`` cells (it grows beyond on demand).

        The stream is the smallest unused one with room; if there is none the largest unused one, which grows, or a new
        one.

        Args:
            reserve: how many cells.
            clear: whether to overwrite what an earlier sequence left there with zeros, for attention that reads cells
                beyond its own: a mask does not remove NaN (0 x NaN).
            exact: whether the stream is to be no larger than that and is freed with the sequence (of no uniform store).
        """
        unused = [number for number, users in enumerate(self._users) if users == 0]
        room = self.capacities.__getitem__
        exact = exact and not self.uniform
        if exact:
            unused = [number for number in unused if not room(number)]
        if fitting := [number for number in unused if room(number) >= reserve]:
            stream = min(fitting, key=room)
            if clear:
                with torch.inference_mode():
                    for store in self._of_stream(stream):
                        store.zero_()
        else:
            stream = max(unused, key=room) if unused else self.streams
            self._grow(stream, max(reserve, 1), keep=False)
        self._users[stream] += 1
        size = self.capacities[stream]
        opened = CellSequence(self, stream, np.empty(size, dtype=np.int64), np.full(size, -np.inf, dtype=np.float32))
        opened.exact = exact
        return opened

    def take(self, sequence: CellSequence, count: int) -> np.ndarray:
        """``count`` free cells of the sequence's stream, lowest first. They are held until kept or dropped."""
        stream, end = sequence.stream, sequence.extent
        used = self.references[stream, : self.capacities[stream]]
        if end == sequence._length and end + count <= len(used) and not np.count_nonzero(used[end : end + count]):
            used[end : end + count] = 1  # no hole below: what the search would find
            return np.arange(end, end + count)
        free = np.flatnonzero(used == 0)[:count]
        if len(free) < count:
            self._grow(stream, len(used) + count - len(free))
            free = np.flatnonzero(self.references[stream, : self.capacities[stream]] == 0)[:count]
        self.references[stream, free] = 1
        return free

    def take_next(self, sequence: CellSequence) -> int:
        """``take`` of the one cell after all others, whose number is its position; -1 if it is not or is used."""
        end, stream = sequence.extent, sequence.stream
        if end != len(sequence) or end >= self.capacities[stream] or self.references.item(stream, end):
            return -1
        self.references[stream, end] = 1
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
        start, end = sequence._length, sequence._length + len(slots)
        if end > len(sequence._slots):
            more = max(self.capacities[sequence.stream], end)
            sequence._slots = np.concatenate([sequence._slots, np.empty(more, dtype=np.int64)])
        sequence._slots[start:end] = slots
        sequence.in_order = sequence.in_order and list(slots) == list(range(start, end))
        sequence._length = end
        if len(slots):
            sequence.extent = max(sequence.extent, max(slots) + 1)
            sequence.bias(sequence.extent)[slots] = 0.0

    def drop(self, sequence: CellSequence, slots: np.ndarray | int) -> None:
        """Give up held cells: their tokens were rejected."""
        self.references[sequence.stream, slots] -= 1

    @torch.inference_mode()
    def clear(self, sequence: CellSequence, slots: np.ndarray) -> None:
        """Overwrite cells with zeros."""
        for store in self._of_stream(sequence.stream):
            store[:, :, upload(store.device, slots)[0]] = 0

    def backtrack(self, sequence: CellSequence, length: int) -> None:
        """Shorten the sequence to its first ``length`` positions; to none where some of these are left out."""
        if not 0 <= length <= len(sequence):
            raise ValueError(f"cannot shorten a sequence of {len(sequence)} positions to {length}")
        if length < sequence.gap + sequence.left_out:
            length = 0
        cells = max(0, length - sequence.left_out)
        self._remove(sequence, cells, sequence._length)
        sequence.in_order = sequence.in_order or not cells
        if not cells:
            sequence.gap = sequence.left_out = 0

    def leave_out(self, sequence: CellSequence, first: int, count: int) -> None:
        """Free ``count`` cells of the sequence from number ``first`` on; later ones keep their positions."""
        self._remove(sequence, first, first + count)
        sequence.gap, sequence.left_out, sequence.in_order = first, sequence.left_out + count, False

    def _remove(self, sequence: CellSequence, start: int, stop: int) -> None:
        gone, later = sequence.slots[start:stop].copy(), sequence.slots[stop:].copy()
        self.references[sequence.stream, gone] -= 1
        sequence.bias(sequence.extent)[gone] = -np.inf
        sequence._length = start + len(later)
        sequence._slots[start : sequence._length] = later
        sequence.extent = int(sequence.slots.max(initial=-1)) + 1

    def fork(self, sequence: CellSequence) -> CellSequence:
        """A second sequence over the same cells, which it shares."""
        self.references[sequence.stream, sequence.slots] += 1
        self._users[sequence.stream] += 1
        twin = CellSequence(self, sequence.stream, sequence._slots.copy(), sequence._bias.copy())
        twin._length, twin.extent, twin.in_order = sequence._length, sequence.extent, sequence.in_order
        twin.gap, twin.left_out = sequence.gap, sequence.left_out
        return twin

    def copy(
        self, source: CellSequence, length: int, reserve: int, clear: bool = False, exact: bool = False
    ) -> CellSequence:
        """A sequence in a stream of its own with copies of the first ``length`` cells of another one.

        Args:
            length: how many of its cells.
            reserve, clear, exact: as in ``open``.
        """
        made = self.open(max(reserve, length), clear, exact)
        self.append_copies(made, source, source.slots[:length])
        return made

    @torch.inference_mode()
    def append_copies(self, sequence: CellSequence, source: CellSequence, slots: np.ndarray | Sequence[Tensor]) -> None:
        """Append copies of cells of another sequence, perhaps of another store of the same model.

        Args:
            sequence: grows by n cells.
            slots: ``[n]`` cells of its stream; or for each layer ``[heads, n]``, cells of their own for each head.
        """
        count = len(slots) if isinstance(slots, np.ndarray) else slots[0].shape[1]
        if not count:
            return
        taken, indices = self.take(sequence, count), dict[torch.device, tuple[Any, Any]]()
        for layer, stores in enumerate(source.store.views):
            old_stores = [store[source.stream] for store in stores]
            if layer == len(self.views):
                self.allocate(layer, *(self.encode(old[:, :, :0]) for old in old_stores))
            for store, old in zip(self.views[layer], old_stores, strict=True):
                if old.device not in indices:
                    first = as_index(slots, old.device) if isinstance(slots, np.ndarray) else None
                    indices[old.device] = first, as_index(taken, old.device)
                index, to = indices[old.device]
                every: Any = slice(None)
                if index is None:
                    every, index = torch.arange(old.shape[1], device=old.device)[:, None], slots[layer]
                store[sequence.stream][:, :, to] = self.encode(old[:, every, index])
        self.keep(sequence, taken.tolist())

    def close(self, sequence: CellSequence) -> None:
        """Give up the sequence and all its cells. Its stream is free once every fork is closed."""
        if sequence.open:
            self.backtrack(sequence, 0)
            self._users[sequence.stream] -= 1
            sequence.open = False
            if not self._users[sequence.stream]:  # cells held by a forward that failed go with the stream
                self.references[sequence.stream] = 0
                if sequence.exact:
                    self._free(sequence.stream)

    def _free(self, stream: int) -> None:
        """Free the memory of an unused stream; its number remains."""
        for layer in self.views:
            for store in layer:
                store[stream] = store[stream].new_zeros(1, store[stream].shape[1], 0, store[stream].shape[3])
        self.capacities[stream] = 0
        self.generation += 1

    def reserve(self, capacities: Sequence[int]) -> None:
        """Grow to streams of at least these capacities, for callers that keep the references elsewhere."""
        for stream, capacity in enumerate(capacities):
            if stream >= self.streams or capacity > self.capacities[stream]:
                self._grow(stream, capacity)

    # Contents ------------------------------------------------------------------------------------------------------

    def encode(self, states: Tensor) -> Tensor:
        """Return keys or values ``[.., dim]`` as they are stored."""
        return states if self.dtype is None else stored(states, self.dtype)

    def decode(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """Return stored keys or values in the data type of a forward."""
        return states.to(dtype)

    def write(self, layer: int, key: Tensor, value: Tensor, rows: list[tuple[int, int, int, slice | Tensor]]) -> None:
        """Write a packed layer's new keys and values ``[1, heads, N, dim]`` into their cells.

        Args:
            rows: for each sequence of the forward (stream, first row, last row + 1, cells).
        """
        key, value = self.encode(key), self.encode(value)
        if len(self.views) <= layer:
            self.allocate(layer, key, value)
        keys, values = self.views[layer]
        for stream, start, stop, cells in rows:
            if len(rows) > 1:
                new_keys, new_values = key[:, :, start:stop], value[:, :, start:stop]
            else:
                new_keys, new_values = key, value
            if isinstance(cells, slice):
                keys[stream].narrow(2, cells.start, stop - start).copy_(new_keys)
                values[stream].narrow(2, cells.start, stop - start).copy_(new_values)
            elif key.dtype.itemsize == 1:  # index_copy_ has no 8-bit floats
                keys[stream][:, :, cells], values[stream][:, :, cells] = new_keys, new_values
            else:
                keys[stream].index_copy_(2, cells, new_keys)
                values[stream].index_copy_(2, cells, new_values)

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Allocate the memory of the layers up to this one, for keys and values ``[.., heads, .., dim]`` like these."""
        while len(self.views) <= layer:
            heads = 0 if len(self.views) in self.unused else key.shape[1]
            if self.uniform:
                for stores, like in ((self.keys, key), (self.values, value)):
                    stores.append(self._zeros(like, self.streams, heads, self.capacity))
                self.views.append((_by_stream(self.keys[-1]), _by_stream(self.values[-1])))
            else:
                keys, values = (
                    [self._zeros(like, 1, heads, size) for size in self.capacities] for like in (key, value)
                )
                self.views.append((keys, values))
        self.generation += 1

    def _zeros(self, like: Tensor, streams: int, heads: int, capacity: int) -> Tensor:
        """(Zeros, not empty: a dead cell must never hold NaN.)"""
        return like.new_zeros(streams, heads, capacity, like.shape[-1], dtype=self.dtype or like.dtype)

    def _of_stream(self, stream: int) -> list[Tensor]:
        return [store[stream] for layer in self.views for store in layer]

    def _grow(self, stream: int, capacity: int, keep: bool = True) -> None:
        """Give a stream at least ``capacity`` cells, and unless not ``keep`` its contents.

        The number after the last stream adds one. It grows layer by layer; where memory runs out, some layers are
        larger than needed, and nothing else changes. In a uniform store each growth copies everything, so streams grow
        by half at least.
        """
        capacity, streams = -(-capacity // GRAIN) * GRAIN, max(self.streams, stream + 1)
        if self.uniform:
            capacity = max(self.capacity, capacity)
            streams = max(streams, self.streams * 3 // 2) if streams > self.streams else streams
        self.generation += 1
        for layer, views in enumerate(self.views):
            if self.uniform:
                for stores in (self.keys, self.values):
                    old = stores[layer]
                    stores[layer] = self._zeros(old, streams, old.shape[1], capacity)
                    stores[layer][: old.shape[0], :, : old.shape[2]] = old
                self.views[layer] = (_by_stream(self.keys[layer]), _by_stream(self.values[layer]))
            else:
                for store in views:
                    if stream == len(store):
                        store.append(self._zeros(store[0], 1, store[0].shape[1], capacity))
                        continue
                    old = store[stream]
                    store[stream] = self._zeros(old, 1, old.shape[1], capacity)
                    if keep:
                        store[stream][:, :, : old.shape[2]] = old
        self.capacities += [0] * (streams - self.streams)
        self.capacities = [capacity] * streams if self.uniform else self.capacities
        self.capacities[stream] = capacity
        references = np.zeros((streams, max(self.capacity, self.references.shape[1])), dtype=np.int32)
        references[: len(self.references), : self.references.shape[1]] = self.references
        self.references = references
        self._users += [0] * (streams - len(self._users))


def allocated(reserves: Sequence[int], uniform: bool = False) -> int:
    """Return how many cells a store has in all once sequences with these reserves are open together."""
    sizes = [-(-max(reserve, 1) // GRAIN) * GRAIN for reserve in reserves]
    streams = 0
    while uniform and streams < len(sizes):
        streams = max(streams + 1, streams * 3 // 2)
    return streams * max(sizes, default=0) if uniform else sum(sizes)


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as a store of this dtype holds them; its largest number stands for all larger ones."""
    largest = torch.finfo(dtype).max
    return (tensor.clamp(-largest, largest) if largest < torch.finfo(tensor.dtype).max else tensor).to(dtype)


def _by_stream(store: Tensor) -> list[Tensor]:  # [S, ..] -> S views [1, ..]
    return [store.narrow(0, stream, 1) for stream in range(store.shape[0])]


def as_index(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """The cheapest index for ``slots``: a slice where each follows the one before."""
    return as_slice(slots) or upload(device, slots)[0]


def as_slice(slots: np.ndarray) -> slice | None:
    """The slice that has these cells; None where they do not follow each other."""
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and (count < 3 or not (np.diff(slots) != 1).any()):
        return slice(first, first + count)
    return None
