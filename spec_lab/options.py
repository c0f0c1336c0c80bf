"""Checks of the scalar arguments that configs give; every message names the option."""

from __future__ import annotations

from typing import Any


def whole(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """``value`` itself, if it is a whole number of ``least`` or more; ``otherwise`` says what else may be given.

    Raises:
        ValueError: it is not; names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of {least} or more{otherwise}, not {value!r}")
    return value


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """``value`` itself, if it is among ``allowed``.

    Raises:
        ValueError: it is not; names the option and what it may be.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return str(value)


def temperature_or_none(name: str, value: Any) -> float | None:
    """``value`` as a float, if it is a finite number of at least 0, or None.

    Raises:
        ValueError: it is neither; names the option.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be null or a number of at least 0, not {value!r}")
    return float(value)


def share(name: str, value: Any) -> float:
    """``value`` as a float, if it is a number between 0 and 1.

    Raises:
        ValueError: it is not; names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number between 0 and 1, not {value!r}")
    return float(value)


def file_name(option: str, value: Any) -> str:
    """``value`` itself, if it can name a folder: a text of 1 to 100 characters in one line, without slashes.

    Raises:
        ValueError: it is not; names the option.
    """
    if not isinstance(value, str) or not 1 <= len(value) <= 100 or "/" in value or not value.isprintable():
        shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:40]}... of {len(str(value))}"
        raise ValueError(f"{option} must be a text of 1 to 100 printable characters without '/', not {shown}")
    if not value.strip(". "):
        raise ValueError(f"{option} must hold a letter, not {value!r}")
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """``value`` as a tuple, if it is a list of texts that are not empty.

    Raises:
        ValueError: it is not; names the option.
    """
    if (
        isinstance(value, str)
        or not isinstance(value, list | tuple)
        or not all(isinstance(s, str) and s for s in value)
    ):
        raise ValueError(f"{name} must be a list of texts that are not empty, such as ['\\n\\n'], not {value!r}")
    return tuple(value)
