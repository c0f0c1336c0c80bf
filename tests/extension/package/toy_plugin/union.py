"""A union of two drafts under one root: an n-gram chain of points, then a sampled token."""

from dataclasses import dataclass

import numpy as np
import torch

from spec_lab.core.draft import WAYS, Draft, Drawn
from spec_lab.core.options import whole
from spec_lab.core.randomness import Key, Purpose
from spec_lab.core.shape import Shape, forest
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target


@dataclass(frozen=True)
class Union(Proposer):
    """Below each root an n-gram chain of points, and one child sampled from a fixed q without the first point's token.

    Excluding the points from q accepts most (both orders and both q would be exact).

    Args:
        depth: of the n-gram chain.
    """

    depth: int = 2
    name: str = "union"
    drawn: Drawn = "iid"
    draws: frozenset[Drawn] = frozenset({"deterministic", "iid"})
    branches: bool = True

    @staticmethod
    def load(target: Target, depth: int = 2) -> "Union":
        """The factory that the config names."""
        return Union(whole("proposer.depth", depth))

    @property
    def nodes(self) -> int:
        """Most nodes below one root."""
        return self.depth + 1

    def propose(self, batch: Batch) -> Draft:
        """The trees, side by side."""
        v, shapes, tokens, codes, q, parents = batch.target.vocabulary, [], [], [], [], []
        for room, sequence in zip(batch.room(), batch.sequences, strict=True):
            text = sequence.tokens
            match = next((n for n in range(len(text) - 2, -1, -1) if text[n] == text[-1]), None)
            drafted = [] if match is None else text[match + 1 : match + 1 + min(self.depth, room)]
            weights = torch.arange(1.0, v + 1.0, dtype=torch.float64)
            if drafted:
                weights[drafted[0]] = 0.0
            tree = list(range(len(drafted)))  # a chain
            if room > 0:
                picked = int(batch.draws.pick((weights / weights.sum())[None], [Key(*sequence.key, Purpose.DRAFT)])[0])
                tree, drafted = [*tree, 0], [*drafted, picked]
                codes += [WAYS.index("deterministic")] * (len(drafted) - 1) + [WAYS.index("iid")]
                q.append(weights / weights.sum())
            parents.append(room > 0)
            shapes.append(Shape(1, np.array(tree, dtype=np.int64)))
            tokens += drafted
        shape = forest(tuple(shapes))
        q_row = np.full(shape.rows, -1, dtype=np.int64)
        q_row[np.flatnonzero(parents)] = np.arange(len(q))
        stated = torch.stack(q) if q else torch.empty(0, v, dtype=torch.float64)
        return Draft(shape, torch.tensor(tokens, dtype=torch.long), np.array(codes, dtype=np.int8), stated, q_row)
