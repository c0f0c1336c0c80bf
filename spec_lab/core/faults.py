"""Errors raised inside a part, which a user may have written: which part raised, and where in its code."""

from __future__ import annotations

from traceback import walk_tb
from types import TracebackType

from spec_lab.core.protocols import Named


class PartError(ValueError):
    """A part raised an error. The message names the part, the error, and the file and line in the part's package."""


class Passing(Exception):
    """An error that a part's code passes on and did not cause, such as one of its random draws."""


class attributed:
    """A context manager that turns errors raised inside the block into a ``PartError``.

    Args:
        kind: of part, such as "proposer".
        part: what is called inside.
        but: errors that the part may raise, which are not changed either.

    Raises:
        PartError: an error was raised inside. ``Passing`` and ``PartError`` are not changed.
    """

    __slots__ = ("but", "kind", "part")

    def __init__(self, kind: str, part: object, *but: type[Exception]) -> None:
        self.kind, self.part, self.but = kind, part, but

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, (PartError, Passing, *self.but)):
            return
        name = self.part.name if isinstance(self.part, Named) else type(self.part).__name__
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise PartError(f"{self.kind} '{name}' raised {message}{place(error, self.part)}") from error


def of_a_part(error: BaseException | None) -> bool:
    """Return whether an error is a ``PartError``, or was raised from one."""
    while error is not None:
        if isinstance(error, PartError):
            return True
        error = error.__cause__
    return False


def place(error: BaseException, part: object) -> str:
    """Return `` (file:line, in function)`` of the innermost frame in the part's package; empty if there is none."""
    package = type(part).__module__.partition(".")[0]
    own = [(frame, line) for frame, line in walk_tb(error.__traceback__) if _package(frame.f_globals) == package]
    if not own:
        return ""
    frame, line = own[-1]
    return f" ({frame.f_code.co_filename}:{line}, in {frame.f_code.co_name})"


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
