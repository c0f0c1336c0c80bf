"""The ranks of torchrun: how many there are, and which one this process is."""

from __future__ import annotations

import os


def started() -> bool:
    """Return whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def size() -> int:
    """Return the number of ranks; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if started() else 1


def size_here() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if started() else 1


def rank() -> int:
    """Return this process's rank, from 0; 0 without torchrun."""
    return int(os.environ["RANK"]) if size() > 1 else 0
