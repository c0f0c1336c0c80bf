"""Abilities that any part of a run may have (ask with ``isinstance``), and the members that a part must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from inspect import get_annotations, isabstract
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from spec_lab.core.options import brief


@runtime_checkable
class Named(Protocol):
    """A part with a name of its own, for messages and records."""

    @property
    def name(self) -> str:
        """As in configs and records."""
        ...


@runtime_checkable
class Described(Protocol):
    """A part with options or results of its own that belong in the manifest."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the manifest records; values that JSON can hold."""
        ...


@runtime_checkable
class Hashed(Protocol):
    """A part that may have been read from files."""

    @property
    def sha256(self) -> str | None:
        """Of the files; empty where it is not known, None where there are none."""
        ...


@runtime_checkable
class Threaded(Protocol):
    """A runner whose forwards have CPU threads of their own in place of torch's."""

    @property
    def threads(self) -> int:
        """Their number."""
        ...


@dataclass(frozen=True)
class Declared:
    """What the value of an attribute must be.

    Args:
        words: for messages, such as "a whole number".
        fits: whether a value is that.
    """

    words: str
    fits: Callable[[Any], bool]


class WrongValue(ValueError):
    """An attribute of a part has a value of another kind than its contract declares."""


TEXT = Declared("a string", lambda value: isinstance(value, str))
FLAG = Declared("True or False", lambda value: isinstance(value, bool))
COUNT = Declared(
    "a whole number of at least 0",
    lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0,
)
TEXTS = Declared(
    "a tuple of strings", lambda value: isinstance(value, tuple) and all(isinstance(text, str) for text in value)
)
FACTS = Declared("a mapping", lambda value: isinstance(value, Mapping))


def check_declared(part: object, declared: Mapping[str, Declared]) -> None:
    """Check the values of those attributes that a part has.

    Raises:
        WrongValue: one is something else; names the class, the attribute and the value.
    """
    for name, must in declared.items():
        if hasattr(part, name) and not must.fits(value := getattr(part, name)):
            raise WrongValue(f"{type(part).__name__}.{name} must be {must.words}, not {brief(value)}")


def members(contract: type) -> list[str]:
    """Return what an object must have: a Protocol's members, a dataclass's fields, an abstract class's methods."""
    if is_dataclass(contract):
        return [one.name for one in fields(contract)]
    if isabstract(contract):
        return sorted(contract.__abstractmethods__)  # type: ignore[attr-defined]
    declared = dict.fromkeys(name for one in contract.__mro__ for name in (*get_annotations(one), *vars(one)))
    return [name for name in declared if name == "__call__" or not name.startswith("_")]


def facts_of(part: object) -> dict[str, Any]:
    """Return what the manifest records of a part; empty for a part that is not ``Described``."""
    return dict(part.facts) if isinstance(part, Described) else {}
