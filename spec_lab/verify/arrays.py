"""Where a verdict's numbers live: NumPy arrays where p is on the CPU, tensors on p's device elsewhere.

Verifiers are written once for both, but for the rejection of siblings (``rejection``, ``parallel``). Numbers per row
and per node (not per token) are of either kind; ``Arrays`` has the few operations whose spelling differs. On a device
nothing is read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.shape import DeviceShape, Shape
from spec_lab.core.upload import upload

CHUNK = 2**19
"""Numbers per token worked on at a time: they stay in a processor's cache, and their memory is used again. (Megabytes
asked for afresh cost more than the arithmetic: every page of them faults.)"""

Array = Any
"""A NumPy array where p is on the CPU, else a tensor on p's device."""


def on_host(x: Tensor) -> bool:
    """Whether numbers per row are kept in NumPy, whose calls cost a third of torch's. There is nothing to wait for."""
    return x.device.type == "cpu"


@dataclass(frozen=True)
class Arrays:
    """Float64 arrays of numbers per row or node: NumPy on the CPU, torch elsewhere.

    Args:
        device: where tensors live; None for NumPy.
    """

    device: torch.device | None

    @staticmethod
    def like(x: Tensor) -> Arrays:
        """Those that go with ``x``."""
        return Arrays(None if on_host(x) else x.device)

    def full(self, size: int | tuple[int, ...], value: float) -> Array:
        """A float64 array of one value."""
        if self.device is None:
            return np.full(size, value)
        return torch.full((size,) if isinstance(size, int) else size, value, dtype=torch.float64, device=self.device)

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """``x`` where the condition holds, else ``y``."""
        return np.where(condition, x, y) if self.device is None else torch.where(condition, x, y)

    def at_least(self, x: Array, minimum: float) -> Array:
        """``x``, but at least ``minimum``."""
        return np.maximum(x, minimum) if self.device is None else x.clamp_min(minimum)

    def at_most(self, x: Array, limit: float) -> Array:
        """``x``, but at most ``limit``."""
        return np.minimum(x, limit) if self.device is None else x.clamp_max(limit)

    def range(self, count: int) -> Array:
        """0, 1, .. as int64."""
        return np.arange(count) if self.device is None else torch.arange(count, device=self.device)

    def read(self, x: Tensor) -> Array:
        """Return a tensor on the device of p as an array."""
        return x.numpy() if self.device is None else x

    def tensor(self, x: Array) -> Tensor:
        """An array as a tensor on p's device."""
        return torch.from_numpy(x) if self.device is None else x

    def index(self, rows: Array) -> Array:
        """Rows given as a NumPy array or a tensor, as an array."""
        if self.device is None:
            return rows.numpy() if isinstance(rows, Tensor) else rows
        return rows if isinstance(rows, Tensor) else upload(self.device, rows)[0]

    def shape(self, shape: Shape) -> Shape | DeviceShape:
        """A forest's index arrays."""
        return shape if self.device is None else shape.on(self.device)


def parts(rows: int, p: Tensor, chunk: int) -> list[slice]:
    """The parts of ``rows`` rows as wide as p's that hold ``chunk`` numbers each; eight times as many on a GPU."""
    size = max(1, (chunk if on_host(p) else 8 * chunk) // p.shape[-1])
    return [slice(start, start + size) for start in range(0, rows, size)]


def zeroed_(x: Tensor, tokens: Array, arrays: Arrays) -> Tensor:
    """``x`` ``[n, V]`` with 0 at ``tokens`` ``[n, K]``, where those are not -1. In place; x has no negative entry."""
    if arrays.device is None:
        values = x.numpy()  # which writes a few numbers faster
        for row, row_tokens in enumerate(tokens.tolist()):
            for token in row_tokens:
                if token >= 0:
                    values[row, token] = 0.0
        return x
    least = torch.where(tokens >= 0, 0.0, torch.inf).to(x.dtype)
    return x.scatter_reduce_(1, tokens.clamp_min(0), least, "amin")


def rows_of(x: Tensor, rows: Array) -> Tensor:
    """A copy of ``x[rows]``. NumPy copies a few rows in a third of torch's time."""
    if isinstance(rows, Tensor):
        return x.index_select(0, rows)
    return torch.from_numpy(x.numpy().take(rows, 0))


def view(x: Tensor, rows: Array) -> Tensor:
    """``x[rows]``, not to be written to."""
    if isinstance(rows, np.ndarray) and len(rows) == 1:
        return x.narrow(0, int(rows[0]), 1)
    return rows_of(x, rows)
