"""The sandbox of chat templates: Jinja's, with the filters, functions and tags of transformers, and bounded.

Python cannot interrupt a single operation, so the operations whose results can be much larger than their operands are
checked before they run: powers, products, sums, joined text, repeated text, formats, padding. They are counted
together, over one rendering. Other operations, such as the comparison of nested lists, are not bounded here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from inspect import signature
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

MAX_WRITTEN = 200_000_000
"""Maximum number of characters and items that one rendering may write, interim results included."""
MAX_WIDTH = 10_000
"""Maximum width or precision of a format, of padding and of an indentation; maximum length of a batch."""
MAX_BITS = 10_000
"""Maximum size of a whole number."""

STRING_METHODS = frozenset(
    "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal isdigit "
    "islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace "
    "rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill".split()
)
FILTERS = (
    "abs attr batch capitalize center count d default dictsort e escape first float format groupby indent int items "
    "join last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort "
    "string sum title trim truncate unique upper wordcount"
).split()
GLOBALS = ("cycler", "joiner", "range")
WIDTHS = ("width", "precision", "linecount", "slices")
"""Arguments of Jinja's filters that decide how long a result is."""

PRINTF = re.compile(r"%(?:\([^)]*\))?[-#0+ ]*(\*|\d*)(?:\.(\*|\d*))?")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one template."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self.sized,
        )  # fmt: skip
        self.left = MAX_WRITTEN
        self.filters = {name: self._bounded(self.filters[name]) for name in FILTERS} | {"tojson": self._json}
        self.filters["sum"] = _sum(self.filters["sum"])
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _dict, "namespace": _Names}
        self.concat = self._concat  # type: ignore[method-assign]  # of what loops, blocks and macros write

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template; "~" becomes the filter "join", which is bounded."""
        tree = super()._parse(source, name, filename)
        return _Joins().visit(tree)

    def write(self, size: int) -> None:
        """Count what an operation writes.

        Raises:
            OverflowError: more than ``MAX_WRITTEN`` in all.
        """
        self.left -= size
        if self.left < 0:
            raise OverflowError(f"it writes more than {MAX_WRITTEN} characters")

    def sized(self, value: Any) -> Any:
        """Count the characters of a value as text; return it."""
        todo = [value]
        while todo:
            one = todo.pop()
            self.write(len(one) if isinstance(one, str) else 1)
            if isinstance(one, Mapping):
                todo += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                todo += one
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See Jinja's.

        Raises:
            OverflowError: the result would be too large.
        """
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise OverflowError(f"it computes a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self.printf(left, right)
        elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            self.write(len(left) + len(right))
        elif operator == "*":
            text, times = (left, right) if isinstance(left, Sequence) else (right, left)
            if isinstance(text, Sequence) and isinstance(times, int):
                self.write(len(text) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def printf(self, text: str, values: Any) -> None:
        """Check a format with "%"."""
        found = PRINTF.findall(text)
        widths = [one for pair in found for one in pair if one]
        _fits(*(MAX_WIDTH + 1 if one == "*" else one for one in widths))  # "*": the width is a value
        before = self.left
        self.sized(values)
        self.write((before - self.left) * len(found) + sum(map(int, widths)))

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See Jinja's; of the methods of texts those are checked whose results can be long.

        Raises:
            OverflowError: the result would be too large.
        """
        if isinstance(called, BuiltinMethodType) and isinstance(called.__self__, str):
            text, name = called.__self__, called.__name__
            if name in ("center", "ljust", "rjust", "zfill"):
                _fits(*args[:1])
            elif name == "replace":
                self._replaced(text, *args)
            elif name == "join" and args:
                args = (self._parts(text, args[0]), *args[1:])
            return self._counted(super().call(context, called, *args, **kwargs))
        return super().call(context, called, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """See Jinja's."""
        known = attr in STRING_METHODS if isinstance(obj, str) else not isinstance(obj, int | float | bytes)
        return known and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See Jinja's."""
        if not isinstance(value, BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text, by_map = value.__self__, value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(str(text), () if by_map else args, args[0] if by_map else kwargs)

        return formatted if isinstance(text, str) else None

    def _concat(self, parts: Iterable[str]) -> str:
        return "".join(self._parts("", parts))

    def _parts(self, between: str, parts: Iterable[Any]) -> list[Any]:
        found = []
        for one in parts:
            self.write(len(between))
            found.append(self.sized(one))
        return found

    def _counted(self, result: Any) -> Any:
        if isinstance(result, str | list | tuple):
            self.write(len(result))
        return result

    def _replaced(self, text: str, old: Any = "", new: Any = "", count: Any = -1) -> None:
        times = text.count(str(old))
        self.write(len(text) + len(str(new)) * (times if count is None or count < 0 else min(times, count)))

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter of Jinja's with checks of its arguments."""
        names = tuple(signature(function).parameters)
        passed = hasattr(function, "jinja_pass_arg")  # Jinja passes it an object of its own first
        if passed and names[0] not in ("context", "eval_ctx", "environment"):  # Jinja's wrapper drops that
            names = ("eval_ctx", *names)
        first = int(passed)

        @wraps(function)  # keeps which of these three it is called with
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            _fits(*(given[name] for name in WIDTHS if name in given))
            value, name = args[first], function.__name__
            if name == "do_indent":
                width = given.get("width", 4)
                self.write((str(value).count("\n") + 1) * (len(width) if isinstance(width, str) else width))
            elif name == "do_replace":
                self._replaced(str(value), *(given[key] for key in ("old", "new")))
            elif name == "do_format":
                self.printf(str(value), [*args[first + 1 :], kwargs])
            elif name == "do_join":
                parts = self._parts(str(given.get("d", "")), value)
                args = (*args[:first], parts, *args[first + 1 :])
            elif name == "soft_str":
                self.sized(value)
            return self._counted(function(*args, **kwargs))

        return checked

    def _json(
        self, x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """Transformers' filter: unlike Jinja's it does not escape HTML."""
        _fits(indent if isinstance(indent, int) else len(indent or ""))
        before = self.left
        self.sized(x)
        self.write((before - self.left) * (indent if isinstance(indent, int) else len(indent or "")))
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class GenerationTag(Extension):
    """The tag "generation" of transformers, which marks what the model writes; its content is kept."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """See Jinja's."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Joins(jinja2.visitor.NodeTransformer):
    """Replaces "~"."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


class _Formatter(SandboxedFormatter):
    """Checks the widths of ``str.format``, and counts what it writes."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self.sandbox = sandbox

    def format_field(self, value: Any, format_spec: str) -> Any:
        """See ``string.Formatter``."""
        widths = re.findall(r"\d+", format_spec)
        _fits(*widths)
        self.sandbox.write(sum(map(int, widths)))
        return super().format_field(self.sandbox.sized(value), format_spec)

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        """See ``string.Formatter``."""
        return super().convert_field(self.sandbox.sized(value), conversion)


class _Names(Namespace):
    """A namespace without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self, {})
        for name, value in given.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may have no variable {name!r}")
        super().__setitem__(name, value)


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Return a template.

    Raises:
        jinja2.TemplateError: it is none.
    """
    return Sandbox().from_string(source)


@lru_cache(maxsize=8)
def variables(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads. Errors as of ``compiled``."""
    return frozenset(meta.find_undeclared_variables(Sandbox().parse(source)))


def rendered(source: str, given: Mapping[str, Any]) -> str:
    """Return what a template writes.

    Args:
        source: the template.
        given: its variables.

    Raises:
        Exception: as the template does; ``OverflowError`` where a bound is exceeded.
    """
    template = compiled(source)
    assert isinstance(template.environment, Sandbox)
    template.environment.left = MAX_WRITTEN
    return template.render(given)


def _fits(*widths: Any) -> None:
    """Refuse a width of more than ``MAX_WIDTH``.

    Raises:
        OverflowError: there is one.
    """
    for width in widths:
        if len(str(width)) > 9 or (str(width).isdigit() and int(width) > MAX_WIDTH):
            raise OverflowError(f"it asks for a width of more than {MAX_WIDTH}")


def _sum(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def numbers(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise TypeError("it sums what is not a number")
        return function(environment, iterable, attribute, start)

    return numbers


def _refuse(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(form: str) -> str:
    if len(form) > MAX_WIDTH or re.search(r"\d{4}", form):
        raise OverflowError("its format of the date is too long")
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
