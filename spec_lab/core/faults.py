"""Errors raised inside a part, which a user may have written: which part raised, and where in its code."""

from __future__ import annotations

import sys
import sysconfig
from traceback import walk_tb
from types import FrameType, TracebackType

from spec_lab.core.terminal import visible

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of Python's own modules and of installed packages."""


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
        if not isinstance(error, Exception | SystemExit) or isinstance(error, (PartError, Passing, *self.but)):
            return
        where = location(error, type(self.part).__module__)
        raise PartError(f"{self.kind} '{_name(self.part)}' raised {described(error)}{where}") from error


def warn(what: str, error: Exception, module: str, then: str) -> None:
    """Print an error in code that a run does not depend on, in one line of standard error.

    Args:
        what: raised it, such as "figure 'acceptance'".
        module: that of the code.
        then: what happens without it.
    """
    text = " ".join(f"{what} raised {described(error)}{location(error, module)}: {then}".split())
    print(f"spec_lab: {visible(text)}", file=sys.stderr)


def of_a_part(error: BaseException | None) -> bool:
    """Return whether an error is a ``PartError``, or was raised from one."""
    return any(isinstance(cause, PartError) for cause in causes(error))


def causes(error: BaseException | None) -> list[BaseException]:
    """Return an error, the one that it was raised from, and so on; each once, since these may form a cycle."""
    chain: list[BaseException] = []
    while error is not None and not any(error is cause for cause in chain):
        chain.append(error)
        error = error.__cause__
    return chain


def described(error: BaseException) -> str:
    """Return the error's type and message; of an error of syntax without its file (``location``)."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def location(error: BaseException, module: str, skip: int = 0) -> str:
    """Return `` (file:line, in function)`` of where a part raised an error; empty where it is not known.

    It is the innermost frame in the part's package. A part of this package may call code of a user's: then the
    innermost frame of that. Of an error of syntax it is the line that cannot be compiled.

    Args:
        module: the part's.
        skip: number of the outermost frames that are the caller's own.
    """
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f" ({error.filename}:{error.lineno})"
    package, ours = module.partition(".")[0], __name__.partition(".")[0]
    frames = [(_package(frame.f_globals), frame, line) for frame, line in list(walk_tb(error.__traceback__))[skip:]]
    of_part = [(frame, line) for name, frame, line in frames if name == package]
    if package == ours:
        foreign = [(frame, line) for name, frame, line in frames if name != ours and not _is_library(frame)]
        of_part = foreign or of_part
    if not of_part:
        return ""
    frame, line = of_part[-1]
    return f" ({frame.f_code.co_filename}:{line}, in {frame.f_code.co_name})"


def _name(part: object) -> str:
    """Return the part's name, or its class's where it has none or another error."""
    try:
        return str(part.name)  # type: ignore[attr-defined]
    except Exception:
        return type(part).__name__


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(("<", *LIBRARIES))
