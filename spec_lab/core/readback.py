"""Copies from a device to the host: each waits for the device, so they are packed, and counted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Readback:
    """Reads tensors on the host, all those of a call by one copy.

    On the CPU nothing is copied; calls are counted all the same, so that tests on the CPU find a copy too many.

    Args:
        copies: how many there were.
    """

    def __init__(self) -> None:
        self.copies = 0

    def __call__(self, *tensors: Tensor | np.ndarray) -> list[np.ndarray]:
        """The same numbers as NumPy arrays. What is an array already stays."""
        self.copies += 1
        away = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        if all(tensor.device.type == "cpu" for tensor in away):
            return [tensor if isinstance(tensor, np.ndarray) else tensor.numpy() for tensor in tensors]
        parts = iter(self.fetch(away))
        return [tensor if isinstance(tensor, np.ndarray) else next(parts) for tensor in tensors]

    def fetch(self, tensors: list[Tensor]) -> list[np.ndarray]:
        """One copy of their bytes, widest types first, so that each begins where its type allows."""
        order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
        flat = [tensors[number].contiguous().view(-1).view(torch.uint8) for number in order]
        packed, start = torch.cat(flat).cpu(), 0
        arrays: list[np.ndarray] = [np.empty(0)] * len(tensors)
        for number, part in zip(order, flat, strict=True):
            values = packed[start : start + len(part)].view(tensors[number].dtype)
            arrays[number] = values.view(tensors[number].shape).numpy()
            start += len(part)
        return arrays
