"""A context of llama.cpp: a KV cache with sequence ids, and one batch that is used again.

A context has a KV cache of cells that all sequence ids share (``kv_unified``). A cell holds the key and value of one
token and the set of ids that it belongs to; a token attends to the cells of its first id up to its own position.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.runners.llama_library import FAILURES, Model, logged

KV_DTYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""Data types of keys and values, and their numbers (``ggml_type``)."""

GRAIN = 256
"""Cells are allocated in multiples of it, as llama.cpp pads its context."""

MAX_IDS = 256
"""llama.cpp's LLAMA_MAX_SEQ."""

MAX_TENSORS = 64
"""Most tensors over the library's memory that a context keeps."""

MAX_OUTPUT = 2**27
"""Most bytes of logits of one forward in which every row has outputs (``Context.set_embeddings``)."""


class OutOfCells(ValueError, MemoryError):
    """The KV cache, or the memory for it, is exhausted; options limit both."""


class Logits(NamedTuple):
    """``[rows, V]`` as a tensor and as an array, both over the same memory."""

    tensor: Tensor
    array: np.ndarray

    @staticmethod
    def of(tensor: Tensor) -> Logits:
        """Both of a tensor."""
        return Logits(tensor, tensor.numpy())

    def clone(self) -> Logits:
        """A copy in memory of its own."""
        return Logits.of(self.tensor.clone())


class Holder(Protocol):
    """A sequence that holds cells of a context."""

    reserve: int
    """About how many tokens it will have."""

    @property
    def cells(self) -> int:
        """Cells that it uses at most."""
        ...


@dataclass(frozen=True)
class LlamaSettings:
    """How a context computes.

    Args:
        threads: of the CPU.
        kv_dtype: data type of keys and values (``KV_DTYPES``).
        batch: most rows of one call of llama_decode.
        cells: most cells of the KV cache; None for no limit.
        snapshots: how many tokens the state of recurrent layers can be rolled back by (``llama_recurrent``); 0 for
            models without them.
    """

    threads: int = 1
    kv_dtype: str = "f16"
    batch: int = 512
    cells: int | None = None
    snapshots: int = 0


class Context:
    """A KV cache and a batch of one model, grown on demand.

    Growing makes a new context and copies the cells that are in use, since llama.cpp fixes sizes and callbacks when a
    context is made. With recurrent layers nothing is copied: snapshots are not part of a saved state.

    Attributes:
        token, position, flags: ``[>= n]`` arrays that the next call of ``decode`` reads: of each row its token, its
            position, and whether it has outputs. Rows' ids are set by ``set_ids``; ``single_ids`` sets all.
        cells, ids: the cells and the sequence ids that exist now.
        made: how many contexts were made so far.
    """

    def __init__(self, model: Model, settings: LlamaSettings) -> None:
        self.model, self.library, self.settings = model, model.library, settings
        self.cells = self.ids = self.made = 0
        self.embeddings = False
        self._watched: dict[str, np.ndarray | None] = {}
        self._watches = self._lost = False
        self._callback: Any = None
        self._tensors: dict[tuple[int, int], Logits] = {}
        self._free_ids = list(range(MAX_IDS - 1, -1, -1))
        self._highest = 0  # one past the highest id that was ever taken
        self._used = 0  # at least as many cells as are in use
        self._handle: Any = None
        self._memory: Any = None
        self._free: Any = None
        self._rows = 0
        self._flat = np.zeros(0, dtype=np.int32)
        self._address = 0
        self.reserve_rows(settings.batch)

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that the seconds of a forward depend on, for records."""
        snapshots = {"snapshots": self.settings.snapshots} if self.settings.snapshots else {}
        return {
            "engine": "llama.cpp", "model": self.model.description, "parameters": self.model.parameters,
            "kv_dtype": self.settings.kv_dtype, "llama_threads": self.settings.threads, **snapshots,
        }  # fmt: skip

    # Sizes -----------------------------------------------------------------------------------------------------------

    def require(self, cells: int, ids: int, watch: Collection[str] | None = None) -> None:
        """Grow to at least ``cells`` cells and ``ids`` sequence ids, and watch these tensors; None changes nothing.

        The callback stays once a tensor was watched: arms that watch none may alternate with one that does.

        Raises:
            OutOfCells: there is not enough memory. The context is as it was before; if not even that can be made
                again, the cells are lost and every further call fails.
        """
        if self._lost:
            raise OutOfCells("the KV cache could not be grown and is lost: start again with fewer or shorter requests")
        limit = self.limit
        if limit is not None:
            cells = min(cells, limit)
        watches = self._watches or bool(watch)
        if cells > self.cells or ids > self.ids or watches > self._watches:
            self._grow(cells, ids, limit, watches)
        if watch is not None and self._watched.keys() != {*watch}:
            self._watched = dict.fromkeys(watch)

    @property
    def limit(self) -> int | None:
        """Maximum number of cells; None for no limit."""
        cells = self.settings.cells
        return None if cells is None else -(-max(cells, MAX_IDS) // GRAIN) * GRAIN

    def reserve(self, rows: int, sequences: Collection[Holder]) -> None:
        """Grow if the free cells may not suffice for ``rows`` more, or if an id was taken that does not exist yet.

        Args:
            rows: that will be computed next.
            sequences: all that hold cells.

        Raises:
            OutOfCells: as in ``require``.
        """
        self._used += rows
        if self._used > self.cells or self._highest > self.ids:
            self._used = rows + sum(sequence.cells for sequence in sequences)
            reserved = sum(sequence.reserve for sequence in sequences) if self._used > self.cells else 0
            self.require(max(self._used, reserved), self._highest)

    @property
    def has_ids(self) -> bool:
        """Whether a sequence id is free."""
        return bool(self._free_ids)

    def take_id(self) -> int | None:
        """A free sequence id; None if there is none. It exists from the next call of ``reserve`` on."""
        if not self._free_ids:
            return None
        number = self._free_ids.pop()
        self._highest = max(self._highest, number + 1)
        return number

    def release_id(self, number: int) -> None:
        """Take back a sequence id whose cells were removed."""
        self._free_ids.append(number)
        while self._highest > self.ids and self._highest - 1 in self._free_ids:  # it need not exist any more
            self._highest -= 1

    def existing_id(self, number: int) -> int:
        """Return the id itself, or in exchange a free one that exists, if this one was taken and does not exist yet."""
        if number >= self.ids and (other := min(self._free_ids, default=number)) < self.ids:
            self._free_ids.remove(other)
            self.release_id(number)
            return other
        return number

    def _grow(self, cells: int, ids: int, limit: int | None, watches: bool) -> None:
        """Make a larger context with the cells of this one, or restore this one. Errors as in ``require``."""
        least = max(-(-cells // GRAIN) * GRAIN, self.cells, self.settings.batch, MAX_IDS)
        cells = max(least, 2 * self.cells) if cells > self.cells else least
        if limit is not None:
            cells, least = min(cells, limit), min(least, limit)
        if ids > self.ids or not self.ids:
            more, fewest = (2, 1) if self.settings.snapshots else (4, 16)  # recurrent states are kept for each id
            ids = min(MAX_IDS, max(ids, more * self.ids, fewest))
        ids = max(ids, self.ids)
        state, before = self._state(), (self.cells, self.ids, self._watches)
        self.close()
        for size in dict.fromkeys((cells, least)):
            try:
                self._make(size, ids, watches, state)
                return
            except OutOfCells as error:
                failed = error
                self.close()
        if state is not None:
            self._lost = True
            self._make(*before, state)
            self._lost = False
        raise failed

    def _make(self, cells: int, ids: int, watches: bool, state: Any) -> None:
        """Make a context with the cells of another one (``_state``).

        Raises:
            OutOfCells: there is not enough memory.
            ValueError: the state of recurrent layers cannot be rolled back.
        """
        settings, lib = self.settings, self.library
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified, params.swa_full = cells, ids, True, True
        params.n_batch = params.n_ubatch = max(settings.batch, MAX_IDS)  # the library reserves outputs for all ids
        params.n_threads = params.n_threads_batch = settings.threads
        params.type_k = params.type_v = KV_DTYPES[settings.kv_dtype]
        if settings.kv_dtype == "f32":
            params.flash_attn_type = 0  # parts of it are float16
        params.n_rs_seq = settings.snapshots
        params.embeddings = self.embeddings
        params.no_perf = True
        if watches:
            params.cb_eval = self._callback = lib.ggml_backend_sched_eval_callback(_weakly(self))
        FAILURES.clear()
        handle = lib.llama_init_from_model(self.model.handle, params)
        if not handle:
            fewer = f", or target.snapshots to fewer than {settings.snapshots}" if settings.snapshots else ""
            raise OutOfCells(
                f"llama.cpp cannot make a KV cache of {cells} cells ({settings.kv_dtype}): set target.cells, "
                f"target.context or max_kv_tokens to fewer tokens{fewer}{logged()}"
            )
        FAILURES.clear()
        if lib.llama_n_rs_seq(handle) < settings.snapshots:
            lib.llama_free(handle)
            raise ValueError(
                f"llama.cpp cannot roll back the recurrent state of {self.model.description}, so that rejected tokens "
                "cannot be removed from it: choose a model of another kind"
            )
        self.made += 1
        self._free = weakref.finalize(self, _free, lib, handle, self.model)
        self._handle, self._memory = handle, lib.llama_get_memory(handle)
        self.cells, self.ids, self._watches = cells, ids, watches
        if state is not None and not lib.llama_state_set_data(handle, state, len(state)):
            raise OutOfCells(f"llama.cpp cannot copy its KV cache to one of {cells} cells")

    def close(self) -> None:
        """Free the KV cache."""
        if self._free is not None:
            self._free()
        self._handle = self._memory = self._free = None
        self.cells = self.ids = 0

    def _state(self) -> Any:
        """All cells in use, as bytes; None without a context, or with one whose cells cannot be copied."""
        if self._handle is None or self.settings.snapshots:
            return None
        size = self.library.llama_state_get_size(self._handle)
        state = (ctypes.c_uint8 * size)()
        self.library.llama_state_get_data(self._handle, state, size)
        return state

    # Cells -----------------------------------------------------------------------------------------------------------

    def remove(self, number: int, start: int) -> None:
        """Take the cells from position ``start`` on from a sequence id.

        Raises:
            RuntimeError: the library cannot.
        """
        if self._free is None or not self._free.alive:  # the process ends, and has freed the cells
            return
        if number >= self.ids:  # it was taken, and never used
            return
        if not self.library.llama_memory_seq_rm(self._memory, number, start, -1):
            raise RuntimeError(f"llama.cpp cannot remove the tokens from position {start} on of a sequence")

    def share(self, source: int, number: int, start: int, end: int) -> None:
        """Give the cells of ``source`` at positions ``start`` to ``end`` - 1 to another sequence id as well."""
        if end > start:
            self.library.llama_memory_seq_cp(self._memory, source, number, start, end)

    # Rows ------------------------------------------------------------------------------------------------------------

    def reserve_rows(self, rows: int) -> None:
        """Grow the arrays to ``rows`` rows."""
        if rows <= self._rows:
            return
        self._rows = rows
        self.token, self.position, self._counts = (np.zeros(rows, dtype=np.int32) for _ in range(3))
        self.flags = np.zeros(rows, dtype=np.int8)
        self._pointers = np.zeros(rows, dtype=np.uintp)
        if len(self._flat) < rows:
            self._allocate_ids(2 * rows)
        self._single = False
        self._whole = self._part(0, rows)

    def single_ids(self, tokens: list[int], positions: list[int], ids: list[int], outputs: int) -> None:
        """Write ``n`` rows of which each has one sequence id; the last ``outputs`` have outputs."""
        rows = len(ids)
        self.reserve_rows(rows)
        if not self._single:
            self._counts[:] = self.flags[:] = 1
            self._pointers[:] = self._address + 4 * np.arange(self._rows)
            self._views = self.token.data, self.position.data, self._flat.data, self.flags.data
            self._single, self._silent = True, 0
        # Items of memoryviews: after a forward the CPU's caches are cold, and NumPy's slices cost ten times more.
        token, position, flat, flags = self._views
        for row in range(rows):
            token[row], position[row], flat[row] = tokens[row], positions[row], ids[row]
        silent = rows - outputs
        if silent != self._silent:
            for row in range(max(silent, self._silent)):
                flags[row] = row >= silent
            self._silent = silent

    def set_ids(self, counts: np.ndarray, starts: np.ndarray, flat: np.ndarray) -> None:
        """Give each row several sequence ids.

        Args:
            counts: ``[n]`` how many each row has.
            starts: ``[n]`` where they begin in ``flat``, in bytes.
            flat: the ids, row by row, int32.
        """
        if len(flat) > len(self._flat):
            self._allocate_ids(2 * len(flat))
        rows = len(counts)
        self._flat[: len(flat)] = flat
        self._counts[:rows] = counts
        np.add(starts, self._address, out=self._pointers[:rows], casting="unsafe")
        self._single = False

    def _allocate_ids(self, size: int) -> None:
        self._flat = np.zeros(size, dtype=np.int32)
        self._address = self._flat.ctypes.data

    def decode(
        self, rows: int, wanted: int, cuts: Sequence[int] = ()
    ) -> tuple[Logits, np.ndarray | None, dict[str, np.ndarray]]:
        """Compute the first ``rows`` rows of the arrays, in several calls where they exceed the batch.

        Args:
            wanted: of how many, the last ones, the logits are returned. These rows have outputs; all others as well
                where ``embeddings`` are on.
            cuts: rows with which another call begins, in ascending order.

        Returns:
            Logits ``[wanted, V]`` in the order of the rows: the library's memory, which the next call overwrites, or a
            copy; hidden states after the final norm ``[rows, H]``, a copy, or None where they are off; and the watched
            tensors ``[rows, H]`` by name.

        Raises:
            OutOfCells: there are not enough free cells, or all were lost (``require``).
            RuntimeError: the library refuses the rows or fails.
        """
        max_rows = self.settings.batch if self.settings.batch < self.cells else self.cells
        if self.embeddings:
            max_rows = max(1, min(max_rows, MAX_OUTPUT // (4 * self.model.vocabulary)))
        if rows <= max_rows and not cuts:
            return self._decode(rows, wanted, self._whole)
        outputs = []
        for begin, end in pairwise((0, *cuts, rows)):
            parts = -(-(end - begin) // max_rows)
            for number in range(parts):
                start, stop = (begin + part * (end - begin) // parts for part in (number, number + 1))
                wanted_here = stop - max(start, min(stop, rows - wanted))
                logits, hidden, watched = self._decode(stop - start, wanted_here, self._part(start, stop))
                outputs.append((logits.clone() if stop < rows else logits, hidden, watched))
        all_logits, states, tensors = zip(*outputs, strict=True)
        several = any(len(logits.tensor) for logits in all_logits[:-1])
        logits = Logits.of(torch.cat([logits.tensor for logits in all_logits])) if several else all_logits[-1]
        hidden = None if states[0] is None else np.concatenate(states)
        return logits, hidden, {name: np.concatenate([part[name] for part in tensors]) for name in self._watched}

    def set_embeddings(self, on: bool) -> None:
        """Return hidden states after the final norm; every row must have outputs then."""
        self.embeddings = on
        if self._handle is not None:
            self.library.llama_set_embeddings(self._handle, on)

    def _part(self, start: int, stop: int) -> Any:
        batch = self.library.llama_batch()
        batch.n_tokens = stop - start
        for name, array in (
            ("token", self.token), ("pos", self.position), ("n_seq_id", self._counts), ("seq_id", self._pointers),
            ("logits", self.flags),
        ):  # fmt: skip
            kind = dict(batch._fields_)[name]
            setattr(batch, name, ctypes.cast(array.ctypes.data + start * array.itemsize, kind))
        return batch

    def _decode(self, rows: int, wanted: int, batch: Any) -> tuple[Logits, np.ndarray | None, dict[str, np.ndarray]]:
        """Compute a batch of ``rows`` rows."""
        lib, model = self.library, self.model
        batch.n_tokens = self._expected = rows
        if code := lib.llama_decode(self._handle, batch):
            self._raise(code, rows)
        logits = self._logits(rows if self.embeddings else wanted, wanted)
        hidden = None
        if self.embeddings:
            hidden = _view(_address(lib.llama_get_embeddings(self._handle)), rows, model.output_size).copy()
        watched = {}
        for name, tensor in self._watched.items():
            if tensor is None:
                raise RuntimeError(
                    f"llama.cpp computes no tensor {name} [{rows}, {model.hidden_size}] for {model.description}: "
                    "these hidden states cannot be read; choose a proposer that requires none, or only the last ones"
                )
            watched[name], self._watched[name] = tensor, None
        return logits, hidden, watched

    def _logits(self, outputs: int, wanted: int) -> Logits:
        """The last rows of the library's memory of logits; what describes them is made once for each address and size.

        Args:
            outputs: rows of that memory.
            wanted: how many of them.
        """
        width = self.model.vocabulary
        if not wanted:
            return Logits.of(torch.empty(0, width))
        address = _address(self.library.llama_get_logits(self._handle)) + 4 * (outputs - wanted) * width
        key = address, wanted
        if key not in self._tensors:
            if len(self._tensors) >= MAX_TENSORS:
                self._tensors.clear()
            self._tensors[key] = Logits.of(torch.from_numpy(_view(address, wanted, width)))
        return self._tensors[key]

    def _raise(self, code: int, rows: int) -> None:
        if code == 1:
            raise OutOfCells(
                f"the KV cache has no {rows} free cells of {self.cells}: raise target.cells, decode fewer requests at "
                f"once (batch_size), or set max_kv_tokens to at most {self.cells}"
            )
        raise RuntimeError(f"llama_decode failed with code {code} for {rows} rows{logged()}")

    def evaluated(self, tensor: int, asks: bool) -> bool:
        """Called for every tensor of a forward: first asked whether it is needed, then with its values."""
        name = self.library.ggml_get_name(tensor).decode(errors="replace")
        if asks or name not in self._watched:
            return name in self._watched
        shape = (self._expected, self.model.hidden_size)
        size = self.library.ggml_nbytes(tensor)
        if size == 4 * shape[0] * shape[1]:  # float32, and of all rows
            values = np.empty(shape, dtype=np.float32)
            self.library.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, size)
            self._watched[name] = values
        return True


def _weakly(context: Context) -> Callable[[int, bool, int], bool]:
    """A callback that does not keep the context, and with it the KV cache, alive."""
    reference = weakref.ref(context)

    def evaluated(tensor: int, asks: bool, _data: int) -> bool:
        context = reference()
        return context is not None and bool(context._watched) and context.evaluated(tensor, asks)

    return evaluated


def _free(library: Any, handle: Any, _model: Model) -> None:
    """Free a context. The finalizer that calls it refers to the model, which must be freed after its contexts."""
    library.llama_free(handle)


def _address(pointer: Any) -> int:
    return ctypes.addressof(pointer.contents)


def _view(address: int, rows: int, width: int) -> np.ndarray:
    """The library's memory from an address on as a float32 array ``[rows, width]``."""
    memory: Any = (ctypes.c_float * (rows * width)).from_address(address)
    return np.frombuffer(memory, dtype=np.float32).reshape(rows, width)
