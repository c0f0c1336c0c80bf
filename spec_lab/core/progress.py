"""Progress of long work: a bar on a terminal, one line every 30 seconds elsewhere, as in a log of a cluster job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from io import StringIO
from threading import Event, Thread
from typing import Any

from tqdm import tqdm

from spec_lab.core.terminal import visible

SECONDS = 30.0
"""Time between two lines."""

LINE = "{desc}: {n:.0f}/{total_fmt}{unit}s, {rate_fmt}, {elapsed} elapsed, {remaining} left{postfix}"
UNBOUNDED_LINE = "{desc}: {n:.0f}{unit}s, {rate_fmt}, {elapsed} elapsed{postfix}"
"""Where the total is not known, and with it the time left."""

CLOCK_LINE = "{desc}: {n:.0f}/{total_fmt} seconds{postfix}"
CLOCK_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total_fmt} seconds{postfix}"
"""Formats of work whose units are seconds: a rate would tell nothing."""

BAR_WIDTH = 10
"""Columns that a bar keeps; what is shown behind it is cut instead."""


class Repeated:
    """A context manager that calls a function again and again from a thread of its own.

    Args:
        call: the function.
        seconds: time between two calls; None: ``SECONDS``.
    """

    def __init__(self, call: Callable[[], object], seconds: float | None = None) -> None:
        self.call, self.seconds, self.ended = call, seconds, Event()
        self.thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Repeated:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def _run(self) -> None:
        while not self.ended.wait(self.seconds or SECONDS):
            self.call()


class Progress(tqdm):
    """A bar of tqdm on standard error; where that is no terminal, a line every ``SECONDS`` with what is done, of how
    much, the rate and, where the total is known, the time left. The lines come also while a single unit of the work
    takes long.

    Args:
        given: as in ``tqdm``.
        disable: show neither.
        clock: the units are seconds: they are shown whole, without a rate.
        more: as in ``tqdm``.
    """

    def __init__(self, *given: Any, disable: bool = False, clock: bool = False, **more: Any) -> None:
        self.repeated: Repeated | None = None
        self.lines = not disable and not sys.stderr.isatty()
        if clock:
            more["bar_format"] = CLOCK_BAR
        if self.lines:  # each update is counted at once, and nothing but the lines is written
            more |= {"file": StringIO(), "mininterval": 0, "miniters": 1, "smoothing": 0}
            more["bar_format"] = CLOCK_LINE if clock else LINE
            more["unit"] = f" {more.get('unit', 'unit')}"
        super().__init__(*given, disable=disable, **more)

    def __enter__(self) -> Progress:
        """Begin to print lines, until ``__exit__`` ends them."""
        if self.lines:
            self.repeated = Repeated(self.print_line)
            self.repeated.__enter__()
        return self

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the work; the lines end with it, also where it is left early."""
        with self:
            yield from super().__iter__()

    @property
    def format_dict(self) -> Any:
        """The state of the bar; where more was done than was expected, all of it is done and no time is left.

        On a terminal the text behind the bar is cut to what is free beside a bar of ``BAR_WIDTH`` columns.
        """
        state = super().format_dict
        if state["total"]:
            state |= {"n": min(state["n"], state["total"])}
        elif self.lines:
            state |= {"bar_format": UNBOUNDED_LINE}
        if state["postfix"] and state["ncols"] and not self.lines:
            bare = self.format_meter(**state | {"postfix": None, "ncols": None})  # its bar has BAR_WIDTH columns
            room = max(0, state["ncols"] - len(bare) - len(", "))
            text = str(state["postfix"])
            state["postfix"] = text if len(text) <= room else text[: room - 1] + "…" if room > BAR_WIDTH else ""
        return state

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Draw the bar; nothing where lines are printed."""
        return True if self.lines else super().display(msg, pos)

    def tick(self, done: int, kept: bool = False) -> None:
        """Count units that are done; those that were kept from an earlier run do not count for the rate."""
        if kept:
            self.initial += done
        self.update(done)

    def print_line(self) -> None:
        """Print the state as a line."""
        print(visible(str(self)), file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar, or the lines."""
        if self.repeated is not None:
            self.repeated.__exit__()
        super().close()
