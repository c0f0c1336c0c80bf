"""No stop token before a number of new tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spec_lab.constrain.protocol import Constraint, ConstraintState, full_mask, mask_of
from spec_lab.core.request import Request


@dataclass(frozen=True)
class MinNewTokens(Constraint):
    """The request's stop tokens are not allowed among the first ``tokens`` new tokens. See ``Constraint``."""

    tokens: int
    vocabulary: int

    name = "min_new_tokens"

    def start(self, request: Request) -> MinNewTokensState:
        """See ``Constraint``."""
        words = full_mask(self.vocabulary) & ~mask_of(request.stop, self.vocabulary)
        return MinNewTokensState(self.tokens, words)


class MinNewTokensState(ConstraintState):
    """The number of new tokens before stop tokens are allowed, and the mask until then. See ``ConstraintState``."""

    def __init__(self, left: int, words: np.ndarray) -> None:
        self.left, self.words = left, words

    def fork(self) -> MinNewTokensState:
        """See ``ConstraintState``."""
        return MinNewTokensState(self.left, self.words)

    def advance(self, token: int) -> None:
        """See ``ConstraintState``."""
        self.left -= 1

    def mask(self) -> np.ndarray | None:
        """See ``ConstraintState``."""
        return self.words if self.left > 0 else None
