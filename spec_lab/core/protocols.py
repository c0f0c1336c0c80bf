"""Abilities that any part of a run may have: proposers, verifiers, constraints, targets. Ask with ``isinstance``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


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


def facts_of(part: object) -> dict[str, Any]:
    """Return what the manifest records of a part; empty for a part that is not ``Described``."""
    return dict(part.facts) if isinstance(part, Described) else {}
