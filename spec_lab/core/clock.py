"""Time marks that cost nothing where they are set: wall-clock on the CPU, events on a GPU, read after the fact."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any
"""A float of seconds on the CPU, a CUDA event on a GPU."""


class Clock:
    """Marks moments on a device's own time line, without synchronising.

    Args:
        device: where the timed work runs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"

    def mark(self) -> Mark:
        """This moment."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks. On a GPU, call it only after ``synchronise``."""
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start

    def synchronise(self) -> None:
        """Wait until everything marked has happened."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
