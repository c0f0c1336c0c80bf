"""Refusals: what went wrong in one line, with the option or the line of code that is at fault."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import CompactHydraException, InstantiationException
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from spec_lab.core.faults import causes, described, location
from spec_lab.core.terminal import visible


class Refused(CompactHydraException):
    """A run that cannot be: one line instead of a traceback (HYDRA_FULL_ERROR=1 shows it)."""


@contextmanager
def refusing() -> Iterator[None]:
    """End the process with the message of a refusal: Hydra would print the overrides before it, and advice after it.

    Raises:
        SystemExit: instead of ``Refused``, unless ``HYDRA_FULL_ERROR=1`` asks for the traceback.
    """
    try:
        yield
    except Refused as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(str(error))


def reason(error: BaseException) -> str:
    """Return an error's message in one line, without characters that a terminal would execute."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no default: give {error.full_key}=... on the command line"
    if isinstance(error, InterpolationResolutionError):  # of several lines; the first one says what is wrong
        named, message = f"{error.full_key}: " * bool(error.full_key), str(error).partition("\n")[0]
        message = message.rpartition("raised while resolving interpolation: ")[2]
        return visible(f"{named}{message}: correct the value, or what it refers to")
    if isinstance(error, ModuleNotFoundError) and isinstance(error.__cause__, Exception):
        # transformers imports lazily and reports every error inside such an import as a missing module: also that of
        # a signal which a launcher handles by raising.
        return reason(error.__cause__)
    return visible(" ".join(str(error).split())) or type(error).__name__


def fault(error: BaseException, target: str) -> str:
    """Return what went wrong in one line: for code of another package, or an error that no part of this package raises
    on purpose, with its type and the file and line.

    Args:
        error: raised while a part was imported or built.
        target: the part's dotted name.
    """
    expected = isinstance(error, InstantiationException | OSError | OmegaConfBaseException | TypeError | ValueError)
    cause = causes(error)[-1]  # of Hydra's errors: that of the import
    if isinstance(error, InstantiationException):
        imported = cause is not error  # else Hydra refuses it
        why = f" cannot be imported: {described(cause)}{location(cause, target)}" if imported else f": {reason(error)}"
        return visible(f"_target_={target}{why}")
    if expected and target.partition(".")[0] == __name__.partition(".")[0]:
        return reason(error)
    where = location(error, target)
    if expected:
        return f"_target_={target}: {reason(error)}{where}" if where else reason(error)
    return visible(f"_target_={target} raised {' '.join(described(error).split())}{where}")
