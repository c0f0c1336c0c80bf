"""Costs of a decoding step for each size of the draft tree, timed on a machine that others may use as well."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_lab.core.machine import Usage, crowded, other_load

log = logging.getLogger(__name__)

VISIT = 4
"""Steps of one size in a row, as in decoding; the first warms up the others and is not counted."""

WARM_UP = 2
"""Passes before the timed ones: they warm up, and show which sizes are too slow to be timed."""

PASSES = 6
"""Timed passes over all sizes at least."""

BLOCKS = 3
"""Blocks of passes at most: a measurement that is not steady is extended up to twice."""

LONGEST = 30.0
"""Seconds, those of the warm-up included, after which no more passes follow once two are timed. A warm-up that takes
longer stops there, and the sizes that it did not reach are not timed, except the first two.
"""

MIN_RATE = 0.5
"""Share of the best rate. Sizes above the largest one that reaches it are not timed; a slow size below it is."""

QUANTILE = 0.1
"""Quantile of the timed steps of a size that counts as its cost."""

STEADY = 0.25
"""Largest relative spread of a measurement that is trusted; the line over all sizes spreads less than single sizes."""


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of a step for each tree size: drafting, the target's forward, its
    distribution and the commit.

    Args:
        seconds: by the number of nodes; 0 is a step without a draft.
        spread: by the number of nodes: how far the costs from the even and from the odd passes differ, relative to
            the cost from all passes.
        steps: timed steps for each size.
        threads: processor cores that the timed process needs.
        other_load: cores that other processes kept busy during the measurement; None where it is not known.
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

        The costs of trees are smoothed by a line that a quarter of bad values does not change; the cost without a
        draft is used as it was timed.
        """
        others = [value for size, value in self.spread.items() if size] or [0.0]
        return max(self.spread[0], float(np.quantile(others, 0.75, method="lower")))

    @property
    def crowded(self) -> bool:
        """Whether other processes needed the cores that this process needs."""
        return crowded(self.other_load, self.threads, self.cores)

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
    longest: float = LONGEST,
) -> StepCosts:
    """Time steps of every size, interleaved, until the result is steady.

    How it resists the load of other processes:

    1. Sizes alternate (round robin, rising and falling in alternation), so that a change of load hits all sizes alike
       and not those that happened to be timed then.
    2. The cost of a size is the lowest tenth of its timed steps: other processes only ever add time. The plain
       minimum depends on a single step, so on a machine under constant load one fast step could change the choice;
       medians and means contain the load.
    3. The costs from even and from odd passes are compared. Where they differ too much, or where other processes used
       the cores that this one needs, timing goes on, up to ``BLOCKS`` times in all.

    Args:
        visit: times ``VISIT`` steps of a size and returns the seconds of all but the first.
        tokens: expected tokens per step, by size, in rising order; size 0 included. Sizes that are too slow
            (``MIN_RATE``, ``LONGEST``) are not timed.
        seconds: of timing in each block at least.
        threads: cores that the process needs.
        usage: of the machine's processors, up to now.
        longest: as ``LONGEST``.
    """
    sizes, spent = _warmed_up(visit, tokens, longest)
    passes: list[dict[int, list[float]]] = []
    start = usage()
    for block in range(1, BLOCKS + 1):
        least = len(passes) + PASSES
        while (
            len(passes) < 2 or len(passes) % 2 or (spent < longest and (spent < seconds * block or len(passes) < least))
        ):
            log.info("Measuring the seconds of a step: pass %d of %d sizes, %.0f s", len(passes) + 1, len(sizes), spent)
            order = sizes if len(passes) % 2 == 0 else sizes[::-1]
            timed = {size: list(visit(size)) for size in order}
            spent += sum(map(sum, timed.values())) * VISIT / (VISIT - 1)
            passes.append(timed)
        end = usage()
        load = other_load(start, end)
        costs = _summary(sizes, passes, threads, None if load is None else max(load, 0.0))
        if costs.steady or spent >= longest:
            break
        start = end
    return costs


def _warmed_up(
    visit: Callable[[int], Sequence[float]], tokens: Mapping[int, float], longest: float
) -> tuple[list[int], float]:
    """Warm up, for ``longest`` seconds at most.

    Returns:
        The sizes to time, by the rates of their fastest steps, and the seconds that the warm-up took.
    """
    best: dict[int, float] = {}
    spent = 0.0
    for warm_up in range(1, WARM_UP + 1):
        log.info("Measuring the seconds of a step: warm-up %d of %d, %.0f s", warm_up, WARM_UP, spent)
        for number, size in enumerate(tokens):
            if spent >= longest and (number > 1 or size in best):
                break
            took = visit(size)
            spent += sum(took) * VISIT / (VISIT - 1)
            best[size] = min(best.get(size, math.inf), *took)
    rates = {size: tokens[size] / seconds for size, seconds in best.items()}
    largest = max(size for size, rate in rates.items() if rate >= MIN_RATE * max(rates.values()))
    return [size for size in best if size <= largest], spent


def _summary(
    sizes: Sequence[int], passes: Sequence[Mapping[int, list[float]]], threads: int, load: float | None
) -> StepCosts:
    """Costs and spreads of the timed passes."""

    def costs(some: Sequence[Mapping[int, list[float]]]) -> dict[int, float]:
        return {size: float(np.quantile([took for timed in some for took in timed[size]], QUANTILE)) for size in sizes}

    every, even, odd = costs(passes), costs(passes[::2]), costs(passes[1::2])
    spread = {size: abs(even[size] - odd[size]) / every[size] for size in sizes}
    steps = sum(len(timed[sizes[0]]) for timed in passes)
    return StepCosts(every, spread, steps, threads, load, os.cpu_count() or 1)
