"""Speeds and speed-ups."""

import math

import pandas as pd
import pytest

from spec_lab.analysis import metrics


def test_speed_counts_a_group_until_its_last_request_ends(requests):
    assert metrics.group_speeds(requests, "speculative").tolist() == [20.0, 30.0]
    assert metrics.tokens_per_second(requests, "speculative") == pytest.approx(70 / 3)
    assert metrics.tokens_per_second(requests, "baseline") == pytest.approx(70 / 7)
    assert metrics.walltime_speedup_paired(requests, "speculative").tolist() == [2.0, 3.0]


def test_a_group_that_ended_with_its_prefill_has_no_speed(requests):
    requests.loc[requests["group"] == 1, ["decode_tokens", "decode_seconds"]] = 0
    assert metrics.walltime_speedup_paired(requests, "speculative").tolist() == [2.0]
    assert math.isnan(metrics.tokens_per_second(requests, "other"))


def test_a_group_whose_baseline_emitted_nothing_after_its_prefill_has_no_speed_up(requests):
    requests.loc[(requests["group"] == 1) & (requests["arm"] == "baseline"), "decode_tokens"] = 0
    assert metrics.walltime_speedup_paired(requests, "speculative").tolist() == [2.0]


def test_a_last_group_with_fewer_prompts_counts_in_every_figure_but_the_speed_up(requests):
    last = requests[requests["request"] == 0].assign(group=2, request=4, decode_tokens=60)
    table = pd.concat([requests, last], ignore_index=True)
    assert metrics.short_groups(requests) == set()
    assert metrics.short_groups(table) == {2}
    assert metrics.walltime_speedup_paired(table, "speculative").tolist() == [2.0, 3.0]
    assert metrics.group_speeds(table, "speculative").tolist() == [20.0, 30.0, 60.0]
    assert metrics.tokens_per_second(table, "speculative") == pytest.approx(130 / 4)
    assert metrics.walltime_speedup_paired(last, "speculative").tolist() == [3.0]  # it is the only group
    assert metrics.short_groups(table.iloc[:0]) == set()


def test_with_the_prefill_its_tokens_and_its_seconds_count(requests):
    assert metrics.group_speeds(requests, "speculative", prefill=True).tolist() == [42 / 3, 32 / 2]
    paired = metrics.walltime_speedup_paired(requests, "speculative", prefill=True)
    assert paired.tolist() == pytest.approx([5 / 3, 2.0])
    assert metrics.prefill_seconds(requests, "speculative") == 2.0


def test_a_group_that_is_all_prefill_has_a_speed_with_the_prefill(requests):
    requests.loc[requests["group"] == 1, ["decode_tokens", "decode_seconds"]] = 0
    paired = metrics.walltime_speedup_paired(requests, "speculative", prefill=True)
    assert paired.tolist() == pytest.approx([5 / 3, 1.0])


@pytest.mark.parametrize("arm", ["speculative", "baseline", "beside"])
def test_a_group_that_broke_in_any_arm_has_no_speed_and_no_output_to_compare(requests, arm):
    """A broken request is short: here it would make its arm look slow, and its output differ."""
    third = requests[requests["arm"] == "baseline"].assign(arm="beside")
    table = pd.concat([requests, third], ignore_index=True)
    table["tokens"] = [[1]] * len(table)
    broken = (table["arm"] == arm) & (table["request"] == 1)
    table.loc[broken, ["decode_tokens", "finish"]] = [2, "nan"]
    table.loc[broken, "tokens"] = pd.Series([[9]] * len(table))
    assert metrics.broken_groups(table) == {0}
    assert metrics.walltime_speedup_paired(table, "speculative").tolist() == [3.0]
    assert metrics.walltime_speedup_paired(table, "speculative", prefill=True).tolist() == [2.0]
    assert metrics.tokens_per_second(table, "speculative") == 30.0
    assert metrics.tokens_per_second(table, "baseline") == 10.0
    assert metrics.identical_outputs(table, "speculative") == 1.0


def test_the_interval_of_the_speed_draws_groups(requests):
    """Groups of 40 tokens in 2 s and 30 in 1 s."""
    found = metrics.tokens_per_second_interval(requests, "speculative")
    assert found == pytest.approx((70 / 3, 20.0, 30.0))
    assert found.mean == metrics.tokens_per_second(requests, "speculative")


def test_the_speed_up_is_a_ratio_of_sums_over_groups(requests):
    """Groups of 40 tokens in 2 s against 4 s, and of 30 tokens in 1 s against 3 s."""
    speedup = metrics.speedup(requests, "speculative")
    assert speedup == pytest.approx(((70 / 3) / (70 / 7), 2.0, 3.0))  # not 2.5, the mean of the groups' ratios
    both = [metrics.tokens_per_second(requests, arm) for arm in ("speculative", "baseline")]
    assert speedup.mean == pytest.approx(both[0] / both[1])
    assert metrics.speedup(requests, "speculative", prefill=True).mean == pytest.approx((74 / 5) / (74 / 9))


def test_the_speed_up_draws_the_groups_of_both_arms_together(requests):
    """Where every group has the same ratio, so has every draw, however the groups differ in length."""
    requests["decode_seconds"] = requests["arm"].map({"speculative": 1.0, "baseline": 2.0})
    assert metrics.speedup(requests, "speculative") == pytest.approx((2.0, 2.0, 2.0))


def test_the_speed_up_leaves_out_short_broken_and_unpaired_groups(requests):
    last = requests[requests["request"] == 0].assign(group=2, request=4, decode_tokens=60)
    table = pd.concat([requests, last], ignore_index=True)
    assert metrics.speedup(table, "speculative") == metrics.speedup(requests, "speculative")
    broken = requests.assign(finish=["nan"] + ["length"] * (len(requests) - 1))
    mean, low, _ = metrics.speedup(broken, "speculative")
    assert mean == 3.0 and math.isnan(low)  # one group is left
    alone = requests[(requests["arm"] == "speculative") | (requests["group"] == 1)]
    assert metrics.speedup(alone, "speculative").mean == 3.0
    assert math.isnan(metrics.speedup(requests, "baseline").mean)
    assert math.isnan(metrics.speedup(requests, "speculative", "nobody").mean)


def test_latencies_are_those_of_requests_in_groups_that_did_not_break(requests):
    assert metrics.time_to_first_token(requests, "speculative").tolist() == [1.0] * 4
    per_token = metrics.time_per_output_token(requests, "speculative")
    assert per_token.tolist() == pytest.approx([1 / 10, 2 / 30, 1 / 15, 0.5 / 15])
    requests.loc[0, "finish"] = "nan"
    assert metrics.time_to_first_token(requests, "baseline").index.tolist() == [2, 3]
    requests.loc[requests["request"] == 2, "decode_tokens"] = 0
    assert metrics.time_per_output_token(requests, "speculative").index.tolist() == [3]
