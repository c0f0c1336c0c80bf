"""Bootstrap intervals, of means and of ratios of sums, over clusters.

What belongs together is drawn together: the steps of a group share their prompts and the machine's state, so a
bootstrap over steps would take them for more than they say. A run's clusters are its groups. The interval is the
percentile one; with few clusters it is too narrow (with eight it misses about one time in ten).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike


class Interval(NamedTuple):
    """A mean with its interval; low and high are NaN where fewer than two values were given."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float] | pd.Series, level: float = 0.95, resamples: int = 9999) -> Interval:
    """Mean and percentile bootstrap interval of independent values; the same values always give the same interval."""
    x = np.asarray(values, dtype=np.float64)
    return cluster_interval(x, np.ones(len(x)), np.arange(len(x)), level, resamples)


def cluster_interval(
    top: ArrayLike, bottom: ArrayLike, clusters: ArrayLike, level: float = 0.95, resamples: int = 9999
) -> Interval:
    """A ratio of sums, ``sum(top) / sum(bottom)``, with its percentile bootstrap interval over clusters.

    Whole clusters are drawn with replacement, as many as there are, and the ratio is taken anew of each draw. The same
    rows always give the same interval. Draws whose bottom is 0 say nothing and are left out.

    Args:
        top, bottom: ``[N]``, what each row adds to the two sums.
        clusters: ``[N]``, which cluster each row belongs to.
        level: the interval's nominal coverage.
        resamples: how many draws.

    Returns:
        The ratio, low and high; NaN bounds with fewer than two clusters, NaN over nothing.
    """
    return cluster_intervals({"": (top, bottom)}, clusters, level, resamples)[""]


def cluster_intervals(
    summands: Mapping[str, tuple[ArrayLike, ArrayLike]],
    clusters: ArrayLike,
    level: float = 0.95,
    resamples: int = 9999,
) -> dict[str, Interval]:
    """``cluster_interval`` of several ratios over the same rows and the same draws, by name."""
    tops, bottoms = (_within(clusters, [pair[side] for pair in summands.values()]) for side in (0, 1))
    count = len(tops)
    means = _over(tops.sum(0), bottoms.sum(0))
    if count < 2:
        low = high = np.full(len(means), np.nan)
    else:
        drawn = resampled(count, resamples)
        low, high = quantiles(_over(drawn @ tops, drawn @ bottoms), level)
    return {
        name: Interval(float(mean), float(one), float(other))
        for name, mean, one, other in zip(summands, means, low, high, strict=True)
    }


def cluster_variance(top: ArrayLike, bottom: ArrayLike, clusters: ArrayLike) -> float:
    """Variance of ``sum(top) / sum(bottom)`` over draws of clusters, linearised (Taylor); NaN under two clusters."""
    tops, bottoms = (_within(clusters, [side])[:, 0] for side in (top, bottom))
    count, whole = len(tops), bottoms.sum()
    if count < 2 or whole == 0:
        return float("nan")
    off = tops - tops.sum() / whole * bottoms
    return float(count / (count - 1) * np.square(off).sum() / whole**2)


@lru_cache(maxsize=2)
def resampled(count: int, resamples: int) -> np.ndarray:  # [resamples, count]
    """How often each resample draws each of ``count`` units, with replacement; the same for every call, read-only."""
    drawn = np.random.default_rng(0).integers(0, count, (resamples, count))
    drawn += count * np.arange(resamples)[:, None]
    times = np.bincount(drawn.ravel(), minlength=count * resamples).reshape(resamples, count).astype(np.float64)
    times.setflags(write=False)
    return times


def quantiles(draws: np.ndarray, level: float) -> np.ndarray:  # [R, K] -> [2, K]
    """Lower and upper end of the central ``level`` of each column's finite draws; NaN of a column without any."""
    ends = [(1 - level) / 2, (1 + level) / 2]
    empty = np.isnan(draws)
    if not empty.any():
        return np.quantile(draws, ends, axis=0)
    never = empty.all(0)
    low_high = np.nanquantile(np.where(never, 0.0, draws), ends, axis=0)
    low_high[:, never] = np.nan
    return low_high


def ratio(part: float, whole: float) -> float:
    """Part / whole; NaN over nothing."""
    return float(part / whole) if whole else float("nan")


def _within(clusters: ArrayLike, columns: Sequence[ArrayLike]) -> np.ndarray:  # [clusters, K]
    """Each column's sum within each cluster."""
    number = np.unique(np.asarray(clusters), return_inverse=True)[1]
    count = int(number.max(initial=-1)) + 1
    return np.stack([np.bincount(number, np.asarray(one, dtype=np.float64), count) for one in columns], axis=1)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom != 0)
