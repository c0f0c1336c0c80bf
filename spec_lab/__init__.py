"""spec_lab: a laboratory for speculative decoding."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from spec_lab.tasks.generation import generate

__all__ = ["generate"]


def __getattr__(name: str) -> Any:
    """``generate``, imported when it is asked for: it is heavy, and the command line answers at once."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("spec_lab.tasks.generation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
