"""A small world for backtracking and several sequences at once."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from spec_lab.tasks.certify.toy_models import RandomToy, code, text_of

V = 4


@dataclass(frozen=True)
class Narrow:
    """A world that stays small with backtracking and several sequences at once.

    Args:
        choices: number of tokens, of four, to which the target gives mass.
        free: texts with fewer tokens have a draft with several possible tokens.
    """

    choices: int = 4
    free: int = 1
    v: int = V

    @cache  # noqa: B019
    def probabilities(self, length):
        world = RandomToy(8, support=2) if self.choices > 2 else RandomToy(5, v=2, support=2, plain=True)
        texts = [text_of(number, length, V) for number in range(V**length)]
        codes = [code([token % world.v for token in text], world.v) for text in texts]
        p, q = (np.zeros((len(texts), V)) for _ in range(2))
        p[:, : world.v], q[:, : world.v] = (every[codes] for every in world.probabilities(length))
        return (p, q) if length < self.free else (p, np.eye(V)[q.argmax(-1)])


FEW, TWO = Narrow(), Narrow(choices=2)
