"""What a decoding step costs for each size of the draft tree, timed on a machine that others may use as well."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_lab.machine import Usage, other_load

VISIT = 4
"""Steps of one size in a row, as in decoding; the first warms up the others and is not counted."""

SCOUTS = 2
"""Passes before the timed ones: they warm up, and find the sizes that are worth timing."""

PASSES = 6
"""Timed passes over all sizes at least."""

BLOCKS = 3
"""Blocks of passes at most: a measurement that is not steady is extended up to twice."""

LONGEST = 30.0
"""Seconds of timing after which no more passes follow, once there are two."""

HOPELESS = 0.5
"""Of the best rate: sizes beyond the largest that reaches it are not timed. Noise on single sizes cuts none off."""

QUANTILE = 0.1
"""Of the timed steps of a size, which one counts as its cost."""

STEADY = 0.25
"""Largest relative spread of a measurement that is trusted; the line over all sizes spreads less than single sizes."""

SLACK = 0.3
"""Cores that other processes may use beyond those that are free, as an idle system's services do."""


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of a step for each tree size: drafting, the target's forward, its law and the commit.

    Args:
        seconds: by the number of nodes; 0 is a step without a draft.
        spread: by the number of nodes: how far the costs from the even and from the odd passes differ, relative to
            the cost from all passes.
        steps: timed steps for each size.
        threads: processor cores that the timed process needs.
        other_load: cores that other processes kept busy meanwhile; None where the system does not tell.
        cores: of the machine.
        measured: when, as an ISO date with its time zone; empty until it is known.
        cached: whether the costs were read from the cache.
    """

    seconds: dict[int, float]
    spread: dict[int, float]
    steps: int
    threads: int = 1
    other_load: float | None = None
    cores: int = 1
    measured: str = ""
    cached: bool = False

    @property
    def overall_spread(self) -> float:
        """The spread that decides whether the costs are trusted: that of a step without a draft, or the upper quartile
        over the other sizes, whichever is larger.

        The costs of trees are smoothed by a line that a quarter of bad values cannot turn; the cost without a draft
        stands alone.
        """
        others = [value for size, value in self.spread.items() if size] or [0.0]
        return max(self.spread[0], float(np.quantile(others, 0.75, method="lower")))

    @property
    def crowded(self) -> bool:
        """Whether other processes needed the cores that this process needs."""
        return self.other_load is not None and self.other_load + self.threads > self.cores + SLACK

    @property
    def steady(self) -> bool:
        """Whether the costs may be trusted: a small spread, and enough free cores."""
        return self.overall_spread <= STEADY and not self.crowded


def measure(
    visit: Callable[[int], Sequence[float]],
    tokens: Mapping[int, float],
    seconds: float = 3.0,
    threads: int = 1,
    usage: Callable[[], Usage] = Usage.now,
) -> StepCosts:
    """Time steps of every size, interleaved, until the result is steady.

    How it resists the load of other processes:

    1. Sizes take turns (round robin, rising and falling in alternation), so that a change of load hits all sizes alike
       and not those that happened to be timed then.
    2. The cost of a size is the lowest tenth of its timed steps: other processes only ever add time. The plain
       minimum would rest on a single step, and on a machine under constant load one lucky step in a size's favour
       turns the choice; medians and means contain the load.
    3. The costs from even and from odd passes are compared. Where they differ too much, or where other processes used
       the cores that this one needs, timing goes on, up to ``BLOCKS`` times in all.

    Args:
        visit: times ``VISIT`` steps of a size and returns the seconds of all but the first.
        tokens: that a step is expected to give, by size, in rising order; size 0 included. Sizes beyond the largest
            promising one (``HOPELESS``) are not timed.
        seconds: of timing in each block at least.
        threads: cores that the process needs.
        usage: of the machine's processors, up to now.
    """
    sizes = _promising(visit, tokens)
    passes: list[dict[int, list[float]]] = []
    start, spent = usage(), 0.0
    for block in range(1, BLOCKS + 1):
        least = len(passes) + PASSES
        while (
            len(passes) < 2 or len(passes) % 2 or (spent < LONGEST and (spent < seconds * block or len(passes) < least))
        ):
            order = sizes if len(passes) % 2 == 0 else sizes[::-1]
            timed = {size: list(visit(size)) for size in order}
            spent += sum(map(sum, timed.values())) * VISIT / (VISIT - 1)
            passes.append(timed)
        end = usage()
        found = _summary(sizes, passes, threads, other_load(start, end))
        if found.steady or spent >= LONGEST:
            break
        start = end
    return found


def _promising(visit: Callable[[int], Sequence[float]], tokens: Mapping[int, float]) -> list[int]:
    """The sizes up to the largest whose rate, by the fastest step of the scouting passes, is not hopeless."""
    best = dict.fromkeys(tokens, math.inf)
    for _ in range(SCOUTS):
        for size in tokens:
            best[size] = min(best[size], *visit(size))
    rates = {size: tokens[size] / best[size] for size in tokens}
    largest = max(size for size, rate in rates.items() if rate >= HOPELESS * max(rates.values()))
    return [size for size in tokens if size <= largest]


def _summary(
    sizes: Sequence[int], passes: Sequence[Mapping[int, list[float]]], threads: int, load: float | None
) -> StepCosts:
    """Costs and spreads of the timed passes."""

    def costs(some: Sequence[Mapping[int, list[float]]]) -> dict[int, float]:
        return {size: float(np.quantile([took for one in some for took in one[size]], QUANTILE)) for size in sizes}

    every, even, odd = costs(passes), costs(passes[::2]), costs(passes[1::2])
    spread = {size: abs(even[size] - odd[size]) / every[size] for size in sizes}
    steps = sum(len(one[sizes[0]]) for one in passes)
    return StepCosts(every, spread, steps, threads, load, os.cpu_count() or 1)
