"""Every formula on tables small enough to compute by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from spec_lab import metrics


def steps(*rows: dict) -> pd.DataFrame:
    plain = {
        "arm": "speculative", "request": 0, "prefill": False, "forced": 0, "nodes": 3, "depth": 3,
        "stop_had_children": True, "forced_accepted": 0, "forced_accepted_kept": 0,
        "forced_emitted": 0, "forced_emitted_kept": 0, "taken_back": 0, "forks": 0,
        "expected_accepted": 0.0, "expected_kind": "exact", "empty_residual": False, "finish": "",
    }  # fmt: skip
    filled = []
    for row in rows:
        one = plain | row
        one.setdefault("emitted", one["accepted"] + 1)
        one.setdefault("accepted_kept", one["accepted"])
        one.setdefault("emitted_kept", one["emitted"])
        one.setdefault("legal", one["nodes"])
        one.setdefault("expected_emitted", 1.0 + one["expected_accepted"])
        filled.append(one)
    return pd.DataFrame(filled)


@pytest.fixture
def chain() -> pd.DataFrame:
    """Chains of 3: request 0 accepts 0, 3, 1; request 1 accepts 2 and 3, cut to a single emitted token."""
    return steps(
        {"accepted": 0, "expected_accepted": 0.5},
        {"accepted": 3, "expected_accepted": 2.0, "stop_had_children": False},
        {"accepted": 1, "expected_accepted": 1.5},
        {"accepted": 2, "expected_accepted": 1.0, "request": 1},
        {"accepted": 3, "expected_accepted": 2.5, "request": 1, "stop_had_children": False,
         "accepted_kept": 1, "emitted_kept": 1, "finish": "length"},
    )  # fmt: skip


def test_tau_is_counted_after_cuts_and_what_expected_tau_predicts_before(chain):
    assert metrics.tau_pooled(chain) == pytest.approx((1 + 4 + 2 + 3 + 1) / 5)
    assert metrics.tau_pooled_raw(chain) == pytest.approx((1 + 4 + 2 + 3 + 4) / 5)
    assert metrics.tau_macro(chain) == pytest.approx((7 / 3 + 4 / 2) / 2)
    assert metrics.expected_tau(chain) == pytest.approx(1 + 7.5 / 5)


def test_vllm_counts_accepted_tokens_by_step_and_the_draft_token_rate_by_node(chain):
    assert metrics.vllm_mean_acceptance_length(chain) == pytest.approx(1 + 9 / 5)
    assert metrics.draft_token_rate(chain) == pytest.approx(9 / 15)


def test_steps_without_a_draft_count_for_tau_and_not_for_vllm(chain):
    none = steps({"accepted": 0, "nodes": 0, "depth": 0, "stop_had_children": False})
    both = pd.concat([chain, none])
    assert metrics.tau_pooled(both) == pytest.approx(12 / 6)
    assert metrics.vllm_mean_acceptance_length(both) == pytest.approx(1 + 9 / 5)
    assert metrics.survival(both)[0] == pytest.approx(4 / 6)
    assert metrics.conditional(both)[0] == pytest.approx(4 / 5)  # the sixth step had nothing to accept


def test_survival_is_a_share_of_all_steps_and_conditional_of_those_that_reached_the_depth(chain):
    np.testing.assert_allclose(metrics.survival(chain), [4 / 5, 3 / 5, 2 / 5])
    np.testing.assert_allclose(metrics.conditional(chain), [4 / 5, 3 / 4, 2 / 3])


def test_conditional_reaches_only_where_a_draft_went_on():
    """A path that ends at a leaf never reached the next depth."""
    table = steps(
        {"accepted": 1, "depth": 2, "stop_had_children": False},
        {"accepted": 1, "depth": 2, "stop_had_children": True},
        {"accepted": 2, "depth": 2, "stop_had_children": False},
    )
    np.testing.assert_allclose(metrics.survival(table), [1, 1 / 3])
    np.testing.assert_allclose(metrics.conditional(table), [1, 1 / 2])


def test_forced_tokens_inflate_nothing(chain):
    forced = chain.copy()
    both = ("accepted", "accepted_kept", "emitted", "emitted_kept", "nodes", "forced")
    for column in (*both, "forced_accepted", "forced_accepted_kept", "forced_emitted", "forced_emitted_kept"):
        forced[column] += 2
    for figure in (
        metrics.tau_pooled, metrics.tau_pooled_raw, metrics.tau_macro, metrics.expected_tau,
        metrics.vllm_mean_acceptance_length, metrics.draft_token_rate, metrics.survival, metrics.conditional,
    ):  # fmt: skip
        np.testing.assert_allclose(figure(forced), figure(chain))


def test_forced_tokens_that_were_cut_are_not_taken_off_what_was_kept():
    """Four accepted, the first and the last forced; a limit keeps three of the five emitted, one of them forced."""
    cut = {"accepted": 4, "accepted_kept": 3, "emitted_kept": 3, "nodes": 5, "finish": "length"}
    table = steps(
        cut
        | {"forced": 2, "forced_accepted": 2, "forced_accepted_kept": 1, "forced_emitted": 2, "forced_emitted_kept": 1}
    )
    assert metrics.tau_pooled(table) == metrics.tau_macro(table) == 2
    assert metrics.tau_pooled_raw(table) == 3
    assert metrics.draft_token_rate(table) == pytest.approx(2 / 3)


def test_prefill_broken_steps_and_other_arms_are_left_out(chain):
    extra = steps(
        {"accepted": 3, "prefill": True},
        {"accepted": 0, "emitted": 0, "finish": "nan"},
        {"accepted": 0, "arm": "baseline"},
    )
    own = metrics.decode_steps(pd.concat([chain, extra]), "speculative")
    pd.testing.assert_frame_equal(own, chain)


def test_a_figure_over_nothing_is_nan():
    none = steps({"accepted": 0}).iloc[:0]
    for figure in (metrics.tau_pooled, metrics.tau_macro, metrics.draft_token_rate, metrics.expected_tau):
        assert math.isnan(figure(none))
    assert len(metrics.survival(none)) == len(metrics.conditional(none)) == 0


@pytest.fixture
def requests() -> pd.DataFrame:
    """Two groups of two prompts; the speculative arm decodes 2 and 3 times as fast. Each prefill takes 1 s."""
    rows = [
        # group, arm, request, decode_tokens, decode_seconds
        (0, "speculative", 0, 10, 1.0), (0, "speculative", 1, 30, 2.0),
        (0, "baseline", 0, 10, 3.0), (0, "baseline", 1, 30, 4.0),
        (1, "speculative", 2, 15, 1.0), (1, "speculative", 3, 15, 0.5),
        (1, "baseline", 2, 15, 3.0), (1, "baseline", 3, 15, 3.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["group", "arm", "request", "decode_tokens", "decode_seconds"])
    return table.assign(sequence=0, violated=-1, prefill_tokens=1, prefill_seconds=1.0, finish="length")


def test_speed_counts_a_group_until_its_last_request_ends(requests):
    assert metrics.group_speeds(requests, "speculative").tolist() == [20.0, 30.0]
    assert metrics.tokens_per_second(requests, "speculative") == pytest.approx(70 / 3)
    assert metrics.tokens_per_second(requests, "baseline") == pytest.approx(70 / 7)
    assert metrics.walltime_speedup_paired(requests, "speculative").tolist() == [2.0, 3.0]


def test_a_group_that_ended_with_its_prefill_has_no_speed(requests):
    requests.loc[requests["group"] == 1, ["decode_tokens", "decode_seconds"]] = 0
    assert metrics.walltime_speedup_paired(requests, "speculative").tolist() == [2.0]
    assert math.isnan(metrics.tokens_per_second(requests, "other"))


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


def test_every_arm_with_rounds_is_compared_to_every_peer_group_by_group(requests, rounds):
    """The peer is half as fast as the baseline in group 0 and as fast in group 1."""
    peer = requests[requests["arm"] == "baseline"].assign(arm="peer")
    peer.loc[peer["group"] == 0, "decode_seconds"] *= 2
    twice = pd.concat([rounds, rounds.assign(arm="baseline")])
    compared = metrics.against(metrics.Tables(twice, steps({"accepted": 0}), pd.concat([requests, peer])))
    assert list(compared) == ["peer"] and list(compared["peer"]) == ["speculative", "baseline"]
    assert compared["peer"]["speculative"] == pytest.approx({"mean": 3.5, "low": 3.0, "high": 4.0})
    assert compared["peer"]["baseline"] == pytest.approx({"mean": 1.5, "low": 1.0, "high": 2.0})
    assert metrics.against(metrics.Tables(twice, steps({"accepted": 0}), requests)) == {}


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


def test_bands_hold_the_figures(chain):
    bands = metrics.depth_bands(chain)
    for name, figure in (("survival", metrics.survival(chain)), ("conditional", metrics.conditional(chain))):
        assert bands[name].shape == (2, 3)
        assert (bands[name][0] <= figure + 1e-12).all()
        assert (bands[name][1] >= figure - 1e-12).all()
    # two requests: each resample is request 0 twice, request 1 twice, or both; extremes are the requests' own rates
    np.testing.assert_allclose(bands["survival"][:, 0], [2 / 3, 1])


def test_bands_of_one_request_are_nan(chain):
    assert np.isnan(metrics.depth_bands(chain[chain["request"] == 0])["survival"]).all()


@pytest.fixture
def rounds() -> pd.DataFrame:
    """One group: a prefill of 1 s, then rounds of 2 s and 3 s with 0.5 s between each."""
    phases = ["propose", "propose_forward", "target", "target_forward", "law", "verify", "commit"]
    rows = [
        (0, True, 0.0, 1.0, 0.1, 0.0, 0.7, 0.6, 0.1, 0.05, 0.05),
        (0, False, 1.5, 2.0, 0.5, 0.4, 1.1, 1.0, 0.2, 0.1, 0.1),
        (0, False, 4.0, 3.0, 0.5, 0.3, 2.0, 1.8, 0.3, 0.1, 0.1),
    ]
    table = pd.DataFrame(rows, columns=["group", "prefill", "start", "whole", *phases])
    return table.assign(arm="speculative", mask_wait=0.0, mask_busy=0.0)


def test_decode_time_begins_after_the_prefill_and_its_phases_add_up(rounds):
    assert metrics.decode_seconds(rounds, "speculative") == pytest.approx(6.0)
    phases = metrics.phase_seconds(rounds, "speculative")
    assert list(phases) == list(metrics.PHASES)
    assert sum(phases.values()) == pytest.approx(6.0)
    expected = {
        "propose_forward": 0.7, "propose_rest": 0.3, "mask_wait": 0.0, "target_forward": 2.8, "target_rest": 0.3,
        "law": 0.5, "verify": 0.2, "commit": 0.2, "between": 1.0,
    }  # fmt: skip
    assert phases == pytest.approx(expected)


def test_overhead_is_what_is_spent_outside_the_module_calls(rounds):
    assert metrics.overhead(rounds, "speculative") == pytest.approx(1 - 3.5 / 6)
    assert math.isnan(metrics.overhead(rounds, "baseline"))


def test_8grams_repeat_within_one_output_and_are_pooled_over_all():
    assert metrics.repeated_8gram_share([list(range(20))]) == 0.0
    # 16 tokens hold nine 8-grams; a loop of period 4 shows 4 new ones, the other 5 repeat
    assert metrics.repeated_8gram_share([[1, 2, 3, 4] * 4]) == pytest.approx(5 / 9)
    # pooled: one more output with two 8-grams, both new although the first output has them
    assert metrics.repeated_8gram_share([[1, 2, 3, 4] * 4, [1, 2, 3, 4] * 2 + [1]]) == pytest.approx(5 / 11)
    assert math.isnan(metrics.repeated_8gram_share([[1, 2, 3]]))


def test_outputs_are_identical_where_all_tokens_are(requests):
    requests["tokens"] = [[1, 2], [3], [1, 2], [3, 4], [5], [6], [5], [6]]
    assert metrics.identical_outputs(requests, "speculative") == pytest.approx(3 / 4)


def test_summary_names_what_the_design_asks_for(chain, requests, rounds):
    both = requests.assign(tokens=[[1]] * len(requests))
    twice = pd.concat([rounds, rounds.assign(arm="baseline")])
    summary = metrics.summarise(metrics.Tables(twice, chain, both), "speculative")
    assert {
        "requests", "tokens", "steps", "tau_pooled", "tau_macro", "expected_tau", "draft_token_rate", "survival",
        "conditional", "tokens_per_second", "baseline_tokens_per_second", "speedup", "phase_seconds", "overhead",
    } <= set(summary)  # fmt: skip
    assert summary["requests"] == 4
    assert summary["tokens"] == 74
    assert summary["speedup"]["mean"] == pytest.approx(2.5)
    assert summary["speedup_with_prefill"]["mean"] == pytest.approx((5 / 3 + 2) / 2)
    assert summary["prefill_seconds"] == 2.0
    assert summary["finish"] == {"length": 4}
    assert summary["sequences"] == 4
    forked = pd.concat([both, both[both["request"] == 0].assign(sequence=1)])
    again = metrics.summarise(metrics.Tables(twice, chain, forked), "speculative")
    assert (again["requests"], again["sequences"]) == (4, 5), "a fork is no prompt"
    alone = metrics.summarise(metrics.Tables(twice, chain, both), "baseline")
    assert math.isnan(alone["speedup"]["mean"])
    assert metrics.arms(metrics.Tables(twice, chain, both)) == ["speculative", "baseline"]
