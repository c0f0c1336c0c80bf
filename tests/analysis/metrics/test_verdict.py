"""The verdict on timed results, on rows that are made up: quiet, loaded, disturbed for a moment, drifting."""

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.results.writer import Tables

MANIFEST = {"threads": 2, "machine": {"cores": 2}, "config": {}}
CORES = metrics.Resources(2, 2)


def run(seed=0, groups=40, noise=0.03, slow=None, other_cores=0.02, drift=0.0, tokens=64, ordered=False):
    """The rows of a run of two arms. A forward of n rows at context c takes 10 ms * (1 + n / 40) * (1 + c / 1000),
    times lognormal noise of each forward (10 %) and of each group.

    Args:
        noise: standard deviation of the groups' noise.
        slow: factors by arm and group.
        other_cores: cores that others use.
        drift: logarithm by which the machine becomes slower until the end.
        ordered: whether prompts are sorted by length.
    """
    draw = np.random.default_rng(seed)
    forwards, requests = [], []
    for group in range(groups):
        prompt, rate = draw.integers(20, 300), draw.uniform(0.6, 0.8)
        prompt = 20 + 280 * group // groups if ordered else prompt
        for arm in ("medusa", "baseline"):
            nodes = 4 * (arm == "medusa")
            emitted = np.cumsum(1 + draw.binomial(nodes, rate, tokens))
            emitted = emitted[: 1 + np.searchsorted(emitted, tokens)]
            context = prompt + np.array([0, 0, *emitted[:-1]])
            factor = (slow or {}).get((arm, group), 1.0) * np.exp(draw.normal(0, noise) + drift * group / groups)
            seconds = 0.01 * (1 + (1 + nodes) / 40) * (1 + context / 1000) * factor
            whole = seconds * np.exp(draw.normal(0, 0.1, len(context)))
            row = {"group": group, "arm": arm, "live": 1, "nodes": nodes, "computed_only": 0, "prefill_chunks": 0}
            number = np.arange(len(context))
            times = {"start": np.cumsum(whole) - whole, "whole": whole, "mask_wait": 0.0}
            forwards.append(pd.DataFrame({**row, "forward": number, "prefill": number == 0, "cells": context, **times}))
            requests.append(
                {"group": group, "arm": arm, "request": group, "decode_tokens": tokens, "prefill_tokens": 1,
                 "decode_seconds": whole[1:].sum(), "prefill_seconds": whole[0], "finish": "length",
                 "other_cores": other_cores}
            )  # fmt: skip
    return Tables(pd.concat(forwards, ignore_index=True), pd.DataFrame(), pd.DataFrame(requests))


def verdict(tables, manifest=MANIFEST):
    return metrics.run_verdict(tables, manifest)


@pytest.mark.parametrize(("groups", "noise"), [(8, 0.05), pytest.param(40, 0.02, marks=pytest.mark.nightly)])
def test_a_quiet_run_is_reliable_in_nineteen_of_twenty(groups, noise):
    """Prompts differ in length by a factor of 15, and groups in acceptance."""
    verdicts = [verdict(run(seed, groups, noise)) for seed in range(20)]
    assert sum(judged.word == "reliable" and not judged.reasons for judged in verdicts) >= 19


@pytest.mark.parametrize("arm", ["baseline", "medusa"])
@pytest.mark.parametrize(("factor", "word"), [(1.7, "doubtful"), (20.0, "not reliable")])
def test_a_group_that_was_disturbed_for_a_moment_is_named_with_the_result_without_it(arm, factor, word):
    for seed in range(3):
        tables = run(seed, slow={(arm, 17): factor})
        run_verdict = verdict(tables)
        assert run_verdict.word == word
        reason = next(reason for reason in run_verdict.reasons if "group 17" in reason)
        rest = tables.requests[tables.requests["group"] != 17]
        without, every = (metrics.speedup(requests, "medusa").mean for requests in (rest, tables.requests))
        assert "1 of 40 groups" in reason and f"{without:.2f} instead of {every:.2f}" in reason
        assert metrics.disturbed(metrics.units_of_run(tables), CORES) == [17]


def test_a_group_that_is_faster_than_the_others_was_not_disturbed():
    tables = run(slow={("baseline", 3): 0.3})
    assert metrics.disturbed(metrics.units_of_run(tables), CORES) == []


@pytest.mark.parametrize(
    ("load", "threads", "cores", "word"),
    [
        (0.15, 2, 2, "reliable"), (0.3, 2, 2, "doubtful"), (1.0, 2, 2, "not reliable"),  # of the cores that it needs
        (0.4, 1, 2, "reliable"), (0.9, 1, 2, "doubtful"), (1.5, 1, 2, "not reliable"),  # beside it, then instead of it
        (3.0, 4, 16, "reliable"), (6.0, 4, 16, "doubtful"), (14.0, 4, 16, "not reliable"),
    ],
)  # fmt: skip
def test_what_other_processes_use_counts_where_the_run_needs_it(load, threads, cores, word):
    """Times alone show nothing: every group of both arms is as slow as the others."""
    run_verdict = verdict(run(other_cores=load), {**MANIFEST, "threads": threads, "machine": {"cores": cores}})
    assert run_verdict.word == word
    assert [f"{load:.1f} of {cores} cores" in reason for reason in run_verdict.reasons] == [True] * (word != "reliable")


def test_the_load_of_the_arm_with_the_most_counts_by_time():
    tables = run()
    tables.requests.loc[(tables.requests["arm"] == "baseline") & (tables.requests["group"] < 20), "other_cores"] = 2.0
    assert verdict(tables).word == "not reliable"


def test_the_limits_of_the_machine_say_how_many_threads_a_forward_uses_and_a_gpu_needs_one():
    limits = {"threads": 6, "cores": 8}
    assert metrics.Resources.of({**MANIFEST, "roofline": {"limits": limits}}) == metrics.Resources(6, 8)
    older = {**MANIFEST, "config": {"target": {"device": "cuda:0"}}}
    assert metrics.Resources.of(older) == metrics.Resources(1, 2, gpu=True)
    chosen = {**MANIFEST, "config": {"target": {"device": None}}, "device": "cuda:0", "ranks": 2}
    assert metrics.Resources.of(chosen) == metrics.Resources(1, 2, gpu=True, ranks=2)


def test_use_of_a_gpu_by_other_processes_was_not_checked():
    run_verdict = verdict(run(), {**MANIFEST, "device": "cuda:0"})
    assert run_verdict.word == "reliable" and run_verdict.kinds == ("unchecked",)


def test_the_load_is_not_judged_where_other_ranks_count_as_other_processes():
    run_verdict = verdict(run(other_cores=1.5), {**MANIFEST, "ranks": 2})
    assert run_verdict.word == "reliable" and run_verdict.kinds == ("unchecked",)
    assert metrics.disturbed(metrics.units_of_run(run(other_cores=1.5)), metrics.Resources(2, 2, ranks=2)) == []


def test_errors_of_short_times_cancel_each_other():
    """Over times as short as the ticks that processor time is counted in, the load is far below 0 or too large."""
    tables = run()
    tables.requests["other_cores"] = np.where(tables.requests["group"] % 2, 1.5, -1.5)
    assert verdict(tables).word == "reliable"
    tables.requests["decode_seconds"] /= 1000
    assert metrics.disturbed(metrics.units_of_run(tables), CORES) == []


@pytest.mark.parametrize("share", [3, 6, 8])
def test_a_machine_that_is_slow_for_many_groups_in_mixed_order_is_named(share):
    """For 30, 60 and 80 % of the groups, and nothing tells the load."""
    slow = {(arm, group): 1.7 for group in range(40) for arm in ("medusa", "baseline") if 7 * group % 10 < share}
    run_verdict = verdict(run(slow=slow, other_cores=np.nan))
    assert run_verdict.word != "reliable" and "spread" in run_verdict.kinds


@pytest.mark.parametrize(("groups", "reasons"), [(7, 1), (8, 0)])
def test_fewer_than_eight_groups_are_doubtful_and_have_no_interval(groups, reasons):
    tables = run(groups=groups)
    run_verdict = verdict(tables)
    assert run_verdict.kinds == ("few",) * reasons
    assert run_verdict.word == ("doubtful" if reasons else "reliable")
    every = [
        metrics.speedup(tables.requests, "medusa"),
        metrics.speedup(tables.requests, "medusa", prefill=True),
        metrics.tokens_per_second_interval(tables.requests, "medusa"),
        metrics.geometric_mean(metrics.walltime_speedup_paired(tables.requests, "medusa")),
    ]
    assert all(np.isnan(interval.low) == np.isnan(interval.high) == (groups < 8) for interval in every)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("drift", "word"), [(0.0, "reliable"), (0.6, "doubtful")])
def test_a_drift_is_told_from_the_context_s_effect_where_prompts_are_sorted_by_length(seed, drift, word):
    run_verdict = verdict(run(seed, drift=drift, ordered=True))
    assert run_verdict.word == word and ("drift" in run_verdict.kinds) == (drift > 0)


@pytest.mark.parametrize(("drift", "word"), [(0.02, "reliable"), (0.4, "doubtful"), (1.2, "not reliable")])
def test_a_machine_that_becomes_slower_is_named(drift, word):
    run_verdict = verdict(run(drift=drift))
    assert run_verdict.word == word
    assert ("drift" in run_verdict.kinds) == (word != "reliable")


def test_a_drift_of_one_arm_against_the_baseline_is_named():
    slow = {("medusa", group): 1.2 for group in range(20, 40)}
    run_verdict = verdict(run(slow=slow))
    assert run_verdict.word == "doubtful" and any(
        "medusa, against baseline" in reason for reason in run_verdict.reasons
    )


def test_means_that_are_far_apart_are_doubtful():
    """Half of the groups are 5 times as fast as the others by acceptance, not by time: no forward is slow."""
    tables = run()
    fast = (tables.requests["arm"] == "medusa") & (tables.requests["group"] % 2 == 0)
    tables.requests.loc[fast, "decode_tokens"] *= 5
    run_verdict = verdict(tables)
    sums = metrics.speedup(tables.requests, "medusa").mean
    mean = metrics.geometric_mean(metrics.walltime_speedup_paired(tables.requests, "medusa")).mean
    assert run_verdict.word == "doubtful"
    assert [f"{sums:.2f} as a ratio of sums and {mean:.2f}" in reason for reason in run_verdict.reasons] == [True]


def test_without_a_baseline_and_of_other_implementations_the_speeds_are_judged():
    """A peer has no rows of forwards: its groups are compared by their time per token."""
    tables = run(slow={("baseline", 5): 9.0})
    alone = tables.requests[tables.requests["arm"] == "baseline"].assign(arm="peer")
    run_verdict = verdict(Tables(tables.forwards.iloc[:0], tables.steps, alone))
    assert (
        run_verdict.word == "not reliable"
        and "group 5" in run_verdict.reasons[0]
        and "tokens/s" in run_verdict.reasons[0]
    )


def test_a_run_whose_arms_emitted_nothing_after_the_prefill_is_not_reliable():
    tables = run(groups=8)
    requests = tables.requests.assign(decode_tokens=0)
    assert verdict(Tables(tables.forwards, tables.steps, requests)).word == "not reliable"
    assert verdict(Tables(tables.forwards.iloc[:0], tables.steps, requests.iloc[:0])).word == "not reliable"


def test_short_and_broken_groups_are_not_judged():
    tables = run(slow={("baseline", 39): 30.0})
    broken = tables.requests.assign(finish=np.where(tables.requests["group"] == 39, "nan", "length"))
    assert verdict(Tables(tables.forwards, tables.steps, broken)).word == "reliable"


def test_the_time_of_a_group_is_that_of_its_requests():
    """Time that passed between forwards counts, whatever forward it is booked on."""
    tables = run()
    disturbed = (tables.requests["group"] == 11) & (tables.requests["arm"] == "baseline")
    tables.requests.loc[disturbed, "decode_seconds"] *= 20
    assert "group 11 of baseline" in verdict(tables).reasons[0]


def test_waiting_for_token_masks_is_no_disturbance():
    """The masks of one grammar take ten times as long as everything else."""
    tables = run()
    slow = tables.forwards["group"] == 7
    tables.forwards.loc[slow, "mask_wait"] = 9 * tables.forwards.loc[slow, "whole"]
    for column in ("start", "whole"):
        tables.forwards.loc[slow, column] *= 10
    tables.requests.loc[tables.requests["group"] == 7, "decode_seconds"] *= 10
    assert metrics.disturbed(metrics.units_of_run(tables), CORES) == []
