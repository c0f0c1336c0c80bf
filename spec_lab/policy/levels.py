"""Counts of what becomes of each level of drafts, and when levels that were given up are tried again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spec_lab.policy.policy import DraftOutcome

FIRST_WAIT, REQUEST_WAIT, LONGEST_WAIT = 1 / 8, 1 / 2, 4.0
"""Waits before a draft deeper than the best depth, in units of the wait that ``goodput.SHARE`` allows: the first one of
a run and after the best depth has changed, the longest one after a request begins, and the longest one. Each wait is
twice the one before. Those for a trial of several sequences are so many times as long, up to the longest one: it tells
as much as that many trials of one sequence."""


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
        tried: levels that were ever tried; of those below nothing is known.
    """

    trials: list[float]
    hits: list[float]
    begun: list[float]
    drawn: list[float]
    trial: Trial = field(default_factory=Trial)
    tried: int = 0

    @staticmethod
    def none(depth: int) -> Levels:
        """Nothing known."""
        return Levels([0.0] * depth, [0.0] * depth, [0.0] * depth, [0.0] * depth)

    def clear(self) -> None:
        """Know nothing again."""
        self.age(0.0, range(len(self.trials)))
        self.trial, self.tried = Trial(), 0

    def age(self, memory: float, levels: range) -> None:
        """Let what is known of some levels count less."""
        for counts in (self.trials, self.hits, self.begun, self.drawn):
            for level in levels:
                counts[level] *= memory

    def add(self, outcome: DraftOutcome, tried: int) -> None:
        """Count an outcome of a draft that might have ``tried`` levels."""
        self.tried = max(self.tried, tried)
        for level in range(tried):
            if outcome.accepted >= level:
                self.trials[level] += 1
                self.hits[level] += outcome.accepted > level
            if outcome.drafted >= level:
                self.begun[level] += 1
                self.drawn[level] += outcome.drafted > level

    def estimates(self, prior: float, weight: float) -> list[tuple[float, float]]:
        """Return for each level the probabilities that a path goes on to it, and that it is drafted.

        Args:
            prior: probability that a path goes on to the first level; each further level starts from the one above.
            weight: of the prior, in steps.
        """
        estimates: list[tuple[float, float]] = []
        reach, draft = prior, 1.0
        for trials, hits, begun, drawn in zip(self.trials, self.hits, self.begun, self.drawn, strict=True):
            reach, draft = (hits + weight * reach) / (trials + weight), (drawn + weight * draft) / (begun + weight)
            estimates.append((reach, draft))
        return estimates


def expected(
    states: Sequence[Levels], run: Sequence[tuple[float, float]], weight: float
) -> Iterator[tuple[float, float]]:
    """Yield for each level how many of the sequences are expected to reach it, and how many to draft it.

    The estimates of each sequence begin with those of the run and move to its own. A level that no sequence has tried
    costs no more time for many sequences than for one.

    Args:
        states: ``[B]`` of the sequences.
        run: ``[D]`` the run's ``estimates``.
        weight: of the run's estimates, in steps.
    """
    reached = drafted = float(len(states))
    paths, drafts = [1.0] * len(states), [1.0] * len(states)
    tried = max(state.tried for state in states)
    for level, (reach, draft) in enumerate(run):
        if level < tried:
            for number, state in enumerate(states):
                paths[number] *= (state.hits[level] + weight * reach) / (state.trials[level] + weight)
                drafts[number] *= (state.drawn[level] + weight * draft) / (state.begun[level] + weight)
            reached, drafted = sum(paths), sum(drafts)
        else:
            reached, drafted = reached * reach, drafted * draft
        yield reached, drafted
