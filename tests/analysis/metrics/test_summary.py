"""All figures of a run."""

import json
import math

import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.results.manifest import finite
from tests.analysis.metrics.tables import steps


def test_every_arm_with_forwards_is_compared_to_every_peer_group_by_group(requests, forwards):
    """The peer is half as fast as the baseline in group 0 and as fast in group 1."""
    peer = requests[requests["arm"] == "baseline"].assign(arm="peer")
    peer.loc[peer["group"] == 0, "decode_seconds"] *= 2
    twice = pd.concat([forwards, forwards.assign(arm="baseline")])
    compared = metrics.speedups_over_peers(metrics.Tables(twice, steps({"accepted": 0}), pd.concat([requests, peer])))
    assert list(compared) == ["peer"] and list(compared["peer"]) == ["medusa", "baseline"]
    assert compared["peer"]["medusa"]["mean"] == pytest.approx(11 / 3)
    assert compared["peer"]["baseline"]["mean"] == pytest.approx(11 / 7)
    assert metrics.speedups_over_peers(metrics.Tables(twice, steps({"accepted": 0}), requests)) == {}


def test_summary_names_what_the_design_asks_for(chain, requests, forwards):
    both = requests.assign(tokens=[[1]] * len(requests))
    twice = pd.concat([forwards, forwards.assign(arm="baseline")])
    summary = metrics.summarise(metrics.Tables(twice, chain, both), "medusa")
    assert {
        "requests", "tokens", "steps", "tau_pooled", "tau_macro", "expected_tau", "draft_token_rate", "survival",
        "conditional", "tokens_per_second", "baseline_tokens_per_second", "speedup", "phase_seconds", "overhead",
    } <= set(summary)  # fmt: skip
    assert summary["requests"] == 4
    assert summary["tokens"] == 74
    speeds = summary["tokens_per_second"], summary["baseline_tokens_per_second"]
    assert summary["speedup"]["mean"] == pytest.approx(speeds[0] / speeds[1]) == pytest.approx(7 / 3)
    assert summary["speedup_with_prefill"]["mean"] == pytest.approx((74 / 5) / (74 / 9))
    assert summary["speedup_mean_of_groups"]["mean"] == pytest.approx(2.5)
    assert summary["time_to_first_token"] == 1.0  # seconds of the prefill
    assert summary["time_per_output_token"] == pytest.approx((1 / 10 + 2 / 30 + 1 / 15 + 0.5 / 15) / 4)
    assert summary["prefill_seconds"] == 2.0
    assert summary["finish"] == {"length": 4}
    assert summary["sequences"] == 4
    forked = pd.concat([both, both[both["request"] == 0].assign(sequence=1)])
    again = metrics.summarise(metrics.Tables(twice, chain, forked), "medusa")
    assert (again["requests"], again["sequences"]) == (4, 5), "a fork is no prompt"
    alone = metrics.summarise(metrics.Tables(twice, chain, both), "baseline")
    assert math.isnan(alone["speedup"]["mean"])
    assert metrics.arms(metrics.Tables(twice, chain, both)) == ["medusa", "baseline"]


def test_figures_from_seconds_are_over_the_groups_of_the_speeds(tables):
    """A last group with fewer prompts counts in none of them, however slow it was."""
    whole = metrics.summarise(tables, "medusa")
    last = {"group": 2, "request": 9}
    requests = tables.requests.drop_duplicates("arm").assign(**last, decode_seconds=1000.0)
    forwards = tables.forwards[tables.forwards["group"] == 0].assign(group=2)
    forwards[["start", "whole"]] *= 1000
    more = metrics.Tables(
        pd.concat([tables.forwards, forwards]), tables.steps, pd.concat([tables.requests, requests], ignore_index=True)
    )
    summary = metrics.summarise(more, "medusa")
    for name in ("decode_seconds", "phase_seconds", "overhead", "spec_bench_speedup", "speedup", "medusa_overhead"):
        assert summary[name] == pytest.approx(whole[name], nan_ok=True), name


@pytest.fixture
def tables(chain, requests, forwards) -> metrics.Tables:
    twice = pd.concat([forwards, forwards.assign(arm="baseline")])
    return metrics.Tables(twice, chain, requests.assign(tokens=[[1]] * len(requests)))


def test_every_interval_belongs_to_a_figure_and_holds_it(tables):
    summary = metrics.summarise(tables, "medusa")
    assert {"tau_pooled", "tau_pooled_raw", "tau_macro", "expected_tau", "draft_token_rate", "tokens_per_second",
            "vllm_mean_acceptance_length", "spec_bench_mean_accepted_tokens"} <= set(summary["intervals"])  # fmt: skip
    for name, interval in summary["intervals"].items():
        assert interval["mean"] == pytest.approx(summary[name]), name
        assert math.isnan(interval["low"]) and math.isnan(interval["high"]), f"two groups: {name}"


def test_other_systems_figures_stand_under_their_names(tables):
    summary = metrics.summarise(tables, "medusa")
    steps = metrics.decode_steps(tables.steps, "medusa")
    assert summary["spec_bench_mean_accepted_tokens"] == pytest.approx(14 / 5)
    assert summary["vllm_per_position_acceptance"] == metrics.vllm_per_position_acceptance(steps).tolist()
    assert summary["eagle_alpha"] == metrics.eagle_alpha(steps).tolist()
    # 70 tokens in decoding and 4 in prefills; prompts' seconds are the decode's and the prefill's 1 s
    assert summary["specforge_accept_length"] == pytest.approx(74 / 5)
    ours, base = (11 / 2, 31 / 3, 16 / 2, 16 / 1.5), (11 / 4, 31 / 5, 16 / 4, 16 / 4)
    cut = 3 / 3  # the last step of request 1 emitted 3 tokens that were not kept, in its 3 s
    assert summary["spec_bench_speedup"] == pytest.approx((sum(ours) + cut) / sum(base))
    assert summary["medusa_overhead"] == 1.0


def test_the_baselines_own_summary_compares_it_with_nothing(tables):
    alone = metrics.summarise(tables, "baseline")
    for figure in ("spec_bench_speedup", "medusa_overhead", "identical_outputs", "expected_tau"):
        assert math.isnan(alone[figure]), figure
    assert math.isnan(alone["intervals"]["tau_pooled"]["mean"])
    assert math.isnan(alone["calibration"]["mean"])


def test_a_summary_is_json(tables):
    for arm in ("medusa", "baseline"):
        json.dumps(finite(metrics.summarise(tables, arm)), allow_nan=False)


def test_the_main_arm_comes_first_and_the_baseline_last_whatever_their_names(requests, forwards):
    names = ["aaa", "medusa", "zzz", "baseline", "peer"]
    order = dict(zip(["medusa", "zzz", "aaa", "peer", "baseline"], range(5), strict=True))
    rows = requests[requests["arm"] == "baseline"]
    every = pd.concat([rows.assign(arm=name, order=order[name]) for name in names])
    forwards = pd.concat([forwards.assign(arm=name) for name in names if name != "peer"])
    tables = metrics.Tables(forwards, steps({"accepted": 0}), every)
    assert metrics.main_arm(tables) == "medusa"
    assert metrics.arms(tables) == ["medusa", "aaa", "zzz", "peer", "baseline"]
    only = metrics.Tables(forwards, tables.steps, every[every["arm"].isin(["baseline", "peer"])])
    assert metrics.main_arm(only) is None and metrics.arms(only) == ["peer", "baseline"]
