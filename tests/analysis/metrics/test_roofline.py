"""Shares of the roofline from known rows."""

import math

import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.verdict import Resources, _load
from spec_lab.analysis.roofline_text import baseline_notes, share_in_words
from spec_lab.core.roofline import AttentionWork, ForwardWork, MachineLimits, Roofline

LIMITS = MachineLimits(
    bandwidth=1e3, bandwidth_median=1e3, read_bytes=1000, peak=100.0, peak_median=90.0, peak_dtype="float32",
    cache_bytes=2**25, fits_cache=False, threads=1, cores=2, other_load=0.0, seconds=0.5,
)  # fmt: skip
ROOFLINE = Roofline(ForwardWork(1000, 10, 5, (AttentionWork(10, 1),)), LIMITS)


def tables(groups=2, **of_steps) -> metrics.Tables:
    """Groups of one prompt: a prefill of 1 s, then two steps of 4 s, half of it forward, 1 s after each other.

    At the first step reading takes 1.1 s and computing .25 s, at the second reading 1.12 s and computing 2.06 s.
    """
    forwards, steps = [], []
    for group in range(groups):
        for number, (start, whole, forward) in enumerate([(0.0, 1.0, 0.9), (2.0, 4.0, 2.0), (7.0, 4.0, 2.0)]):
            keys = {"group": group, "arm": "medusa", "forward": number, "prefill": number == 0}
            times = {"start": start, "whole": whole, "target_forward": forward}
            forwards.append({**keys, **times, "prefill_chunks": 0})
            context, nodes, extra = [(5, 0, 0), (10, 0, 0), (11, 3, 1)][number]
            steps.append({**keys, "context": context, "pending": 1, "nodes": nodes, "computed_only": extra, **of_steps})
    return metrics.Tables(pd.DataFrame(forwards), pd.DataFrame(steps), pd.DataFrame())


def test_every_step_after_the_prefill_has_its_two_bounds():
    steps = metrics.step_bounds(tables(), "medusa", ROOFLINE)
    assert steps["group"].tolist() == [0, 0, 1, 1]
    assert steps["memory"].tolist()[:2] == [1.1, 1.15]
    assert steps["compute"].tolist()[:2] == [(10 + 5 + 10) / 100, (5 * 10 + 5 * 5 + 5 * 15) / 100]
    assert steps["forward"].tolist() == [2.0] * 4 and steps["whole"].tolist() == [5.0] * 4


def test_the_share_is_the_larger_bound_over_the_seconds_of_the_forwards():
    figures = metrics.roofline_figures(tables(8), "medusa", ROOFLINE)
    least = 1.1 + 1.5
    assert figures["roofline_share"] == pytest.approx(dict.fromkeys(("mean", "low", "high"), least / 4)), (
        "groups are equal"
    )
    assert figures["roofline_share_end_to_end"]["mean"] == pytest.approx(least / 10)
    assert figures["memory_bound_steps"] == 0.5


def test_a_step_that_computed_a_part_of_a_prompt_is_left_out():
    both = tables()
    both.forwards.loc[1, "prefill_chunks"] = 1
    assert len(metrics.step_bounds(both, "medusa", ROOFLINE)) == 3
    mixed = tables()
    second = mixed.steps.iloc[[1]].assign(prefill=True)
    mixed = metrics.Tables(mixed.forwards, pd.concat([mixed.steps, second], ignore_index=True), mixed.requests)
    assert len(metrics.step_bounds(mixed, "medusa", ROOFLINE)) == 3


def test_all_sequences_of_a_step_count():
    recorded = tables()
    two = metrics.Tables(
        recorded.forwards, pd.concat([recorded.steps, recorded.steps], ignore_index=True), recorded.requests
    )
    alone, both = (metrics.step_bounds(each, "medusa", ROOFLINE) for each in (recorded, two))
    assert (both["compute"] == 2 * alone["compute"]).all()
    assert both["memory"].tolist() == pytest.approx((2 * alone["memory"] - 1).tolist()), "weights are read once"


@pytest.mark.parametrize(("arm", "roofline"), [("medusa", None), ("peer", ROOFLINE)])
def test_without_a_roofline_or_without_steps_nothing_is_known(arm, roofline):
    figures = metrics.roofline_figures(tables(), arm, roofline)
    assert math.isnan(figures["roofline_share"]["mean"]) and math.isnan(figures["memory_bound_steps"])
    assert "unknown" in share_in_words(figures)


def test_an_arm_s_share_names_the_resource_that_bounds_most_steps():
    share = {"roofline_share": {"mean": 0.194}}
    assert share_in_words({**share, "memory_bound_steps": 1.0}) == "at 19 % of this machine's memory roofline"
    assert share_in_words({**share, "memory_bound_steps": 0.2}, "its") == "at 19 % of its compute roofline"
    for share, text in ((0.0123, "1.2 %"), (0.999, "100 %"), (1.25, "125 %")):
        assert text in share_in_words({"roofline_share": {"mean": share}, "memory_bound_steps": 1.0})
    assert "unknown" in share_in_words({}), "a summary of an older version"


def test_what_the_share_means_is_said_only_where_the_times_are_reliable():
    arms = {"baseline": {"roofline_share": {"mean": 0.093}, "memory_bound_steps": 1.0}}
    unchecked = "whether other processes used the GPU was not checked"
    for judged in ({}, {"verdict": "reliable", "verdict_reasons": [unchecked]}):
        assert "a faster engine would leave drafts less to gain" in baseline_notes(arms, judged)[0]
    units = {"other_cores": [1.2] * 8, "seconds": [9.0] * 8}
    busy = [reason.reason for reason in _load({"baseline": pd.DataFrame(units)}, Resources(1, 2))]
    for judged in ({"verdict": "not reliable"}, {"verdict": "doubtful", "verdict_reasons": busy}):
        assert baseline_notes(arms, judged) == [
            "The baseline is at 9.3 % of this machine's memory roofline, as far as its times are reliable."
        ]
