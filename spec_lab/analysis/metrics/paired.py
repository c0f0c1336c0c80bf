"""Changes from one run to another, in figures that are ratios of sums.

A figure is the sum over units (prompts, or groups of them) of one quantity over the sum of another: tau is tokens over
steps; the logarithm of a geometric mean is the sum of logarithms over their number. A change's interval comes from
leaving out one unit at a time (jackknife, Tukey 1958) and Student's t. Where both runs have the same units, a unit is
left out of both at once, so that the difficulty of a prompt cancels.

Why not the percentile bootstrap: see ``intervals``; and many comparisons need levels near 100 %, where it has no
resolution. Student's t covers both (``tests/analysis/metrics/test_paired.py``). Why the geometric mean of group
speed-ups (``speedup_geometric_mean``) and not their ratio of sums (``speedup``): without a difference the change of its
logarithm is symmetric; a change of the ratio of means is not, and with eight groups it was called significant too
often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.acceptance import SUMMANDS
from spec_lab.analysis.metrics.intervals import Interval, half_width, jackknife_variance, ratio
from spec_lab.analysis.metrics.speed import walltime_speedup_paired

FIGURES = ("tau_pooled", "expected_tau", "draft_token_rate", "nodes_per_step")
"""Acceptance figures that are compared, named as in ``acceptance``."""


class Totals(NamedTuple):
    """The terms of one run's figure, summed within every unit; the figure is ``top.sum() / bottom.sum()``."""

    top: np.ndarray  # [N]
    bottom: np.ndarray  # [N]

    def figure(self) -> float:
        """Return the run's figure; NaN over nothing."""
        return ratio(self.top.sum(), self.bottom.sum())


@dataclass(frozen=True)
class Change:
    """The change of a figure.

    Args:
        reference, other: the figure in both; the geometric mean if relative.
        relative: whether the change is the factor other / reference; else it is other - reference.
        error: standard error of the change (of its logarithm if relative); NaN with fewer than two units.
        freedom: degrees of freedom of the error.
        units: number of units with data in each run; the same ones if paired.
        paired: whether both runs have the same units.
        identical: whether no unit differs, or no leave-one-out figure; only for paired units.
    """

    reference: float
    other: float
    relative: bool
    error: float
    freedom: float
    units: tuple[int, int]
    paired: bool
    identical: bool

    def interval(self, level: float = 0.95) -> Interval:
        """Return the change with its interval."""
        half, center = self.half_width(level), self.other - self.reference
        if self.relative:
            center = float(np.log(self.other / self.reference))
        ends = center, center - half, center + half
        return Interval(*(factor(end) if self.relative else end for end in ends))

    def half_width(self, level: float = 0.95) -> float:
        """Return the smallest change (of the logarithm, if relative) whose interval would exclude no change."""
        return half_width(self.error**2, self.freedom, level)


def factor(logarithm: float) -> float:
    """Return the factor with this logarithm; infinite where it is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(logarithm))


def change(reference: Totals, other: Totals, paired: bool, relative: bool = False) -> Change:
    """Return the change from ``reference`` to ``other``.

    Units without data in either run are left out, such as prompts for which nothing was drafted.

    Args:
        reference, other: the runs; if ``paired``, entry i of both is the same unit.
        paired: whether they have the same units.
        relative: whether ``top`` holds logarithms, so that the change is a factor.

    Raises:
        ValueError: paired runs with different numbers of units.
    """
    if paired and len(reference.top) != len(other.top):
        raise ValueError(f"paired runs must have the same units (got {len(reference.top)} and {len(other.top)})")
    known = [(run.top != 0) | (run.bottom != 0) for run in (reference, other)]
    if paired:
        known = [known[0] | known[1]] * 2
    runs = [Totals(run.top[rows], run.bottom[rows]) for run, rows in zip((reference, other), known, strict=True)]
    leave_one_out = [_leave_one_out(run) for run in runs]
    units = len(runs[0].top), len(runs[1].top)
    if paired:
        error, freedom = float(np.sqrt(jackknife_variance(leave_one_out[1] - leave_one_out[0]))), units[0] - 1.0
    else:
        variances = [jackknife_variance(figures) for figures in leave_one_out]
        error, freedom = float(np.sqrt(sum(variances))), _welch(variances, units)
    figures = [float(np.exp(run.figure())) if relative else run.figure() for run in runs]
    equal_terms = paired and all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))
    equal_figures = (
        paired and units[0] > 1 and bool(np.allclose(leave_one_out[0], leave_one_out[1], rtol=1e-12, atol=1e-12))
    )
    identical = units[0] > 0 and (equal_terms or equal_figures)
    return Change(figures[0], figures[1], relative, error, freedom, units, paired, identical)


def acceptance_totals(steps: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return ``top`` and ``bottom`` of each prompt, by figure (``FIGURES``), indexed by request.

    Args:
        steps: one arm's decode steps.
    """
    totals = {}
    for name in FIGURES:
        top, bottom = SUMMANDS[name](steps)
        totals[name] = pd.DataFrame({"top": top, "bottom": bottom}).groupby(steps["request"].to_numpy()).sum()
    return totals


def speedup_totals(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> pd.DataFrame:
    """Return ``top`` (logarithm of the group's speed-up over the baseline) and ``bottom`` (1) of each timed group.

    Their figure is the logarithm of ``speedup_geometric_mean``.
    """
    ratios = walltime_speedup_paired(requests, arm, baseline)
    return pd.DataFrame({"top": np.log(ratios), "bottom": 1.0})


def _leave_one_out(run: Totals) -> np.ndarray:  # [N]
    """Return the figure without each unit in turn; NaN where nothing remains."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (run.top.sum() - run.top) / (run.bottom.sum() - run.bottom)


def _welch(variances: list[float], units: tuple[int, int]) -> float:
    """Return the degrees of freedom of a sum of two variances (Welch 1947, Satterthwaite 1946)."""
    if min(units) < 2:
        return 0.0
    if sum(variances) == 0:
        return float(min(units) - 1)
    return float(sum(variances) ** 2 / sum(variance**2 / (n - 1) for variance, n in zip(variances, units, strict=True)))
