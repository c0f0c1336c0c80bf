"""What a grammar is compiled from, for every engine: given as it is, in a file, or brought by a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from spec_lab.constrain.protocol import ConstraintError
from spec_lab.core.files import read_text
from spec_lab.core.options import brief
from spec_lab.engine.request import Request

SHORT = 200
"""Characters of a source that a record holds as it is."""
MOST_SOURCE = 16 * 2**20
"""Largest file of a pattern, schema or grammar, in bytes."""

MOST_THREADS = 64
"""Largest ``constraint.threads``, for every engine."""

EXACT = 2**53
"""Largest whole number up to which every whole number is a double: llguidance reads the numbers of a schema as such."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose value holds a schema for each name."""


def as_text(name: str, value: Any) -> str | None:
    """``value``, if it is text or None.

    Raises:
        ValueError: it is neither; names the option.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(f"constraint.{name} must be text, not {brief(value)}: put it in quotes")
    return value


def read_source(name: str, value: Any, path: str | None) -> Any:
    """``value``, or what the file at ``path`` holds: a regular file of at most 16 MiB, in UTF-8.

    Raises:
        ValueError: both are given; the file cannot be read. Names the option.
    """
    if value is not None and path is not None:
        raise ValueError(f"give constraint.{name} or constraint.path, not both")
    if path is None:
        return value
    if not isinstance(path, str) or not path:
        raise ValueError(f"constraint.path must name a file, not {path!r}")
    try:
        return read_text(Path(path), MOST_SOURCE)
    except (OSError, ValueError) as error:
        raise ValueError(f"constraint.path={path} cannot be read: {error}") from None


def shown(source: Any) -> dict[str, Any]:
    """What a record should keep: the source itself where it is short, its hash where it is not."""
    said = source if source is None or isinstance(source, str) else json.dumps(source, sort_keys=True)
    if said is not None and len(said) > SHORT:
        return {"source_sha256": sha256(said.encode("utf-8", "surrogatepass")).hexdigest()}
    return {"source": said}


def missing(kind: str, request: Request) -> ConstraintError:
    """The error of a request that brings no source where it must."""
    return ConstraintError(f"request '{request.name}' brings no {kind} of its own, and the constraint has none")


def check_numbers(schema: Any) -> None:
    """Check that an engine which reads numbers as doubles takes those of a JSON schema for what they are.

    Raises:
        ValueError: a bound beyond ``EXACT``, or a constant that is no double; names its place.
    """
    for where, number in _rounded(schema, "#"):
        raise ValueError(
            f"{number} at {where} of the schema would not be enforced exactly, because llguidance reads numbers as "
            f"doubles, which are exact up to 2**53 = {EXACT}: use a smaller number, leave it out, or use "
            "constraint.engine=xgrammar, which takes bounds of 64 bits"
        )


def _rounded(schema: Any, where: str) -> Iterator[tuple[str, int | float]]:
    """Numbers of a schema that are not what they seem as doubles, each after its place."""
    if isinstance(schema, list):
        for place, one in enumerate(schema):
            yield from _rounded(one, f"{where}/{place}")
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        inner = f"{where}/{key}"
        if key in BOUNDS and isinstance(value, int | float):
            if not abs(value) <= EXACT:
                yield inner, value
        elif key in ("const", "enum"):
            yield from ((inner, one) for one in _whole_numbers(value) if not _is_double(one))
        elif key in NAMED and isinstance(value, dict):
            for name, one in value.items():
                yield from _rounded(one, f"{inner}/{name}")
        elif key not in ("default", "examples"):
            yield from _rounded(value, inner)


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(one)


def _is_double(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False
