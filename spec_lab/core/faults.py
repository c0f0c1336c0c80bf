"""Errors raised inside a part that a user may have written: which part raised, and where in its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb


class PartError(ValueError):
    """A part raised an error. The message names the part, the error, and file and line in the part's own package."""


class Passing(Exception):
    """An error that comes out of a part's code and is not the part's, such as one of the draws it was given."""


@contextmanager
def attributed(kind: str, part: object) -> Iterator[None]:
    """Errors raised inside become a ``PartError``.

    Args:
        kind: of part, such as "proposer".
        part: what is called inside.

    Raises:
        PartError: an error was raised inside. Those that are ``Passing`` or ``PartError`` already stay as they are.
    """
    try:
        yield
    except (PartError, Passing):
        raise
    except Exception as error:
        name = getattr(part, "name", type(part).__name__)
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise PartError(f"{kind} '{name}' raised {said}{place(error, part)}") from error


def of_a_part(error: BaseException | None) -> bool:
    """Whether an error is a ``PartError``, or was raised from one."""
    while error is not None:
        if isinstance(error, PartError):
            return True
        error = error.__cause__
    return False


def place(error: BaseException, part: object) -> str:
    """`` (file:line, in function)`` of the innermost frame of the part's own package; empty where there is none."""
    package = type(part).__module__.partition(".")[0]
    own = [(frame, line) for frame, line in walk_tb(error.__traceback__) if _package(frame.f_globals) == package]
    if not own:
        return ""
    frame, line = own[-1]
    return f" ({frame.f_code.co_filename}:{line}, in {frame.f_code.co_name})"


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
