"""Distributions of outputs, and how far they are from the target's.

Two kinds are compared. A *step* emits an accepted path and one more token, so its outputs have several lengths. They
are
extended to a fixed length with exact samples from the target: the step is lossless if and only if the extended outputs
have the target's distribution. The same condition locally: let A(s) be the probability that the output begins with the
text s, and D(s) that it is exactly s. Lossless means ``A(s a) = (A(s) - D(s)) p(a | s)`` for every s and token a, and
the shortest s for which it fails is where the fault lies (``StepOutputs``). A whole request emits finished sequences,
which are compared as they are (``total_variation``, ``first_difference``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spec_lab.tasks.certify.toy_models import text_of

EXACT = 1e-12
"""Largest difference that counts as rounding: enumerated probabilities are sums and products in float64."""

Probabilities = Sequence[np.ndarray]
"""The probabilities of the next token after every text of 0, 1, .. tokens, each ``[V ** length, V]``."""

Output = tuple[tuple[tuple[int, ...], str], ...]
"""Every sequence of a request, in the order of lineages: its text and why it ended."""

Distribution = dict[Output, float]


def text_probabilities(p: Probabilities, length: int) -> np.ndarray:
    """Return the probability of every text of ``length`` tokens, ``[V ** length]``."""
    reached = np.ones(1)
    for after in p[:length]:
        reached = (reached[:, None] * after).ravel()
    return reached


# One step ------------------------------------------------------------------------------------------------------------


class WrongText(NamedTuple):
    """A text after which a step emits another distribution than the target's.

    Args:
        emitted: ``[V]`` probabilities of the next token, given that the output goes on after the text.
        p: ``[V]`` the target's.
    """

    words: str
    text: tuple[int, ...]
    emitted: np.ndarray
    p: np.ndarray


@dataclass(eq=False)
class StepOutputs:
    """For each length the probability of emitting exactly each text, ``[V ** length]``.

    Args:
        v: V.
        longest: tokens of the longest output.
    """

    v: int
    longest: int
    exactly: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.exactly = [np.zeros(self.v**length) for length in range(self.longest + 1)]

    @property
    def mass(self) -> float:
        """Total probability."""
        return float(sum(part.sum() for part in self.exactly))

    def begins(self) -> list[np.ndarray]:
        """Return A: for each length the probability of beginning with each text."""
        begins = [part.copy() for part in self.exactly]
        for k in range(self.longest, 0, -1):
            begins[k - 1] += begins[k].reshape(-1, self.v).sum(-1)
        return begins

    def extended(self, p: Probabilities, length: int | None = None) -> np.ndarray:  # [V ** length]
        """Return the distribution of the first ``length`` tokens (default: of the longest output) when shorter outputs
        are extended with exact samples from ``p``.
        """
        length = self.longest if length is None else length
        extended = self.exactly[0]
        for k in range(length):
            extended = (extended[:, None] * p[k]).ravel() + self.exactly[k + 1]
        for k in range(length + 1, self.longest + 1):  # longer outputs are cut
            extended = extended + self.exactly[k].reshape(self.v**length, -1).sum(-1)
        return extended

    def tv(self, p: Probabilities, length: int | None = None) -> float:
        """Return the total variation between the extended outputs and the target's texts of as many tokens."""
        length = self.longest if length is None else length
        return 0.5 * float(np.abs(self.extended(p, length) - text_probabilities(p, length)).sum())

    def first_failure(self, p: Probabilities, tolerance: float = EXACT) -> str | None:
        """Describe the shortest s with |A(s a) - (A(s) - D(s)) p(a | s)| > ``tolerance`` for some a; None if there is
        none: the step is lossless.
        """
        wrong = self.first_wrong(p, tolerance)
        return None if wrong is None else wrong.words

    def first_wrong(self, p: Probabilities, tolerance: float = EXACT) -> WrongText | None:
        """Return the text that ``first_failure`` describes, with what comes after it."""
        begins = self.begins()
        for k in range(self.longest):
            expected = (begins[k] - self.exactly[k])[:, None] * p[k]
            computed = begins[k + 1].reshape(-1, self.v)
            error = np.abs(computed - expected)
            if not error.max() <= tolerance:
                number, token = np.unravel_index(int(np.nan_to_num(error, nan=np.inf).argmax()), error.shape)
                text, goes_on = text_of(int(number), k, self.v), (begins[k] - self.exactly[k])[number]
                words = (
                    f"after {list(text)} token {token} has probability "
                    f"{_unlike(computed[number, token], expected[number, token])}"
                )
                return WrongText(words, text, computed[number] / (goes_on or 1.0), p[k][number])
        return None


# Whole requests ------------------------------------------------------------------------------------------------------


def total_variation(computed: Distribution, expected: Distribution) -> float:
    """Return the total variation between two distributions, sum |P - Q| / 2."""
    return 0.5 * sum(abs(computed.get(output, 0.0) - expected.get(output, 0.0)) for output in {*computed, *expected})


def first_difference(computed: Distribution, expected: Distribution, tolerance: float = EXACT) -> str | None:
    """Describe the shortest text with which outputs begin, or which they are, whose probability differs by more than
    ``tolerance``; None if there is none. Of several as short, the one that differs most.
    """
    mine, theirs = _events(computed), _events(expected)
    errors = {event: abs(mine[event] - theirs[event]) for event in {**mine, **theirs}}
    wrong = [event for event, error in errors.items() if not error <= tolerance]
    if not wrong:
        return None
    size, whole, output = min(wrong, key=lambda event: (event[:2], -np.nan_to_num(errors[event], nan=np.inf), event))
    text = " and ".join(f"{list(text)}{f' ({finish})' if whole else ''}" for text, finish in output) or "nothing"
    difference = _unlike(mine[size, whole, output], theirs[size, whole, output])
    return f"outputs {'are exactly' if whole else 'begin with'} {text} with probability {difference}"


def _events(outputs: Distribution) -> Counter[tuple[int, bool, Output]]:
    """Return the probability of being exactly each output (True), and of beginning with each text (False); with the
    number of tokens. What forks begin with is left out.
    """
    events: Counter[tuple[int, bool, Output]] = Counter()
    for output, probability in outputs.items():
        events[sum(len(text) for text, _ in output), True, output] += probability  # type: ignore[assignment]
        if len(output) == 1:
            ((text, _),) = output
            for length in range(1, len(text) + 1):
                events[length, False, ((text[:length], ""),)] += probability  # type: ignore[assignment]
    return events


def _unlike(computed: float, expected: float) -> str:
    """Describe two probabilities that should be equal."""
    if not abs(computed - expected) < 1e-6:
        return f"{computed:.6g}, not {expected:.6g}"
    return f"{computed:.6g}, off by {abs(computed - expected):.1e}: float32 where p is float64?"
