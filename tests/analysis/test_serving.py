"""Throughput, latencies, goodput and speed-ups of a served stream, checked by hand, and their table."""

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis.metrics import speedup
from spec_lab.analysis.serving import drift_figures, serving_verdict, summarise


def frame(*rows):
    names = ["arm", "segment", "arrival", "admitted", "first_token", "end", "tokens"]
    return pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows])


def test_throughput_latencies_and_goodput_by_hand():
    """Two segments: seconds from the first arrival to the last token, summed; time between segments does not count."""
    summary = summarise(
        frame(
            ("a", 0, 0.0, 0.5, 1.0, 3.0, 5), ("a", 0, 1.0, 1.0, 3.0, 4.0, 2), ("a", 1, 0.0, 0.0, 2.0, 2.0, 1),
        ),
        ["a"], ttft_bound=2.0, tpot_bound=0.5,
    )["a"]  # fmt: skip
    assert (summary["requests"], summary["tokens"], summary["seconds"]) == (3, 8, 6.0)
    assert summary["tokens_per_second"] == pytest.approx(8 / 6)
    assert summary["goodput"] == pytest.approx(2 / 6)  # the second's later token came 1 s after its first
    assert summary["queue"] == {"p50": 0.0, "p90": pytest.approx(0.4), "p99": pytest.approx(0.49), "mean": 0.5 / 3}
    assert summary["prefill"]["mean"] == pytest.approx((0.5 + 2.0 + 2.0) / 3)
    assert summary["ttft"]["p50"] == 2.0 and summary["ttft"]["mean"] == pytest.approx(5 / 3)
    assert (
        summary["tpot"]["mean"] == summary["tpot"]["p50"] == pytest.approx((0.5 + 1.0) / 2)
    )  # the third has one token
    assert np.isnan(summary["speedup"]["mean"])  # no baseline


def test_the_share_of_the_roofline_is_a_ratio_of_sums_over_requests():
    rows = frame(("a", 0, 0.0, 0.0, 1.0, 2.0, 2), ("a", 1, 0.0, 0.0, 2.0, 2.5, 2), ("a", 1, 0.0, 0.0, 1.0, 4.0, 2))
    older = summarise(rows, ["a"], 1, 1)["a"]
    assert np.isnan(older["roofline_share"]["mean"]) and np.isnan(older["memory_bound_share"])
    least = {"lower_bound_seconds": [1.0, 1.0, 2.0], "read_seconds": [1.0, 0.0, 2.0]}
    measured = rows.assign(**least, forward_seconds=[2.0, 4.0, 10.0])
    figures = summarise(measured, ["a"], 1, 1)["a"]
    assert figures["roofline_share"]["mean"] == 4 / 16 and np.isnan(figures["roofline_share"]["low"]), "two segments"
    assert figures["memory_bound_share"] == 3 / 4
    mixed = summarise(measured.assign(lower_bound_seconds=[1.0, None, None]), ["a"], 1, 1)["a"]
    assert mixed["roofline_share"]["mean"] == 0.5, "segments that an older version served are left out"


def test_a_bound_is_met_by_what_equals_it_and_missed_by_one_of_two():
    rows = frame(("a", 0, 0.0, 0.0, 1.0, 2.0, 2), ("a", 0, 0.0, 0.0, 2.0, 2.5, 2), ("a", 0, 0.0, 0.0, 1.0, 4.0, 2))
    counts = [summarise(rows, ["a"], *bounds)["a"]["goodput"] * 4 for bounds in ((1, 1), (2, 1), (2, 3), (0.5, 3))]
    assert counts == pytest.approx([1, 2, 3, 0])


def test_requests_without_a_further_token_have_no_time_per_further_token_and_are_within_its_bound():
    rows = frame(("a", 0, 0.0, 0.0, 1.0, 1.0, 1), ("a", 0, 0.0, 0.0, 1.0, 1.0, 0), ("a", 0, 0.0, 0.0, 1.0, 4.0, 2))
    figures = summarise(rows, ["a"], ttft_bound=1, tpot_bound=1)["a"]
    assert set(figures["tpot"].values()) == {3.0}
    assert figures["goodput"] == pytest.approx(2 / 4)
    alone = summarise(rows[:2], ["a"], ttft_bound=1, tpot_bound=1)["a"]
    assert np.isnan(list(alone["tpot"].values())).all() and alone["goodput"] == pytest.approx(2 / 1)


def pair(base, drafted):
    """Segments of one request each: (seconds, tokens) of the baseline and of an arm."""
    rows = [("draft", n, 0.0, 0.0, 0.1, seconds, tokens) for n, (seconds, tokens) in enumerate(drafted)]
    rows += [("baseline", n, 0.0, 0.0, 0.1, seconds, tokens) for n, (seconds, tokens) in enumerate(base)]
    return frame(*rows)


def test_the_speed_up_is_a_ratio_of_sums_over_the_baseline_paired_by_segments():
    base, drafted = [(10.0, 20), (2.0, 20), (6.0, 20)], [(4.0, 20), (2.0, 20), (3.0, 20)]
    summary = summarise(pair(base, drafted), ["draft", "baseline"], 1, 1)
    speedup = summary["draft"]["speedup"]
    assert speedup["mean"] == pytest.approx(18 / 9) != pytest.approx(np.mean([10 / 4, 2 / 2, 6 / 3]))
    assert np.isnan(speedup["low"]) and np.isnan(speedup["high"]), "three segments"
    assert np.isnan(list(summary["baseline"]["speedup"].values())).all()  # as in the benchmark's table
    doubled = summarise(
        pair([(20.0, 20), (4.0, 20), (12.0, 20)], [(8.0, 20), (4.0, 20), (6.0, 20)]), ["draft", "baseline"], 1, 1
    )
    assert doubled["draft"]["speedup"] == pytest.approx(speedup, nan_ok=True)


def test_where_outputs_differ_in_length_the_speed_up_is_still_the_ratio_of_tokens_per_second():
    summary = summarise(pair([(10.0, 10), (4.0, 8)], [(4.0, 20), (1.0, 2)]), ["draft", "baseline"], 1, 1)
    assert summary["draft"]["speedup"]["mean"] == pytest.approx((22 / 5) / (18 / 14))
    speeds = [summary[arm]["tokens_per_second"] for arm in ("draft", "baseline")]
    assert summary["draft"]["speedup"]["mean"] == pytest.approx(speeds[0] / speeds[1])


def test_the_speed_up_is_the_one_of_the_benchmark_for_the_same_tokens_and_seconds():
    base, drafted = [(10.0, 10), (4.0, 8), (3.0, 7)] * 3, [(4.0, 20), (1.0, 2), (2.0, 9)] * 3
    columns = ["arm", "group", "request", "decode_seconds", "decode_tokens", "finish"]
    rows = [
        (arm, n, n, *numbers, "length")
        for arm, each in (("draft", drafted), ("baseline", base))
        for n, numbers in enumerate(each)
    ]
    expected = speedup(pd.DataFrame(rows, columns=columns), "draft")
    summary = summarise(pair(base, drafted), ["draft", "baseline"], 1, 1)
    assert tuple(summary["draft"]["speedup"].values()) == pytest.approx(expected)


def test_a_segment_without_tokens_does_not_undo_the_others():
    """A constraint may end every request of a segment before its first step."""
    summary = summarise(pair([(10.0, 10), (0.0, 0)], [(5.0, 10), (0.0, 0)]), ["draft", "baseline"], 1, 1)
    assert summary["draft"]["speedup"]["mean"] == pytest.approx(2.0)
    assert summary["draft"]["tokens_per_second"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("slow", "load", "word"), [(1.0, 0.0, "reliable"), (9.0, 0.0, "not reliable"), (1.0, 1.5, "not reliable")]
)
def test_the_verdict_is_that_of_a_benchmark_segment_by_segment(slow, load, word):
    rows = pair([(2.0 + n % 3 / 50, 20) for n in range(9)], [(slow if n == 4 else 1.0, 20) for n in range(9)])
    manifest = {"threads": 2, "machine": {"cores": 2}, "config": {}}
    judged = serving_verdict(rows.assign(other_cores=load), manifest)
    assert judged.word == word and (slow == 1.0 or "segment 4 of draft" in judged.reasons[0])
    assert any("not recorded" in reason for reason in serving_verdict(rows, manifest).reasons)
    few = serving_verdict(rows[rows["segment"] < 3].assign(other_cores=0.0), manifest)
    assert few.word == "doubtful" and "3 segments" in few.reasons[0]


def test_windows_of_a_stream_begin_with_the_change_of_its_workload():
    """Three requests before the change and four after it, in windows of two."""
    counts = [(3, 2, 1, 4), (2, 2, 0, 4), (6, 3, 3, 6), (1, 1, 0, 2), (2, 1, 1, 2), (3, 1, 2, 2), (4, 4, 0, 8)]
    rows = pd.DataFrame(counts, columns=["emitted", "decode_steps", "accepted", "drafted"])
    rows = rows.assign(arm="a", request=range(7))
    drift = drift_figures(pd.concat([rows, rows.assign(arm="baseline", drafted=0)]), ["a", "baseline"], 3, 2)
    assert [*drift["arms"]] == ["a"]
    windows = [(row["first"], row["last"], row["requests"]) for row in drift["arms"]["a"]]
    assert windows == [(0, 0, 1), (1, 2, 2), (3, 4, 2), (5, 6, 2)]
    means = [(row["tau_pooled"]["mean"], row["draft_token_rate"]["mean"]) for row in drift["arms"]["a"]]
    assert means == [(3 / 2, 1 / 4), (8 / 5, 3 / 10), (3 / 2, 1 / 4), (7 / 5, 2 / 10)]
