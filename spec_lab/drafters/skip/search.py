"""Chooses which sublayers a draft skips while requests are decoded.

Source: SWIFT (2410.06916): candidates are drawn at random, every few tries the one with the largest expected
improvement under a Gaussian process (Draft&Verify 2309.08168 uses the same offline), and each is scored by how often
the draft's arg max agrees with the last tokens of the text. The search stops at a high agreement, or after some tries.

Here try j is made when the text has a certain length, so that what it finds follows from the text alone. Every set is
scored once, on the same number of tokens: the best of repeated scores, or of scores on few tokens, would be chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spec_lab.core.options import WrongOption
from spec_lab.runners.draft_pass import Sublayer

RANDOM = 4
"""Random candidates between two that the Gaussian process chooses."""

POOL = 64
"""Candidates among which it chooses."""

LENGTH = 0.25
"""Its length scale, as a share of the sublayers that differ."""

NOISE = 1e-3
"""The variance of a score."""

MAX_TRIES = 1024
"""Most sets that may be scored: the Gaussian process has so many rows."""

MAX_WINDOW = 1024
"""Most tokens that a set may be scored on: the attention mask among them has their square."""


@dataclass(frozen=True)
class Try:
    """One set that was scored.

    Args:
        score: share of the tokens that the draft's arg max agrees with.
        end: length of the text that was scored.
    """

    skipped: frozenset[Sublayer]
    score: float
    end: int


@dataclass(frozen=True)
class SkipSearch:
    """Options of the search: its space, and how long it runs.

    Args:
        sublayers: those that may be skipped, in order.
        ratio: share of the attention sublayers, and of the MLP sublayers, that every set skips.
        tries: most sets that are scored, up to ``MAX_TRIES``.
        enough: the score that ends the search.
        every: tokens of the text from one try to the next.
        window: tokens that a set is scored on, up to ``MAX_WINDOW``; no try is made of a text with fewer before the
            last.
    """

    sublayers: tuple[Sublayer, ...]
    ratio: float = 0.45
    tries: int = 64
    enough: float = 0.93
    every: int = 8
    window: int = 50

    @cached_property
    def sets(self) -> int:
        """How many sets there are."""
        return math.prod(math.comb(len(places), count) for places, count in self._kinds())

    def due(self, length: int, last: int) -> bool:
        """Whether a try is due for a text of some length, the last one of which was made at length ``last``."""
        return length > self.window and length >= last + self.every

    def ends(self, begin: int, length: int, done: Sequence[Try]) -> list[int]:
        """Return the lengths of text at which further tries are due.

        Args:
            begin: length of the prompt.
            length: of the text now.
            done: the tries made so far for this text.
        """
        if self.over(done):
            return []
        first = max(begin, self.window + 1) if not done else done[-1].end + self.every
        return list(range(first, length + 1, self.every))[: self.tries - len(done)]

    def over(self, done: Sequence[Try]) -> bool:
        """Whether no further set is scored: one is good enough, or as many as allowed are scored, or all there are."""
        return len(done) >= min(self.tries, self.sets) or any(attempt.score >= self.enough for attempt in done)

    def best(self, done: Sequence[Try]) -> frozenset[Sublayer]:
        """Return the set with the best score, the first of them; before any try an even choice."""
        return max(done, key=lambda attempt: attempt.score).skipped if done else self.candidate(())

    def candidate(self, done: Sequence[Try]) -> frozenset[Sublayer]:
        """Return the set of the next try, which follows from those before and is none of them.

        Args:
            done: the tries made so far; fewer than there are sets.
        """
        number = len(done)
        if not number:
            return self._set(self._even())
        if number % (RANDOM + 1):
            return self._set(self._random(done, 1)[0])
        pool = self._random(done, POOL)
        known = np.array([[sublayer in each.skipped for sublayer in self.sublayers] for each in done])
        gain = expected_improvement(known, np.array([attempt.score for attempt in done]), pool)
        return self._set(pool[int(gain.argmax())])

    def _set(self, chosen: np.ndarray) -> frozenset[Sublayer]:
        return frozenset(sublayer for sublayer, skipped in zip(self.sublayers, chosen, strict=True) if skipped)

    def _kinds(self) -> list[tuple[np.ndarray, int]]:
        """For attention and MLP the places of its sublayers, and how many are skipped."""
        places = [
            np.array([n for n, sublayer in enumerate(self.sublayers) if sublayer.kind == kind])
            for kind in ("attn", "mlp")
        ]
        return [(numbers, max(1, round(self.ratio * len(numbers)))) for numbers in places if len(numbers)]

    def _even(self) -> np.ndarray:
        chosen = np.zeros(len(self.sublayers), dtype=bool)
        for numbers, count in self._kinds():
            chosen[numbers[((np.arange(count) + 0.5) * len(numbers) / count).astype(np.int64)]] = True
        return chosen

    def _random(self, done: Sequence[Try], most: int) -> np.ndarray:  # [n, sublayers]
        """Random sets that were not scored, at most so many, and as many as there are."""
        generator = np.random.default_rng([len(done), len(self.sublayers)])
        scored, kinds = {attempt.skipped for attempt in done}, self._kinds()
        sets: dict[frozenset[Sublayer], np.ndarray] = {}
        while len(sets) < min(most, self.sets - len(scored)):
            row = np.zeros(len(self.sublayers), dtype=bool)
            for numbers, skipped in kinds:
                row[generator.permutation(numbers)[:skipped]] = True
            if (sublayers := self._set(row)) not in scored:
                sets.setdefault(sublayers, row)
        return np.stack([*sets.values()])


def expected_improvement(known: np.ndarray, scores: np.ndarray, pool: np.ndarray) -> np.ndarray:  # [m]
    """Return the expected improvement over the best score, of a Gaussian process with an exponential kernel.

    Args:
        known: ``[n, d]`` bool, what was scored.
        scores: ``[n]``.
        pool: ``[m, d]`` bool, the candidates.
    """
    mean, scale = scores.mean(), max(float(scores.std()), 1e-3)

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        differ = (a[:, None] != b[None]).mean(-1)
        return np.exp(-differ / LENGTH)

    covariance = kernel(known, known) + NOISE / scale**2 * np.eye(len(known))
    across = kernel(known, pool)
    solved = np.linalg.solve(covariance, across)
    expected = solved.T @ ((scores - mean) / scale)
    deviation = np.sqrt(np.maximum(1 - (across * solved).sum(0), 1e-12))
    gain = expected - (scores.max() - mean) / scale
    z = gain / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z.tolist()])
    return gain * below + deviation * density


def parse_sublayers(text: str) -> frozenset[Sublayer]:
    """Read sublayers written as 'attn 2 3 mlp 4'.

    Raises:
        ValueError: it names none, or is written otherwise.
    """
    sublayers, kind = set(), None
    for word in str(text).replace(",", " ").split():
        if word in ("attn", "mlp"):
            kind = word
        elif kind is not None and word.isascii() and word.isdigit() and len(word) < 10:
            sublayers.add(Sublayer(kind, int(word)))  # type: ignore[arg-type]
        else:
            sublayers.clear()
            break
    if not sublayers:
        raise WrongOption(
            "skipped must name sublayers by their layers, such as 'attn 2 3 mlp 4' (attention of layers 2 and "
            f"3, MLP of layer 4), or be null to search for them (got {str(text)[:60]!r})"
        )
    return frozenset(sublayers)


def write_sublayers(skipped: frozenset[Sublayer]) -> str:
    """Write sublayers as ``parse_sublayers`` reads them."""
    words = []
    for kind in ("attn", "mlp"):
        if layers := sorted(sublayer.layer for sublayer in skipped if sublayer.kind == kind):
            words += [kind, *map(str, layers)]
    return " ".join(words)
