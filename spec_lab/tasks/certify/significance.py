"""Tests of samples against known distributions, each with the smallest error that it would have detected.

A test that does not reject is evidence only together with the smallest error that it would have rejected. Throughout,
``alpha`` is the probability of rejecting a true distribution, ``power`` that of rejecting an error of the size called
detectable, and TV the total variation. Probabilities are float64 and sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, log1p, sqrt
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import chndtrinc
from scipy.stats import chi2, norm

ALPHA = 1e-6
POWER = 0.999
ROUNDING = 1e-6  # of a mean or value of order 1: probabilities may have been float32
NEVER = 1e-12  # the probability of an event that does not occur in any run


# Histograms --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test of counts against a distribution.

    Args:
        statistic: sum over cells of (observed - expected)^2 / expected; infinite where something impossible occurred.
        df: degrees of freedom, one less than the cells.
        p_value: P(chi-square(df) >= statistic), asymptotically.
        cells: number of cells after pooling.
        impossible: samples of outcomes with probability 0. Any makes the p-value 0.
        detectable: the smallest TV of the pooled distribution that would have been rejected, see ``detectable_tv``.
    """

    statistic: float
    df: int
    p_value: float
    samples: int
    cells: int
    impossible: int
    detectable: float


def chi_square(
    counts: np.ndarray, expected: np.ndarray, min_expected: float = 10.0, alpha: float = ALPHA, power: float = POWER
) -> ChiSquare:
    """Return Pearson's chi-square test; cells in which fewer than ``min_expected`` samples are expected are pooled.

    Pooling depends on the expected distribution and the number of samples only, so the test remains valid. With one
    cell
    left nothing is tested: p-value 1, detectable 1.

    Args:
        counts: ``[K]``, the number of samples of each outcome.
        expected: ``[K]``, its probability.
        min_expected: smallest number of samples expected in a cell.
        alpha, power: of ``detectable``.

    Raises:
        ValueError: shapes that differ; negative counts; probabilities that do not sum to 1.
    """
    counts, expected = _checked(counts, expected)
    samples = int(counts.sum())
    impossible = int(counts[expected == 0].sum())
    seen, mean = _pooled(counts[expected > 0], samples * expected[expected > 0], min_expected)
    df = len(mean) - 1
    statistic = float(((seen - mean) ** 2 / mean).sum()) if df > 0 else 0.0
    p_value = float(chi2.sf(statistic, df)) if df > 0 else 1.0
    if impossible:
        statistic, p_value = inf, 0.0
    detectable = detectable_tv(df, samples, alpha, power)
    return ChiSquare(statistic, df, p_value, samples, len(mean), impossible, detectable)


def detectable_tv(df: int, samples: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """Return the smallest TV that the chi-square test rejects with probability ``power``, in any direction; at most 1.

    sqrt(lambda / (4 n)), with P(noncentral chi-square(df, lambda) > critical value) = power. An error d of the
    distribution p has lambda = n sum d^2 / p >= 4 n TV^2 (Cauchy-Schwarz), with equality where |d| is proportional to
    p: the least favourable direction. Smaller errors are detected in any other.
    """
    if df < 1 or samples < 1:
        return 1.0
    return min(1.0, sqrt(_noncentrality(df, alpha, power) / (4 * samples)))


def distance(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the TV between the empirical and the expected distribution, sum |counts / n - p| / 2.

    For samples of the expected distribution it falls as 1 / sqrt(n).
    """
    counts, expected = _checked(counts, expected)
    if not counts.any():
        raise ValueError("no samples")
    return float(0.5 * np.abs(counts / counts.sum() - expected).sum())


def expected_distance(expected: np.ndarray, samples: float | np.ndarray) -> np.ndarray:
    """Return the mean of ``distance`` for ``samples`` ``[..]`` of the expected distribution p itself.

    sum sqrt(2 p (1 - p) / (pi n)) / 2, with each count as a normal variable: right where several samples are expected
    in every cell, too large where none is expected in many.
    """
    p = np.asarray(expected, dtype=np.float64)
    return 0.5 * np.sqrt(2 * p * (1 - p) / np.pi).sum() / np.sqrt(samples)


def _noncentrality(df: int, alpha: float, power: float) -> float:
    """Return lambda with P(noncentral chi-square(df, lambda) > chi-square's critical value at alpha) = power."""
    if not 0 < alpha < power < 1:
        raise ValueError(f"power {power} must lie above alpha {alpha}, both inside (0, 1)")
    return float(chndtrinc(chi2.isf(alpha, df), df, 1.0 - power))


def _pooled(seen: np.ndarray, expected: np.ndarray, min_expected: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells in which at least ``min_expected`` samples are expected, and the others as one cell.

    If that one is still too small it joins the smallest cell.
    """
    small = expected < min_expected
    if not small.any():
        return seen, expected
    rest_seen, rest_expected = seen[small].sum(), expected[small].sum()
    seen, expected = seen[~small].astype(np.float64), expected[~small].copy()
    if rest_expected >= min_expected or not len(expected):
        return np.append(seen, rest_seen), np.append(expected, rest_expected)
    smallest = expected.argmin()
    seen[smallest] += rest_seen
    expected[smallest] += rest_expected
    return seen, expected


def _checked(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts, p = np.asarray(counts), np.asarray(expected, dtype=np.float64)
    if counts.shape != p.shape or counts.ndim != 1:
        raise ValueError(f"counts {counts.shape} and probabilities {p.shape} must be two vectors of one length")
    if (counts < 0).any():
        raise ValueError("a count is negative")
    mass = p.sum()
    if not (p >= 0).all() or not abs(mass - 1) < 1e-6:
        raise ValueError(f"not a distribution: it sums to {mass}, its smallest entry is {p.min(initial=0.0)}")
    return counts, p / mass


# Scores ------------------------------------------------------------------------------------------------------------


class Detectable(NamedTuple):
    """The smallest error that a score test would have detected.

    Args:
        bias: of E f, per token.
        tv: the smallest TV per token with a bias of this size; at most 1.
    """

    bias: float
    tv: float


class Score:
    """Martingale score test: tokens x_i of known distributions p_i, each of which may depend on all tokens before.

    For any f_i fixed before x_i is drawn, the sum of f_i(x_i) - E_{p_i} f_i is a martingale, and

        z = sum (f_i(x_i) - E f_i) / sqrt(sum Var f_i)

    is standard normal for many tokens. One number per token is enough: no histogram, so no small vocabulary is needed.

    Args:
        spread: max f - min f.

    Attributes:
        tokens: number of tokens added.
        deviation: sum of f - E f.
        variance: sum of Var f.
        impossible: tokens whose f was certain (Var f = 0 up to rounding) and had another value. Any makes the p-value
            0: in z, one such token among many ordinary ones would go unnoticed.
    """

    def __init__(self, spread: float = 1.0) -> None:
        self.spread = spread
        self.tokens = self.impossible = 0
        self.deviation = self.variance = 0.0

    def add(self, value: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> None:
        """Add tokens: f(x), E f and Var f, each ``[n]``.

        Raises:
            ValueError: shapes that differ, NaN or infinite numbers, a variance below 0 by more than rounding.
        """
        value, mean, variance = (np.asarray(x, dtype=np.float64) for x in (value, mean, variance))
        if not value.shape == mean.shape == variance.shape:
            raise ValueError(f"shapes differ: value {value.shape}, mean {mean.shape}, variance {variance.shape}")
        if not (np.isfinite(value) & np.isfinite(mean) & np.isfinite(variance)).all():
            raise ValueError("a value, mean or variance is not finite")
        if (variance < -1e-9 * (1 + mean**2)).any():  # E f^2 - (E f)^2 cancels
            raise ValueError(f"a variance is negative: {variance.min()}")
        off = value - mean
        # The mean of a certain f is rounded. Such deviations all have one sign; added up without variance, they would
        # make z large.
        rounding = ROUNDING * (1 + np.abs(mean))
        still = (np.abs(off) <= rounding) & (variance <= rounding**2)
        # Chebyshev: P(|f - E f| >= |off|) <= Var f / off^2
        never = (np.abs(off) > rounding) & (variance <= NEVER * off**2)
        self.tokens += value.size
        self.impossible += int(never.sum())
        self.deviation += float(off[~still].sum())
        self.variance += float(np.maximum(variance[~still], 0.0).sum())

    @property
    def z(self) -> float:
        """The score; infinite where something impossible occurred, 0 where nothing was random."""
        if self.impossible:
            return inf if self.deviation >= 0 else -inf
        return self.deviation / sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def p_value(self) -> float:
        """Two-sided, by the normal distribution; for a variance of less than many ``spread`` squared see ``bound``."""
        return float(2 * norm.sf(abs(self.z)))

    @property
    def bound(self) -> float:
        """A p-value without asymptotics, by Freedman's inequality: 2 exp(-V / b^2 h(b |S| / V)), at most 1.

        S is the deviation, V the variance, b the spread and h(u) = (1 + u) log(1 + u) - u. Peaked
        distributions need it: where V is not much larger than b^2, one rare token, no more frequent than its
        probability, makes z large. With much variance it is a few times larger than ``p_value``.
        """
        if self.impossible:
            return 0.0
        if not self.variance > 0:
            return 1.0
        u = self.spread * abs(self.deviation) / self.variance
        return min(1.0, 2 * exp(-self.variance / self.spread**2 * ((1 + u) * log1p(u) - u)))

    def detectable(self, alpha: float = ALPHA, power: float = POWER) -> Detectable:
        """Return the smallest bias that ``p_value`` would have rejected: (z_{alpha/2} + z_power) sqrt(sum Var f) / n.

        The variance is taken to be the same under the error. Where nothing was random nothing is detectable: bias
        infinite, TV 1. A bias b implies a TV of at least b / spread, with equality for f = sign(q - p) where
        probability moves from p towards q.
        """
        if not self.variance > 0:
            return Detectable(inf, 1.0)
        quantiles = float(norm.isf(alpha / 2) + norm.isf(1 - power))
        bias = quantiles * sqrt(self.variance) / self.tokens
        return Detectable(bias, min(1.0, bias / self.spread))

    def detectable_by_bound(self, alpha: float = ALPHA, power: float = POWER) -> Detectable:
        """Return the smallest bias that ``bound`` would have rejected: (S + z_power sqrt(V)) / n, bound(S) = alpha."""
        if not self.variance > 0:
            return Detectable(inf, 1.0)

        def excess(u: float) -> float:  # h(u) V / b^2 is log(2 / alpha) where the bound is alpha
            return self.variance / self.spread**2 * ((1 + u) * log1p(u) - u) - log(2 / alpha)

        high = 1.0
        while excess(high) < 0:
            high *= 2
        deviation = brentq(excess, 0.0, high) * self.variance / self.spread
        bias = (deviation + float(norm.isf(1 - power)) * sqrt(self.variance)) / self.tokens
        return Detectable(bias, min(1.0, bias / self.spread))


# Many tests --------------------------------------------------------------------------------------------------------


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Return which hypotheses Holm's step-down rejects: P(any true one is rejected) <= alpha under any dependence."""
    return [value <= alpha for value in holm_adjusted(p_values)]


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values in the order given: the largest of (m - i) p_(i) up to each rank i, at most 1.

    Raises:
        ValueError: a p-value outside [0, 1], or NaN.
    """
    p = np.asarray(p_values, dtype=np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("a p-value lies outside [0, 1]")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return adjusted.tolist()
