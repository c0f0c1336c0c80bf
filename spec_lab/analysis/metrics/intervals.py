"""Intervals of means and of ratios of sums, over clusters.

The steps of a group share their prompts and the machine's state, so they are not independent, and an interval over
steps would be too narrow. Intervals are over clusters instead (of a run: its groups), by leaving out one cluster at a
time (jackknife, Tukey 1958) and Student's t. With few clusters a percentile bootstrap is too narrow: with eight it
misses about one time in ten (``tests/analysis/metrics/test_intervals.py``). With fewer than ``MIN_CLUSTERS`` there is
no interval: their spread is not known well enough.

``resampled_sums`` and ``quantiles`` are a bootstrap for what no jackknife covers: the best of many designs, bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import t

MIN_CLUSTERS = 8
"""Fewest clusters that have an interval."""

MAX_DRAWS = 2**22
"""Draws of a bootstrap that are computed at once, of at most 32 bytes each: the resamples of many units are chunked."""


class Interval(NamedTuple):
    """A mean (or ratio of sums) with its bounds; low and high are NaN with fewer than ``MIN_CLUSTERS`` values."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float] | pd.Series, level: float = 0.95) -> Interval:
    """Return the mean of independent values with its interval; equal values give equal bounds."""
    x = np.asarray(values, dtype=np.float64)
    return cluster_interval(x, np.ones(len(x)), np.arange(len(x)), level)


def cluster_interval(top: ArrayLike, bottom: ArrayLike, clusters: ArrayLike, level: float = 0.95) -> Interval:
    """Return a ratio of sums, ``sum(top) / sum(bottom)``, with its interval over clusters.

    Clusters whose two sums are 0 are left out. A ratio of terms that are never negative has no negative bound, and a
    share, whose top is at most its bottom in every cluster, none above 1.

    Args:
        top, bottom: the terms of the two sums, ``[N]``.
        clusters: the cluster of each row, ``[N]``.
        level: the interval's nominal coverage.

    Returns:
        The ratio, low and high; NaN bounds with fewer than ``MIN_CLUSTERS`` clusters, NaN over nothing.
    """
    sums = _within(clusters, [top, bottom])
    sums = sums[(sums != 0).any(axis=1)]
    mean, low, high = jackknife(sums, lambda totals: _over(*totals.T), level)
    if (sums >= 0).all():
        low = np.maximum(low, 0.0)
        if (sums[:, 0] <= sums[:, 1]).all():
            high = np.minimum(high, 1.0)
    return Interval(mean, float(low), float(high))


def jackknife(
    sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], level: float = 0.95, relative: bool = False
) -> Interval:
    """Return a function of sums over clusters with its interval.

    NaN bounds with fewer than ``MIN_CLUSTERS`` clusters, NaN over none.

    Args:
        sums: what each cluster adds to each sum, ``[N, K]``.
        statistic: maps totals ``[R, K]`` to values ``[R]``.
        level: the interval's nominal coverage.
        relative: whether the interval is symmetric in the logarithm, as a factor's is.
    """
    if not len(sums):
        return Interval(*[float("nan")] * 3)
    totals = sums.sum(0, keepdims=True)
    mean = float(statistic(totals)[0])
    if len(sums) < MIN_CLUSTERS:
        return Interval(mean, float("nan"), float("nan"))
    each = statistic(totals - sums)
    if relative:
        half = half_width(jackknife_variance(np.log(each)), len(sums) - 1, level)
        return Interval(mean, float(mean * np.exp(-half)), float(mean * np.exp(half)))
    half = half_width(jackknife_variance(each), len(sums) - 1, level)
    return Interval(mean, mean - half, mean + half)


def jackknife_variance(leave_one_out: np.ndarray) -> float:
    """Return the variance of a figure from the figures without each unit in turn, ``[N]``; NaN below two units."""
    n = len(leave_one_out)
    return float((n - 1) / n * np.square(leave_one_out - leave_one_out.mean()).sum()) if n > 1 else float("nan")


def half_width(variance: float, freedom: float, level: float) -> float:
    """Return half the width of Student's interval; NaN without a degree of freedom."""
    return float(t.ppf((1 + level) / 2, freedom) * np.sqrt(variance)) if freedom > 0 else float("nan")


def cluster_variance(top: ArrayLike, bottom: ArrayLike, clusters: ArrayLike) -> float:
    """Return the variance of ``sum(top) / sum(bottom)`` over draws of clusters, linearised (Taylor).

    NaN with fewer than two clusters.
    """
    tops, bottoms = (_within(clusters, [terms])[:, 0] for terms in (top, bottom))
    count, total = len(tops), bottoms.sum()
    if count < 2 or total == 0:
        return float("nan")
    residuals = tops - tops.sum() / total * bottoms
    return float(count / (count - 1) * np.square(residuals).sum() / total**2)


def resampled_sums(sums: np.ndarray, resamples: int) -> np.ndarray:  # [N, K] -> [resamples, K]
    """Return the totals of each resample, which draws N of the N units with replacement: the same for every call.

    At most ``MAX_DRAWS`` draws, or those of one resample, are computed at once.

    Args:
        sums: what each unit adds.
        resamples: number of them.
    """
    return np.concatenate([weights @ sums for weights in _weights(len(sums), resamples)])


class Resampler:
    """``resampled_sums`` for many calls: the draws, which follow from the number of units alone, are made once.

    Draws of more than ``MAX_DRAWS`` are not kept.

    Args:
        resamples: number of them.
    """

    def __init__(self, resamples: int) -> None:
        self.resamples = resamples
        self._weights: dict[int, np.ndarray] = {}

    def __call__(self, sums: np.ndarray) -> np.ndarray:  # [N, K] -> [resamples, K]
        """Return the totals of each resample, as ``resampled_sums`` does."""
        count = len(sums)
        if count * self.resamples > MAX_DRAWS:
            return resampled_sums(sums, self.resamples)
        if count not in self._weights:
            self._weights[count] = np.concatenate(list(_weights(count, self.resamples)))
        return np.asarray(self._weights[count] @ sums)


def _weights(count: int, resamples: int) -> Iterator[np.ndarray]:  # [some, count]
    """Yield how often each resample draws each of ``count`` units, some resamples at a time."""
    rng, most = np.random.default_rng(0), max(MAX_DRAWS // max(count, 1), 1)
    for start in range(0, resamples, most):
        some = min(most, resamples - start)
        draws = rng.integers(0, count, (some, count), dtype=np.int32)  # five times as fast as int64
        draws += count * np.arange(some, dtype=np.int32)[:, None]
        yield np.bincount(draws.ravel(), minlength=count * some).reshape(some, count).astype(np.float64)


def quantiles(draws: np.ndarray, level: float) -> np.ndarray:  # [R, K] -> [2, K]
    """Return the ends of the central ``level`` of each column's finite draws; NaN of a column without any."""
    ends = [(1 - level) / 2, (1 + level) / 2]
    empty = np.isnan(draws)
    if not empty.any():
        return np.quantile(draws, ends, axis=0)
    all_empty = empty.all(0)
    low_high = np.nanquantile(np.where(all_empty, 0.0, draws), ends, axis=0)
    low_high[:, all_empty] = np.nan
    return low_high


def ratio(top: float, bottom: float) -> float:
    """Return top / bottom; NaN over 0."""
    return float(top / bottom) if bottom else float("nan")


def _within(clusters: ArrayLike, columns: Sequence[ArrayLike]) -> np.ndarray:  # [clusters, K]
    """Return each column's sum within each cluster."""
    cluster = np.unique(np.asarray(clusters), return_inverse=True)[1]
    count = int(cluster.max(initial=-1)) + 1
    return np.stack([np.bincount(cluster, np.asarray(column, dtype=np.float64), count) for column in columns], axis=1)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom != 0)
