"""A constraint: no token comes twice in a row."""

from dataclasses import dataclass

import numpy as np

from spec_lab.constrain.protocol import Constraint, ConstraintState, full_mask, mask_of
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request


@dataclass(frozen=True)
class Apart(Constraint):
    """Every token differs from the one before it; the first from the prompt's last."""

    vocabulary: int  # V, the width of the target's logits
    name: str = "apart"

    @staticmethod
    def load(vocabulary: Vocabulary) -> "Apart":
        """The factory that the config names."""
        return Apart(vocabulary.size)

    def start(self, request: Request) -> "After":
        """The state at the end of the prompt."""
        return After(request.tokens[-1], full_mask(self.vocabulary), self.vocabulary)

    def toy(self, vocabulary: Vocabulary) -> "Apart":
        """The same over the few tokens of a toy, for ``certify`` to enumerate."""
        return Apart.load(vocabulary)


@dataclass
class After(ConstraintState):
    """The state after a token: ``words`` is the packed mask that allows all tokens."""

    token: int
    words: np.ndarray
    vocabulary: int

    def fork(self) -> "After":
        """An independent copy: drafts are tried on copies."""
        return After(self.token, self.words, self.vocabulary)

    def advance(self, token: int) -> None:
        """Append ``token``."""
        self.token = token

    def mask(self) -> np.ndarray:
        """The allowed tokens as packed bits."""
        return self.words & ~mask_of([self.token], self.vocabulary)
