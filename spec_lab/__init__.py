"""spec_lab: a laboratory for speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_lab.generation import generate

__all__ = ["generate"]


def __getattr__(name: str) -> Any:
    """``generate``, imported when it is asked for: it is heavy, and the command line answers at once."""
    if name in __all__:
        return getattr(import_module("spec_lab.generation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
