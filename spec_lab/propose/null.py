"""The null proposer: it drafts nothing, which makes every step autoregressive decoding, the baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target


@dataclass(frozen=True)
class Null(Proposer):
    """No draft at all."""

    name: str = "none"
    drawn: Drawn = "deterministic"
    nodes: int = 0
    branches: bool = False
    _empty: Callable[[int, torch.device], Draft] = field(
        init=False, repr=False, compare=False, default_factory=lambda: lru_cache(maxsize=256)(empty)
    )

    @staticmethod
    def load(target: Target) -> Null:
        """Needs nothing from the target."""
        return Null()

    def propose(self, batch: Batch) -> Draft:
        """Return a forest of roots, the same one for as many sequences: what is derived from it is computed once."""
        return self._empty(len(batch.sequences), batch.device)
