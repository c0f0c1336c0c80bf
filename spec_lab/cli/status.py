"""Show what a run is doing at start-up, on one line of the terminal."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from types import TracebackType

from spec_lab.core.progress import Repeated
from spec_lab.core.terminal import visible

CLEAR = "\r\x1b[2K"
"""Terminal codes that return to the beginning of the line and erase it."""


class Status(logging.Handler):
    """Context manager that shows INFO messages of spec_lab's loggers on standard error, each replacing the previous.

    Where standard error is no terminal, the last message is printed every 30 seconds, with the seconds since then. Code
    that takes long logs a message when it begins.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.logger = logging.getLogger("spec_lab")
        self.shown = sys.stderr.isatty()
        self.repeated = Repeated(self.print_line)
        self.message, self.began = "", time.monotonic()

    def __enter__(self) -> Status:
        self.before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        if not self.shown:
            self.repeated.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)
        if self.shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
        else:
            self.repeated.__exit__()

    def print_line(self) -> None:
        """Print the last message, and for how long it has been true."""
        if self.message:
            since = time.monotonic() - self.began
            print(f"{visible(self.message)} ... ({since:.0f} s)", file=sys.stderr, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message in place of the previous one; warnings stay on the screen."""
        if not self.shown:
            if record.levelno <= logging.INFO:
                self.message, self.began = record.getMessage(), time.monotonic()
            else:
                print(visible(record.getMessage()), file=sys.stderr, flush=True)
            return
        if record.levelno > logging.INFO:
            sys.stderr.write(f"{CLEAR}{visible(record.getMessage())}\n")
            return
        width = shutil.get_terminal_size().columns - 5
        sys.stderr.write(f"{CLEAR}{visible(record.getMessage())[:width]} ...")
        sys.stderr.flush()
