"""Policies: how much a proposer drafts in each step, decided from what happened before it."""

from __future__ import annotations

from typing import Any


def none(**live: Any) -> None:
    """No policy: the proposer drafts as it is configured."""
