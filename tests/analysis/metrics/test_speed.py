"""Speeds and speed-ups."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from spec_lab.analysis import metrics


def test_speed_counts_a_group_until_its_last_request_ends(requests):
    assert metrics.group_speeds(requests, "medusa").tolist() == [20.0, 30.0]
    assert metrics.tokens_per_second(requests, "medusa") == pytest.approx(70 / 3)
    assert metrics.tokens_per_second(requests, "baseline") == pytest.approx(70 / 7)
    assert metrics.walltime_speedup_paired(requests, "medusa").tolist() == [2.0, 3.0]


def test_a_group_that_ended_with_its_prefill_has_no_speed(requests):
    requests.loc[requests["group"] == 1, ["decode_tokens", "decode_seconds"]] = 0
    assert metrics.walltime_speedup_paired(requests, "medusa").tolist() == [2.0]
    assert math.isnan(metrics.tokens_per_second(requests, "other"))


def test_a_group_whose_baseline_emitted_nothing_after_its_prefill_has_no_speed_up(requests):
    requests.loc[(requests["group"] == 1) & (requests["arm"] == "baseline"), "decode_tokens"] = 0
    assert metrics.walltime_speedup_paired(requests, "medusa").tolist() == [2.0]


def test_a_last_group_with_fewer_prompts_counts_in_no_speed(requests):
    last = requests[requests["request"] == 0].assign(group=2, request=4, decode_tokens=60)
    table = pd.concat([requests, last], ignore_index=True)
    assert metrics.short_groups(requests) == set()
    assert metrics.short_groups(table) == {2}
    assert metrics.walltime_speedup_paired(table, "medusa").tolist() == [2.0, 3.0]
    assert metrics.group_speeds(table, "medusa").tolist() == [20.0, 30.0]
    assert metrics.tokens_per_second(table, "medusa") == pytest.approx(70 / 3)
    assert metrics.time_per_output_token(table, "medusa").index.tolist() == [0, 1, 2, 3]
    assert metrics.walltime_speedup_paired(last, "medusa").tolist() == [3.0]  # it is the only group
    assert metrics.short_groups(table.iloc[:0]) == set()


@pytest.mark.parametrize("prefill_only", [False, True])
def test_the_published_speeds_give_the_published_speed_up(requests, prefill_only):
    """With a short last group; and where one arm emitted nothing after its prefill in a group of another size."""
    last = requests[requests["request"] == 0].assign(group=2, request=4, decode_tokens=60)
    table = pd.concat([requests, last, requests[requests["group"] == 1].assign(group=3)], ignore_index=True)
    if prefill_only:
        table.loc[(table["group"] == 1) & (table["arm"] == "medusa"), "decode_tokens"] = 0
    speeds = [metrics.tokens_per_second(table, arm) for arm in ("medusa", "baseline")]
    assert metrics.timed_groups(table) == ([0, 3] if prefill_only else [0, 1, 3])
    assert metrics.speedup(table, "medusa").mean == pytest.approx(speeds[0] / speeds[1], rel=1e-14)
    frames = [metrics.tokens_per_second_interval(table, arm).mean for arm in ("medusa", "baseline")]
    assert frames == pytest.approx(speeds, rel=1e-14)


def test_with_the_prefill_its_tokens_and_its_seconds_count(requests):
    assert metrics.group_speeds(requests, "medusa", prefill=True).tolist() == [42 / 3, 32 / 2]
    paired = metrics.walltime_speedup_paired(requests, "medusa", prefill=True)
    assert paired.tolist() == pytest.approx([5 / 3, 2.0])
    assert metrics.prefill_seconds(requests, "medusa") == 2.0


def test_a_group_that_is_all_prefill_has_a_speed_with_the_prefill(requests):
    requests.loc[requests["group"] == 1, ["decode_tokens", "decode_seconds"]] = 0
    paired = metrics.walltime_speedup_paired(requests, "medusa", prefill=True)
    assert paired.tolist() == pytest.approx([5 / 3, 1.0])


@pytest.mark.parametrize("arm", ["medusa", "baseline", "beside"])
def test_a_group_that_broke_in_any_arm_has_no_speed_and_no_output_to_compare(requests, arm):
    """A broken request is short: here it would make its arm look slow, and its output differ."""
    third = requests[requests["arm"] == "baseline"].assign(arm="beside")
    table = pd.concat([requests, third], ignore_index=True)
    table["tokens"] = [[1]] * len(table)
    broken = (table["arm"] == arm) & (table["request"] == 1)
    table.loc[broken, ["decode_tokens", "finish"]] = [2, "nan"]
    table.loc[broken, "tokens"] = pd.Series([[9]] * len(table))
    assert metrics.broken_groups(table) == {0}
    assert metrics.walltime_speedup_paired(table, "medusa").tolist() == [3.0]
    assert metrics.walltime_speedup_paired(table, "medusa", prefill=True).tolist() == [2.0]
    assert metrics.tokens_per_second(table, "medusa") == 30.0
    assert metrics.tokens_per_second(table, "baseline") == 10.0
    assert metrics.identical_outputs(table, "medusa") == 1.0


def test_the_speed_up_is_a_ratio_of_sums_over_groups(requests):
    """Groups of 40 tokens in 2 s against 4 s, and of 30 tokens in 1 s against 3 s."""
    mean, low, high = metrics.speedup(requests, "medusa")
    assert mean == pytest.approx((70 / 3) / (70 / 7))  # not 2.5, the mean of the groups' ratios
    assert math.isnan(low) and math.isnan(high), "two groups"
    assert metrics.speedup(requests, "medusa", prefill=True).mean == pytest.approx((74 / 5) / (74 / 9))


def of_groups(ratios) -> pd.DataFrame:
    """Groups of 60 tokens, which the baseline decodes in 6 s."""
    rows = [
        (group, arm, group, 60, 6 / ratio if arm == "medusa" else 6.0)
        for group, ratio in enumerate(ratios)
        for arm in ("medusa", "baseline")
    ]
    table = pd.DataFrame(rows, columns=["group", "arm", "request", "decode_tokens", "decode_seconds"])
    return table.assign(prefill_tokens=1, prefill_seconds=1.0, finish="length")


def test_the_interval_of_the_speed_up_is_a_factor_by_student_s_t():
    """Equal baselines, so that the speed-up is 8 over the sum of the groups' shares of time."""
    table = of_groups(ratios := np.array([1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6]))
    seconds = 1 / ratios
    mean, low, high = metrics.speedup(table, "medusa")
    each = np.log(7 / (seconds.sum() - seconds))
    factor = np.exp(t.ppf(0.975, 7) * np.sqrt(7 / 8 * ((each - each.mean()) ** 2).sum()))
    assert (mean, low, high) == pytest.approx((8 / seconds.sum(), mean / factor, mean * factor))
    interval = metrics.tokens_per_second_interval(table, "medusa")
    assert interval == pytest.approx((10 * mean, 10 * low, 10 * high)), "the baseline does not vary"


def test_the_speed_up_leaves_the_groups_of_both_arms_out_together():
    """Where every group has the same ratio, so has every rest, however the groups differ in length."""
    table = of_groups([2.0] * 8)
    table["decode_seconds"] *= 1 + table["group"]
    assert metrics.speedup(table, "medusa") == pytest.approx((2.0, 2.0, 2.0))


def test_the_speed_up_leaves_out_short_broken_and_unpaired_groups(requests):
    last = requests[requests["request"] == 0].assign(group=2, request=4, decode_tokens=60)
    table = pd.concat([requests, last], ignore_index=True)
    assert metrics.speedup(table, "medusa").mean == metrics.speedup(requests, "medusa").mean
    broken = requests.assign(finish=["nan"] + ["length"] * (len(requests) - 1))
    mean, low, _ = metrics.speedup(broken, "medusa")
    assert mean == 3.0 and math.isnan(low)  # one group is left
    alone = requests[(requests["arm"] == "medusa") | (requests["group"] == 1)]
    assert metrics.speedup(alone, "medusa").mean == 3.0
    assert math.isnan(metrics.speedup(requests, "baseline").mean)
    assert math.isnan(metrics.speedup(requests, "medusa", "nobody").mean)


def test_latencies_are_those_of_requests_in_groups_that_did_not_break(requests):
    assert metrics.time_to_first_token(requests, "medusa").tolist() == [1.0] * 4
    per_token = metrics.time_per_output_token(requests, "medusa")
    assert per_token.tolist() == pytest.approx([1 / 10, 2 / 30, 1 / 15, 0.5 / 15])
    requests.loc[0, "finish"] = "nan"
    assert metrics.time_to_first_token(requests, "baseline").index.tolist() == [2, 3]
    requests.loc[requests["request"] == 2, "decode_tokens"] = 0
    assert metrics.time_per_output_token(requests, "medusa").index.tolist() == [3]
