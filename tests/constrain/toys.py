"""Small constraints over a few tokens, and the total variation between output distributions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_lab.constrain.protocol import Constraint, ConstraintState, mask_of
from spec_lab.core.request import Request


@dataclass(frozen=True)
class Table(Constraint):
    """A constraint given by a function: the allowed tokens after each text."""

    allowed: Callable[[tuple[int, ...]], Sequence[int]]
    vocabulary: int = 4
    name: str = "table"
    has_actions: bool = False

    def start(self, request: Request) -> ConstraintState:
        return At(self, ())


class At(ConstraintState):
    def __init__(self, table: Table, text: tuple[int, ...]) -> None:
        self.table, self.text = table, text

    def fork(self):
        return At(self.table, self.text)

    def advance(self, token: int) -> None:
        assert token in self.table.allowed(self.text), f"{token} is not allowed after {self.text}"
        self.text += (token,)

    def mask(self) -> np.ndarray:
        return mask_of(self.table.allowed(self.text), self.table.vocabulary)


def uneven(text: tuple[int, ...]) -> list[int]:
    """One, two, three or all tokens are allowed, depending on the text."""
    seed = sum((number + 2) * (token + 1) for number, token in enumerate(text)) + len(text)
    count = (1, 3, 2, 4, 3)[seed % 5]
    return [(seed + k * 3) % 4 for k in range(count)] if count < 4 else [0, 1, 2, 3]


Distribution = Mapping[tuple, float]


def distance(a: Distribution, b: Distribution) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})
