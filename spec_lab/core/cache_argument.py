"""By which name a module of transformers reads its KV cache."""

from __future__ import annotations

from functools import cache
from inspect import signature

from torch import nn


def cache_argument(module: nn.Module) -> str:
    """``cache``, or ``past_key_values`` where transformers is older than 5.24 (or where the module says so)."""
    return _name(type(module).forward)


@cache
def _name(forward: object) -> str:
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"  # type: ignore[arg-type]
