"""Timing without synchronisation: wall-clock time on the CPU; on a GPU events that are read when the work is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Mark = Any
"""A float of seconds on the CPU, a CUDA event on a GPU."""


Span = tuple[str, Mark, Mark]
"""A phase with its start and end."""


class Phase:
    """See ``Clock.phase``. It may be entered again when it has ended, not before."""

    __slots__ = ("clock", "name", "start")

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.start = self.clock.mark()

    def __exit__(self, *_: object) -> None:
        self.clock.spans.append((self.name, self.start, self.clock.mark()))


class Stage(Phase):
    """See ``Clock.stage``."""

    __slots__ = ()

    def __enter__(self) -> None:
        """It began when the stage before it ended."""

    def __exit__(self, *_: object) -> None:
        end = self.clock.mark()
        self.clock.spans.append((self.name, end, end))


class Clock:
    """Marks points in time on a device's own time line, without synchronising.

    Args:
        device: the device of the timed work.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.spans: list[Span] = []
        self._phases: dict[str, Phase] = {}
        self.mark: Callable[[], Mark] = self._event if self.cuda else time.perf_counter
        """Return a mark of the current time."""

    def _event(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def phase(self, name: str) -> Phase:
        """Return a context manager that records its block as one span of the phase ``name``.

        A phase is not entered within itself: each name has one manager.
        """
        if name not in self._phases:
            self._phases[name] = Phase(self, name)
        return self._phases[name]

    def stage(self, name: str) -> Stage:
        """Return a context manager that records when its block, one of those that follow each other, ends.

        It saves half of the marks: on a GPU each is an event, which takes some microseconds of the host.
        """
        return Stage(self, name)

    def take(self) -> list[Span]:
        """Return the spans recorded since the last call, in the order in which they ended."""
        spans, self.spans = self.spans, []
        return spans

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks. On a GPU, call it only after ``synchronise``."""
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start

    def synchronise(self) -> None:
        """Wait until the device has done all work that was started."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
