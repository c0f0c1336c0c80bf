"""Whether torchrun started several processes, and which of them this is."""

from __future__ import annotations

import os


def size() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 1


def rank() -> int:
    """Which of them this process is, from 0; 0 without torchrun."""
    return int(os.environ["RANK"]) if size() > 1 else 0
