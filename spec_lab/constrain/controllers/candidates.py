"""Several texts side by side, of which the likeliest is kept. At temperature 0 they are all the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spec_lab.constrain.control import Branch, Controlled, Event
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import one_of, whole
from spec_lab.engine.request import BROKEN, Ended

MOST = 64


class Candidates:
    """Forks once, at the start; each fork then goes its own way."""

    def __init__(self, count: int) -> None:
        self.count = count

    def fork(self) -> Candidates:
        """See ``Controller``."""
        return Candidates(self.count)

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        return [Branch()] if event.append else [Branch()] * self.count


def likeliest(ended: Sequence[Ended], by: str = "sum") -> list[int]:
    """The place of the text whose tokens' log-probabilities have the largest "sum" or "mean"; broken ones come last."""

    def score(place: int) -> tuple[bool, float]:
        one = ended[place]
        total = math.fsum(one.logprobs)
        return one.finish not in BROKEN, total if by == "sum" else total / max(len(one.logprobs), 1)

    return [max(range(len(ended)), key=score)]


def load(vocabulary: Vocabulary, count: int = 4, by: str = "sum") -> Controlled:
    """``count`` texts are generated, and the likeliest is kept, by ``likeliest``.

    Raises:
        ValueError: options of the wrong kind, or more than 64 texts.
    """
    one_of("constraint.by", by, ("sum", "mean"))
    whole("constraint.count", count, most=MOST)
    return Controlled(
        lambda request: Candidates(count),
        vocabulary.size,
        "candidates",
        facts={"count": count, "by": by},
        keep=lambda ended: likeliest(ended, by),
        wants_logprobs=True,
    )
