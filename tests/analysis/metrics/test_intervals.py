"""Bootstrap intervals."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import intervals


def test_the_interval_of_many_values_is_nearly_the_normal_one_and_always_the_same():
    values = np.random.default_rng(1).normal(2.0, 0.5, 200)
    mean, low, high = metrics.interval(values)
    assert mean == pytest.approx(values.mean())
    error = 1.96 * values.std() / math.sqrt(len(values))  # the normal interval, which the bootstrap approaches
    assert low == pytest.approx(mean - error, abs=0.15 * error)
    assert high == pytest.approx(mean + error, abs=0.15 * error)
    assert metrics.interval(values) == (mean, low, high)


def test_fewer_than_two_values_have_no_interval():
    assert metrics.interval([2.0, 2.0]) == (2.0, 2.0, 2.0)
    assert metrics.interval([2.0])[0] == 2.0
    assert math.isnan(metrics.interval([2.0]).low)
    assert math.isnan(metrics.interval([]).mean)


def test_a_ratio_draws_whole_clusters():
    """Cluster 0 has 1 of 4, cluster 1 has 5 of 6: together 6 of 10; a draw is one of them twice, or both."""
    top, bottom, cluster = [1, 0, 2, 3], [1, 3, 3, 3], [0, 0, 1, 1]
    assert metrics.cluster_interval(top, bottom, cluster) == pytest.approx((6 / 10, 1 / 4, 5 / 6))


def test_a_ratio_over_clusters_is_not_the_mean_of_their_ratios():
    assert metrics.cluster_interval([1, 90], [10, 100], [0, 1]).mean == pytest.approx(91 / 110)
    assert metrics.interval([1 / 10, 90 / 100]).mean == pytest.approx(0.5)


def test_draws_over_nothing_are_left_out():
    """Cluster 0 drafted nothing: only draws with cluster 1 have a rate, and it is always 1 / 2."""
    assert metrics.cluster_interval([0, 1], [0, 2], [0, 1]) == (0.5, 0.5, 0.5)
    assert np.isnan(metrics.cluster_interval([0, 0], [0, 0], [0, 1])).all()


def test_one_cluster_has_no_bounds():
    mean, low, high = metrics.cluster_interval([1, 2], [2, 4], [7, 7])
    assert mean == 0.5 and math.isnan(low) and math.isnan(high)
    assert np.isnan(metrics.cluster_interval([], [], [])).all()
    assert math.isnan(metrics.cluster_variance([1, 2], [2, 4], [7, 7]))


def test_several_ratios_share_their_draws():
    top, bottom, cluster = np.array([1.0, 2, 6, 3]), np.array([2.0, 2, 9, 3]), [0, 0, 1, 2]
    both = metrics.cluster_intervals({"rate": (top, bottom), "twice": (2 * top, bottom)}, cluster)
    assert both["rate"] == metrics.cluster_interval(top, bottom, cluster)
    assert both["twice"] == pytest.approx([2 * end for end in both["rate"]])


ROWS = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0.1, 10), st.integers(0, 7)), min_size=1, max_size=20
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_an_interval_holds_its_mean_and_knows_no_order_of_rows(rows, random):
    one = metrics.cluster_interval(*zip(*rows, strict=True), resamples=999)
    random.shuffle(rows)
    assert metrics.cluster_interval(*zip(*rows, strict=True), resamples=999) == pytest.approx(one, nan_ok=True)
    if not math.isnan(one.low):
        assert one.low - 1e-9 <= one.mean <= one.high + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=2, max_size=12))
def test_clusters_of_one_row_are_the_plain_bootstrap(rows):
    top, bottom = np.array(rows).T
    drawn = np.random.default_rng(0).integers(0, len(rows), (999, len(rows)))
    plain = np.quantile(top[drawn].sum(1) / bottom[drawn].sum(1), [0.025, 0.975])
    found = metrics.cluster_interval(top, bottom, np.arange(len(rows)), resamples=999)
    assert found == pytest.approx((top.sum() / bottom.sum(), *plain))


def test_intervals_over_clusters_cover_what_intervals_over_steps_miss():
    """300 runs of 40 groups of 5 to 15 steps; tau differs from group to group as much as from step to step."""
    draw = np.random.default_rng(0)
    covered, naive = 0, 0
    for _ in range(300):
        cluster = np.repeat(np.arange(40), draw.integers(5, 16, 40))
        emitted = 3 + draw.normal(size=40)[cluster] + draw.normal(size=len(cluster))
        one = np.ones(len(cluster))
        _, low, high = metrics.cluster_interval(emitted, one, cluster, resamples=499)
        covered += low <= 3 <= high
        wide = 1.96 * emitted.std() / math.sqrt(len(emitted))  # what a bootstrap over steps approaches
        naive += abs(emitted.mean() - 3) <= wide
    assert 0.90 <= covered / 300 <= 0.98
    assert naive / 300 < 0.75


def test_the_linearised_variance_is_that_of_the_draws():
    draw = np.random.default_rng(2)
    top, bottom, cluster = draw.normal(5, 1, 400), draw.uniform(1, 3, 400), np.repeat(np.arange(50), 8)
    _, low, high = metrics.cluster_interval(top, bottom, cluster)
    assert math.sqrt(metrics.cluster_variance(top, bottom, cluster)) == pytest.approx((high - low) / 3.92, rel=0.06)


def test_the_linearised_variance_by_hand():
    """Ratio 6 / 10: off it by 1 - 0.6 * 4 = -1.4 and 5 - 0.6 * 6 = 1.4; 2 / (2 - 1) * (1.96 + 1.96) / 10^2."""
    assert metrics.cluster_variance([1, 0, 2, 3], [1, 3, 3, 3], [0, 0, 1, 1]) == pytest.approx(0.0784)


@pytest.mark.parametrize("most", [1, 500, 1234, 10**9])
def test_a_bootstrap_in_chunks_draws_the_same(monkeypatch, most):
    sums = np.random.default_rng(2).normal(size=(123, 3))
    draws = np.random.default_rng(0).integers(0, 123, (50, 123), dtype=np.int32)
    expected = sums[draws].sum(1)
    monkeypatch.setattr(intervals, "MOST_DRAWS", most)
    assert intervals.resampled_sums(sums, 50) == pytest.approx(expected)


@pytest.mark.parametrize("most", [1, 10**9])
def test_a_resampler_gives_the_same_sums_and_draws_once(monkeypatch, most):
    drawn, weights = [], intervals._weights
    monkeypatch.setattr(
        intervals, "_weights", lambda count, resamples: drawn.append(count) or weights(count, resamples)
    )
    monkeypatch.setattr(intervals, "MOST_DRAWS", most)
    resampled, every = intervals.Resampler(50), [np.random.default_rng(n).normal(size=(n, 3)) for n in (20, 30, 20)]
    found = [resampled(one) for one in every]
    assert drawn == ([20, 30, 20] if most == 1 else [20, 30])
    for one, sums in zip(found, every, strict=True):
        np.testing.assert_array_equal(one, intervals.resampled_sums(sums, 50))


def test_the_memory_of_a_bootstrap_does_not_grow_with_its_units():
    sums = np.ones((200_000, 1))
    tracemalloc.start()
    try:
        found = intervals.resampled_sums(sums, 100)  # in one piece: 20 million draws, 400 MB
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found == 200_000).all()
    assert peak < 32 * intervals.MOST_DRAWS + 16 * len(sums)
