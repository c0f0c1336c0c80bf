"""What was accepted: tau and its kin. Figures as other systems define them are in ``published``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import (
    Interval,
    cluster_interval,
    cluster_intervals,
    cluster_variance,
    quantiles,
    ratio,
    resampled,
)
from spec_lab.engine.request import BROKEN

Summands = tuple[np.ndarray, np.ndarray]
"""Of a ratio of sums over steps, what each step adds to the top ``[N]`` and to the bottom ``[N]``."""


def decode_steps(steps: pd.DataFrame, arm: str) -> pd.DataFrame:
    """The arm's steps after the prefill that did not break."""
    return steps[(steps["arm"] == arm) & ~steps["prefill"] & ~steps["finish"].isin(BROKEN)]


def tau_pooled(steps: pd.DataFrame) -> float:
    """Emitted tokens / steps, over all steps: the bonus counted, forced tokens and those cut after a stop not.

    Spec-Bench and SpecForge pool likewise and count other tokens: ``spec_bench_mean_accepted_tokens``,
    ``specforge_accept_length``.
    """
    return pooled(SUMMANDS["tau_pooled"], steps)


def tau_pooled_raw(steps: pd.DataFrame) -> float:
    """As ``tau_pooled``, before cuts: what ``expected_tau`` predicts."""
    return pooled(SUMMANDS["tau_pooled_raw"], steps)


def tau_with_forced(steps: pd.DataFrame) -> float:
    """As ``tau_pooled``, tokens that a constraint forced counted in: what tokens per second see.

    At batch size 1 this is the "acceleration rate" of Medusa's paper (arXiv 2401.10774), the average number of tokens
    decoded per decoding step; over ``medusa_overhead`` it gives the speed-up.
    """
    return pooled(SUMMANDS["tau_with_forced"], steps)


def tau_macro(steps: pd.DataFrame) -> float:
    """Mean over prompts of emitted tokens / steps: every prompt weighs alike, however long. AngelSlim."""
    return pooled(SUMMANDS["tau_macro"], steps)


def expected_tau(steps: pd.DataFrame) -> float:
    """Mean of the exact expected emitted tokens of each step, given its draft: 1 + the accepted ones if none is forced.

    Of verifiers that share the draft's noise (``expected_kind`` "noise") it is given that as well: then nothing is left
    to chance, and it equals ``tau_pooled_raw``.
    """
    return pooled(SUMMANDS["expected_tau"], steps)


def draft_token_rate(steps: pd.DataFrame) -> float:
    """Accepted / drafted tokens, every node counted (trees: low), forced ones not. TensorRT-LLM, llama.cpp.

    Where nothing is forced it is also vLLM's (``vllm_draft_acceptance_rate``).
    """
    return pooled(SUMMANDS["draft_token_rate"], steps)


def survival(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """survival@k = steps that accepted >= k / all steps, for k = 1 .. the deepest draft. DeepSpec.

    A step without a draft counts as one that accepted nothing; vLLM leaves it out (``vllm_per_position_acceptance``).
    """
    accepted = _own(steps, "accepted").to_numpy()
    return np.array([ratio((accepted >= k).sum(), len(steps)) for k in depths(steps)])


def conditional(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """conditional@k = accepted k / reached k, reached: k - 1 accepted and a draft for k below.

    So a path that ends at a leaf was not refused at the next depth. EAGLE's code counts it as if it were
    (``eagle_alpha``); on chains of one length the two agree.
    """
    accepted = _own(steps, "accepted").to_numpy()
    refused = steps["stop_had_children"].to_numpy(dtype=bool)
    rates = []
    for k in depths(steps):
        yes = (accepted >= k).sum()
        rates.append(ratio(yes, yes + ((accepted == k - 1) & refused).sum()))
    return np.array(rates)


def legal_share(steps: pd.DataFrame) -> float:
    """Drafted nodes that the constraint allows / drafted nodes; 1 without a constraint."""
    return ratio(steps["legal"].sum(), steps["nodes"].sum())


def forced_rate(steps: pd.DataFrame) -> float:
    """Accepted / drafted of the nodes that the constraint left no choice for."""
    return ratio(steps["forced_accepted"].sum(), steps["forced"].sum())


def acceptance_intervals(
    steps: pd.DataFrame, figures: dict[str, Callable[[pd.DataFrame], Summands]]
) -> dict[str, Interval]:
    """95 % intervals of figures that are ratios of sums over steps, by bootstrap over groups, the same draws for all.

    Args:
        steps: an arm's decode steps.
        figures: what each step adds, by figure; ``SUMMANDS`` here and in ``published``.
    """
    return cluster_intervals({name: of(steps) for name, of in figures.items()}, steps["group"].to_numpy())


def calibration(steps: pd.DataFrame) -> dict[str, float]:
    """Sampled beside exact acceptance: do they agree, and how much less does the exact one vary?

    Both estimate tokens per step before cuts: ``tau_pooled_raw`` by what was sampled, ``expected_tau`` by what the
    verifier's law makes of each draft. The luck of accepting is taken out of the latter; what is left is the variation
    of drafts and contexts, so it gains little where prompts differ more than luck does. As luck also moves a sequence
    on, the contexts differ with it, and the exact one need not vary less in every run.

    Returns:
        ``mean``, ``low``, ``high``: sampled - expected, with its 95 % interval over groups. Nothing is wrong where
            0 lies inside; it does in about 19 of 20 sound runs of many groups.
        ``sampled_variance``, ``expected_variance``: of the two estimators, over groups (linearised).
        ``variance_reduction``: sampled / expected variance: as if there were so many times the groups. 1 is no gain;
            of few groups the factor is itself uncertain. NaN where there is no luck to take out, so that it would be 1
            by construction: at temperature 0, of a verifier that is given the draft's noise (``expected_kind``), and of
            steps without drafts.
    """
    sampled, expected = _own(steps, "emitted").to_numpy(dtype=float), steps["expected_emitted"].to_numpy(dtype=float)
    one, group = np.ones(len(steps)), steps["group"].to_numpy()
    variances = [cluster_variance(top, one, group) for top in (sampled, expected)]
    luck = bool((np.abs(sampled - expected) > 1e-6).any()) and not (steps["expected_kind"] == "noise").any()
    return cluster_interval(sampled - expected, one, group)._asdict() | {
        "sampled_variance": variances[0],
        "expected_variance": variances[1],
        "variance_reduction": ratio(*variances) if luck else float("nan"),
    }


def depth_bands(steps: pd.DataFrame, level: float = 0.95, resamples: int = 999) -> dict[str, np.ndarray]:
    """Bootstrap bands ``[2, K]`` (low, high) of survival and conditional, groups drawn with replacement."""
    accepted, refused = _own(steps, "accepted").to_numpy(), steps["stop_had_children"].to_numpy(dtype=bool)
    group = np.unique(steps["group"].to_numpy(), return_inverse=True)[1]
    groups, each = int(group.max(initial=-1)) + 1, np.array(depths(steps))

    def per_group(flags: np.ndarray) -> np.ndarray:  # [N, K] -> [groups, K]
        return np.stack([np.bincount(group, flags[:, k], groups) for k in range(flags.shape[1])], axis=1)

    if groups < 2 or not len(each):
        nothing = np.full((2, len(each)), np.nan)
        return {"survival": nothing, "conditional": nothing}
    drawn = resampled(groups, resamples)
    hits = drawn @ per_group(accepted[:, None] >= each)
    misses = drawn @ per_group((accepted[:, None] == each - 1) & refused[:, None])
    total = drawn @ np.bincount(group, minlength=groups)[:, None]
    rates = np.divide(hits, hits + misses, out=np.full(hits.shape, np.nan), where=hits + misses > 0)
    return {"survival": quantiles(hits / total, level), "conditional": quantiles(rates, level)}


def pooled(summands: Callable[[pd.DataFrame], Summands], steps: pd.DataFrame) -> float:
    """The figure with these summands, over all steps."""
    top, bottom = summands(steps)
    return ratio(top.sum(), bottom.sum())


def depths(steps: pd.DataFrame) -> range:
    """1 .. the deepest draft."""
    return range(1, int(steps["depth"].max() if len(steps) else 0) + 1)


def _own(steps: pd.DataFrame, column: str) -> pd.Series:
    """The column without forced tokens, themselves counted after cuts where the column is."""
    return steps[column] - steps[f"forced_{column}"]


def _per_step(column: Callable[[pd.DataFrame], pd.Series]) -> Callable[[pd.DataFrame], Summands]:
    return lambda steps: (column(steps).to_numpy(dtype=float), np.ones(len(steps)))


def _per_prompt(steps: pd.DataFrame) -> Summands:
    """Steps weighed by 1 / steps of their prompt, so that the bottom adds up to the number of prompts."""
    prompt, count = np.unique(steps["request"].to_numpy(), return_inverse=True, return_counts=True)[1:]
    weight = 1.0 / count[prompt]
    return _own(steps, "emitted_kept").to_numpy(dtype=float) * weight, weight


def _own_drafted(steps: pd.DataFrame) -> Summands:
    drafted = steps["nodes"] - steps["forced"]
    return _own(steps, "accepted").to_numpy(dtype=float), drafted.to_numpy(dtype=float)


SUMMANDS: dict[str, Callable[[pd.DataFrame], Summands]] = {
    "tau_pooled": _per_step(lambda steps: _own(steps, "emitted_kept")),
    "tau_with_forced": _per_step(lambda steps: steps["emitted_kept"]),
    "tau_pooled_raw": _per_step(lambda steps: _own(steps, "emitted")),
    "tau_macro": _per_prompt,
    "expected_tau": _per_step(lambda steps: steps["expected_emitted"]),
    "nodes_per_step": _per_step(lambda steps: steps["nodes"]),
    "draft_token_rate": _own_drafted,
}
"""What each step adds to the two sums of a figure that is a ratio of sums."""
