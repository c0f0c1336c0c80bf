"""Counts of what becomes of each level of drafts, and when levels that were given up are tried again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_lab.policy.policy import DraftOutcome

FIRST_WAIT, REQUEST_WAIT, LONGEST_WAIT = 1 / 8, 1 / 2, 4.0
"""Waits before a draft deeper than the best depth, in units of the wait that ``goodput.SHARE`` allows: the first one of
a run and after the best depth has changed, the longest one after a request begins, and the longest one. Each wait is
twice the one before."""


@dataclass
class Trial:
    """When the next draft deeper than the best depth is tried, and what was decided last.

    Args:
        depth: the best one, as decided last; None: nothing was decided.
        current: whether nothing was learned since.
        situation: sequences and context (in units of ``goodput.GRAIN``) of that decision.
        waited: steps since the last trial.
        wait: steps to the next, in units of the wait that ``goodput.SHARE`` allows.
        at_once: whether the next one does not wait, since the last one paid.
        levels: below the best depth that are tried: doubled after each trial that paid.
    """

    depth: int | None = None
    current: bool = False
    situation: tuple[int, int] = (0, 0)
    waited: int = 0
    wait: float = FIRST_WAIT
    at_once: bool = False
    levels: int = 1

    def ended(self, paid: bool) -> None:
        """Wait for twice as long; or try twice as many levels at once, if the trial paid."""
        self.waited, self.at_once = 0, paid
        if paid:
            self.levels *= 2
        else:
            self.wait, self.levels = min(2 * self.wait, LONGEST_WAIT), 1

    def shorten(self, wait: float) -> None:
        """Decide again, and wait no longer than this."""
        self.current, self.wait = False, min(self.wait, wait)


@dataclass
class Levels:
    """Moving averages of what becomes of each level that may be drafted.

    Args:
        trials, hits: ``[D]`` steps whose path had reached the level above, and those in which it reached this one.
        begun, drawn: ``[D]`` steps that had drafted the level above, and those that drafted this one.
        trial: of a depth beyond the best one.
    """

    trials: list[float]
    hits: list[float]
    begun: list[float]
    drawn: list[float]
    trial: Trial = field(default_factory=Trial)

    @staticmethod
    def none(depth: int) -> Levels:
        """Nothing known."""
        return Levels([0.0] * depth, [0.0] * depth, [0.0] * depth, [0.0] * depth)

    def clear(self) -> None:
        """Know nothing again."""
        self.age(0.0, range(len(self.trials)))
        self.trial = Trial()

    def age(self, memory: float, levels: range) -> None:
        """Let what is known of some levels count less."""
        for counts in (self.trials, self.hits, self.begun, self.drawn):
            for level in levels:
                counts[level] *= memory

    def add(self, outcome: DraftOutcome) -> None:
        """Count an outcome."""
        for level in range(
            len(self.trials) if outcome.limit.depth is None else min(outcome.limit.depth, len(self.trials))
        ):
            if outcome.accepted >= level:
                self.trials[level] += 1
                self.hits[level] += outcome.accepted > level
            if outcome.drafted >= level:
                self.begun[level] += 1
                self.drawn[level] += outcome.drafted > level

    def estimates(self, prior: Sequence[tuple[float, float]], weight: float) -> list[tuple[float, float]]:
        """For each level the probabilities that a path goes on to it, and that it is drafted.

        Args:
            prior: for each level; a single one: the first level's, and each further level starts from the one above.
            weight: of the prior, in steps.
        """
        estimates: list[tuple[float, float]] = []
        for level, (trials, hits, begun, drawn) in enumerate(
            zip(self.trials, self.hits, self.begun, self.drawn, strict=True)
        ):
            reach, draft = prior[level] if len(prior) > 1 else (estimates[-1] if estimates else prior[0])
            estimates.append(((hits + weight * reach) / (trials + weight), (drawn + weight * draft) / (begun + weight)))
        return estimates
