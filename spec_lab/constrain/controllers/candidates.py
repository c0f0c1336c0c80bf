"""Best of n: several texts are generated, and the likeliest is kept. At temperature 0 they are all the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from spec_lab.constrain.control import Branch, ControllerConstraint, Event
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import Whole, checked
from spec_lab.core.request import BROKEN, Ended

MAX_COUNT = 64


class CandidatesController:
    """Forks the sequence once, at the start."""

    def __init__(self, count: int) -> None:
        self.count = count

    def fork(self) -> CandidatesController:
        """See ``Controller``."""
        return CandidatesController(self.count)

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        return [Branch()] if event.append else [Branch()] * self.count


def likeliest(ended: Sequence[Ended], by: str = "sum") -> list[int]:
    """Return the index of the text with the largest "sum" or "mean" of log-probabilities; failed texts come last."""

    def score(index: int) -> tuple[bool, float]:
        text = ended[index]
        total = math.fsum(text.logprobs)
        return text.finish not in BROKEN, total if by == "sum" else total / max(len(text.logprobs), 1)

    return [max(range(len(ended)), key=score)]


@checked
def load(
    vocabulary: Vocabulary, count: Annotated[int, Whole(1, MAX_COUNT)] = 4, by: Literal["sum", "mean"] = "sum"
) -> ControllerConstraint:
    """Return a constraint that generates ``count`` texts and keeps the likeliest by ``likeliest``.

    Args:
        count: number of branches.
        by: keep the text with the largest sum, or mean, of its tokens' log-probabilities.

    Raises:
        ValueError: an invalid option, or more than 64 texts.
    """
    return ControllerConstraint(
        lambda request: CandidatesController(count),
        vocabulary.size,
        "candidates",
        facts={"count": count, "by": by},
        keep=lambda ended: likeliest(ended, by),
        reads_logprobs=True,
    )
