"""Acceptance, on tables small enough to compute by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from spec_lab.analysis import metrics
from tests.analysis.metrics.tables import steps


def test_tau_is_counted_after_cuts_and_what_expected_tau_predicts_before(chain):
    assert metrics.tau_pooled(chain) == pytest.approx((1 + 4 + 2 + 3 + 1) / 5)
    assert metrics.tau_pooled_raw(chain) == pytest.approx((1 + 4 + 2 + 3 + 4) / 5)
    assert metrics.tau_macro(chain) == pytest.approx((7 / 3 + 4 / 2) / 2)
    assert metrics.expected_tau(chain) == pytest.approx(1 + 7.5 / 5)


def test_the_draft_token_rate_divides_by_every_node(chain):
    assert metrics.draft_token_rate(chain) == pytest.approx(9 / 15)


def test_a_step_without_a_draft_emits_one_token_and_had_nothing_to_accept(chain):
    none = steps({"accepted": 0, "nodes": 0, "depth": 0, "stop_had_children": False})
    both = pd.concat([chain, none])
    assert metrics.tau_pooled(both) == pytest.approx(12 / 6)
    assert metrics.survival(both)[0] == pytest.approx(4 / 6)
    assert metrics.conditional(both)[0] == pytest.approx(4 / 5)  # the sixth step is not among those that reached 1


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


def test_forced_tokens_inflate_nothing_but_what_names_them(chain):
    forced = chain.copy()
    both = ("accepted", "accepted_kept", "emitted", "emitted_kept", "nodes", "forced")
    for column in (*both, "forced_accepted", "forced_accepted_kept", "forced_emitted", "forced_emitted_kept"):
        forced[column] += 2
    for figure in (
        metrics.tau_pooled, metrics.tau_pooled_raw, metrics.tau_macro, metrics.expected_tau,
        metrics.draft_token_rate, metrics.survival, metrics.conditional,
    ):  # fmt: skip
        np.testing.assert_allclose(figure(forced), figure(chain))
    assert metrics.tau_with_forced(forced) == pytest.approx(metrics.tau_pooled(chain) + 2)


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
    arm_steps = metrics.decode_steps(pd.concat([chain, extra]), "medusa")
    pd.testing.assert_frame_equal(arm_steps, chain)


def test_a_figure_over_nothing_is_nan():
    none = steps({"accepted": 0}).iloc[:0]
    for figure in (metrics.tau_pooled, metrics.tau_macro, metrics.draft_token_rate, metrics.expected_tau):
        assert math.isnan(figure(none))
    assert len(metrics.survival(none)) == len(metrics.conditional(none)) == 0


def test_bands_hold_the_figures_and_leave_out_whole_groups(chain):
    chain = pd.concat([chain.assign(request=chain["request"] + n, group=chain["request"] + n) for n in range(0, 8, 2)])
    bands = metrics.depth_bands(chain)
    for name, figure in (("survival", metrics.survival(chain)), ("conditional", metrics.conditional(chain))):
        assert bands[name].shape == (2, 3)
        assert (bands[name][0] <= figure + 1e-12).all()
        assert (bands[name][1] >= figure - 1e-12).all()
        assert (bands[name] >= 0).all() and (bands[name] <= 1).all()
    hit = (chain["accepted"] >= 1).to_numpy()
    interval = metrics.cluster_interval(hit, np.ones(len(chain)), chain["group"])
    np.testing.assert_allclose(bands["survival"][:, 0], [interval.low, interval.high])
    together = metrics.depth_bands(chain.assign(group=0))  # two prompts decoded together are one cluster
    assert np.isnan(together["survival"]).all() and np.isnan(together["conditional"]).all()


def test_a_depth_that_a_group_never_reached_has_the_band_of_the_groups_that_did():
    table = steps({"accepted": 0, "request": 0}, *({"accepted": 2, "request": n} for n in range(1, 9)))
    bands = metrics.depth_bands(table)
    # conditional@2: group 0 never reached it, the others accepted; conditional@3: they were refused
    np.testing.assert_allclose(bands["conditional"][:, 1:], [[1, 0], [1, 0]])
    assert np.isnan(metrics.depth_bands(table.iloc[:8])["conditional"][:, 1:]).all(), "seven reached them"


def test_the_difference_of_sampled_and_exact_acceptance_is_by_hand():
    """Pairs of groups of two steps, four times. Emitted 1, 4 and 2, 3; expected 2, 2.5 and 2, 2.5."""
    table = steps(
        *(
            {"accepted": accepted, "expected_accepted": expected, "request": group + pair}
            for pair in range(0, 8, 2)
            for accepted, expected, group in ((0, 1.0, 0), (3, 1.5, 0), (1, 1.0, 1), (1, 1.5, 1))
        )
    )
    figures = metrics.calibration(table)
    # differences: -1 + 1.5 = 0.5 in the first group, 0 - 0.5 = -0.5 in the second; over their steps 0.25 and -0.25
    half = t.ppf(0.975, 7) * math.sqrt(8 * 0.25**2 / 7 / 8)
    assert (figures["mean"], figures["low"], figures["high"]) == pytest.approx((0, -half, half))
    # sampled: 5 and 4 of a mean of 4.5: 8 / (8 - 1) * 8 * 0.5^2 / 16^2; expected: 4.5 in all
    assert figures["sampled_variance"] == pytest.approx(8 / 7 * 2 / 256)
    assert figures["expected_variance"] == 0.0
    assert math.isnan(figures["variance_reduction"])  # over nothing


def sampled_steps(groups: int, each: int, seed: int, spread: float) -> pd.DataFrame:
    """Chains of one token, accepted with probabilities that differ by prompt and step."""
    draw = np.random.default_rng(seed)
    prompt = draw.uniform(0.5 - spread, 0.5 + spread, groups)
    rows = []
    for group in range(groups):
        for chance in np.clip(prompt[group] + draw.uniform(-0.2, 0.2, each), 0, 1):
            rows.append({"accepted": int(draw.random() < chance), "expected_accepted": chance, "nodes": 1, "depth": 1,
                         "request": group})  # fmt: skip
    return steps(*rows)


def test_exact_acceptance_varies_less_and_the_less_prompts_differ_the_more_it_gains():
    alike, different = (metrics.calibration(sampled_steps(40, 25, 1, spread)) for spread in (0.0, 0.3))
    # of one step: accepted or not 0.25 in all, of which its own chance 0.4^2 / 12 = 0.0133: 18.8 times
    assert alike["variance_reduction"] == pytest.approx(18.75, rel=0.5)
    assert 1 < different["variance_reduction"] < 3
    for figures in (alike, different):
        assert figures["low"] < 0 < figures["high"]


def test_a_wrong_expectation_is_seen():
    table = sampled_steps(40, 25, 1, 0.0)
    wrong = metrics.calibration(table.assign(expected_emitted=table["expected_emitted"] + 0.1))
    assert wrong["high"] < 0


@pytest.mark.parametrize("kind", ["exact", "noise"])
def test_where_nothing_is_left_to_chance_there_is_no_variance_to_reduce(kind):
    """Temperature 0, or the noise given: what is expected is what comes, and the ratio would be 1 by construction."""
    table = sampled_steps(10, 5, 0, 0.3).assign(expected_kind=kind)
    figures = metrics.calibration(table.assign(expected_emitted=table["emitted"].astype(float)))
    assert (figures["mean"], figures["low"], figures["high"]) == (0, 0, 0)
    assert figures["sampled_variance"] == figures["expected_variance"] > 0
    assert math.isnan(figures["variance_reduction"])
