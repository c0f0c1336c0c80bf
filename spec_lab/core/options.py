"""Validation of scalar options; every message names the option."""

from __future__ import annotations

import math
from typing import Any

MAX_TEMPERATURE = 1e6
"""Maximum temperature. Far below it every distribution is uniform already; far above it float32 overflows."""


def whole(name: str, value: Any, least: int = 1, otherwise: str = "", most: int | None = None) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``most``.

    Args:
        name: the option, for the message.
        value: as given.
        least: the lower bound.
        otherwise: which other values are allowed, for the message.
        most: the upper bound; None for none.

    Raises:
        ValueError: it is not; names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of {least} or more{otherwise}, not {brief(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}{otherwise}, not {brief(value)}")
    return value


def brief(value: Any) -> str:
    """Return ``repr(value)`` for a message; a long one is shortened."""
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print more than 4300 digits
    try:
        text = repr(value)
    except ValueError:  # a number of that size inside
        return f"a {type(value).__name__} with a number that is too long to print"
    return text if len(text) <= 100 else f"{text[:97]}..."


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is among ``allowed``.

    Raises:
        ValueError: it is not; names the option and the allowed values.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {brief(value)}")
    return str(value)


def temperature_or_none(name: str, value: Any) -> float | None:
    """Return ``value`` as a float if it is a number from 0 to ``MAX_TEMPERATURE``, or None.

    Raises:
        ValueError: it is neither; names the option.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"{name} must be null or a number of at least 0 and at most {MAX_TEMPERATURE:g}, not {brief(value)}"
        )
    return float(value)


def share(name: str, value: Any) -> float:
    """Return ``value`` as a float if it is a number between 0 and 1.

    Raises:
        ValueError: it is not; names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number between 0 and 1, not {brief(value)}")
    return float(value)


def number(name: str, value: Any, least: float) -> float:
    """Return ``value`` as a float if it is a finite number of at least ``least``.

    Raises:
        ValueError: it is not; names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least {least:g}, not {brief(value)}")
    return float(value)


def true_or_false(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool.

    Raises:
        ValueError: it is not; names the option.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {brief(value)}")
    return value


def file_name(option: str, value: Any) -> str:
    """Return ``value`` if it can name a folder: a text of 1 to 100 printable characters without slashes.

    Raises:
        ValueError: it is not; names the option.
    """
    if not isinstance(value, str) or not 1 <= len(value) <= 100 or "/" in value or not value.isprintable():
        shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:40]}... of {len(str(value))}"
        raise ValueError(f"{option} must be a text of 1 to 100 printable characters without '/', not {shown}")
    if not value.strip(". "):
        raise ValueError(f"{option} must hold a letter, not {value!r}")
    return value


MAX_STRINGS = 10_000
"""Maximum number of texts in a list."""

MAX_CHARACTERS = 100_000
"""Maximum number of characters of a list's texts in total."""


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Return ``value`` as a tuple if it is a list of non-empty texts, at most ``MAX_STRINGS`` of them, with at most
    ``MAX_CHARACTERS`` in total.

    Raises:
        ValueError: it is not; names the option.
    """
    if (
        isinstance(value, str)
        or not isinstance(value, list | tuple)
        or not all(isinstance(s, str) and s for s in value)
    ):
        raise ValueError(f"{name} must be a list of texts that are not empty, such as ['\\n\\n'], not {brief(value)}")
    for place, one in enumerate(value):
        try:
            one.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}[{place}] {brief(one)} has a lone surrogate, which no text can hold") from None
    for what, number, most in (
        ("texts", len(value), MAX_STRINGS),
        ("characters", sum(map(len, value)), MAX_CHARACTERS),
    ):
        if number > most:
            raise ValueError(f"{name} has {number} {what}, at most {most} are possible: shorten the list")
    return tuple(value)
