"""Arrays of the host on a device: all that one call is given by one copy; uploads are counted.

A tensor that is made of numbers of the host on a device (``torch.tensor(.., device=)``, ``.to(device)``, an index given
as a list) is a copy of its own, which waits for the device. So nothing in a step uploads but by these functions.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16
"""Bytes at whose multiples an array begins: every data type may be read there."""


class _Counted(threading.local):
    uploads = 0


_COUNTED = _Counted()


def uploads() -> int:
    """Return how many uploads this thread has made. It only rises: what a step makes is a difference of two calls."""
    return _COUNTED.uploads


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Return arrays on a device, each in its own data type, by one asynchronous copy from pinned memory.

    The memory is that of torch's allocator of pinned memory, which hands it out again when the copy has ended. On the
    CPU nothing is copied or counted: the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    if device.type == "cuda":
        staged = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        memory = staged.numpy()
    else:  # of one byte at least: an empty array has no stride. (A fake tensor has no memory to write to.)
        memory = np.empty(max(1, end), dtype=np.uint8)
        staged = torch.from_numpy(memory)
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    _COUNTED.uploads += 1
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def upload_tokens(device: torch.device | str, tokens: Sequence[int] | np.ndarray) -> Tensor:  # [n] int64
    """Return tokens that the host knows, as a draft holds them."""
    return upload(torch.device(device), np.asarray(tokens, dtype=np.int64))[0]


def rows_at(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of ``x[rows]`` ``[n, ..]`` without an upload of the numbers: neighbours are copied together."""
    ends = [0, *(number for number, (row, after) in enumerate(pairwise(rows), 1) if after != row + 1), len(rows)]
    runs = [x[rows[start] : rows[start] + end - start] for start, end in pairwise(ends) if end > start]
    return torch.cat(runs) if len(runs) > 1 else runs[0].clone() if runs else x[:0].clone()
