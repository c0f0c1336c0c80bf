"""What a grammar is compiled from, for every engine: given as it is, in a file, or brought by a request."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from spec_lab.batch import Request
from spec_lab.constrain.state import Stuck
from spec_lab.files import read_text

SHORT = 200
"""Characters of a source that a record holds as it is."""
MOST_SOURCE = 16 * 2**20
"""Largest file of a pattern, schema or grammar, in bytes."""


def as_text(name: str, value: Any) -> str | None:
    """``value``, if it is text or None.

    Raises:
        ValueError: it is neither; names the option.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(f"constraint.{name} must be text, not {value!r}: put it in quotes")
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


def missing(kind: str, request: Request) -> Stuck:
    """The error of a request that brings no source where it must."""
    return Stuck(f"request '{request.name}' brings no {kind} of its own, and the constraint has none")
