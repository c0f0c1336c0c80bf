"""Other systems' figures, on tables that tell one definition from another."""

import math

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import metrics
from tests.analysis.metrics.tables import steps


def test_the_bonus_is_in_lengths_and_out_of_rates():
    """A chain of 4 of which 2 are accepted; the step emits 3."""
    table = steps({"accepted": 2, "nodes": 4, "depth": 4})
    assert metrics.spec_bench_mean_accepted_tokens(table) == metrics.vllm_mean_acceptance_length(table) == 3
    assert metrics.vllm_draft_acceptance_rate(table) == 2 / 4


def test_tokens_after_a_stop_count_for_all_but_specforge_and_tau(chain, requests):
    """The fixture's last step accepts 3 and emits 4, of which a limit keeps 1: 14 tokens emitted, 11 kept, 5 steps."""
    assert metrics.tau_pooled(chain) == pytest.approx(11 / 5)
    assert metrics.spec_bench_mean_accepted_tokens(chain) == pytest.approx(14 / 5)
    assert metrics.vllm_mean_acceptance_length(chain) == pytest.approx(1 + 9 / 5)  # the same, each step having drafted
    group_requests = requests[(requests["arm"] == "medusa") & (requests["group"] == 0)]
    kept = group_requests.assign(prefill_tokens=1, decode_tokens=[7, 4])
    # the 11 kept, and one token of each of the two prefills
    assert metrics.specforge_accept_length(metrics.Tables(chain, chain, kept), "medusa") == pytest.approx(13 / 5)


def test_the_prefill_is_a_token_to_specforge_and_a_step_to_spec_benchs_prompt_lookup(requests):
    """One prompt: its prefill emits 1 token, then two steps emit 3 and 2."""
    table = steps(
        {"accepted": 0, "prefill": True, "nodes": 0, "depth": 0, "stop_had_children": False},
        {"accepted": 2}, {"accepted": 1},
    )  # fmt: skip
    decode = metrics.decode_steps(table, "medusa")
    request = requests.iloc[:1].assign(prefill_tokens=1, decode_tokens=5)
    assert metrics.tau_pooled(decode) == 5 / 2
    assert metrics.spec_bench_mean_accepted_tokens(decode) == 5 / 2  # as of Medusa and EAGLE
    assert metrics.spec_bench_mean_accepted_tokens(table) == 6 / 3  # as of prompt lookup and the draft model
    assert metrics.specforge_accept_length(metrics.Tables(table, table, request), "medusa") == 6 / 2


PREFILL = {"accepted": 0, "prefill": True, "nodes": 0, "depth": 0, "stop_had_children": False}


def published(*rows, kept):
    """Every figure of acceptance, of prompts of which ``kept`` tokens are kept."""
    table = steps(*rows)
    requests = pd.DataFrame({
        "arm": "medusa", "request": range(len(kept)), "prefill_tokens": kept, "decode_tokens": 0
    })  # fmt: skip
    verified = metrics.verify_steps(table, "medusa")
    return {
        "spec_bench": metrics.spec_bench_mean_accepted_tokens(verified),
        "vllm": metrics.vllm_mean_acceptance_length(verified),
        "rate": metrics.vllm_draft_acceptance_rate(verified),
        "positions": metrics.vllm_per_position_acceptance(verified).tolist(),
        "alpha": metrics.eagle_alpha(verified).tolist(),
        "eagle": metrics.eagle_average_length(verified),
        "specforge": metrics.specforge_accept_length(metrics.Tables(table, table, requests), "medusa"),
    }


def test_a_first_step_that_drafts_is_a_verification_to_every_formula():
    """A chain of 2 after the prompt: both accepted, 3 emitted. Then one of 2: one accepted, 2 emitted."""
    first = {"accepted": 2, "prefill": True, "nodes": 2, "depth": 2, "stop_had_children": False}
    lengths = published(first, {"accepted": 1, "nodes": 2, "depth": 2}, kept=[5])
    assert lengths["spec_bench"] == lengths["vllm"] == lengths["specforge"] == 5 / 2  # a step emits at most 3
    assert lengths["rate"] == 3 / 4 and lengths["positions"] == [2 / 2, 1 / 2] and lengths["alpha"] == [2 / 2, 1 / 2]
    assert lengths["eagle"] == 5 / 1  # it divides by one step too few


def test_a_first_step_that_does_not_draft_is_no_verification():
    """The prefill emits 1 token; then a chain of 2: both accepted, 3 emitted."""
    lengths = published(PREFILL, {"accepted": 2, "nodes": 2, "depth": 2, "stop_had_children": False}, kept=[4])
    assert lengths["spec_bench"] == lengths["vllm"] == 3 and lengths["specforge"] == 4 / 1
    assert lengths["rate"] == 1 and lengths["positions"] == lengths["alpha"] == [1, 1]


def test_a_first_step_that_ends_its_request():
    """Prompt 0 ends with the token of its prefill, which drafted nothing; prompt 1 with 3 of its prefill."""
    ends = {"finish": "stop"}
    drafts = {"accepted": 2, "request": 1, "prefill": True, "nodes": 2, "depth": 2, "stop_had_children": False}
    lengths = published(PREFILL | ends, drafts | ends, kept=[1, 3])
    assert lengths["spec_bench"] == lengths["vllm"] == 3 and lengths["specforge"] == 4 / 1
    assert math.isnan(lengths["eagle"])  # prompts of one step
    assert published(PREFILL | ends, kept=[1])["specforge"] == 1  # as SpecForge without a verification
    assert math.isnan(published(drafts | {"finish": "nan"}, kept=[0])["spec_bench"])  # a step that broke


def test_a_first_step_that_is_cut():
    """The prefill's chain of 3 is accepted, 4 tokens are emitted, and a limit keeps 2 of them."""
    cut = {"accepted": 3, "prefill": True, "accepted_kept": 2, "emitted_kept": 2, "stop_had_children": False}
    lengths = published(cut | {"finish": "length"}, kept=[2])
    assert lengths["spec_bench"] == lengths["vllm"] == 4  # counted before the cut
    assert lengths["specforge"] == 2  # after it
    assert lengths["rate"] == 1 and lengths["alpha"] == [1, 1, 1]


def test_empty_drafts_count_for_spec_bench_and_not_for_vllm_nor_eagle():
    """Chains of 2: accepted 2, 0, and two steps in which prompt lookup found nothing. Emitted 3, 1, 1, 1."""
    none = {"accepted": 0, "nodes": 0, "depth": 0, "stop_had_children": False}
    table = steps(
        {"accepted": 2, "nodes": 2, "depth": 2, "stop_had_children": False},
        {"accepted": 0, "nodes": 2, "depth": 2},
        none, none,
    )  # fmt: skip
    assert metrics.spec_bench_mean_accepted_tokens(table) == metrics.tau_pooled(table) == 6 / 4
    assert metrics.vllm_mean_acceptance_length(table) == 1 + 2 / 2
    assert metrics.vllm_draft_acceptance_rate(table) == 2 / 4
    np.testing.assert_allclose(metrics.survival(table), [1 / 4, 1 / 4])
    np.testing.assert_allclose(metrics.vllm_per_position_acceptance(table), [1 / 2, 1 / 2])
    np.testing.assert_allclose(metrics.eagle_alpha(table), [1 / 2, 1])


def test_without_any_draft_there_is_nothing_to_accept():
    table = steps(*[{"accepted": 0, "nodes": 0, "depth": 0, "stop_had_children": False}] * 3)
    assert metrics.spec_bench_mean_accepted_tokens(table) == 1
    assert math.isnan(metrics.vllm_mean_acceptance_length(table))
    assert math.isnan(metrics.vllm_draft_acceptance_rate(table))
    assert len(metrics.vllm_per_position_acceptance(table)) == len(metrics.eagle_alpha(table)) == 0


def test_pooled_macro_and_eagles_average_differ_where_prompts_do():
    """Prompt 0: four steps of 1 token. Prompt 1: two steps of 4."""
    table = steps(*[{"accepted": 0}] * 4, *[{"accepted": 3, "request": 1, "stop_had_children": False}] * 2)
    assert metrics.tau_pooled(table) == pytest.approx((4 + 8) / 6)
    assert metrics.tau_macro(table) == pytest.approx((1 + 4) / 2)
    assert metrics.eagle_average_length(table) == pytest.approx((4 / 3 + 8 / 1) / 2)  # one step too few of each
    joined = pd.concat([table, steps({"accepted": 1, "request": 2})])
    assert metrics.eagle_average_length(joined) == metrics.eagle_average_length(table)  # it would divide by zero


def test_on_a_tree_eagle_takes_a_leaf_for_a_refusal():
    """A tree with two children of the root, the first with a child of its own.

    Paths: the second child, a leaf (accepted 1); the first, its child refused (accepted 1); the first and its child
    (accepted 2); nothing (accepted 0).
    """
    tree = {"nodes": 3, "depth": 2}
    table = steps(
        tree | {"accepted": 1, "stop_had_children": False},
        tree | {"accepted": 1, "stop_had_children": True},
        tree | {"accepted": 2, "stop_had_children": False},
        tree | {"accepted": 0, "stop_had_children": True},
    )
    np.testing.assert_allclose(metrics.survival(table), [3 / 4, 1 / 4])
    np.testing.assert_allclose(metrics.conditional(table), [3 / 4, 1 / 2])  # two paths had a draft at depth 2
    np.testing.assert_allclose(metrics.eagle_alpha(table), [3 / 4, 1 / 3])  # three accepted one token
    assert metrics.vllm_draft_acceptance_rate(table) == pytest.approx(4 / 12)  # by node, not by depth


def test_on_chains_of_one_length_alpha_is_the_conditional_rate(chain):
    np.testing.assert_allclose(metrics.eagle_alpha(chain), metrics.conditional(chain))
    np.testing.assert_allclose(metrics.vllm_per_position_acceptance(chain), metrics.survival(chain))


def test_other_systems_count_forced_tokens_as_any_other():
    """2 of 4 drafted are forced; 3 are accepted, both forced ones among them; 4 are emitted."""
    table = steps({"accepted": 3, "nodes": 4, "depth": 4, "forced": 2, "forced_accepted": 2, "forced_accepted_kept": 2,
                   "forced_emitted": 2, "forced_emitted_kept": 2})  # fmt: skip
    assert metrics.tau_pooled(table) == 2 and metrics.tau_with_forced(table) == 4
    assert metrics.draft_token_rate(table) == 1 / 2 and metrics.vllm_draft_acceptance_rate(table) == 3 / 4
    assert metrics.spec_bench_mean_accepted_tokens(table) == metrics.vllm_mean_acceptance_length(table) == 4
    assert len(metrics.eagle_alpha(table)) == 4 and metrics.eagle_alpha(table)[2] == 1


@pytest.fixture
def single(requests) -> pd.DataFrame:
    """Two groups of one prompt; the prefill takes 1 s and emits 1 token. The arm: 9 in 1 s, 39 in 3 s; the baseline:
    9 in 4 s, 39 in 7 s."""
    rows = [
        # group, arm, request, decode_tokens, decode_seconds
        (0, "medusa", 0, 9, 1.0), (1, "medusa", 1, 39, 3.0),
        (0, "baseline", 0, 9, 4.0), (1, "baseline", 1, 39, 7.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["group", "arm", "request", "decode_tokens", "decode_seconds"])
    return table.assign(sequence=0, prefill_tokens=1, prefill_seconds=1.0, finish="length")


def test_spec_benchs_speed_up_is_a_ratio_of_means_with_the_prefill(single):
    none = steps({"accepted": 0}).iloc[:0]
    tables = metrics.Tables(none, none, single)
    # tokens per second, prefill's tokens and seconds counted: 10 / 2 and 40 / 4; of the baseline 10 / 5 and 40 / 8
    assert metrics.spec_bench_tokens_per_second(tables, "medusa") == pytest.approx((5 + 10) / 2)
    assert metrics.spec_bench_tokens_per_second(tables, "baseline") == pytest.approx((2 + 5) / 2)
    assert metrics.spec_bench_speedup(tables, "medusa") == pytest.approx(7.5 / 3.5)
    # prompt by prompt: 5 / 2 and 10 / 5; without the prefill: 4 / 1 and 7 / 3; all tokens over all seconds: 50 / 6
    prefill = metrics.walltime_speedup_paired(single, "medusa", prefill=True)
    assert prefill.mean() == pytest.approx((5 / 2 + 10 / 5) / 2)
    assert metrics.walltime_speedup_paired(single, "medusa").mean() == pytest.approx((4 + 7 / 3) / 2)


def test_spec_bench_counts_the_methods_tokens_before_cuts_and_the_baselines_after(single):
    """Each arm's last step in prompt 0 emits 4 tokens of which 2 are kept: 2 more in the arm's 2 s."""
    cut = {"accepted": 3, "emitted": 4, "emitted_kept": 2}
    table = steps(cut, cut | {"arm": "baseline"})
    tables = metrics.Tables(table, table, single)
    assert metrics.spec_bench_tokens_per_second(tables, "medusa") == pytest.approx((12 / 2 + 40 / 4) / 2)
    assert metrics.spec_bench_speedup(tables, "medusa") == pytest.approx(8 / 3.5)
    assert math.isnan(metrics.spec_bench_speedup(tables, "medusa", "missing"))


def test_a_broken_group_has_no_speed_in_spec_benchs_either(single):
    none = steps({"accepted": 0}).iloc[:0]
    broken = single.assign(finish=["nan", "length", "length", "length"])
    assert metrics.spec_bench_speedup(metrics.Tables(none, none, broken), "medusa") == pytest.approx(10 / 5)


def test_medusas_acceleration_rate_over_its_overhead_is_the_speed_up():
    """One prompt of 12 tokens: the arm takes 4 steps of 1.5 s, the baseline 12 of 1 s."""
    columns = ["arm", "group", "prefill", "start", "whole"]
    arm = [("medusa", 0, False, 1.5 * number, 1.5) for number in range(4)]
    base = [("baseline", 0, False, 1.0 * number, 1.0) for number in range(12)]
    prefills = [("medusa", 0, True, -9.0, 9.0), ("baseline", 0, True, -9.0, 9.0)]  # end where decoding begins
    forwards = pd.DataFrame(prefills + arm + base, columns=columns)
    arm_steps = steps(*[{"accepted": 2}] * 4)
    assert metrics.medusa_overhead(forwards, "medusa") == pytest.approx(1.5)
    assert metrics.tau_with_forced(arm_steps) / metrics.medusa_overhead(forwards, "medusa") == pytest.approx(12 / 6)
