"""What a grammar is compiled from, for every engine: given as it is, in a file, or brought by a request."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from spec_lab.batch import Request
from spec_lab.constrain.state import Stuck
from spec_lab.options import brief

SHORT = 200
"""Characters of a source that a record holds as it is."""


def as_text(name: str, value: Any) -> str | None:
    """``value``, if it is text or None.

    Raises:
        ValueError: it is neither; names the option.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(f"constraint.{name} must be text, not {brief(value)}: put it in quotes")
    return value


def read_source(name: str, value: Any, path: str | None) -> Any:
    """``value``, or what the file at ``path`` holds.

    Raises:
        ValueError: both are given; the file cannot be read. Names the option.
    """
    if value is not None and path is not None:
        raise ValueError(f"give constraint.{name} or constraint.path, not both")
    if path is None:
        return value
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
