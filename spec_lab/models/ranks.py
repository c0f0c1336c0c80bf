"""Whether torchrun started several processes, and which of them this is."""

from __future__ import annotations

import os


def started() -> bool:
    """Whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def size() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if started() else 1


def size_here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if started() else 1


def rank() -> int:
    """Which of them this process is, from 0; 0 without torchrun."""
    return int(os.environ["RANK"]) if size() > 1 else 0
