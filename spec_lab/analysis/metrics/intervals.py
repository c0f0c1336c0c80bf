"""Bootstrap intervals, of means and of ratios of sums, over clusters.

The steps of a group share their prompts and the machine's state, so they are not independent, and a bootstrap over
steps would give intervals that are too narrow. Clusters (of a run: its groups) are drawn as wholes instead. The
interval is the percentile one; with few clusters it is too narrow (with eight it misses about one time in ten).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

MOST_DRAWS = 2**22
"""Draws of a bootstrap that are computed at once, of at most 32 bytes each: the resamples of many units are chunked."""


class Interval(NamedTuple):
    """A mean (or ratio of sums) with its bounds; low and high are NaN with fewer than two values."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float] | pd.Series, level: float = 0.95, resamples: int = 9999) -> Interval:
    """Return mean and percentile bootstrap interval of independent values; equal values give equal intervals."""
    x = np.asarray(values, dtype=np.float64)
    return cluster_interval(x, np.ones(len(x)), np.arange(len(x)), level, resamples)


def cluster_interval(
    top: ArrayLike, bottom: ArrayLike, clusters: ArrayLike, level: float = 0.95, resamples: int = 9999
) -> Interval:
    """Return a ratio of sums, ``sum(top) / sum(bottom)``, with its percentile bootstrap interval over clusters.

    Whole clusters are drawn with replacement, as many as there are, and the ratio is computed of each draw. Equal rows
    give equal intervals. Draws whose bottom is 0 are left out.

    Args:
        top, bottom: the terms of the two sums, ``[N]``.
        clusters: the cluster of each row, ``[N]``.
        level: the interval's nominal coverage.
        resamples: number of draws.

    Returns:
        The ratio, low and high; NaN bounds with fewer than two clusters, NaN over nothing.
    """
    return cluster_intervals({"": (top, bottom)}, clusters, level, resamples)[""]


def cluster_intervals(
    terms: Mapping[str, tuple[ArrayLike, ArrayLike]],
    clusters: ArrayLike,
    level: float = 0.95,
    resamples: int = 9999,
) -> dict[str, Interval]:
    """Return ``cluster_interval`` of several ratios over the same rows and the same draws, by name."""
    sums = {name: _within(clusters, pair) for name, pair in terms.items()}
    return {name: bootstrap(one, lambda totals: _over(*totals.T), level, resamples) for name, one in sums.items()}


def bootstrap(
    sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], level: float = 0.95, resamples: int = 9999
) -> Interval:
    """Return a function of sums over clusters with its percentile bootstrap interval.

    NaN bounds with fewer than two clusters, NaN over none.

    Args:
        sums: what each cluster adds to each sum, ``[clusters, K]``.
        statistic: maps totals ``[R, K]`` to values ``[R]``.
        level: the interval's nominal coverage.
        resamples: number of draws.
    """
    if not len(sums):
        return Interval(*[float("nan")] * 3)
    mean = float(statistic(sums.sum(0, keepdims=True))[0])
    if len(sums) < 2:
        return Interval(mean, float("nan"), float("nan"))
    low, high = quantiles(statistic(resampled_sums(sums, resamples))[:, None], level)[:, 0]
    return Interval(mean, float(low), float(high))


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

    At most ``MOST_DRAWS`` draws, or those of one resample, are computed at once.

    Args:
        sums: what each unit adds.
        resamples: number of them.
    """
    return np.concatenate([weights @ sums for weights in _weights(len(sums), resamples)])


class Resampler:
    """``resampled_sums`` for many calls: the draws, which follow from the number of units alone, are made once.

    Draws of more than ``MOST_DRAWS`` are not kept.

    Args:
        resamples: number of them.
    """

    def __init__(self, resamples: int) -> None:
        self.resamples = resamples
        self._weights: dict[int, np.ndarray] = {}

    def __call__(self, sums: np.ndarray) -> np.ndarray:  # [N, K] -> [resamples, K]
        """Return the totals of each resample, as ``resampled_sums`` does."""
        count = len(sums)
        if count * self.resamples > MOST_DRAWS:
            return resampled_sums(sums, self.resamples)
        if count not in self._weights:
            self._weights[count] = np.concatenate(list(_weights(count, self.resamples)))
        return np.asarray(self._weights[count] @ sums)


def _weights(count: int, resamples: int) -> Iterator[np.ndarray]:  # [some, count]
    """Yield how often each resample draws each of ``count`` units, some resamples at a time."""
    rng, most = np.random.default_rng(0), max(MOST_DRAWS // max(count, 1), 1)
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
    return np.stack([np.bincount(cluster, np.asarray(one, dtype=np.float64), count) for one in columns], axis=1)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom != 0)
