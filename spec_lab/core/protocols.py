"""Base class of the parts of a run, abilities that any object may have, and the members that a part must have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from inspect import get_annotations, getattr_static, isabstract, isfunction
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from spec_lab.core.options import brief_repr

SIMILAR = 0.85
"""How similar (``difflib``) a name is to a member's for it to be a misspelling of it: "branchs" is 0.93. One with the
same letters in another order ("frok") is one as well."""

if TYPE_CHECKING:
    default = property
else:

    class default:
        """Decorator of a property of a part, in whose place a subclass or an instance may have an attribute.

        Of an ``abstractmethod`` there is no default: reading it raises AttributeError. A dataclass may name one as a
        field, which has no default then.
        """

        def __init__(self, value: Callable[[Any], Any]) -> None:
            self.value, self.__doc__ = value, value.__doc__
            self.missing = getattr(value, "__isabstractmethod__", False)

        def __get__(self, part: Any, kind: type) -> Any:
            if part is None or self.missing:
                raise AttributeError(f"{kind.__name__} has no {self.value.__name__}")
            return self.value(part)


class Part(ABC):
    """Base class of a kind of part, which declares its members and their defaults."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class with a name that is nearly that of a member of its kind.

        Raises:
            TypeError: names both.
        """
        super().__init_subclass__(**options)
        if (kind := kind_of(cls)) is not cls:
            check_spelling(cls, kind, dict.fromkeys(get_annotations(cls)) | vars(cls))

    @default
    @abstractmethod
    def name(self) -> str:
        """As in configs and records."""

    @default
    def facts(self) -> Mapping[str, Any]:
        """Options and results for the manifest, as values that JSON can hold."""
        return {}


def kind_of(cls: type) -> type:
    """Return the class that declares the members of a part's class: that directly below ``Part``."""
    return next(base for base in cls.__mro__ if Part in base.__bases__)


def check_spelling(cls: type, kind: type, named: Mapping[str, Any]) -> None:
    """Check that no method is nearly called as a method of a kind of part, and no attribute as an attribute.

    Args:
        kind: declares the members.
        named: methods, properties and attributes by name.

    Raises:
        TypeError: names both.
    """
    known = members(kind)
    for name, value in named.items():
        alike = [member for member in known if isfunction(getattr_static(kind, member)) == isfunction(value)]
        swapped = [member for member in alike if sorted(member) == sorted(name)]
        near = swapped or get_close_matches(name, alike, 1, SIMILAR)
        if name.startswith("_") or name in known or not near:
            continue
        raise TypeError(
            f"{cls.__name__}.{name} is no member of {kind.__name__}: did you mean {near[0]}? For something of your own "
            f"choose a name that differs more, or _{name}"
        )


@runtime_checkable
class Hashed(Protocol):
    """A part that may have been read from files."""

    @property
    def sha256(self) -> str | None:
        """The hash of its files; empty where it is not known, None where there are none."""
        ...


@dataclass(frozen=True)
class Declared:
    """A condition on the value of an attribute.

    Args:
        words: for messages, such as "a whole number".
        fits: whether a value is that.
    """

    words: str
    fits: Callable[[Any], bool]


class WrongValue(ValueError):
    """An attribute of a part has a value of another kind than its contract declares."""


TEXT = Declared("a string", lambda value: isinstance(value, str))
TEXT_OR_NONE = Declared("a string or None", lambda value: value is None or isinstance(value, str))
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
        TypeError: an attribute of the part's own is nearly called like a member of its kind.
    """
    if isinstance(part, Part):
        check_spelling(type(part), kind_of(type(part)), vars(part))
    for name, must in declared.items():
        if hasattr(part, name) and not must.fits(value := getattr(part, name)):
            raise WrongValue(f"{type(part).__name__}.{name} must be {must.words}, not {brief_repr(value)}")


def members(contract: type) -> list[str]:
    """Return what a contract declares: the members of a kind of part, a Protocol or an abstract class, the fields of a
    dataclass.
    """
    if is_dataclass(contract):
        return [field.name for field in fields(contract)]
    declared = dict.fromkeys(name for base in contract.__mro__ for name in (*get_annotations(base), *vars(base)))
    return [name for name in declared if name == "__call__" or not name.startswith("_")]


def required(contract: type) -> list[str]:
    """Return those members of a contract for which there is no default."""
    if isabstract(contract) and not issubclass(contract, Part):
        return sorted(contract.__abstractmethods__)  # type: ignore[attr-defined]
    if not issubclass(contract, Part):
        return members(contract)
    return [name for name in members(contract) if getattr(getattr_static(contract, name), "missing", False)]
