"""All figures of a run."""

from __future__ import annotations

from typing import Any

from spec_lab.analysis.metrics import acceptance, published
from spec_lab.analysis.metrics.acceptance import (
    acceptance_intervals,
    calibration,
    conditional,
    decode_steps,
    draft_token_rate,
    expected_tau,
    forced_rate,
    legal_share,
    survival,
    tau_macro,
    tau_pooled,
    tau_pooled_raw,
    tau_with_forced,
)
from spec_lab.analysis.metrics.intervals import interval, ratio
from spec_lab.analysis.metrics.phases import decode_seconds, mask_seconds, overhead, phase_seconds
from spec_lab.analysis.metrics.published import (
    eagle_alpha,
    eagle_average_length,
    medusa_overhead,
    spec_bench_mean_accepted_tokens,
    spec_bench_speedup,
    specforge_accept_length,
    vllm_draft_acceptance_rate,
    vllm_mean_acceptance_length,
    vllm_per_position_acceptance,
)
from spec_lab.analysis.metrics.speed import (
    prefill_seconds,
    tokens_per_second,
    tokens_per_second_interval,
    walltime_speedup_paired,
)
from spec_lab.analysis.metrics.texts import identical_outputs, repeated_8gram_share
from spec_lab.results.writer import Tables


def arms(tables: Tables) -> list[str]:
    """The run's arms: the experiment's first, then other proposers, then arms without rounds, the baseline last."""
    looped = set(tables.rounds["arm"])
    place = {"speculative": 0, "baseline": 3}
    return sorted(tables.requests["arm"].unique(), key=lambda arm: (place.get(arm, 1 if arm in looped else 2), arm))


def against(tables: Tables) -> dict[str, dict[str, dict[str, float]]]:
    """Of each arm without rounds (a peer), the speed-ups of the arms with rounds over it: peer, arm, interval."""
    looped = set(tables.rounds["arm"])
    ours, peers = ([arm for arm in arms(tables) if (arm in looped) is own] for own in (True, False))
    return {
        peer: {arm: interval(walltime_speedup_paired(tables.requests, arm, peer))._asdict() for arm in ours}
        for peer in peers
    }


def summarise(tables: Tables, arm: str, baseline: str = "baseline") -> dict[str, Any]:
    """Every figure of one arm against the baseline. NaN stands for figures without data, e.g. of a missing baseline.

    Most are named as the functions that compute them. ``intervals`` holds mean, low and high (95 %, by bootstrap over
    groups) of those that are ratios of sums, ``calibration`` the sampled acceptance beside the exact one. Figures named
    after another system are as its code computes them (``published``).
    """
    steps = decode_steps(tables.steps, arm)
    own = tables.requests[tables.requests["arm"] == arm]
    whole = decode_seconds(tables.rounds, arm)
    busy, exposed = mask_seconds(tables.rounds, arm)
    intervals = acceptance_intervals(steps, acceptance.SUMMANDS | published.SUMMANDS)
    intervals["tokens_per_second"] = tokens_per_second_interval(tables.requests, arm)

    def speedup(prefill: bool) -> dict[str, float]:
        paired = [] if arm == baseline else walltime_speedup_paired(tables.requests, arm, baseline, prefill)
        return interval(paired)._asdict()

    return {
        "requests": int(own["request"].nunique()),
        "sequences": len(own),
        "tokens": int((own["prefill_tokens"] + own["decode_tokens"]).sum()),
        "steps": len(steps),
        "nodes_per_step": ratio(steps["nodes"].sum(), len(steps)),
        "forced_tokens": int(steps["forced_emitted_kept"].sum()),
        "forced_rate": forced_rate(steps),
        "legal_share": legal_share(steps),
        "taken_back": int(steps["taken_back"].sum()),
        "forks": int(steps["forks"].sum()),
        "violated": float((own["violated"] >= 0).mean()) if len(own) else float("nan"),
        "tau_pooled": tau_pooled(steps),
        "tau_with_forced": tau_with_forced(steps),
        "tau_pooled_raw": tau_pooled_raw(steps),
        "tau_macro": tau_macro(steps),
        "expected_tau": expected_tau(steps),
        "expected_kind": ", ".join(sorted(set(steps["expected_kind"]))),
        "calibration": calibration(steps),
        "empty_residuals": int(tables.steps.loc[tables.steps["arm"] == arm, "empty_residual"].sum()),
        "draft_token_rate": draft_token_rate(steps),
        "survival": survival(steps).tolist(),
        "conditional": conditional(steps).tolist(),
        "spec_bench_mean_accepted_tokens": spec_bench_mean_accepted_tokens(steps),
        "spec_bench_speedup": float("nan") if arm == baseline else spec_bench_speedup(tables, arm, baseline),
        "vllm_mean_acceptance_length": vllm_mean_acceptance_length(steps),
        "vllm_draft_acceptance_rate": vllm_draft_acceptance_rate(steps),
        "vllm_per_position_acceptance": vllm_per_position_acceptance(steps).tolist(),
        "eagle_alpha": eagle_alpha(steps).tolist(),
        "eagle_average_length": eagle_average_length(steps),
        "specforge_accept_length": specforge_accept_length(tables, arm),
        "medusa_overhead": float("nan") if arm == baseline else medusa_overhead(tables.rounds, arm, baseline),
        "tokens_per_second": tokens_per_second(tables.requests, arm),
        "baseline_tokens_per_second": tokens_per_second(tables.requests, baseline),
        "speedup": speedup(prefill=False),
        "speedup_with_prefill": speedup(prefill=True),
        "intervals": {name: one._asdict() for name, one in intervals.items()},
        "prefill_seconds": prefill_seconds(tables.requests, arm),
        "phase_seconds": phase_seconds(tables.rounds, arm),
        "mask_busy": busy,
        "mask_exposed_share": ratio(exposed, whole),
        "decode_seconds": whole,
        "overhead": overhead(tables.rounds, arm),
        "baseline_overhead": overhead(tables.rounds, baseline),
        "repeated_8gram_share": repeated_8gram_share(own["tokens"]),
        "identical_outputs": float("nan") if arm == baseline else identical_outputs(tables.requests, arm, baseline),
        "finish": {str(why): int(count) for why, count in own["finish"].value_counts().items()},
    }
