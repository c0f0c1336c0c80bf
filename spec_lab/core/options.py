"""Declarations of options: which values an option may have, stated once, in the annotation of an argument or a field.

``depth: Annotated[int, Whole(1, 64)] = 5`` declares a type and bounds; ``Literal["a", "b"]``, ``bool``, ``str | None``
and lists and mappings of these need no more. The command line checks a config against the signature of what its
``_target_`` names, under each option's full name and before anything is imported (``cli.declarations``). ``checked``
and ``check_fields`` check the same declaration for callers in Python. The reference of options and the comments of
conf/ are generated from it.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    is_typeddict,
)

P = ParamSpec("P")
R = TypeVar("R")

MAX_STRINGS = 10_000
"""Maximum number of texts in a list."""

MAX_CHARACTERS = 100_000
"""Maximum number of characters of a list's texts in total."""


@dataclass(frozen=True)
class Whole:
    """The bounds of a whole number; ``maximum`` None: no upper bound."""

    minimum: int = 1
    maximum: int | None = None

    def fits(self, value: Any) -> bool:
        """Return whether a whole number is within the bounds."""
        return self.minimum <= value and (self.maximum is None or value <= self.maximum)

    def __str__(self) -> str:
        return f"of {self.minimum} or more" if self.maximum is None else f"from {self.minimum} to {self.maximum}"


@dataclass(frozen=True)
class Number:
    """The bounds of a number; ``above``: ``minimum`` itself is not allowed."""

    minimum: float = 0.0
    maximum: float = math.inf
    above: bool = False

    def fits(self, value: Any) -> bool:
        """Return whether a number is within the bounds."""
        return self.minimum <= value <= self.maximum and not (self.above and value == self.minimum)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.minimum:g}" + f" and at most {self.maximum:g}" * (self.maximum < math.inf)
        if self.maximum == math.inf:
            return f"of {self.minimum:g} or more"
        return f"from {self.minimum:g} to {self.maximum:g}"


class WrongOption(ValueError):
    """An option with a value that it cannot have. The message begins with the name of the argument or field, before
    which the command line puts the path of the part.
    """


class OneOf:
    """Names that are known only as a constant, such as the keys of a table; others are a ``Literal``."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def fits(self, value: Any) -> bool:
        """Return whether a text is one of the names."""
        return value in self.names


@dataclass(frozen=True)
class NotEmpty:
    """A text that is not empty."""

    def fits(self, value: Any) -> bool:
        """Return whether a text is not empty."""
        return bool(value)

    def __str__(self) -> str:
        return "that is not empty"


@dataclass(frozen=True)
class Folder:
    """A text that can name a folder."""

    def fits(self, value: Any) -> bool:
        """Return whether a text has 1 to 100 printable characters, none of them a slash, and not only dots."""
        return 1 <= len(value) <= 100 and "/" not in value and value.isprintable() and bool(value.strip(". "))

    def __str__(self) -> str:
        return "of 1 to 100 printable characters without '/', not only dots"


@dataclass(frozen=True)
class Form:
    """The form in which an option's text must be written; code that reads the text may check more.

    Args:
        words: the form in words, for messages and the reference ("int or null").
        pattern: a regular expression that the whole text must match.
    """

    words: str
    pattern: str = "(?s:.*)"

    def fits(self, value: Any) -> bool:
        """Return whether the pattern matches a text."""
        return not isinstance(value, str) or re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class TextList:
    """The bounds of a list of texts."""

    def fits(self, value: Any) -> bool:
        """Return whether no text is empty or has a lone surrogate, and the list is not too long."""
        whole_text = "".join(value)
        encodes = whole_text.isascii() or not any("\ud800" <= character <= "\udfff" for character in whole_text)
        return all(value) and encodes and len(value) <= MAX_STRINGS and len(whole_text) <= MAX_CHARACTERS

    def __str__(self) -> str:
        return f"without empty ones, at most {MAX_STRINGS} with {MAX_CHARACTERS} characters in all"


@dataclass(frozen=True)
class DraftedTokens(Form):
    """A text that names a file of tokens, of which the first N are meant with ``:N`` at its end."""

    words: str = "FILE or FILE:N"
    pattern: str = "(?s:.+)"

    @staticmethod
    def split(value: str) -> tuple[Path, int | None]:
        """Return the file and N; None without one."""
        file, _, count = value.rpartition(":")
        return (Path(file), int(count)) if file and re.fullmatch(r"\d{1,9}", count, re.ASCII) else (Path(value), None)


@dataclass(frozen=True)
class DrafterPath:
    """A text that names a local folder, or a repository of the hub (OWNER/NAME), of a drafter or a draft model.

    Args:
        what: it holds, for messages: "Hydra heads", "an EAGLE head".
        hidden: fields of its config.json of which the first that is there holds the target's hidden size.
        vocabulary: likewise, the target's number of tokens.
        converts: whether ``spec-lab convert`` knows the layout of its pickles.
        model: whether it is a checkpoint of a whole model, with a tokenizer.
    """

    what: str
    hidden: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    converts: bool = True
    model: bool = False

    def fits(self, value: Any) -> bool:
        """Return whether a text is not empty."""
        return bool(value)


MAX_TEMPERATURE = 1e6
"""Maximum temperature. Far below it every distribution is uniform already; far above it float32 overflows."""

Count = Annotated[int, Whole(1)]
Share = Annotated[float, Number(0, 1)]
Temperature = Annotated[float, Number(0, MAX_TEMPERATURE)]
Filled = Annotated[str, NotEmpty()]
Texts = Annotated[Sequence[str], TextList()]
DraftModelPath = Annotated[str, DrafterPath("a draft model", vocabulary=("vocab_size",), model=True)]
"""Path of a draft model with the target's tokens."""


PLAIN = (Whole(0), Whole(1), Number(0), Number(0, 1), NotEmpty(), TextList())
"""Bounds that a comment need not state."""


def brief(value: Any) -> str:
    """Return a value as a config or a JSON file writes it, for a message; a long one is shortened."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else brief_repr(value)


def brief_repr(value: Any) -> str:
    """Return ``repr(value)`` for a message about an object in Python; a long one is shortened."""
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print more than 4300 digits
    try:
        text = repr(value)
    except ValueError:  # a number of that size inside
        return f"a {type(value).__name__} with a number that is too long to print"
    return text if len(text) <= 100 else f"{text[:97]}..."


LISTS = (list, tuple, Sequence, Collection, Iterable)
MAPPINGS = (dict, Mapping)
SCALARS: dict[Any, tuple[tuple[str, str, str], Callable[[Any], bool]]] = {
    int: (
        ("int", "a whole number", "whole numbers"),
        lambda value: isinstance(value, int) and not isinstance(value, bool),
    ),
    float: (("float", "a number", "numbers"), lambda value: _number(value) and abs(value) < 1e300),
    str: (("str", "a text", "texts"), lambda value: isinstance(value, str)),
    Path: (("str", "a text", "texts"), lambda value: isinstance(value, str | Path)),
    bool: (("bool", "true or false", "true or false"), lambda value: isinstance(value, bool)),
    type(None): (("null", "null", "null"), lambda value: value is None),
}
"""The scalar types of a declaration: their names in the reference and in messages (one, several), and what has the
type."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; a type that is none is its only member."""
    hint = type(None) if hint is None else hint
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return a type without its bounds, its arguments, and its bounds."""
    bounds: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, bounds = hint.__origin__, (*hint.__metadata__, *bounds)
    return get_origin(hint) or hint, get_args(hint), bounds


def bound_of(hint: Any, kind: type[R]) -> R | None:
    """Return the bound of this kind that a type declares; None if it has none."""
    stated = (bound for alternative in _alternatives(hint) for bound in _parts(alternative)[2])
    return next((bound for bound in stated if isinstance(bound, kind)), None)


def misfit(value: Any, hint: Any) -> tuple[str, Any, Any] | None:
    """Find what is wrong with a value.

    Args:
        value: as a config or a caller gives it.
        hint: the declared type with its bounds. A type that no config can state, such as a class, has every value.

    Returns:
        The place within a list or a mapping (empty: the value itself), the value there and the type that it must
        have; None of a value that fits.
    """
    inner = None
    for alternative in _alternatives(hint):
        kind, arguments, bounds = _parts(alternative)
        if kind is Literal:
            fits = any(value == name and type(value) is type(name) for name in arguments)
        elif kind in LISTS:
            fits = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            element = arguments[0] if arguments else Any
            for number, item in enumerate(value) if fits else ():
                if wrong := misfit(item, element):
                    inner, fits = inner or (f"[{number}]{wrong[0]}", *wrong[1:]), False
                    break
        elif kind in MAPPINGS:
            fits = isinstance(value, Mapping)
            for key, item in value.items() if fits else ():
                if wrong := misfit(item, arguments[1] if arguments else Any):
                    inner, fits = inner or (f".{key}{wrong[0]}", *wrong[1:]), False
                    break
        else:
            fits = SCALARS[kind][1](value) if kind in SCALARS else True
        if fits and all(bound.fits(value) for bound in bounds):
            return None
    formed = any(isinstance(bound, Form) for alternative in _alternatives(hint) for bound in _parts(alternative)[2])
    return ("", value, hint) if formed or not inner else inner


def words(hint: Any, column: int = 1) -> str:
    """Return a declared type with its bounds; empty if it is no type of a config.

    Args:
        column: 0: as the reference writes it, such as "int from 1 to 64 or null"; 1: as messages do; 2: as messages
            name several.
    """
    alternatives: list[str] = []
    for alternative in _alternatives(hint):
        kind, arguments, bounds = _parts(alternative)
        names = arguments if kind is Literal else next((b.names for b in bounds if isinstance(b, OneOf)), None)
        forms = [bound.words for bound in bounds if isinstance(bound, Form)]
        if (names is not None and not column) or (forms and column):
            alternatives += map(str, names or forms)
            continue
        if names is not None:
            text = f"one of {', '.join(map(str, names))}"
        elif kind in SCALARS:
            text = SCALARS[kind][0][column]
        elif kind in LISTS:
            element = words(arguments[0], 2 * bool(column)) if arguments else ""
            text = ("list", "a list", "lists")[column] + f" of {element}" * bool(element)
        elif kind in MAPPINGS:
            text = ("mapping", "a mapping", "mappings")[column]
            element = words(arguments[1], 2) if arguments and column else ""
            text += f" of names to {element}" * bool(element)
        else:
            continue
        alternatives.append(
            " ".join((text, *(str(bound) for bound in bounds if not isinstance(bound, OneOf | Form | DrafterPath))))
        )
    *first, last = dict.fromkeys(alternatives) or [""]
    if column and last == "null" and len(first) == 1 and first[0].startswith("one of "):
        return f"{first[0]}, null"
    comma = "," * any(" or " in text or "," in text for text in first)
    return f"{', '.join(first)}{comma} or {last}" if first else last


def bounds(hint: Any, meaning: str, chosen: str = "") -> str:
    """Return the bounds of a declared type as a comment states them; empty if they tell nothing new.

    Args:
        meaning: beside which they stand; names that it explains are not listed.
        chosen: of a table's names, among which this one is; they are not listed.
    """
    texts = []
    for alternative in _alternatives(hint):
        kind, arguments, stated = _parts(alternative)
        listed = next((bound.names for bound in stated if isinstance(bound, OneOf) and chosen not in bound.names), ())
        names = arguments if kind is Literal else listed
        texts += [", ".join(map(str, names))] * any(str(name) not in meaning for name in names)
        texts += [
            str(bound) for bound in stated if not isinstance(bound, OneOf | Form | DrafterPath) and bound not in PLAIN
        ]
    return re.sub(r"\bof (\S+) or more", r"at least \1", " or ".join(texts))


OLD_VALUES = {
    "point": "deterministic", "without": "without_replacement", "spans": "per_sequence", "dense": "dense_mask",
}  # fmt: skip
"""Values of options that have another name now, by their former one."""


def accept(name: str, value: Any, hint: Any) -> None:
    """Check a value against a declared type with its bounds.

    Args:
        name: of the option, for the message.
        hint: the declared type.

    Raises:
        WrongOption: it does not fit; names the option, what it must be and the value.
    """
    if wrong := misfit(value, hint):
        inner_path, value, hint = wrong
        message = f"{name}{inner_path} must be {words(hint)}, not {brief(value)}"
        if isinstance(value, str) and value in OLD_VALUES and not misfit(new := OLD_VALUES[value], hint):
            message += f": {brief(value)} is now called {brief(new)}"
        if not inner_path and isinstance(value, int | float) and not misfit(brief(value), hint):
            message += f": quote a text that looks like another value, \"{name}='{brief(value)}'\""
        raise WrongOption(message)


def evaluate(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return the type that an annotation states; ``Any`` where a name in it is not known.

    Args:
        annotation: as ``inspect`` returns it: source text in modules with postponed evaluation.
        names: by which it may refer to types, bounds and constants.
    """
    text = getattr(annotation, "__forward_arg__", annotation)
    try:
        return eval(text, {"__builtins__": {}}, names) if isinstance(text, str) else annotation
    except Exception:
        return Any


class _Names(dict[str, Any]):
    """The names of a module; those that are imported for type checkers only are any type."""

    def __missing__(self, name: str) -> Any:
        return vars(sys.modules["builtins"]).get(name, Any)


def _annotations(made: Any) -> dict[str, Any]:
    annotations = inspect.get_annotations(made)
    modules = {  # a TypedDict has its bases' annotations too, each with the module that it was written in
        name: getattr(annotation, "__forward_module__", None) or made.__module__
        for name, annotation in annotations.items()
    }
    names = {module: _Names(vars(sys.modules[module])) for module in modules.values()}
    return {name: evaluate(annotation, names[modules[name]]) for name, annotation in annotations.items()}


@cache
def hints(made: Callable[..., Any]) -> dict[str, Any]:
    """Return the declared type of each argument of a function, or of each field of a dataclass with its bases'."""
    if isinstance(made, type) and not is_dataclass(made) and not is_typeddict(made):
        return {} if made.__init__ is object.__init__ else hints(made.__init__)  # type: ignore[misc]
    if isinstance(made, type):
        declared = {name: hint for base in reversed(made.__mro__) for name, hint in _annotations(base).items()}
        return {name: hint for name, hint in declared.items() if ClassVar not in (hint, get_origin(hint))}
    declared = _annotations(inspect.unwrap(made))
    declared.pop("return", None)
    further = [name for name, hint in declared.items() if get_origin(hint) is Unpack]
    unpacked = [hints(get_args(declared.pop(name))[0]) for name in further]
    return declared | {option: hint for options in unpacked for option, hint in options.items()}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose arguments are options: a value that its annotation does not allow is refused, and a
    whole number becomes a ``float`` where one is declared.

    Raises:
        ValueError: by the decorated function; names the argument.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        for argument, stated in given.arguments.items():
            variable = signature.parameters[argument].kind is inspect.Parameter.VAR_KEYWORD
            for name, value in (stated if variable else {argument: stated}).items():
                hint = hints(function).get(name, Any)
                accept(name, value, hint)
                if isinstance(value, int) and {_parts(kind)[0] for kind in _alternatives(hint)} <= {float, type(None)}:
                    (stated if variable else given.arguments)[name] = float(value)
        return function(*given.args, **given.kwargs)

    return call


def check_fields(part: Any) -> None:
    """Check the fields of a dataclass against their declarations.

    Raises:
        ValueError: a value does not fit; names the field.
    """
    made: Callable[..., Any] = type(part)
    for name, hint in hints(made).items():
        accept(name, getattr(part, name), hint)


def whole(name: str, value: Any, minimum: int = 1, otherwise: str = "", maximum: int | None = None) -> int:
    """Return ``value`` if it is a whole number from ``minimum`` to ``maximum``.

    Args:
        name: of the value, for the message.
        otherwise: which other values are allowed, for the message.
        maximum: the upper bound; None for none.

    Raises:
        ValueError: it is not; names it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be a whole number of {minimum} or more{otherwise}, not {brief(value)}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}{otherwise}, not {brief(value)}")
    return value


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is among ``allowed``.

    Raises:
        ValueError: it is not; names the option and the allowed values.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {brief(value)}")
    return str(value)


def check_wandb_name(name: str, value: Any) -> None:
    """Refuse a project or an owner that Weights & Biases would refuse only after the run has started.

    Raises:
        ValueError: it is one; names the option.
    """
    if not isinstance(value, str) or not re.fullmatch(r"[^/\\#?%:]{1,128}", value) or not value.isprintable():
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:40]}..."
        raise ValueError(
            f"{name} must be a text of 1 to 128 printable characters without any of / \\ # ? % : (got {shown})"
        )
