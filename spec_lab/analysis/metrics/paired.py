"""What changed from one run to another, in figures that are sums over sums.

A figure is the sum over units (prompts, or groups of them) of one quantity over the sum of another: tau is tokens over
steps; the logarithm of a geometric mean is the sum of logarithms over their number. A change's interval comes from
leaving out one unit at a time (jackknife, Tukey 1958) and Student's t. Where both runs have the same units, a unit is
left out of both at once, so that what makes a prompt easy or hard cancels.

Why no percentile bootstrap here: with eight units its 95 % interval misses about one time in ten, and many comparisons
ask for levels near 100 %, where it has no resolution left. With t both hold
(``tests/analysis/metrics/test_paired.py``), and no random
number is needed. Why logarithms of speed-ups: under no difference their change is symmetric, which that of a
ratio of means is not; with eight groups it was called real too often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

from spec_lab.analysis.metrics.acceptance import SUMMANDS
from spec_lab.analysis.metrics.intervals import Interval, ratio
from spec_lab.analysis.metrics.speed import walltime_speedup_paired

FIGURES = ("tau_pooled", "expected_tau", "draft_token_rate", "nodes_per_step")
"""What is compared of acceptance, named as in ``acceptance``."""


class Totals(NamedTuple):
    """Two quantities of one run, each summed within every unit; the figure is ``top.sum() / bottom.sum()``."""

    top: np.ndarray  # [N]
    bottom: np.ndarray  # [N]

    def figure(self) -> float:
        """The run's figure; NaN over nothing."""
        return ratio(self.top.sum(), self.bottom.sum())


@dataclass(frozen=True)
class Change:
    """How a figure changed.

    Args:
        reference, other: the figure in both; the geometric mean if relative.
        relative: whether the change is the factor other / reference, else it is other - reference.
        error: standard error of the change (of its logarithm if relative); NaN with fewer than two units.
        freedom: degrees of freedom of the error.
        units: how many of each run's units say something; the same ones if paired.
        paired: whether both runs have the same units.
        same: whether nothing differs, in any unit or whichever unit is left out; only of paired units.
    """

    reference: float
    other: float
    relative: bool
    error: float
    freedom: float
    units: tuple[int, int]
    paired: bool
    same: bool

    def interval(self, level: float = 0.95) -> Interval:
        """The change with its interval."""
        half, changed = self.half_width(level), self.other - self.reference
        if self.relative:
            changed = float(np.log(self.other / self.reference))
        ends = changed, changed - half, changed + half
        return Interval(*(factor(end) if self.relative else end for end in ends))

    def half_width(self, level: float = 0.95) -> float:
        """The smallest change (of the logarithm, if relative) whose interval would leave out no change."""
        return float(t.ppf((1 + level) / 2, self.freedom) * self.error) if self.freedom > 0 else float("nan")


def factor(logarithm: float) -> float:
    """The factor with this logarithm; infinite where it is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(logarithm))


def change(reference: Totals, other: Totals, paired: bool, relative: bool = False) -> Change:
    """The change from ``reference`` to ``other``.

    Units of which neither run has anything are left out: a prompt for which nothing was drafted says nothing of
    drafted tokens.

    Args:
        reference, other: the runs; if ``paired``, entry i of both is the same unit.
        paired: whether they have the same units.
        relative: whether ``top`` holds logarithms, so that the change is a factor.

    Raises:
        ValueError: paired runs with different numbers of units.
    """
    if paired and len(reference.top) != len(other.top):
        raise ValueError(f"paired runs have the same units, not {len(reference.top)} and {len(other.top)}")
    says = [_says_something(one) for one in (reference, other)]
    if paired:
        says = [says[0] | says[1]] * 2
    sides = [Totals(one.top[some], one.bottom[some]) for one, some in zip((reference, other), says, strict=True)]
    left_out = [_left_out(side) for side in sides]
    units = len(sides[0].top), len(sides[1].top)
    if paired:
        steps = left_out[1] - left_out[0]
        error, freedom = float(np.sqrt(_variance(steps))), units[0] - 1.0
    else:
        parts = [_variance(one) for one in left_out]
        error, freedom = float(np.sqrt(sum(parts))), _welch(parts, units)
    figures = [float(np.exp(side.figure())) if relative else side.figure() for side in sides]
    identical = paired and all(np.array_equal(a, b) for a, b in zip(*sides, strict=True))
    steady = paired and units[0] > 1 and bool(np.allclose(left_out[0], left_out[1], rtol=1e-12, atol=1e-12))
    same = units[0] > 0 and (identical or steady)
    return Change(figures[0], figures[1], relative, error, freedom, units, paired, same)


def acceptance_totals(steps: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """``top`` and ``bottom`` of each prompt, by figure: ``FIGURES``.

    Args:
        steps: one arm's decode steps; rows of the result are numbered by ``request``.
    """
    found = {}
    for name in FIGURES:
        top, bottom = SUMMANDS[name](steps)
        found[name] = pd.DataFrame({"top": top, "bottom": bottom}).groupby(steps["request"].to_numpy()).sum()
    return found


def speedup_totals(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> pd.DataFrame:
    """``top`` (logarithm of the speed-up over the baseline) and ``bottom`` (1) of each full group."""
    ratios = walltime_speedup_paired(requests, arm, baseline)
    return pd.DataFrame({"top": np.log(ratios[ratios > 0]), "bottom": 1.0})


def _says_something(side: Totals) -> np.ndarray:  # [N]
    return (side.top != 0) | (side.bottom != 0)


def _left_out(side: Totals) -> np.ndarray:  # [N]
    """The figure without each unit in turn; NaN where nothing is left."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (side.top.sum() - side.top) / (side.bottom.sum() - side.bottom)


def _variance(left_out: np.ndarray) -> float:
    """The jackknife's variance of a figure, from the figures without each unit in turn."""
    n = len(left_out)
    return float((n - 1) / n * np.square(left_out - left_out.mean()).sum()) if n > 1 else float("nan")


def _welch(parts: list[float], units: tuple[int, int]) -> float:
    """Degrees of freedom of a sum of two variances (Welch 1947, Satterthwaite 1946)."""
    if min(units) < 2:
        return 0.0
    if sum(parts) == 0:
        return float(min(units) - 1)
    return float(sum(parts) ** 2 / sum(part**2 / (n - 1) for part, n in zip(parts, units, strict=True)))
