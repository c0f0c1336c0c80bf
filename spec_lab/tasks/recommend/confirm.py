"""Select the fastest of several modes in paired groups, then confirm on other prompts that it beats the baseline.

Selection and confirmation share no measurement: the fastest of several is chosen by chance in part, so its speed in the
groups that chose it is too high. Afterwards one mode is compared once more, and what is to be shown is one statement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS, Interval
from spec_lab.analysis.metrics.speed import group_totals, speedup_of_totals

ERROR = 0.05
"""Probability that a mode is called faster although it is not."""

LEVEL = 0.95
"""Confidence at which a mode that is slower than the fastest so far is dropped."""

SELECTION_LOOKS = (MIN_CLUSTERS, 12, 16, 24, 32, 48)
"""Groups after which modes are dropped."""

TIE = 0.05
"""Selection ends when no other mode can be faster than the fastest by more than this share."""


@dataclass(frozen=True)
class Confirmed:
    """The result of paired runs.

    Args:
        leader: the mode that was selected and compared on other prompts; empty where none was measured.
        speedups: over the baseline; the leader's as confirmed, those of other modes in the groups that selected.
        groups: that each mode has decoded for its speed-up.
        level: confidence of the leader's interval.
        ended: why the confirmation ended: "faster", "slower", "time" or "groups".
    """

    leader: str
    speedups: Mapping[str, Interval]
    groups: Mapping[str, int]
    level: float
    ended: str

    @property
    def fastest(self) -> str:
        """The leader, if it was shown to be faster than the baseline; else empty."""
        return self.leader if self.leader in self.speedups and self.speedups[self.leader].low > 1 else ""


def select(
    names: Sequence[str],
    decode: Callable[[int, Sequence[str]], Collection[str]],
    speed: Callable[[str, str], Interval],
    fits: Callable[[int, int, Sequence[str]], bool] = lambda number, count, names: True,
) -> list[str]:
    """Decode groups with the modes until one is the fastest, within ``TIE``; return those left, the fastest first.

    At each look a mode whose whole interval over the fastest so far is below 1 is dropped. Before, the slowest are
    dropped as long as the groups until the look do not fit into the time with all (successive halving by time; Jamieson
    and Talwalkar, 1502.07943).

    Args:
        names: the modes, the best predicted one first.
        decode: decodes the group of a number with modes; returns those that did, none where no time or group is left.
        speed: of a mode over another or "baseline", on the groups that both decoded.
        fits: returns whether so many further groups, from the one of a number on, fit into the time with modes.
    """

    def over_baseline(name: str) -> float:
        mean = speed(name, "baseline").mean
        return 0.0 if math.isnan(mean) else mean

    alive, number = list(names), 0
    for look in SELECTION_LOOKS:
        while len(alive) > 1 and number < look:
            while len(alive) > 1 and not fits(number, look - number, alive):
                alive.remove(min(alive, key=over_baseline) if number else alive[-1])
            decoded = decode(number, alive)
            if not decoded:
                return sorted(alive, key=over_baseline, reverse=True) if number else alive
            alive = [name for name in alive if name in decoded]
            number += 1
        if not number:
            break
        alive.sort(key=over_baseline, reverse=True)
        others = {name: speed(name, alive[0]) for name in alive[1:]}
        alive = [name for name in alive if name not in others or not others[name].high < 1]
        if all(others[name].high < 1 + TIE for name in alive[1:]):
            break
    return alive


def confirm(
    decode: Callable[[int], bool], speedup: Callable[[float], Interval], looks: Sequence[int]
) -> tuple[Interval, int, float, str]:
    """Decode groups with one mode and the baseline until it is shown to be faster, or slower, or there are no more.

    The looks share ``ERROR`` (Bonferroni), so that the end at a good moment makes no slow mode look fast.

    Args:
        decode: decodes the group of a number; returns False where no time is left.
        speedup: so far, at a level of confidence.
        looks: numbers of groups after which is looked, ascending.

    Returns:
        The speed-up, groups, level, and why it ended.
    """
    level, number, known = 1 - ERROR / len(looks), 0, Interval(*[float("nan")] * 3)
    for look in looks:
        while number < look:
            if not decode(number):
                return (speedup(level) if number else known), number, level, "time"
            number += 1
        known = speedup(level)
        if known.low > 1 or known.high < 1:
            return known, number, level, "faster" if known.low > 1 else "slower"
    return known, number, level, "groups"


def paired_speed(requests: pd.DataFrame, arm: str, reference: str, period: int, level: float = LEVEL) -> Interval:
    """Return an arm's speed over another's on the groups that both decoded.

    Groups of the same prompts, which are decoded again where there are too few, count as one unit.

    Args:
        requests: of one stage, whose groups are numbered from 0.
        arm: the arm.
        reference: the arm that it is compared with.
        period: numbers of groups after which the same prompts are decoded again.
        level: of the interval.
    """
    both = requests[requests["arm"].isin([arm, reference])]
    shared = both.groupby("group")["arm"].nunique()
    both = both[both["group"].isin(shared.index[shared == 2])]
    totals = (group_totals(both, name) for name in (arm, reference))
    ours, theirs = (of_groups.groupby(of_groups.index % period).sum() for of_groups in totals)
    return speedup_of_totals(ours, theirs, level)
