"""Forwards of fixed shapes over static buffers, which a CUDA graph can capture and replay.

A replayed graph runs the same kernels on the same addresses, so the shapes of a forward are padded to buckets, and what
changes from step to step (tokens, positions, cells, which cells a row attends to) is data in static buffers. Only
decoding steps run so; prompts have too many shapes and run eagerly. Everything but the capture itself is the same on
the CPU, where the forward is called in place of a replay.

Rows are padded stream by stream (``kv_cache``): N = S * n rows, n of each of S streams. A padding row attends to one
unused cell, and its own key and value are written there, so that it computes finite numbers that no other row reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload
from spec_lab.runners.attention import FULL, AttentionKind, CellCache, uncounted
from spec_lab.runners.forward import Forward, ModelCall
from spec_lab.runners.kv_cache import GRAIN, Cells, CellSequence, stored
from spec_lab.runners.prepare import Packer, Planned
from spec_lab.runners.softmax import Softmax, torch_attention

MAX_ROWS = 256
"""Most rows of a stream in a forward of fixed shape; a step with more rows runs eagerly."""

MAX_GRAPHS = 128
"""Most shapes that stay captured; then the one that was not used for the longest time is forgotten."""

MAX_PENDING = 16
"""Most pending tokens of a sequence in a forward of fixed shape; longer ones are prompts."""

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Turns a forward over static buffers into what replays it, and returns the same tensors in every call."""


def uncaptured(forward: Callable[[], Any]) -> Callable[[], Any]:
    """Replay by calling: the only way on a CPU."""
    return forward


class CudaGraphs:
    """Captures forwards as CUDA graphs that share their memory: results are read before another graph is replayed.

    It has a stream of its own, on which kernels are chosen and captured, so that the workspace that cuBLAS keeps for
    each stream is neither that of another model's graphs nor a part of the graphs' memory. That memory is freed with
    its last graph, and cannot be captured into again: graphs that follow get another.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    def __call__(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        """Capture after two calls in which libraries choose their kernels."""
        with torch.cuda.device(self.device):
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    forward()
            torch.cuda.current_stream().wait_stream(stream)
            graph, other = torch.cuda.CUDAGraph(), next(iter(self._graphs), None)
            with torch.cuda.graph(graph, pool=None if other is None else other.pool(), stream=stream):
                outputs = forward()
        self._graphs.add(graph)

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay


class Bucket(NamedTuple):
    """The sizes of a forward of fixed shape, which a CUDA graph computes. Smaller forwards are padded to them.

    Args:
        streams: S, number of streams of the KV cache.
        rows: n, rows of each stream.
        cells: C, KV cells of each stream that rows may attend to.
        sequences: Q, number of sequences; the last one holds the padding rows.
        uncommitted: m, maximum number of tokens of a sequence that are not committed yet.
        logits: L, number of rows whose logits are computed.
    """

    streams: int
    rows: int
    cells: int
    sequences: int
    uncommitted: int
    logits: int


def padded(count: int) -> int:
    """Return the size to which a number is padded: 1, 2, 4, multiples of 8 up to 64, of 16 up to 128, then of 32."""
    for least, grain in ((128, 32), (64, 16), (4, 8)):
        if count > least:
            return -(-count // grain) * grain
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, eq=False, kw_only=True)
class FixedForward(Forward):
    """One forward of fixed shape, ready to run.

    Args:
        numbers: ``[..]`` int64 what is uploaded, in the order of ``Buffers``.
        flags: ``[..]`` bool, likewise.
        rows: how many rows get logits: the first of ``Buffers.wanted``.
        drafted: the nodes' tokens on the device, which follow the roots' rows in ``wanted``; None for none.
        roots: how many rows come before them.
        total: rows that are no padding, which ``pending`` and ``nodes`` number.
    """

    graphs: Graphs
    bucket: Bucket
    numbers: np.ndarray
    flags: np.ndarray
    rows: int
    drafted: Tensor | None
    roots: int
    total: int

    def compute(self, call: ModelCall) -> tuple[Tensor, Tensor | None]:
        """See ``forward.Forward``. What it returns has memory of its own."""
        return self.graphs.run(self, call)


class Buffers:
    """The static inputs of one bucket.

    Attributes:
        ids: ``[1, N]``; positions: ``[1, N]``; cell: ``[N]`` where each row's key and value are written.
        owner: ``[N]`` the sequence of each row.
        slots: ``[Q, m]`` cells of uncommitted tokens; keys: ``[Q, C]`` positions of the tokens in the cells, where some
            layers attend to nearby positions only.
        wanted: ``[L]`` rows that get logits, then padding; packed: ``[N]`` rows that are no padding, then padding.
        committed: ``[Q, C]`` bool, whether a cell holds a committed token of the sequence.
        sees: ``[N, m]`` bool, whether the row attends to each uncommitted token of its sequence.
    """

    def __init__(self, bucket: Bucket, nearby: bool, device: torch.device) -> None:
        streams, rows, cells, sequences, uncommitted, logits = bucket
        total = streams * rows
        sizes = [total, total, total, total, sequences * uncommitted, logits, total, sequences * cells * nearby]
        self.numbers = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        self.flags = torch.zeros(sequences * cells + total * uncommitted, dtype=torch.bool, device=device)
        ids, positions, self.cell, self.owner, slots, self.wanted, self.packed, keys = self.numbers.split(sizes)
        self.ids, self.positions = ids[None], positions[None]
        self.slots = slots.view(sequences, uncommitted)
        self.keys = keys.view(sequences, cells) if nearby else None
        committed, sees = self.flags.split([sequences * cells, total * uncommitted])
        self.committed, self.sees = committed.view(sequences, cells), sees.view(total, uncommitted)
        self.stream = torch.arange(streams, device=device).repeat_interleave(rows)


class FixedPack(CellCache):
    """Stands in for transformers' cache in a forward of fixed shape. See ``attention.Pack``."""

    def __init__(
        self,
        cells: Cells,
        kinds: Mapping[int, AttentionKind],
        counting: Collection[int],
        bucket: Bucket,
        given: Buffers,
        dtype: torch.dtype,
    ) -> None:
        self.cells, self.kinds, self.counting, self.bucket, self.given = cells, kinds, counting, bucket, given
        self.positions, self.streams = given.positions, bucket.streams
        self.masks = {kind: self._mask(kind, dtype) for kind in {FULL, *kinds.values()}}
        self._repeated: dict[tuple[AttentionKind, int], Tensor] = {}
        self._made: dict[int, tuple[Tensor, Any]] = {}

    def mask(self, kind: AttentionKind, groups: int) -> Tensor:
        """The mask of so many query heads that share keys, which are rows: ``[S, 1, groups * n, C]``."""
        if (kind, groups) not in self._repeated:
            mask = self.masks[kind][:, None].expand(-1, groups, -1, -1)
            self._repeated[kind, groups] = mask.reshape(mask.shape[0], 1, -1, mask.shape[3])
        return self._repeated[kind, groups]

    def _mask(self, kind: AttentionKind, dtype: torch.dtype) -> Tensor:  # [S, n, C] additive
        given, bucket = self.given, self.bucket
        slots = given.slots[given.owner]  # [N, m]
        visible = given.committed[given.owner].scatter(1, slots, given.sees)  # [N, C]
        if kind != FULL:
            assert given.keys is not None
            near = kind.reaches(given.positions.view(-1, 1), given.keys[given.owner])
            visible = visible & (near | (given.owner == bucket.sequences - 1)[:, None])
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        return mask.view(bucket.streams, bucket.rows, bucket.cells)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """See ``attention.CellCache``; or of each stream, ``[S, heads, n, dim]``."""
        if len(self.cells.keys) <= layer_idx:
            self.cells.allocate(layer_idx, key, value)
        streams, cells = self.bucket.streams, []
        where = self.given.stream.view(streams, -1), self.given.cell.view(streams, -1)
        for store, new in ((self.cells.keys[layer_idx], key), (self.cells.values[layer_idx], value)):
            new = stored(by_stream(new, streams), store.dtype)
            store.transpose(1, 2).index_put_(where, new.transpose(1, 2))
            cells.append(store[:streams, :, : self.bucket.cells])
        layer = FixedLayer(cells[0], cells[1], self.kinds.get(layer_idx, FULL), self)
        return layer, layer

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """See ``attention.Pack``."""
        return uncounted(self.positions) if layer_idx in self.counting else 0


def by_stream(rows: Tensor, streams: int) -> Tensor:
    """Rows of all streams ``[1, heads, N, dim]``, or of each already, as those of each: ``[S, heads, n, dim]``."""
    return rows if rows.shape[0] == streams else rows[0].unflatten(1, (streams, -1)).transpose(0, 1)


class FixedLayer(NamedTuple):
    """One layer's cells, its kind, and the forward with the masks. An ``attention.ReadsCells``."""

    keys: Tensor  # [S, kv heads, C, dim]
    values: Tensor
    kind: AttentionKind
    pack: FixedPack

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[1, heads, N, dim] -> [1, N, heads, dim]``. Query heads that share keys become rows: no key is repeated.

        Args:
            query: as ``by_stream`` reads it.
        """
        q = by_stream(query, self.keys.shape[0])
        streams, heads, rows, dim = q.shape
        groups = heads // self.keys.shape[1]
        keys, values = self.keys.to(q.dtype), self.values.to(q.dtype)
        if softmax.plain:
            q = q.reshape(streams, heads // groups, groups * rows, dim)
            out = torch_attention(q, keys, values, self.pack.mask(self.kind, groups), softmax.scaling)
        else:
            out = softmax.attend(q, keys, values, self.pack.masks[self.kind][:, None, None])
        return out.reshape(streams, heads, rows, -1).transpose(1, 2).reshape(1, streams * rows, heads, -1)


@dataclass(eq=False)
class Graphs:
    """Runs decoding steps of one model in fixed shapes, and captures each shape once.

    Args:
        packer: of the model; its forwards run in shapes as they come where no fixed shape fits.
        capture: a ``CudaGraphs``, or ``uncaptured``.
        clock: records the phase "capture", which steps do not count as theirs: that of the next forward's caller.
        captured: the buckets that were captured so far, each with its buffers and its replay.
    """

    packer: Packer
    capture: Capture
    clock: Clock
    captured: dict[tuple[Any, ...], tuple[Buffers, Callable[[], tuple[Tensor, Tensor | None]]]] = field(
        default_factory=dict
    )
    _generation: int = -1
    _outputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def cells(self) -> Cells:
        """Where the model's keys and values are."""
        return self.packer.cells

    def prepare(
        self,
        sequences: Sequence[CellSequence],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[CellSequence, Sequence[int]]] = (),
    ) -> Forward:
        """``CausalLM.prepare``."""
        if sequences and not prefill and max(map(len, pending)) <= MAX_PENDING:
            planned = self.packer.plan(sequences, pending, draft, len(sequences))
            if (fixed := self._fixed(planned, draft)) is not None:
                self.packer.keep(planned)
                return fixed
            self.packer.give_back(planned)
        return self.packer.prepare(sequences, pending, draft, prefill)

    def level(
        self, sequences: Sequence[CellSequence | None], shape: Shape, rows: np.ndarray, token: Tensor | np.ndarray
    ) -> Forward:
        """``CausalLM.extend``."""
        planned, drafted = self.packer.plan_level(sequences, shape, rows), None
        if isinstance(token, np.ndarray):
            planned.numbers[0] = token
        else:
            drafted = token
        return self._fixed(planned, None, drafted) or self.packer.finish_level(planned, token)

    def _fixed(self, planned: Planned, draft: Draft | None, tokens: Tensor | None = None) -> FixedForward | None:
        """Fill the inputs of a forward; None where a stream has more rows than ``MAX_ROWS``.

        Args:
            draft: its forest; None where all rows get logits.
            tokens: ``[N]`` of these, on the device; None where the plan holds them.
        """
        rows = [0] * self.cells.streams
        begins = []  # of each sequence's rows: stream, first row in the stream
        for new in planned.new:
            begins.append((new.sequence.stream, rows[new.sequence.stream]))
            rows[new.sequence.stream] += len(new.taken)
        if max(rows) > MAX_ROWS:
            return None
        streams = min(padded(max(stream for stream, _ in begins) + 1), self.cells.streams)
        unused = self._unused(streams, max(new.end for new in planned.new))
        bucket = Bucket(
            streams,
            padded(max(rows)),
            unused + 1,
            padded(len(planned.new)) + 1,
            padded(max(len(new.slots) for new in planned.new)),
            padded(planned.numbers.shape[1] if draft is None else draft.shape.rows),
        )
        total, n = bucket.streams * bucket.rows, bucket.rows
        ids, positions, packed = (np.zeros(total, dtype=np.int64) for _ in range(3))
        wanted = np.zeros(bucket.logits, dtype=np.int64)
        cell, owner = np.full(total, unused), np.full(total, bucket.sequences - 1)
        slots = np.full((bucket.sequences, bucket.uncommitted), unused)
        keys = np.zeros((bucket.sequences, bucket.cells if self.packer.kinds else 0), dtype=np.int64)
        committed = np.zeros((bucket.sequences, bucket.cells), dtype=bool)
        sees = np.ones((total, bucket.uncommitted), dtype=bool)
        where = np.empty(planned.numbers.shape[1], dtype=np.int64)  # of each row that is no padding
        for number, (new, (stream, first)) in enumerate(zip(planned.new, begins, strict=True)):
            count, known = len(new.taken), len(new.slots)
            here = slice(stream * n + first, stream * n + first + count)
            rows_here = slice(new.start, new.start + count)
            where[rows_here] = np.arange(here.start, here.stop)
            ids[here], positions[here] = planned.numbers[:, rows_here]
            cell[here], owner[here] = new.taken, number
            slots[number, :known] = new.slots
            sees[here] = False
            sees[here, :known] = True if new.mask is None else new.mask == 0
            committed[number, : new.sequence.extent] = new.sequence.bias(new.sequence.extent) == 0
            if self.packer.kinds:
                keys[number, : new.end] = new.key_positions(new.end)
        packed[: len(where)] = where
        if draft is None:
            chosen, roots = where, 0
        else:
            chosen, roots, tokens = where[planned.logits(draft)], draft.shape.roots, draft.token
        wanted[: len(chosen)] = chosen
        numbers = np.concatenate(
            [ids, positions, cell, owner, slots.ravel(), wanted, packed, keys.ravel()], dtype=np.int64
        )
        flags = np.concatenate([committed.ravel(), sees.ravel()])
        return FixedForward(
            graphs=self, bucket=bucket, numbers=numbers, flags=flags, rows=len(chosen), drafted=tokens, roots=roots,
            total=len(where), attended=sum(new.end for new in planned.new), pending=planned.pending,
            nodes=planned.nodes,
        )  # fmt: skip

    def _unused(self, streams: int, end: int) -> int:
        """The last cell of a bucket, beyond ``end``, that no sequence uses in any of the first streams."""
        size = GRAIN
        while True:
            while size <= end:
                size *= 2
            if size > self.cells.capacity:
                size = self.cells.capacity
                if size <= end or self.cells.references[:streams, size - 1].any():
                    self.cells.reserve([size + GRAIN])
                    size = self.cells.capacity
            if not self.cells.references[:streams, size - 1].any():
                return size - 1
            size *= 2

    def _shared(self, name: str, output: Tensor) -> Tensor:
        """Copy an output into the memory that those of all shapes have in common: each is read before the next replay.

        128 captured outputs of 64 rows and 128,000 logits would take 2 GB. The memory grows in powers of two; graphs of
        smaller outputs keep what they were captured with.
        """
        memory, size = self._outputs.get(name), output.numel()
        if memory is None or memory.dtype != output.dtype or len(memory) < size:
            memory = self._outputs[name] = output.new_empty(1 << (size - 1).bit_length())
        return memory[:size].view(output.shape).copy_(output)

    def run(self, given: FixedForward, call: ModelCall) -> tuple[Tensor, Tensor | None]:
        """``FixedForward.compute``. Another choice of captured hidden states is another graph."""
        device, kinds = self.packer.device, self.packer.kinds
        if self._generation != self.cells.generation:
            self.captured.clear()
        key = (given.bucket, call.layers)
        known = self.captured.get(key)
        buffers = Buffers(given.bucket, bool(kinds), device) if known is None else known[0]
        numbers, flags = upload(device, given.numbers, given.flags)
        buffers.numbers.copy_(numbers)
        buffers.flags.copy_(flags)
        if given.drafted is not None:
            count = given.drafted.shape[0]
            buffers.ids.view(-1).index_copy_(0, buffers.wanted[given.roots : given.roots + count], given.drafted)
        if key not in self.captured:

            def forward() -> tuple[Tensor, Tensor | None]:
                pack = FixedPack(self.cells, kinds, self.packer.counting, given.bucket, buffers, self.packer.dtype)
                logits, hidden = call(buffers.ids, buffers.positions, pack, None, buffers.wanted)
                return self._shared("logits", logits), None if hidden is None else self._shared("hidden", hidden)

            while len(self.captured) >= MAX_GRAPHS:
                del self.captured[next(iter(self.captured))]
            with self.clock.phase("capture"):
                replay = self.capture(forward)
        else:
            replay = self.captured.pop(key)[1]
        self.captured[key] = buffers, replay  # the last one used comes last
        logits, hidden = replay()
        self._generation = self.cells.generation  # the first forward may have allocated cells
        chosen = logits[: given.rows].clone()
        return chosen, None if hidden is None else hidden.index_select(0, buffers.packed[: given.total])
