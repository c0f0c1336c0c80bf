"""The proposer ``my_proposer``."""

from typing import Annotated

import torch

from spec_lab.core.draft import Draft
from spec_lab.core.options import Whole
from spec_lab.core.shape import chain, forest
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose import Proposer


class MyProposer(Proposer):
    """Drafts the last token again, ``depth`` times.

    Args:
        target: that it drafts for.
        depth: most tokens drafted in a step.
    """

    name = "my_proposer"
    drawn = "deterministic"  # as a function of the text; sampled drafts carry their distributions q
    branches = False  # it drafts chains

    def __init__(self, target: Target, depth: Annotated[int, Whole(1, 256)] = 2) -> None:
        self.depth = depth

    @property
    def nodes(self) -> int:
        """The most nodes below one root."""
        return self.depth

    def propose(self, batch: Batch) -> Draft:
        """Return a chain for each sequence, no deeper than context and policy allow."""
        depths = [min(self.depth, room) for room in batch.room()]
        tokens = [
            token
            for sequence, depth in zip(batch.sequences, depths, strict=True)
            for token in sequence.tokens[-1:] * depth
        ]
        shape = forest(tuple(chain(depth) for depth in depths))
        return Draft(shape, torch.tensor(tokens, dtype=torch.long, device=batch.device))
