"""Keys and values in 8 or 4 bits, which are dequantised whenever a forward reads them (QuantSpec, 2502.10424).

Each head of a cell is a row of bytes: its numbers, two to a byte in 4 bits, then for each group of neighbouring numbers
the smallest one and the step between levels, in float32. A number is the level that is nearest to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from spec_lab.runners.kv_cache import Cells

SCALE_BYTES = 8
"""Bytes of the smallest number and the step of a group."""


def quantized(x: Tensor, bits: int, group: int) -> Tensor:  # [.., dim] -> [.., bytes]
    """Return the rows of bytes of a head's keys or values.

    Args:
        x: the numbers of each head.
        bits: 8 or 4.
        group: most neighbouring numbers with a scale; the groups of a head are equal.
    """
    of_group = math.gcd(x.shape[-1], group)
    groups = x.float().unflatten(-1, (x.shape[-1] // of_group, of_group))
    low, levels = groups.amin(-1, keepdim=True), 2**bits - 1
    step = (groups.amax(-1, keepdim=True) - low) / levels
    nearest = ((groups - low) / torch.where(step > 0, step, 1.0)).round().clamp(0, levels)
    number = nearest.to(torch.uint8).flatten(-2)
    if bits == 4:
        number = pad(number, (0, number.shape[-1] % 2))
        number = number[..., ::2] | (number[..., 1::2] << 4)
    return torch.cat([number, torch.cat([low, step], -1).flatten(-2).view(torch.uint8)], -1)


def dequantized(rows: Tensor, dim: int, bits: int, group: int) -> Tensor:  # [.., bytes] -> [.., dim] float32
    """Return the numbers of rows that ``quantized`` has made of ``dim`` numbers each."""
    of_group = math.gcd(dim, group)
    ends = rows.shape[-1] - SCALE_BYTES * (dim // of_group)
    number, scales = rows[..., :ends], rows[..., ends:].clone(memory_format=torch.contiguous_format)
    if bits == 4:
        number = torch.stack([number & 15, number >> 4], -1).flatten(-2)[..., :dim]
    scale = scales.view(torch.float32).unflatten(-1, (dim // of_group, 2))
    return (number.unflatten(-1, (dim // of_group, of_group)) * scale[..., 1:] + scale[..., :1]).flatten(-2)


def row_bytes(dim: int, bits: int, group: int) -> int:
    """Return the bytes of a row of ``dim`` numbers."""
    return math.ceil(dim * bits / 8) + SCALE_BYTES * (dim // math.gcd(dim, group))


class QuantizedCells(Cells):
    """A store of rows of bytes.

    Args:
        bits, group: as in ``quantized``.
    """

    def __init__(self, bits: int, group: int) -> None:
        super().__init__()
        self.bits, self.group = bits, group
        self._dims: dict[int, int] = {}  # numbers of a row, by its bytes

    def encode(self, states: Tensor) -> Tensor:
        """See ``Cells``. Rows of bytes stay as they are."""
        if states.dtype == torch.uint8:
            return states
        rows, dim = quantized(states, self.bits, self.group), states.shape[-1]
        if self._dims.setdefault(rows.shape[-1], dim) != dim:
            raise ValueError(f"keys and values of {self._dims[rows.shape[-1]]} and {dim} numbers have rows of one size")
        return rows

    def decode(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``Cells``."""
        return dequantized(states, self._dims[states.shape[-1]], self.bits, self.group).to(dtype)
