"""Show what a run is doing at start-up, on one line of the terminal."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from types import TracebackType

from tqdm import tqdm

from spec_lab.core.progress import Repeated
from spec_lab.core.terminal import visible

CLEAR = "\r\x1b[2K"
"""Terminal codes that return to the beginning of the line and erase it."""


class Status(logging.Handler):
    """Context manager that shows INFO messages of spec_lab's loggers on standard error, each replacing the previous.

    Once a second, the seconds since then are shown behind it, unless a bar of tqdm has the line. Where standard error
    is no terminal, the last message is printed every 30 seconds, with the seconds since then. Code that takes long logs
    a message when it begins.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.logger = logging.getLogger("spec_lab")
        self.shown = sys.stderr.isatty()
        self.repeated = Repeated(self.redraw, 1.0) if self.shown else Repeated(self.print_line)
        self.message, self.began = "", time.monotonic()

    def __enter__(self) -> Status:
        self.before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        self.repeated.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)
        self.repeated.__exit__()
        self.acquire()  # the thread may be about to draw
        try:
            self.message = ""
            if self.shown:
                sys.stderr.write(CLEAR)
                sys.stderr.flush()
        finally:
            self.release()

    def print_line(self) -> None:
        """Print the last message, and for how long it has been true."""
        if self.message:
            since = time.monotonic() - self.began
            print(f"{visible(self.message)} ... ({since:.0f} s)", file=sys.stderr, flush=True)

    def redraw(self) -> None:
        """Show the last message again, with the seconds since then."""
        self.acquire()
        try:
            if self.message and not tqdm._instances:
                self._draw(f"... ({time.monotonic() - self.began:.0f} s)")
        finally:
            self.release()

    def _draw(self, end: str) -> None:
        width = shutil.get_terminal_size().columns - len(end) - 2
        sys.stderr.write(f"{CLEAR}{visible(self.message)[:width]} {end}")
        sys.stderr.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message in place of the previous one; warnings stay on the screen."""
        if record.levelno > logging.INFO:
            print(f"{CLEAR * self.shown}{visible(record.getMessage())}", file=sys.stderr, flush=True)
            return
        self.message, self.began = record.getMessage(), time.monotonic()
        if self.shown:
            self._draw("...")
