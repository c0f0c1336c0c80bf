"""Tests of the tests: known values, calibration under the true distribution, power at the stated error."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spec_lab.tasks.certify.significance import (
    Score,
    chi_square,
    detectable_tv,
    distance,
    holm,
    holm_adjusted,
)


def binomial_band(probability: float, repeats: int, sds: float = 4.0) -> float:
    """How far a share of ``repeats`` may lie from its probability."""
    return sds * math.sqrt(probability * (1 - probability) / repeats)


# Chi-square


def test_chi_square_agrees_with_scipy():
    counts, p = np.array([43, 52, 54, 40, 11]), np.array([0.2, 0.25, 0.25, 0.25, 0.05])
    test = chi_square(counts, p)
    statistic, p_value = stats.chisquare(counts, counts.sum() * p)
    assert (test.statistic, test.p_value) == pytest.approx((statistic, p_value), rel=1e-12)
    assert (test.df, test.cells, test.samples, test.impossible) == (4, 5, 200, 0)
    assert test.detectable == detectable_tv(4, 200)


def test_rare_cells_are_pooled():
    # expected 50, 38, 6, 6: the two small ones make a cell of 12
    statistic = chi_square(np.array([55, 35, 8, 2]), np.array([0.50, 0.38, 0.06, 0.06]))
    assert (statistic.cells, statistic.df) == (3, 2)
    assert statistic.statistic == pytest.approx(25 / 50 + 9 / 38 + 4 / 12)


def test_a_pool_too_small_joins_the_smallest_cell():
    # expected 60, 33, 5, 2: the pool of 7 joins 33
    statistic = chi_square(np.array([70, 20, 9, 1]), np.array([0.60, 0.33, 0.05, 0.02]))
    assert (statistic.cells, statistic.df) == (2, 1)
    assert statistic.statistic == pytest.approx(100 / 60 + 100 / 40)


def test_an_impossible_outcome_is_named():
    p = np.array([0.5, 0.5, 0.0])
    seen = chi_square(np.array([500, 499, 1]), p)
    assert (seen.p_value, seen.impossible, seen.statistic) == (0.0, 1, math.inf)
    assert chi_square(np.array([500, 500, 0]), p).p_value == 1.0  # and is no cell
    assert chi_square(np.array([500, 500, 0]), p).cells == 2
    assert chi_square(np.array([9, 1]), np.array([1.0, 0.0])).p_value == 0.0


@pytest.mark.parametrize(
    ("counts", "p"),
    [
        ([1, 2], [0.5, 0.4]),
        ([1, 2], [1.5, -0.5]),
        ([1, 2], [math.nan, 0.5]),
        ([1, -2], [0.5, 0.5]),
        ([1, 2, 3], [0.5, 0.5]),
        ([], []),
    ],
)
def test_negative_counts_and_wrong_probabilities_are_refused(counts, p):
    with pytest.raises(ValueError):
        chi_square(np.array(counts), np.array(p))


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1)), min_size=2, max_size=30),
    st.floats(1.0, 50.0),
)
def test_pooling_loses_no_sample_and_leaves_no_small_cell(cells, least):
    counts, p = np.array([count for count, _ in cells]), np.array([mass for _, mass in cells])
    if p.sum() < 1e-3:
        return
    p /= p.sum()
    counts[p == 0] = 0
    statistic = chi_square(counts, p, least)
    assert statistic.samples == counts.sum()
    assert 1 <= statistic.cells <= (p > 0).sum()
    assert 0 <= statistic.p_value <= 1
    if statistic.cells > 1:
        assert statistic.cells * least <= statistic.samples * (1 + 1e-9)
    if len(set(p.tolist())) < len(p):
        return  # of equally small cells the first takes the rest in
    order = np.random.default_rng(0).permutation(len(p))
    assert chi_square(counts[order], p[order], least).statistic == pytest.approx(
        statistic.statistic, rel=1e-6, abs=1e-9
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", ["even", "skewed"])
def test_a_true_distribution_is_rejected_as_often_as_stated(shape):
    rng, repeats = np.random.default_rng(1), 4000
    p = np.full(10, 0.1) if shape == "even" else rng.dirichlet(np.full(40, 0.3))
    p_values = [chi_square(counts, p).p_value for counts in rng.multinomial(2000, p, size=repeats)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=binomial_band(0.05, repeats))


# Detectable errors


@given(st.integers(1, 5000), st.floats(1e-9, 0.1), st.floats(0.5, 0.9999), st.integers(1, 10**9))
def test_the_smallest_detectable_error_has_the_stated_power(df, alpha, power, samples):
    tv = detectable_tv(df, samples, alpha, power)
    if tv < 1:
        assert stats.ncx2.sf(stats.chi2.isf(alpha, df), df, 4 * samples * tv**2) == pytest.approx(power, abs=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("power", [0.5, 0.9])
def test_the_least_favourable_error_is_rejected_as_often_as_stated(power):
    """|d| proportional to p; another direction of the same TV is rejected more often."""
    rng, repeats, samples, alpha = np.random.default_rng(2), 2000, 50_000, 1e-3
    p = np.array([0.15, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])
    tv = detectable_tv(len(p) - 1, samples, alpha, power)

    def rejected(error: np.ndarray) -> float:
        error *= tv / (0.5 * np.abs(error).sum())
        assert error.sum() == pytest.approx(0, abs=1e-15)
        counts = rng.multinomial(samples, p + error, size=repeats)
        return float(np.mean([chi_square(count, p).p_value < alpha for count in counts]))

    least = rejected(np.tile([1.0, -1.0], 5) * p)
    assert least == pytest.approx(power, abs=binomial_band(power, repeats) + 0.01)  # exact for large n only
    assert rejected(np.array([1.0, -1, 0, 0, 0, 0, 0, 0, 0, 0])) > least


# Distance


def test_distance():
    assert distance(np.array([6, 4, 0]), np.array([0.5, 0.25, 0.25])) == pytest.approx(0.25)
    assert distance(np.array([2, 2]), np.array([0.5, 0.5])) == 0.0
    assert distance(np.array([0, 7]), np.array([1.0, 0.0])) == 1.0
    with pytest.raises(ValueError, match="no samples"):
        distance(np.array([0, 0]), np.array([0.5, 0.5]))


# Scores


def sign_score(p: np.ndarray, f: np.ndarray, tokens: np.ndarray) -> Score:
    score = Score(2.0)
    mean = p @ f
    every = np.ones(len(tokens))
    score.add(f[tokens], mean * every, (p @ f**2 - mean**2) * every)
    return score


def test_score_by_hand():
    score = Score()
    score.add(np.array([1.0, 0.0]), np.array([0.5, 0.5]), np.array([0.25, 0.25]))
    assert (score.z, score.p_value, score.tokens) == (0.0, 1.0, 2)
    score.add(np.ones(2), np.full(2, 0.5), np.full(2, 0.25))  # batches add up
    assert score.z == pytest.approx(1.0)
    assert score.p_value == pytest.approx(0.31731, abs=1e-5)
    bias, tv = score.detectable(alpha=0.05, power=0.5)
    assert (bias, tv) == pytest.approx((1.959964 / 4, 1.959964 / 4))


def test_without_randomness_nothing_is_detectable():
    score = Score()
    assert (score.p_value, score.bound, score.detectable()) == (1.0, 1.0, (math.inf, 1.0))
    score.add(np.ones(5), np.full(5, 1 - 1e-9), np.zeros(5))  # a rounded mean is no deviation
    assert (score.tokens, score.deviation) == (5, 0.0)
    assert (score.p_value, score.bound, score.detectable()) == (1.0, 1.0, (math.inf, 1.0))


@pytest.mark.parametrize("variance", [0.0, -1e-16, 1e-14])
def test_a_certain_value_that_comes_out_otherwise_is_impossible(variance):
    score = Score()
    score.add(np.random.default_rng(0).choice([-1.0, 1.0], 1000), np.zeros(1000), np.ones(1000))
    assert score.p_value > 0.01
    score.add(np.array([-1.0]), np.array([1.0]), np.array([variance]))
    assert (score.p_value, score.bound, score.impossible, abs(score.z)) == (0.0, 0.0, 1, math.inf)


def test_score_of_a_true_distribution_is_rejected_as_often_as_stated():
    """Distributions change from token to token, and f with them."""
    rng, repeats, n = np.random.default_rng(4), 2000, 400
    p_values = []
    for _ in range(repeats):
        p = rng.dirichlet(np.ones(6), size=n)
        f = np.sign(rng.dirichlet(np.ones(6), size=n) - p)
        token = (p.cumsum(-1) < rng.random((n, 1))).sum(-1).clip(max=5)
        mean = (p * f).sum(-1)
        score = Score()
        score.add(f[np.arange(n), token], mean, (p * f**2).sum(-1) - mean**2)
        p_values.append(score.p_value)
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=binomial_band(0.05, repeats))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("power", [0.5, 0.9])
def test_a_detectable_bias_is_rejected_as_often_as_stated(power):
    """Mass moves from where f = -1 to where f = +1: the TV is bias / 2."""
    rng, repeats, n, alpha = np.random.default_rng(5), 1000, 20_000, 1e-3
    p, f = np.array([0.3, 0.2, 0.1, 0.4]), np.array([1.0, -1.0, 1.0, -1.0])
    bias, tv = sign_score(p, f, np.zeros(n, dtype=int)).detectable(alpha, power)
    wrong = p + tv * np.array([0.75, -1 / 3, 0.25, -2 / 3])
    assert wrong @ f - p @ f == pytest.approx(bias)
    rejected = [sign_score(p, f, rng.choice(4, n, p=wrong)).p_value < alpha for _ in range(repeats)]
    assert np.mean(rejected) == pytest.approx(power, abs=binomial_band(power, repeats) + 0.01)


def test_few_rare_tokens_need_the_bound():
    """300 tokens of p = 0.9999: 3 % of all runs have one rare token; the normal distribution rejects all those.

    The bound does not, and with much variance it costs little.
    """
    rng, p, n, repeats, alpha = np.random.default_rng(6), 1e-4, 300, 3000, 1e-3
    normal = bounded = 0
    for hits in rng.binomial(n, p, size=repeats):
        score = Score()
        value = np.zeros(n)
        value[:hits] = 1.0
        score.add(value, np.full(n, p), np.full(n, p * (1 - p)))
        normal += score.p_value < alpha
        bounded += score.bound < alpha
    assert normal / repeats > 0.02
    assert bounded / repeats <= alpha
    much = Score(2.0)
    much.add(np.full(100_000, 0.018), np.zeros(100_000), np.ones(100_000))
    assert much.p_value < much.bound < 20 * much.p_value < 1e-6


# Holm


def test_holm_by_hand():
    # sorted 0.005, 0.01, 0.03, 0.04 against alpha / 4, / 3, / 2, / 1: the third fails, so the fourth is kept too
    p_values = [0.01, 0.04, 0.03, 0.005]
    assert holm(p_values, 0.05) == [True, False, False, True]
    assert holm_adjusted(p_values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([], 0.05) == []
    assert holm([1e-7]) == [True] and holm([0.0, 1.0, 0.9]) == [True, False, False]
    assert holm_adjusted([0.6, 0.7]) == [1.0, 1.0]
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError):
            holm([0.5, wrong])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(1e-6, 0.5))
def test_holm_steps_down(p_values, alpha):
    """Against the procedure: reject the smallest while p <= alpha / (hypotheses left)."""
    rejected = [False] * len(p_values)
    for index, number in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[number] * (len(p_values) - index) > alpha:
            break
        rejected[number] = True
    assert holm(p_values, alpha) == rejected
    assert all(adjusted >= p for adjusted, p in zip(holm_adjusted(p_values), p_values, strict=True))


def test_holm_rejects_a_true_family_as_often_as_stated():
    rng, repeats = np.random.default_rng(7), 4000
    wrong = np.mean([any(holm(rng.random(10).tolist(), 0.05)) for _ in range(repeats)])
    assert wrong <= 0.05 + binomial_band(0.05, repeats)
    assert wrong == pytest.approx(1 - (1 - 0.05 / 10) ** 10, abs=binomial_band(0.05, repeats))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("power", [0.5, 0.9])
def test_the_bound_rejects_a_detectable_bias_as_often_as_stated(power):
    rng, repeats, n, alpha = np.random.default_rng(7), 1000, 20_000, 1e-3
    p, f = np.array([0.3, 0.2, 0.1, 0.4]), np.array([1.0, -1.0, 1.0, -1.0])
    score = sign_score(p, f, np.zeros(n, dtype=int))
    seen = score.detectable_by_bound(alpha, power)
    assert seen.tv > score.detectable(alpha, power).tv, "the bound asks for more than the normal distribution"
    wrong = p + seen.tv * np.array([0.75, -1 / 3, 0.25, -2 / 3])
    rejected = [sign_score(p, f, rng.choice(4, n, p=wrong)).bound < alpha for _ in range(repeats)]
    assert np.mean(rejected) == pytest.approx(power, abs=binomial_band(power, repeats) + 0.02)
    assert Score().detectable_by_bound() == (math.inf, 1.0)
