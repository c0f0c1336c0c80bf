"""Token recycling (2408.08696): a static tree of the tokens that were likeliest when each token was last seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, forest
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch


@dataclass(frozen=True)
class Recycling(Proposer):
    """Child r of a node is the r-th likeliest token after the node's token in the target's latest logits.

    The store's scope is the sequence, so that its draft does not depend on batch mates.

    Args:
        widths: children of each node, level by level.
    """

    widths: tuple[int, ...] = (2, 1)
    name: str = "recycling"
    drawn: Drawn = "deterministic"
    branches: bool = True

    @property
    def nodes(self) -> int:
        """Most nodes below one root."""
        nodes, level = 0, 1
        for width in self.widths:
            level *= width
            nodes += level
        return nodes

    @property
    def requires(self) -> Requires:
        """The likeliest tokens of all rows, rejected ones too."""
        return Requires(top_k=max(self.widths))

    def init(self, request: Request) -> dict[int, list[int]]:
        """Nothing was seen yet."""
        return {}

    def observe(self, observed: Sequence[Observation]) -> None:
        """Remember the likeliest tokens after the token of every row; a later row overwrites an earlier one."""
        for observation in observed:
            if observation.top_k is not None:
                observation.sequence.state.update(zip(observation.rows, observation.top_k.tolist(), strict=True))

    def propose(self, batch: Batch) -> Draft:
        """Levels of remembered tokens; a token that was never seen has no children."""
        shapes, tokens = [], []
        for room, sequence in zip(batch.room(), batch.sequences, strict=True):
            level, parents, drafted = [(0, sequence.tokens[-1])], [], []
            for width in self.widths[: max(room, 0)]:
                below = []
                for row, token in level:
                    for child in sequence.state.get(token, ())[:width]:
                        parents.append(row)
                        drafted.append(child)
                        below.append((len(drafted), child))
                level = below
            shapes.append(Shape(1, torch.tensor(parents, dtype=torch.long).numpy()))
            tokens += drafted
        return Draft(forest(tuple(shapes)), torch.tensor(tokens, dtype=torch.long, device=batch.device))
