"""Confirm predicted modes against the baseline in paired groups, dropping losers early (successive halving).

Source: Jamieson and Talwalkar (1502.07943). A mode counts as faster only if the lower end of its interval is above 1.
The intervals share an error of 5 % over all modes and looks (Bonferroni), so that neither the number of modes that were
tried nor the end at a good moment makes a slow mode look fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS, Interval
from spec_lab.analysis.metrics.speed import group_totals, speedup_of_totals

ERROR = 0.05
"""Probability that any mode is called faster although it is not."""

LOOKS = (MIN_CLUSTERS, 12, 16, 24, 32, 48)
"""Groups after which the modes are compared; where there are fewer prompts they are decoded again."""


@dataclass(frozen=True)
class Confirmed:
    """The result of paired runs.

    Args:
        speedups: of each mode over the baseline, with the corrected interval.
        groups: that each mode has decoded.
        level: of the intervals.
        fastest: the mode that is faster than the baseline and has the largest speed-up; empty if none is faster.
        ended: why it ended: "faster", "slower", "time" or "groups".
    """

    speedups: Mapping[str, Interval]
    groups: Mapping[str, int]
    level: float
    fastest: str
    ended: str


def confirm(
    names: Sequence[str],
    decode: Callable[[int, Sequence[str]], bool],
    speedup: Callable[[str, float], Interval],
    looks: Sequence[int],
    fits: Callable[[int, int, Sequence[str]], bool] = lambda number, count, names: True,
) -> Confirmed:
    """Decode groups with the modes until one is ahead with its interval, all are slower, or there are no more.

    At each look a mode whose interval is below 1 is dropped, and of several others the slower half. Before, the slowest
    are dropped as long as the groups until the look do not fit into the time with all.

    Args:
        names: the modes, the best predicted one first.
        decode: decodes the group of a number with modes and the baseline; returns False where no time is left.
        speedup: of a mode so far, at a level of confidence.
        looks: numbers of groups after which the modes are compared, ascending.
        fits: returns whether so many further groups, from the one of a number on, fit into the time with modes.
    """
    level = 1 - ERROR / (max(1, len(names)) * max(1, len(looks)))
    alive, known = list(names), dict[str, Interval]()
    groups, ended = dict.fromkeys(names, 0), "groups"
    number = 0
    for look in looks:
        while alive and number < look:
            while len(alive) > 1 and not fits(number, look - number, alive):
                alive.remove(min(alive, key=lambda name: speedup(name, level).mean) if number else alive[-1])
            if not decode(number, alive):
                ended = "time"
                break
            number += 1
            groups |= dict.fromkeys(alive, number)
        known |= {name: speedup(name, level) for name in alive if groups[name]}
        if ended == "time":
            break
        alive = [name for name in alive if not (math.isnan(known[name].mean) or known[name].high < 1)]
        alive = sorted(alive, key=lambda name: -known[name].mean)[: max(1, math.ceil(len(alive) / 2))]
        if not alive or (len(alive) == 1 and known[alive[0]].low > 1):
            ended = "faster" if alive else "slower"
            break
    known |= {name: speedup(name, level) for name in names if groups[name]}
    faster = [name for name in known if known[name].low > 1]
    fastest = max(faster, key=lambda name: known[name].mean, default="")
    return Confirmed(known, groups, level, fastest, ended)


def paired_speedup(requests: pd.DataFrame, arm: str, level: float, first: int, period: int) -> Interval:
    """Return an arm's speed-up over the baseline on the groups that both decoded.

    Groups of the same prompts, which are decoded again where there are too few, count as one unit.

    Args:
        requests: of the run.
        arm: the arm.
        level: of the interval.
        first: number of the first group that was decoded to confirm modes.
        period: numbers of groups after which the same prompts are decoded again.
    """
    of_arm = requests[(requests["group"] >= first) & requests["arm"].isin([arm, "baseline"])]
    of_arm = of_arm[of_arm["group"].isin(of_arm.loc[of_arm["arm"] == arm, "group"])]
    totals = (group_totals(of_arm, name) for name in (arm, "baseline"))
    ours, theirs = (of_groups.groupby((of_groups.index - first) % period).sum() for of_groups in totals)
    return speedup_of_totals(ours, theirs, level)
