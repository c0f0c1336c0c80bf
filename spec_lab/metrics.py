"""Every published number, computed from the rows a run leaves behind, each under its own name.

Published formulas differ, so there is no bare "acceptance rate" here. Conventions, the same throughout:

- ``steps`` are one arm's decode steps (``decode_steps``): the prefill's forward and broken steps are left out.
- Output is counted after cuts (``emitted_kept``), so nothing after a stop token or a limit counts; what describes the
  acceptance law (survival, conditional, rates, expected_tau) is counted before cuts, as the law knows of none.
- Tokens forced by a constraint are left out of every figure that does not name them: they are certain and would
  inflate it. (They are those that it left no choice for, drafted, sampled or appended.) So under a constraint tau may
  be below 1, that of the baseline as well.
- The token emitted after the accepted ones (the bonus) is part of tau.
- Speeds and comparisons of outputs leave out whole groups in which a request of any arm broke (``broken_groups``): what
  broke is cut short, perhaps in one arm only. Acceptance and time by phase count what was decoded until then.
- Speeds leave out the prefill, its tokens and its seconds, unless they say otherwise.
- Speed-ups leave out a last group with fewer prompts than the others (``short_groups``), as every group weighs alike.

A figure over nothing is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from spec_lab.batch import BROKEN
from spec_lab.record import Tables, load

__all__ = ["Interval", "Tables", "load", "summarise"]

PHASES = {
    "target_forward": "target, inside the model",
    "propose_forward": "draft, inside its model",
    "target_rest": "target, packing and cells",
    "propose_rest": "draft, around its model",
    "mask_wait": "waiting for masks",
    "law": "laws",
    "verify": "verifying",
    "commit": "committing",
    "between": "between rounds",
}
"""Disjoint parts of decode time, and what they are."""


class Interval(NamedTuple):
    """A mean with its bootstrap interval; low and high are NaN where fewer than two values were given."""

    mean: float
    low: float
    high: float


# Acceptance --------------------------------------------------------------------------------------------------------


def decode_steps(steps: pd.DataFrame, arm: str) -> pd.DataFrame:
    """The arm's steps after the prefill that did not break."""
    return steps[(steps["arm"] == arm) & ~steps["prefill"] & ~steps["finish"].isin(BROKEN)]


def tau_pooled(steps: pd.DataFrame) -> float:
    """Emitted tokens / steps, over all steps. Spec-Bench's "#mean accepted tokens", SpecForge."""
    return _ratio(_own(steps, "emitted_kept").sum(), len(steps))


def tau_pooled_raw(steps: pd.DataFrame) -> float:
    """As ``tau_pooled``, before cuts: what ``expected_tau`` predicts."""
    return _ratio(_own(steps, "emitted").sum(), len(steps))


def tau_with_forced(steps: pd.DataFrame) -> float:
    """As ``tau_pooled``, tokens that a constraint forced counted in: what tokens per second see."""
    return _ratio(steps["emitted_kept"].sum(), len(steps))


def tau_macro(steps: pd.DataFrame) -> float:
    """Mean over prompts of emitted tokens / steps. AngelSlim."""
    each = _own(steps, "emitted_kept").groupby(steps["request"])
    return float((each.sum() / each.size()).mean())


def expected_tau(steps: pd.DataFrame) -> float:
    """Mean of the exact expected emitted tokens of each step, given its draft: 1 + the accepted ones if none is forced.

    Of verifiers that share the draft's noise (``expected_kind`` "noise") it is given that as well: then nothing is left
    to chance, and it equals ``tau_pooled_raw``.
    """
    return float(steps["expected_emitted"].mean())


def vllm_mean_acceptance_length(steps: pd.DataFrame) -> float:
    """1 + accepted / drafts, over steps that drafted. vLLM, llama.cpp."""
    drafted = steps[steps["nodes"] > steps["forced"]]
    return 1.0 + _ratio(_own(drafted, "accepted").sum(), len(drafted))


def draft_token_rate(steps: pd.DataFrame) -> float:
    """Accepted / drafted tokens, every node counted (trees: low). vLLM's "acceptance rate", TensorRT-LLM, llama.cpp."""
    return _ratio(_own(steps, "accepted").sum(), (steps["nodes"] - steps["forced"]).sum())


def survival(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """survival@k = steps that accepted >= k / steps, for k = 1 .. the deepest draft. vLLM per position, DeepSpec."""
    accepted = _own(steps, "accepted").to_numpy()
    return np.array([_ratio((accepted >= k).sum(), len(steps)) for k in _depths(steps)])


def conditional(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """conditional@k = accepted k / reached k, reached: k - 1 accepted and a draft for k below. EAGLE's alpha_k."""
    accepted = _own(steps, "accepted").to_numpy()
    refused = steps["stop_had_children"].to_numpy(dtype=bool)
    rates = []
    for k in _depths(steps):
        yes = (accepted >= k).sum()
        rates.append(_ratio(yes, yes + ((accepted == k - 1) & refused).sum()))
    return np.array(rates)


def legal_share(steps: pd.DataFrame) -> float:
    """Drafted nodes that the constraint allows / drafted nodes; 1 without a constraint."""
    return _ratio(steps["legal"].sum(), steps["nodes"].sum())


def forced_rate(steps: pd.DataFrame) -> float:
    """Accepted / drafted of the nodes that the constraint left no choice for."""
    return _ratio(steps["forced_accepted"].sum(), steps["forced"].sum())


def _own(steps: pd.DataFrame, column: str) -> pd.Series:
    """The column without forced tokens, themselves counted after cuts where the column is."""
    return steps[column] - steps[f"forced_{column}"]


def _depths(steps: pd.DataFrame) -> range:
    return range(1, int(steps["depth"].max() if len(steps) else 0) + 1)


# Speed -------------------------------------------------------------------------------------------------------------


def broken_groups(requests: pd.DataFrame) -> set[int]:
    """Groups in which a request of any arm broke."""
    return set(requests.loc[requests["finish"].isin(BROKEN), "group"])


def short_groups(requests: pd.DataFrame) -> set[int]:
    """Groups with fewer prompts than the largest: a run's last, where the batch size does not divide the prompts."""
    sizes = requests.groupby("group")["request"].nunique()
    return set(sizes.index[sizes < sizes.max()])


def group_speeds(requests: pd.DataFrame, arm: str, prefill: bool = False) -> pd.Series:
    """Decode tokens per second of each group: its tokens over the time until its last request ended.

    With ``prefill`` the prefill's tokens and seconds are counted in.
    """
    tokens, seconds = _tokens_and_seconds(requests, arm, prefill)
    return (tokens / seconds)[seconds > 0]


def tokens_per_second(requests: pd.DataFrame, arm: str) -> float:
    """All decode tokens of the arm over all decode seconds."""
    tokens, seconds = _tokens_and_seconds(requests, arm)
    return _ratio(tokens.sum(), seconds.sum())


def walltime_speedup_paired(
    requests: pd.DataFrame, arm: str, baseline: str = "baseline", prefill: bool = False
) -> pd.Series:
    """Of each full group, the arm's tokens per second over the baseline's on the same prompts in the same run."""
    full = requests[~requests["group"].isin(short_groups(requests))]
    return (group_speeds(full, arm, prefill) / group_speeds(full, baseline, prefill)).dropna()


def prefill_seconds(requests: pd.DataFrame, arm: str) -> float:
    """Seconds of the arm's prefills, summed over all groups."""
    return float(requests[requests["arm"] == arm].groupby("group")["prefill_seconds"].max().sum())


def _tokens_and_seconds(requests: pd.DataFrame, arm: str, prefill: bool = False) -> tuple[pd.Series, pd.Series]:
    """The arm's tokens and seconds of each group that is not broken."""
    counted = (requests["arm"] == arm) & ~requests["group"].isin(broken_groups(requests))
    groups = requests[counted].groupby("group")
    tokens, seconds = groups["decode_tokens"].sum(), groups["decode_seconds"].max()
    if prefill:
        return tokens + groups["prefill_tokens"].sum(), seconds + groups["prefill_seconds"].max()
    return tokens, seconds


def interval(values: Sequence[float] | pd.Series, level: float = 0.95, resamples: int = 9999) -> Interval:
    """Mean and percentile bootstrap interval of independent values; the same values always give the same interval."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean()) if len(x) else float("nan")
    if len(x) < 2:
        return Interval(mean, float("nan"), float("nan"))
    means = x[_resampled(len(x), resamples)].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high))


def depth_bands(steps: pd.DataFrame, level: float = 0.95, resamples: int = 999) -> dict[str, np.ndarray]:
    """Bootstrap bands ``[2, K]`` (low, high) of survival and conditional, requests drawn with replacement."""
    accepted, refused = _own(steps, "accepted").to_numpy(), steps["stop_had_children"].to_numpy(dtype=bool)
    request = np.unique(steps["request"].to_numpy(), return_inverse=True)[1]
    requests, depths = int(request.max(initial=-1)) + 1, np.array(_depths(steps))

    def per_request(flags: np.ndarray) -> np.ndarray:  # [N, K] -> [requests, K]
        return np.stack([np.bincount(request, flags[:, k], requests) for k in range(flags.shape[1])], axis=1)

    if requests < 2 or not len(depths):
        nothing = np.full((2, len(depths)), np.nan)
        return {"survival": nothing, "conditional": nothing}
    yes = per_request(accepted[:, None] >= depths)
    no = per_request((accepted[:, None] == depths - 1) & refused[:, None])
    count = np.bincount(request, minlength=requests)[:, None]
    drawn = _resampled(requests, resamples)
    hits, misses, total = yes[drawn].sum(1), no[drawn].sum(1), count[drawn].sum(1)
    ends = [(1 - level) / 2, (1 + level) / 2]
    with np.errstate(invalid="ignore"):
        rates = np.divide(hits, hits + misses, out=np.full(hits.shape, np.nan), where=hits + misses > 0)
    seen = np.where(np.isnan(rates).all(0), 0.0, rates)  # a depth never reached has no band
    low_high = np.nanquantile(seen, ends, axis=0)
    low_high[:, np.isnan(rates).all(0)] = np.nan
    return {"survival": np.quantile(hits / total, ends, axis=0), "conditional": low_high}


def _resampled(count: int, resamples: int) -> np.ndarray:  # [resamples, count]
    return np.random.default_rng(0).integers(0, count, (resamples, count))


# Where the time goes -----------------------------------------------------------------------------------------------


def decode_seconds(rounds: pd.DataFrame, arm: str) -> float:
    """Seconds from the end of each group's prefill to the end of its last round, summed."""
    own = rounds[rounds["arm"] == arm]
    end = own["start"] + own["whole"]
    last = end.groupby(own["group"]).max()
    first = end[own["prefill"]].groupby(own["group"]).max()
    return float((last - first.reindex(last.index, fill_value=0.0)).sum())


def phase_seconds(rounds: pd.DataFrame, arm: str) -> dict[str, float]:
    """Decode seconds by phase (``PHASES``); they add up to ``decode_seconds``."""
    own = rounds[(rounds["arm"] == arm) & ~rounds["prefill"]]
    total = own[
        ["propose", "propose_forward", "mask_wait", "target", "target_forward", "law", "verify", "commit"]
    ].sum()
    parts = {
        "propose_forward": total["propose_forward"],
        "propose_rest": total["propose"] - total["propose_forward"],
        "mask_wait": total["mask_wait"],
        "target_forward": total["target_forward"],
        "target_rest": total["target"] - total["target_forward"],
        "law": total["law"],
        "verify": total["verify"],
        "commit": total["commit"],
    }
    parts["between"] = decode_seconds(rounds, arm) - sum(parts.values())
    return {phase: float(parts[phase]) for phase in PHASES}


def mask_seconds(rounds: pd.DataFrame, arm: str) -> tuple[float, float]:
    """Decode seconds spent on masks, wherever they ran, and of them those that the loop waited for."""
    own = rounds[(rounds["arm"] == arm) & ~rounds["prefill"]]
    return float(own["mask_busy"].sum()), float(own["mask_wait"].sum())


def overhead(rounds: pd.DataFrame, arm: str) -> float:
    """1 - seconds inside the module calls of target, draft and heads / decode seconds."""
    phases, whole = phase_seconds(rounds, arm), decode_seconds(rounds, arm)
    return 1.0 - _ratio(phases["propose_forward"] + phases["target_forward"], whole)


# Text --------------------------------------------------------------------------------------------------------------


def repeated_8gram_share(outputs: Iterable[Sequence[int]], n: int = 8) -> float:
    """Share of the outputs' 8-grams of tokens that occurred before in the same output, pooled: how much text loops."""
    repeated = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return _ratio(repeated, total)


def identical_outputs(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> float:
    """Share of requests whose tokens equal the baseline's; at temperature 0 anything below 1 is rounding (or a bug)."""
    whole = requests[~requests["group"].isin(broken_groups(requests))]
    both = [whole[whole["arm"] == one].set_index(["request", "sequence"])["tokens"] for one in (arm, baseline)]
    shared = both[0].index.intersection(both[1].index)
    return _ratio(sum(list(both[0][r]) == list(both[1][r]) for r in shared), len(shared))


# All of it ---------------------------------------------------------------------------------------------------------


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
    """Every figure of one arm against the baseline. NaN stands for figures without data, e.g. of a missing baseline."""
    steps = decode_steps(tables.steps, arm)
    own = tables.requests[tables.requests["arm"] == arm]

    def speedup(prefill: bool) -> dict[str, float]:
        paired = walltime_speedup_paired(tables.requests, arm, baseline, prefill)
        return interval([] if arm == baseline else paired)._asdict()

    return {
        "requests": int(own["request"].nunique()),
        "sequences": len(own),
        "tokens": int((own["prefill_tokens"] + own["decode_tokens"]).sum()),
        "steps": len(steps),
        "nodes_per_step": _ratio(steps["nodes"].sum(), len(steps)),
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
        "empty_residuals": int(tables.steps.loc[tables.steps["arm"] == arm, "empty_residual"].sum()),
        "vllm_mean_acceptance_length": vllm_mean_acceptance_length(steps),
        "draft_token_rate": draft_token_rate(steps),
        "survival": survival(steps).tolist(),
        "conditional": conditional(steps).tolist(),
        "tokens_per_second": tokens_per_second(tables.requests, arm),
        "baseline_tokens_per_second": tokens_per_second(tables.requests, baseline),
        "speedup": speedup(prefill=False),
        "speedup_with_prefill": speedup(prefill=True),
        "prefill_seconds": prefill_seconds(tables.requests, arm),
        "phase_seconds": phase_seconds(tables.rounds, arm),
        "mask_busy": mask_seconds(tables.rounds, arm)[0],
        "mask_exposed_share": _ratio(mask_seconds(tables.rounds, arm)[1], decode_seconds(tables.rounds, arm)),
        "decode_seconds": decode_seconds(tables.rounds, arm),
        "overhead": overhead(tables.rounds, arm),
        "baseline_overhead": overhead(tables.rounds, baseline),
        "repeated_8gram_share": repeated_8gram_share(own["tokens"]),
        "identical_outputs": float("nan") if arm == baseline else identical_outputs(tables.requests, arm, baseline),
        "finish": {str(why): int(count) for why, count in own["finish"].value_counts().items()},
    }


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")
