"""Acceptance: tau, survival, rates. Figures as other systems define them are in ``published``.

``steps`` is a data frame with the columns of ``results.schema.STEPS``: N decode steps of one arm (``decode_steps``).
Rates are shares from 0 to 1; arrays ``[K]`` have one value for each depth, K being that of the deepest draft.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import Interval, cluster_interval, cluster_variance, ratio
from spec_lab.core.request import BROKEN

Summands = tuple[np.ndarray, np.ndarray]
"""The terms of a ratio of sums over steps: what each step adds to the top ``[N]`` and to the bottom ``[N]``."""


def decode_steps(steps: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Return the arm's steps after the prefill that did not break.

    Args:
        steps: the run's table ``steps``.
        arm: its name in the column ``arm``, such as the name of the proposer.
    """
    return steps[(steps["arm"] == arm) & ~steps["prefill"] & ~steps["finish"].isin(BROKEN)]


def tau_pooled(steps: pd.DataFrame) -> float:
    """Return emitted tokens / steps, over all steps.

    The bonus or recovered token counts; forced tokens and those cut after a stop do not. Spec-Bench and SpecForge also
    pool and count other tokens: ``spec_bench_mean_accepted_tokens``, ``specforge_accept_length``.
    """
    return pooled(SUMMANDS["tau_pooled"], steps)


def tau_pooled_raw(steps: pd.DataFrame) -> float:
    """Return untruncated tau: ``tau_pooled`` before stop tokens and limits cut; what ``expected_tau`` predicts."""
    return pooled(SUMMANDS["tau_pooled_raw"], steps)


def tau_with_forced(steps: pd.DataFrame) -> float:
    """Return ``tau_pooled`` with the tokens that a constraint forced: the figure that tokens per second follow.

    At batch size 1 this is the "acceleration rate" of Medusa's paper (arXiv 2401.10774), the average number of tokens
    decoded per decoding step; divided by ``medusa_overhead`` it is the speed-up.
    """
    return pooled(SUMMANDS["tau_with_forced"], steps)


def tau_macro(steps: pd.DataFrame) -> float:
    """Return the mean over prompts of emitted tokens / steps: every prompt has the same weight. AngelSlim."""
    return pooled(SUMMANDS["tau_macro"], steps)


def expected_tau(steps: pd.DataFrame) -> float:
    """Return the mean over steps of the exact expected number of emitted tokens, given the step's draft.

    Without forced tokens this is 1 + the expected number of accepted tokens. For verifiers that share the draft's noise
    (``expected_kind`` "noise") the expectation is conditional on that noise too; then it equals ``tau_pooled_raw``.
    """
    return pooled(SUMMANDS["expected_tau"], steps)


def draft_token_rate(steps: pd.DataFrame) -> float:
    """Return the acceptance rate: accepted / drafted tokens, forced ones left out. TensorRT-LLM, llama.cpp.

    Every node of a tree is a drafted token, so trees have low rates. Where nothing is forced it is also vLLM's
    (``vllm_draft_acceptance_rate``).
    """
    return pooled(SUMMANDS["draft_token_rate"], steps)


def survival(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """Return survival@k = steps that accepted >= k / all steps, for k = 1 .. the deepest draft. DeepSpec.

    A step without a draft counts as one that accepted nothing; vLLM leaves it out (``vllm_per_position_acceptance``).
    """
    accepted = _unforced(steps, "accepted").to_numpy()
    return np.array([ratio((accepted >= k).sum(), len(steps)) for k in depths(steps)])


def conditional(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """Return conditional@k = accepted k / reached k, where reached means k - 1 accepted and a draft for k below.

    A path that ends at a leaf was not rejected at the next depth. EAGLE's code counts it as rejected (``eagle_alpha``);
    on chains of one length the two agree.
    """
    accepted = _unforced(steps, "accepted").to_numpy()
    rejected = steps["stop_had_children"].to_numpy(dtype=bool)
    rates = []
    for k in depths(steps):
        accepted_k = (accepted >= k).sum()
        rates.append(ratio(accepted_k, accepted_k + ((accepted == k - 1) & rejected).sum()))
    return np.array(rates)


def legal_share(steps: pd.DataFrame) -> float:
    """Return drafted nodes that the constraint allows / drafted nodes; 1 without a constraint."""
    return ratio(steps["legal"].sum(), steps["nodes"].sum())


def forced_rate(steps: pd.DataFrame) -> float:
    """Return accepted / drafted nodes of the forced ones, where the constraint allows one token only."""
    return ratio(steps["forced_accepted"].sum(), steps["forced"].sum())


def acceptance_intervals(
    steps: pd.DataFrame, figures: dict[str, Callable[[pd.DataFrame], Summands]]
) -> dict[str, Interval]:
    """Return 95 % intervals over groups of ratios of sums over steps.

    Args:
        steps: an arm's decode steps.
        figures: functions that return the terms, by figure: ``SUMMANDS`` here and in ``published``.
    """
    groups = steps["group"].to_numpy()
    return {name: cluster_interval(*terms(steps), groups) for name, terms in figures.items()}


def calibration(steps: pd.DataFrame) -> dict[str, float]:
    """Compare sampled with exact acceptance: whether they agree, and how much less the exact one varies.

    Both estimate tokens per step before cuts: ``tau_pooled_raw`` from the sampled outcomes, ``expected_tau`` from the
    acceptance probabilities of each draft. The latter has no sampling noise of acceptance; the variation of drafts and
    contexts remains, so the gain is small where prompts differ by more than that noise. Accepted tokens also decide the
    next contexts, so the exact estimate need not vary less in every run.

    Returns:
        ``mean``, ``low``, ``high``: sampled - expected, with its 95 % interval over groups. The interval contains 0 in
            about 19 of 20 correct runs of many groups.
        ``sampled_variance``, ``expected_variance``: of the two estimators, over groups (linearised).
        ``variance_reduction``: sampled / expected variance, the factor by which more groups would be needed for the
            same precision. 1 is no gain; with few groups the factor is itself uncertain. NaN where it is 1 by
            construction: at temperature 0, for a verifier that shares the draft's noise (``expected_kind``), and for
            steps without drafts.
    """
    sampled, expected = (
        _unforced(steps, "emitted").to_numpy(dtype=float),
        steps["expected_emitted"].to_numpy(dtype=float),
    )
    ones, group = np.ones(len(steps)), steps["group"].to_numpy()
    variances = [cluster_variance(top, ones, group) for top in (sampled, expected)]
    noisy = bool((np.abs(sampled - expected) > 1e-6).any()) and not (steps["expected_kind"] == "noise").any()
    return cluster_interval(sampled - expected, ones, group)._asdict() | {
        "sampled_variance": variances[0],
        "expected_variance": variances[1],
        "variance_reduction": ratio(*variances) if noisy else float("nan"),
    }


def depth_bands(steps: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return bands ``[2, K]`` (low, high) of survival and conditional: 95 % intervals over groups."""
    accepted, rejected = _unforced(steps, "accepted").to_numpy(), steps["stop_had_children"].to_numpy(dtype=bool)
    groups, each_step = steps["group"].to_numpy(), np.ones(len(steps))
    bands: dict[str, list[Interval]] = {"survival": [], "conditional": []}
    for k in depths(steps):
        hit, missed = accepted >= k, (accepted == k - 1) & rejected
        bands["survival"].append(cluster_interval(hit, each_step, groups))
        bands["conditional"].append(cluster_interval(hit, hit | missed, groups))
    ends = {kind: np.array([[band.low, band.high] for band in each]) for kind, each in bands.items()}
    return {kind: each.reshape(-1, 2).T for kind, each in ends.items()}


def pooled(summands: Callable[[pd.DataFrame], Summands], steps: pd.DataFrame) -> float:
    """Return the figure with these terms, over all steps."""
    top, bottom = summands(steps)
    return ratio(top.sum(), bottom.sum())


def depths(steps: pd.DataFrame) -> range:
    """Return the depths from 1 to that of the deepest draft."""
    return range(1, int(steps["depth"].max() if len(steps) else 0) + 1)


def _unforced(steps: pd.DataFrame, column: str) -> pd.Series:
    """Return the column without forced tokens, which are counted after cuts where the column is."""
    return steps[column] - steps[f"forced_{column}"]


def _per_step(column: Callable[[pd.DataFrame], pd.Series]) -> Callable[[pd.DataFrame], Summands]:
    return lambda steps: (column(steps).to_numpy(dtype=float), np.ones(len(steps)))


def _per_prompt(steps: pd.DataFrame) -> Summands:
    """Return terms weighted by 1 / steps of their prompt, so that the bottom adds up to the number of prompts."""
    prompt, count = np.unique(steps["request"].to_numpy(), return_inverse=True, return_counts=True)[1:]
    weight = 1.0 / count[prompt]
    return _unforced(steps, "emitted_kept").to_numpy(dtype=float) * weight, weight


def _accepted_and_drafted(steps: pd.DataFrame) -> Summands:
    drafted = steps["nodes"] - steps["forced"]
    return _unforced(steps, "accepted").to_numpy(dtype=float), drafted.to_numpy(dtype=float)


SUMMANDS: dict[str, Callable[[pd.DataFrame], Summands]] = {
    "tau_pooled": _per_step(lambda steps: _unforced(steps, "emitted_kept")),
    "tau_with_forced": _per_step(lambda steps: steps["emitted_kept"]),
    "tau_pooled_raw": _per_step(lambda steps: _unforced(steps, "emitted")),
    "tau_macro": _per_prompt,
    "expected_tau": _per_step(lambda steps: steps["expected_emitted"]),
    "nodes_per_step": _per_step(lambda steps: steps["nodes"]),
    "draft_token_rate": _accepted_and_drafted,
}
"""The terms of each figure that is a ratio of sums over steps."""
