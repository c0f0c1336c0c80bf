"""Intervals over clusters, and the bootstrap for what they do not cover."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import intervals


def test_the_interval_of_independent_values_is_student_s():
    values = np.random.default_rng(1).normal(2.0, 0.5, 9)
    mean, low, high = metrics.interval(values)
    half = t.ppf(0.975, 8) * values.std(ddof=1) / 3
    assert (mean, low, high) == pytest.approx((values.mean(), values.mean() - half, values.mean() + half))


def test_fewer_than_eight_values_have_no_interval():
    assert metrics.interval([2.0] * 8) == (2.0, 2.0, 2.0)
    mean, low, high = metrics.interval([1.0, 2.0] * 3 + [1.5])
    assert mean == 1.5 and math.isnan(low) and math.isnan(high)
    assert math.isnan(metrics.interval([]).mean)


def test_a_ratio_leaves_out_whole_clusters():
    """Rows of a cluster count as one: nine clusters of two rows are those of their sums."""
    draw = np.random.default_rng(3)
    top, bottom = draw.uniform(0, 2, 18), draw.uniform(1, 3, 18)
    sums = [values.reshape(9, 2).sum(1) for values in (top, bottom)]
    interval = metrics.cluster_interval(top, bottom, np.repeat(np.arange(9), 2))
    assert interval == pytest.approx(metrics.cluster_interval(*sums, range(9)))
    each = (sums[0].sum() - sums[0]) / (sums[1].sum() - sums[1])
    error = math.sqrt(8 / 9 * ((each - each.mean()) ** 2).sum())
    assert interval.high - interval.mean == pytest.approx(t.ppf(0.975, 8) * error)


def test_a_ratio_over_clusters_is_not_the_mean_of_their_ratios():
    assert metrics.cluster_interval([1, 90], [10, 100], [0, 1]).mean == pytest.approx(91 / 110)
    assert metrics.interval([1 / 10, 90 / 100]).mean == pytest.approx(0.5)


def test_clusters_over_nothing_are_left_out():
    """One cluster of nine drafted nothing: eight are left. Seven are left of eight."""
    top, bottom = [0, *[1, 2] * 4], [0, *[2] * 8]
    assert metrics.cluster_interval(top, bottom, range(9)) == metrics.cluster_interval(top[1:], bottom[1:], range(8))
    assert math.isnan(metrics.cluster_interval(top[:8], bottom[:8], range(8)).low)
    assert np.isnan(metrics.cluster_interval([0, 0], [0, 0], [0, 1])).all()
    assert np.isnan(metrics.cluster_interval([], [], [])).all()
    assert math.isnan(metrics.cluster_variance([1, 2], [2, 4], [7, 7]))


def test_a_share_has_no_bound_below_0_or_above_1():
    shares = [1, 1, 1, 1, 1, 1, 1, 0]
    assert metrics.interval(shares).high == 1.0 and metrics.interval([1 - share for share in shares]).low == 0.0
    assert metrics.interval([2 * share for share in shares]).high > 2.0
    assert metrics.interval([share - 0.9 for share in shares]).low < -0.1


ROWS = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0.1, 10), st.integers(0, 11)), min_size=1, max_size=30
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_an_interval_holds_its_mean_and_knows_no_order_of_rows(rows, random):
    interval = metrics.cluster_interval(*zip(*rows, strict=True))
    random.shuffle(rows)
    assert metrics.cluster_interval(*zip(*rows, strict=True)) == pytest.approx(interval, nan_ok=True)
    if not math.isnan(interval.low):
        assert interval.low - 1e-9 <= interval.mean <= interval.high + 1e-9


def test_intervals_over_clusters_cover_what_intervals_over_steps_miss():
    """300 runs of 40 groups of 5 to 15 steps; tau differs from group to group as much as from step to step."""
    draw = np.random.default_rng(0)
    covered, naive = 0, 0
    for _ in range(300):
        cluster = np.repeat(np.arange(40), draw.integers(5, 16, 40))
        emitted = 3 + draw.normal(size=40)[cluster] + draw.normal(size=len(cluster))
        weights = np.ones(len(cluster))
        _, low, high = metrics.cluster_interval(emitted, weights, cluster)
        covered += low <= 3 <= high
        wide = 1.96 * emitted.std() / math.sqrt(len(emitted))  # what a bootstrap over steps approaches
        naive += abs(emitted.mean() - 3) <= wide
    assert 0.92 <= covered / 300 <= 0.98
    assert naive / 300 < 0.75


def test_of_eight_groups_the_interval_covers_what_a_percentile_bootstrap_misses():
    """1000 runs whose groups' speed-ups are lognormal (20 %), as a ratio of sums of equal tokens."""
    draw = np.random.default_rng(5)
    covered, bootstrap = 0, 0
    drawn = draw.integers(0, 8, (499, 8))
    for _ in range(1000):
        seconds = np.exp(draw.normal(0, 0.2, 8))
        truth = math.exp(0.02)  # the mean of the seconds
        sums = np.stack([seconds, np.ones(8)], axis=1)
        _, low, high = intervals.jackknife(sums, lambda totals: totals[:, 0] / totals[:, 1], relative=True)
        covered += low <= truth <= high
        low, high = np.quantile(seconds[drawn].mean(1), [0.025, 0.975])
        bootstrap += low <= truth <= high
    assert covered / 1000 >= 0.935
    assert bootstrap / 1000 < 0.91


def test_the_linearised_variance_is_nearly_the_jackknife_s():
    draw = np.random.default_rng(2)
    top, bottom, cluster = draw.normal(5, 1, 400), draw.uniform(1, 3, 400), np.repeat(np.arange(50), 8)
    _, low, high = metrics.cluster_interval(top, bottom, cluster)
    error = (high - low) / 2 / t.ppf(0.975, 49)
    assert math.sqrt(metrics.cluster_variance(top, bottom, cluster)) == pytest.approx(error, rel=0.06)


def test_the_linearised_variance_by_hand():
    """Ratio 6 / 10: off it by 1 - 0.6 * 4 = -1.4 and 5 - 0.6 * 6 = 1.4; 2 / (2 - 1) * (1.96 + 1.96) / 10^2."""
    assert metrics.cluster_variance([1, 0, 2, 3], [1, 3, 3, 3], [0, 0, 1, 1]) == pytest.approx(0.0784)


@pytest.mark.parametrize("most", [1, 500, 1234, 10**9])
def test_a_bootstrap_in_chunks_draws_the_same(monkeypatch, most):
    sums = np.random.default_rng(2).normal(size=(123, 3))
    draws = np.random.default_rng(0).integers(0, 123, (50, 123), dtype=np.int32)
    expected = sums[draws].sum(1)
    monkeypatch.setattr(intervals, "MAX_DRAWS", most)
    assert intervals.resampled_sums(sums, 50) == pytest.approx(expected)


@pytest.mark.parametrize("most", [1, 10**9])
def test_a_resampler_gives_the_same_sums_and_draws_once(monkeypatch, most):
    drawn, weights = [], intervals._weights
    monkeypatch.setattr(
        intervals, "_weights", lambda count, resamples: drawn.append(count) or weights(count, resamples)
    )
    monkeypatch.setattr(intervals, "MAX_DRAWS", most)
    resampled, every = intervals.Resampler(50), [np.random.default_rng(n).normal(size=(n, 3)) for n in (20, 30, 20)]
    resamples = [resampled(sums) for sums in every]
    assert drawn == ([20, 30, 20] if most == 1 else [20, 30])
    for drawn_sums, sums in zip(resamples, every, strict=True):
        np.testing.assert_array_equal(drawn_sums, intervals.resampled_sums(sums, 50))


def test_the_memory_of_a_bootstrap_does_not_grow_with_its_units():
    sums = np.ones((200_000, 1))
    tracemalloc.start()
    try:
        drawn = intervals.resampled_sums(sums, 100)  # in one piece: 20 million draws, 400 MB
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (drawn == 200_000).all()
    assert peak < 32 * intervals.MAX_DRAWS + 16 * len(sums)
