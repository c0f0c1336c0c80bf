"""Arrays of the host on a device: all that one forward reads, by one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16
"""Bytes at whose multiples an array begins: every data type may be read there."""


def upload_all(device: torch.device, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Return arrays on a device, each in its own data type, by one asynchronous copy from pinned memory.

    The memory is that of torch's allocator of pinned memory, which hands it out again when the copy has ended. On the
    CPU nothing is copied: the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = staged.numpy()
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
