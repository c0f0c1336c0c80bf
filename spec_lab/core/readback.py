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
        away = [one for one in tensors if isinstance(one, Tensor)]
        if all(one.device.type == "cpu" for one in away):
            return [one if isinstance(one, np.ndarray) else one.numpy() for one in tensors]
        parts = iter(self.fetch(away))
        return [one if isinstance(one, np.ndarray) else next(parts) for one in tensors]

    def fetch(self, tensors: list[Tensor]) -> list[np.ndarray]:
        """One copy of their bytes, widest types first, so that each begins where its type allows."""
        order = sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())
        flat = [tensors[place].contiguous().view(-1).view(torch.uint8) for place in order]
        packed, start = torch.cat(flat).cpu(), 0
        found: list[np.ndarray] = [np.empty(0)] * len(tensors)
        for place, part in zip(order, flat, strict=True):
            own = packed[start : start + len(part)].view(tensors[place].dtype)
            found[place] = own.view(tensors[place].shape).numpy()
            start += len(part)
        return found
