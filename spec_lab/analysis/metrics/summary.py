"""All figures of a run."""

from __future__ import annotations

from typing import Any

import pandas as pd

from spec_lab.analysis.metrics import acceptance, phases, published, reliability, speed, texts
from spec_lab.analysis.metrics.accuracy import accuracy, correct
from spec_lab.analysis.metrics.experts import expert_figures
from spec_lab.analysis.metrics.intervals import interval, ratio
from spec_lab.analysis.metrics.ranges import along_text
from spec_lab.analysis.metrics.roofline import roofline_figures
from spec_lab.core.roofline import Roofline
from spec_lab.results.writer import Tables

SCHEMA_VERSION = 1
"""Version of ``summary.json``. Keys are only added within a version."""


def arms(tables: Tables) -> list[str]:
    """Return the run's arms: the main one, other proposers, peers (without rows in ``forwards``), the baseline last."""
    with_forwards, main = set(tables.forwards["arm"]), main_arm(tables)

    def order(arm: str) -> tuple[int, str]:
        rank = 0 if arm == main else 3 if arm == "baseline" else 1 if arm in with_forwards else 2
        return rank, arm

    return sorted(tables.requests["arm"].unique(), key=order)


def main_arm(tables: Tables) -> str | None:
    """Return the arm of ``proposer``, which is decoded first in the run's first group; None if only others are there.

    Peers and the baseline are never the main arm.
    """
    proposing = set(tables.forwards["arm"]) - {"baseline"}
    requests = tables.requests[tables.requests["arm"].isin(proposing)]
    if not len(requests):
        return None
    by = [name for name in ("group", "order") if name in requests]
    return str(requests.sort_values(by, kind="stable")["arm"].iloc[0])


def speedups_over_peers(tables: Tables) -> dict[str, dict[str, dict[str, float]]]:
    """Return the speed-ups of the other arms over each peer (arm without rows in ``forwards``): peer, arm, interval."""
    with_forwards, names = set(tables.forwards["arm"]), arms(tables)
    measured = [arm for arm in names if arm in with_forwards]
    return {
        peer: {arm: speed.speedup(tables.requests, arm, peer)._asdict() for arm in measured}
        for peer in names
        if peer not in with_forwards
    }


def summarise(tables: Tables, arm: str, baseline: str = "baseline", roofline: Roofline | None = None) -> dict[str, Any]:
    """Return every figure of one arm against the baseline; NaN for figures without data.

    Most keys are the names of the functions that compute them. ``intervals`` holds mean, low and high (95 %, over
    groups) of those that are ratios of sums, ``calibration`` sampled against exact acceptance, ``confidence`` the
    reliability of the drafter's own predictions (empty without any). ``experts`` are those of
    ``expert_figures`` (empty where none were counted). ``by_position``, ``by_context`` and ``by_turn``
    are those of ``along_text``. ``speedup`` and ``speedup_with_prefill`` are ratios of sums;
    ``speedup_mean_of_groups`` and ``speedup_geometric_mean`` are means of the groups' ratios. Times to first and per
    output token are means over requests, in seconds. Figures named after another system are as its code computes them
    (``published``). ``accuracy`` has the answers' figures by checker, ``correct`` and ``correct_change`` those of all
    checkers together, ``correct_cut`` the share of checked answers that ``max_new_tokens`` ended. Figures from seconds
    are over the ``timed_groups``, acceptance is over all steps.
    """
    compared, nan = arm != baseline, float("nan")
    timed = speed.of_timed_groups(tables)
    steps, verified = acceptance.decode_steps(tables.steps, arm), published.verify_steps(tables.steps, arm)
    requests = tables.requests[tables.requests["arm"] == arm]
    intervals = acceptance.acceptance_intervals(steps, acceptance.SUMMANDS)
    intervals |= acceptance.acceptance_intervals(verified, published.SUMMANDS)
    intervals["tokens_per_second"] = speed.tokens_per_second_interval(tables.requests, arm)
    base = roofline_figures(timed, baseline, roofline)
    answers, change, cut = correct(tables.requests, arm, baseline)
    return {
        "requests": int(requests["request"].nunique()),
        "sequences": len(requests),
        "tokens": int((requests["prefill_tokens"] + requests["decode_tokens"]).sum()),
        "violated": float((requests["violated"] >= 0).mean()) if len(requests) else nan,
        **_acceptance_figures(steps),
        "empty_residuals": int(tables.steps.loc[tables.steps["arm"] == arm, "empty_residual"].sum()),
        **along_text(tables, arm),
        **_published_figures(tables, timed, verified, arm, baseline),
        **_speed_figures(tables, arm, baseline),
        "intervals": {name: interval._asdict() for name, interval in intervals.items()},
        **_phase_figures(timed, arm, baseline),
        **(roofline_figures(timed, arm, roofline) if compared else base),
        "baseline_roofline_share": base["roofline_share"]["mean"],
        "experts": expert_figures(tables, arm, roofline),
        "repeated_8gram_share": texts.repeated_8gram_share(requests["tokens"]),
        "identical_outputs": texts.identical_outputs(tables.requests, arm, baseline) if compared else nan,
        "accuracy": accuracy(tables.requests, arm, baseline),
        "correct": answers._asdict(),
        "correct_change": change._asdict(),
        "correct_cut": cut,
        "finish": {str(finish): int(count) for finish, count in requests["finish"].value_counts().items()},
    }


def _acceptance_figures(steps: pd.DataFrame) -> dict[str, Any]:
    """Return the figures of decode steps that do not depend on time."""
    return {
        "steps": len(steps),
        "nodes_per_step": ratio(steps["nodes"].sum(), len(steps)),
        "forced_tokens": int(steps["forced_emitted_kept"].sum()),
        "forced_rate": acceptance.forced_rate(steps),
        "legal_share": acceptance.legal_share(steps),
        "taken_back": int(steps["taken_back"].sum()),
        "forks": int(steps["forks"].sum()),
        "tau_pooled": acceptance.tau_pooled(steps),
        "tau_with_forced": acceptance.tau_with_forced(steps),
        "tau_pooled_raw": acceptance.tau_pooled_raw(steps),
        "tau_macro": acceptance.tau_macro(steps),
        "expected_tau": acceptance.expected_tau(steps),
        "expected_kind": ", ".join(sorted(set(steps["expected_kind"]))),
        "calibration": acceptance.calibration(steps),
        "confidence": reliability.confidence(steps),
        "draft_token_rate": acceptance.draft_token_rate(steps),
        "survival": acceptance.survival(steps).tolist(),
        "conditional": acceptance.conditional(steps).tolist(),
    }


def _published_figures(
    tables: Tables, timed: Tables, verified: pd.DataFrame, arm: str, baseline: str
) -> dict[str, Any]:
    """Return the figures that are named after other systems; those that compare are NaN for the baseline."""
    compared, nan = arm != baseline, float("nan")
    return {
        "spec_bench_mean_accepted_tokens": published.spec_bench_mean_accepted_tokens(verified),
        "spec_bench_speedup": published.spec_bench_speedup(timed, arm, baseline) if compared else nan,
        "vllm_mean_acceptance_length": published.vllm_mean_acceptance_length(verified),
        "vllm_draft_acceptance_rate": published.vllm_draft_acceptance_rate(verified),
        "vllm_per_position_acceptance": published.vllm_per_position_acceptance(verified).tolist(),
        "eagle_alpha": published.eagle_alpha(verified).tolist(),
        "eagle_average_length": published.eagle_average_length(verified),
        "specforge_accept_length": published.specforge_accept_length(tables, arm),
        "medusa_overhead": published.medusa_overhead(timed.forwards, arm, baseline) if compared else nan,
    }


def _speed_figures(tables: Tables, arm: str, baseline: str) -> dict[str, Any]:
    """Return tokens per second, speed-ups, and times to the first token and per output token."""
    compared = arm != baseline
    ratios = speed.walltime_speedup_paired(tables.requests, arm, baseline) if compared else pd.Series(dtype=float)
    return {
        "tokens_per_second": speed.tokens_per_second(tables.requests, arm),
        "baseline_tokens_per_second": speed.tokens_per_second(tables.requests, baseline),
        "speedup": speed.speedup(tables.requests, arm, baseline)._asdict(),
        "speedup_with_prefill": speed.speedup(tables.requests, arm, baseline, prefill=True)._asdict(),
        "speedup_mean_of_groups": interval(ratios)._asdict(),
        "speedup_geometric_mean": speed.geometric_mean(ratios)._asdict(),
        "time_to_first_token": float(speed.time_to_first_token(tables.requests, arm).mean()),
        "time_per_output_token": float(speed.time_per_output_token(tables.requests, arm).mean()),
        "prefill_seconds": speed.prefill_seconds(tables.requests, arm),
    }


def _phase_figures(timed: Tables, arm: str, baseline: str) -> dict[str, Any]:
    """Return the seconds of the phases of the timed groups, and the overheads."""
    seconds = phases.decode_seconds(timed.forwards, arm)
    mask_busy, mask_wait = phases.mask_seconds(timed.forwards, arm)
    return {
        "phase_seconds": phases.phase_seconds(timed.forwards, arm),
        "mask_busy": mask_busy,
        "mask_exposed_share": ratio(mask_wait, seconds),
        "decode_seconds": seconds,
        "overhead": phases.overhead(timed.forwards, arm),
        "baseline_overhead": phases.overhead(timed.forwards, baseline),
    }
