"""Parts of a step for studies, in which nothing is sampled and nothing of the draft is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from spec_lab.constrain import AppliedConstraint
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.randomness import Draws
from spec_lab.core.shape import Shape
from spec_lab.decode.commit import Committed, Decision
from spec_lab.decode.sequence import SequenceState
from spec_lab.verify.arrays import Arrays, rows_of
from spec_lab.verify.verdict import Choice, Verdict, Verifier


@dataclass
class Capture(Verifier):
    """A verifier that accepts nothing, and keeps the draft and the target probabilities p for others to verify.

    Args:
        draft: of the last step.
        p: ``[R, V]`` of the last step; valid until the next one.
    """

    draft: Draft | None = None
    p: Tensor | None = None
    name: str = "capture"
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "without_replacement", "deterministic", "gumbel"})
    accepts_mixed: ClassVar[bool] = True
    lossless: bool = False

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """See ``Verifier``."""
        self.draft, self.p = draft, p
        stop = Arrays.like(p).full(draft.shape.rows, 0.0)
        stop[: draft.shape.roots] = 1.0
        return Verdict(stop, lambda rows: rows_of(p, rows))


def choose_nothing(
    verdict: Verdict, shape: Shape, p: Tensor, draws: Draws, keys: Sequence[tuple[int, int, int]]
) -> Choice:
    """A choice without randomness: every path ends at its root, and no token is emitted."""
    roots = shape.roots
    return Choice(np.arange(roots), np.full(roots, -1), np.zeros(roots, dtype=bool))


def commit_nothing(
    sequences: Sequence[SequenceState], decision: Decision, applied: AppliedConstraint | None, context: int
) -> list[Committed]:
    """Forget the draft; pending tokens stay computed."""
    for sequence in sequences:
        sequence.kv.accept()
    return [Committed([]) for _ in sequences]
