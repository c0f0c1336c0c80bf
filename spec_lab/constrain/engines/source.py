"""The source of a grammar, for every engine: an option's value, a file, or a request's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from spec_lab.constrain.protocol import ConstraintError
from spec_lab.core.files import read_text
from spec_lab.core.options import brief
from spec_lab.core.request import Request

T = TypeVar("T")

MAX_RECORDED = 200
"""Maximum characters of a source that the manifest holds as it is; of a longer one it holds the hash."""
MAX_SOURCE = 16 * 2**20
"""Maximum size of a file with a pattern, schema or grammar, in bytes."""

MAX_THREADS = 64
"""Maximum ``constraint.threads``, for every engine."""

EXACT = 2**53
"""Every whole number up to this one is exact as a double, as which llguidance reads the numbers of a schema."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose value holds a schema for each name."""


def as_text(name: str, value: Any) -> str | None:
    """Return ``value`` if it is text or None.

    Raises:
        ValueError: it is neither; names the option.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(f"constraint.{name} must be text, not {brief(value)}: put it in quotes")
    return value


def read_source(name: str, value: Any, path: str | None) -> Any:
    """Return ``value``, or the contents of the file at ``path``: a regular file of at most 16 MiB, in UTF-8.

    Raises:
        ValueError: both are given, or the file cannot be read; names the option.
    """
    if value is not None and path is not None:
        raise ValueError(f"give constraint.{name} or constraint.path, not both")
    if path is None:
        return value
    if not isinstance(path, str) or not path:
        raise ValueError(f"constraint.path must name a file, not {path!r}")
    try:
        return read_text(Path(path), MAX_SOURCE)
    except (OSError, ValueError) as error:
        raise ValueError(f"constraint.path={path} cannot be read: {error}") from None


def shown(source: Any) -> dict[str, Any]:
    """Return what the manifest records of a source: the source itself if it is short, otherwise its hash."""
    text = source if source is None or isinstance(source, str) else json.dumps(source, sort_keys=True)
    if text is not None and len(text) > MAX_RECORDED:
        return {"source_sha256": sha256(text.encode("utf-8", "surrogatepass")).hexdigest()}
    return {"source": text}


def matcher_of(kind: str, source: str | None, request: Request, compiled: Callable[[str], T]) -> T:
    """Return what ``compiled`` makes of the request's own source, or of the constraint's where it has none.

    Raises:
        ConstraintError: the source does not compile, or there is none.
    """
    given = request.constraint or source
    if given is None:
        raise ConstraintError(f"request '{request.name}' has no {kind} of its own, and the constraint has none either")
    try:
        return compiled(given)
    except ValueError as error:
        raise ConstraintError(f"request '{request.name}': its {kind}: {error}") from None


def check_numbers(schema: Any) -> None:
    """Refuse numbers of a JSON schema that an engine which reads numbers as doubles would not enforce exactly.

    Raises:
        ValueError: a bound beyond ``EXACT``, or a constant that is not a double; names its path.
    """
    for where, number in _rounded(schema, "#"):
        raise ValueError(
            f"{number} at {where} of the schema would not be enforced exactly, because llguidance reads numbers as "
            f"doubles, which are exact up to 2**53 = {EXACT}: use a smaller number, leave it out, or use "
            "constraint.engine=xgrammar, which supports bounds of 64 bits"
        )


def _rounded(schema: Any, where: str) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of a schema that are not exact as doubles, each with its path."""
    if isinstance(schema, list):
        for number, item in enumerate(schema):
            yield from _rounded(item, f"{where}/{number}")
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        inner = f"{where}/{key}"
        if key in BOUNDS and isinstance(value, int | float):
            if not abs(value) <= EXACT:
                yield inner, value
        elif key in ("const", "enum"):
            yield from ((inner, whole) for whole in _whole_numbers(value) if not _is_double(whole))
        elif key in NAMED and isinstance(value, dict):
            for name, item in value.items():
                yield from _rounded(item, f"{inner}/{name}")
        elif key not in ("default", "examples"):
            yield from _rounded(value, inner)


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(item)


def _is_double(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False
