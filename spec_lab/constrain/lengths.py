"""No end of text before a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spec_lab.constrain.protocol import everything, only
from spec_lab.engine.request import Request


@dataclass(frozen=True)
class AtLeast:
    """Stop tokens are not allowed before ``tokens`` tokens have come. See ``Constraint``."""

    tokens: int
    vocabulary: int

    name = "at least"
    acts = False

    def start(self, request: Request) -> Count:
        """See ``Constraint``."""
        words = everything(self.vocabulary) & ~only(request.stop, self.vocabulary)
        return Count(self.tokens, words)


class Count:
    """Tokens still to come before the text may end, and what may come until then. See ``State``."""

    def __init__(self, left: int, words: np.ndarray) -> None:
        self.left, self.words = left, words

    def fork(self) -> Count:
        """See ``State``."""
        return Count(self.left, self.words)

    def advance(self, token: int) -> None:
        """See ``State``."""
        self.left -= 1

    def mask(self) -> np.ndarray | None:
        """See ``State``."""
        return self.words if self.left > 0 else None

    def action(self) -> None:
        """None is ever wanted."""
        return None
