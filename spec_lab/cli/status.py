"""Show what a run is doing at start-up, on one line of the terminal."""

from __future__ import annotations

import logging
import shutil
import sys
from types import TracebackType

from spec_lab.core.terminal import visible

CLEAR = "\r\x1b[2K"
"""Terminal codes that return to the beginning of the line and erase it."""


class Status(logging.Handler):
    """Context manager that shows INFO messages of spec_lab's loggers on standard error, each replacing the previous.

    Nothing is shown if standard error is not a terminal. Code that takes long logs a message when it begins.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.logger = logging.getLogger("spec_lab")
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> Status:
        if self.shown:
            self.before = self.logger.level
            self.logger.setLevel(logging.INFO)
            self.logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            self.logger.removeHandler(self)
            self.logger.setLevel(self.before)
            sys.stderr.write(CLEAR)
            sys.stderr.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message in place of the previous one; warnings stay on the screen."""
        if record.levelno > logging.INFO:
            sys.stderr.write(f"{CLEAR}{visible(record.getMessage())}\n")
            return
        width = shutil.get_terminal_size().columns - 5
        sys.stderr.write(f"{CLEAR}{visible(record.getMessage())[:width]} ...")
        sys.stderr.flush()
