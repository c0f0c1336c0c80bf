"""The null proposer: it drafts nothing, which makes the loop autoregressive decoding, the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.engine.batch import Batch, SequenceState
from spec_lab.models.target import Target


@dataclass(frozen=True)
class Null:
    """No draft at all."""

    name: str = "none"
    drawn: Drawn = "point"
    nodes: int = 0
    wants_hidden: bool = False
    branches: bool = False

    @staticmethod
    def load(target: Target) -> Null:
        """Needs nothing from the target."""
        return Null()

    def propose(self, batch: Batch) -> Draft:
        """An empty forest."""
        return empty(len(batch.sequences), batch.device)

    def close(self, sequence: SequenceState) -> None:
        """Nothing is held."""
