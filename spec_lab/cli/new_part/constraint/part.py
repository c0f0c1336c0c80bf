"""The constraint ``my_constraint``."""

from dataclasses import dataclass

import numpy as np

from spec_lab.constrain.protocol import Constraint, ConstraintState, full_mask, mask_of
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request


@dataclass
class After(ConstraintState):
    """The state after a token.

    Args:
        token: the last token.
        words: ``[W]`` the mask that allows every token.
        vocabulary: V.
    """

    token: int
    words: np.ndarray
    vocabulary: int

    def fork(self) -> "After":
        """Return an independent copy: drafts are tried on copies."""
        return After(self.token, self.words, self.vocabulary)

    def advance(self, token: int) -> None:
        """Append a token."""
        self.token = token

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next, as packed bits ``[W]``."""
        return self.words & ~mask_of([self.token], self.vocabulary)


class MyConstraint(Constraint):
    """No token comes twice in a row.

    Args:
        vocabulary: the target's.
    """

    name = "my_constraint"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.size

    @property
    def vocabulary(self) -> int:
        """V, the width of the masks."""
        return self.size

    def start(self, request: Request) -> After:
        """Return the state at the end of a prompt."""
        return After(request.tokens[-1], full_mask(self.vocabulary), self.vocabulary)

    def toy(self, vocabulary: Vocabulary) -> "MyConstraint":
        """Return the same constraint over the few tokens of a toy model."""
        return type(self)(vocabulary)
