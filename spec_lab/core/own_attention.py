"""Which attention function of transformers computes a model."""

from __future__ import annotations

from typing import Any


def own_attention(model: Any) -> str:
    """Return "sdpa", or "eager" for a model without support for it.

    Such models use soft caps or sinks, which torch's function does not have.
    """
    return "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
