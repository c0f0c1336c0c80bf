"""spec_lab: a laboratory for speculative decoding."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from spec_lab.cli.runs import Run, run
    from spec_lab.tasks.generation import generate

    __version__: str

__all__ = ["Run", "__version__", "generate", "run"]

MODULES = {"Run": "spec_lab.cli.runs", "generate": "spec_lab.tasks.generation", "run": "spec_lab.cli.runs"}
"""Where each name is defined. It is imported when it is asked for: the command line must answer at once."""


def __getattr__(name: str) -> Any:
    if name in MODULES:
        from importlib import import_module

        return getattr(import_module(MODULES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("spec-lab")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
