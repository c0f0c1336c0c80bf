"""The null proposer: it drafts nothing, which makes every step autoregressive decoding, the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.engine.proposer import Lifecycle
from spec_lab.engine.sequence import Batch
from spec_lab.models.target import Target


@dataclass(frozen=True)
class Null(Lifecycle):
    """No draft at all."""

    name: str = "none"
    drawn: Drawn = "point"
    nodes: int = 0
    branches: bool = False

    @staticmethod
    def load(target: Target) -> Null:
        """Needs nothing from the target."""
        return Null()

    def propose(self, batch: Batch) -> Draft:
        """An empty forest."""
        return empty(len(batch.sequences), batch.device)
