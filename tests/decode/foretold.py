"""A proposer that drafts the known future of a text."""

from dataclasses import dataclass, field

import numpy as np
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape, forest, tree
from spec_lab.decode.proposer import Proposer
from tests.tiny import VOCABULARY

TREE = tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
NEW = 20
"""Tokens of each text."""


@dataclass
class Foretold(Proposer):
    """Drafts the future tokens, some of them replaced at random; other requests do not change its draft."""

    future: list[list[int]]  # of each request
    spoil: float = 0.3
    shape: Shape = TREE
    name: str = "foretold"
    drawn: str = "deterministic"
    nodes: int = TREE.nodes
    opened: list = field(default_factory=list)
    closed: list = field(default_factory=list)

    def propose(self, batch):
        tokens = []
        for sequence in batch.sequences:
            noise = np.random.default_rng([sequence.request.id, sequence.step])
            coming, row, right = self.future[sequence.request.id][len(sequence.emitted) :], 0, {}
            while len(self.shape.children[row]):
                row = int(self.shape.children[row][0])
                right[row], coming = (*coming, 0)[0], coming[1:]
            for row in range(1, self.shape.rows):
                wrong = int(noise.integers(VOCABULARY))
                tokens.append(right[row] if row in right and noise.random() > self.spoil else wrong)
        return Draft(forest((self.shape,) * len(batch.sequences)), torch.tensor(tokens))

    def init(self, request):
        self.opened.append(request.id)
        return request.id

    def close(self, state):
        self.closed.append(state)
