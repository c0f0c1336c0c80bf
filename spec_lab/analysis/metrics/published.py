"""Figures as other systems' code computes them, each under its own name, to compare with their published numbers.

None of these systems forces tokens: forced tokens are counted here as any other, as their counters would. Each
docstring names the source file of the formula and what it counts: the bonus or recovered token, tokens after a stop,
the prefill, steps without a draft, and whether steps are pooled or prompts averaged.

These systems verify nothing in the forward that computes a prompt. Here a look-up proposer drafts there as well, and
that step verifies its draft: it counts as the verification that it is (``verify_steps``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.acceptance import Summands, depths, pooled
from spec_lab.analysis.metrics.intervals import ratio
from spec_lab.analysis.metrics.phases import decode_seconds
from spec_lab.analysis.metrics.speed import broken_groups
from spec_lab.core.request import BROKEN
from spec_lab.results.writer import Tables


def verify_steps(steps: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Return the arm's steps that other systems' counters would count: all decode steps (``decode_steps``), and of the
    steps that computed a prompt those that verified a draft.

    Args:
        steps: the run's table ``steps``.
    """
    verified = ~steps["prefill"] | (steps["nodes"] > 0)
    return steps[(steps["arm"] == arm) & verified & ~steps["finish"].isin(BROKEN)]


def spec_bench_mean_accepted_tokens(steps: pd.DataFrame) -> float:
    """Return Spec-Bench's "#Mean accepted tokens": mean over all steps of the tokens appended by each.

    From ``evaluation/speed.py``, over the ``accept_lengths`` that each method's loop keeps. Bonus: included. Tokens
    after a stop: included, the lists are not cut. Prefill: not a step for Medusa, EAGLE and other loops that draft
    after it; for prompt lookup and the draft model (``model/pld/pld.py``, ``model/sps/decoding.py``), which draft
    before it, a step even where nothing is drafted: for those, pass every step of the prefill as well. Steps without a
    draft: included. Pooled over prompts.

    Args:
        steps: one arm's steps (``verify_steps``); so for the other functions of this module.
    """
    return pooled(SUMMANDS["spec_bench_mean_accepted_tokens"], steps)


def spec_bench_tokens_per_second(tables: Tables, arm: str, cut: bool = False) -> float:
    """Return Spec-Bench's "Tokens per second": mean over prompts of tokens / seconds, prefill included.

    From ``evaluation/speed.py``. It counts a method's tokens as its loop does, those after a stop included, and the
    baseline's by tokenizing its text again, which was cut: ``cut``. (Here the baseline's kept tokens are used, because
    rows hold no text to tokenize.) Peers have no step rows; their tokens are those that they returned.

    Groups that broke are left out. At batch sizes above 1 the prompts of a group share its seconds.
    """
    requests = tables.requests[~tables.requests["group"].isin(broken_groups(tables.requests))]
    requests = requests[requests["arm"] == arm]
    prompts = requests.groupby("request")
    tokens = (requests["prefill_tokens"] + requests["decode_tokens"]).groupby(requests["request"]).sum()
    if not cut:
        steps = tables.steps[tables.steps["arm"] == arm]
        cut_tokens = (steps["emitted"] - steps["emitted_kept"]).groupby(steps["request"]).sum()
        tokens = tokens + cut_tokens.reindex(tokens.index, fill_value=0)
    seconds = prompts["prefill_seconds"].max() + prompts["decode_seconds"].max()
    return float((tokens / seconds)[seconds > 0].mean())


def spec_bench_speedup(tables: Tables, arm: str, baseline: str = "baseline") -> float:
    """Return Spec-Bench's "Speedup ratio": the arm's mean tokens per second over the baseline's, a ratio of means.

    From ``evaluation/speed.py``; EAGLE's ``evaluation/speed.py`` computes the same. Prompts are not paired: a fast
    prompt has more weight than a slow one. The method's tokens are counted before cuts, the baseline's after
    (``spec_bench_tokens_per_second``), which favours the method.
    """
    return ratio(spec_bench_tokens_per_second(tables, arm), spec_bench_tokens_per_second(tables, baseline, cut=True))


def vllm_mean_acceptance_length(steps: pd.DataFrame) -> float:
    """Return the "Mean acceptance length" of vLLM: 1 + accepted / drafts.

    From ``vllm/v1/spec_decode/metrics.py``. Bonus: included, as the 1. Tokens after a stop: included, the scheduler
    counts before it checks for one. Steps without a draft: left out. Pooled. NaN where nothing was drafted.
    """
    return pooled(SUMMANDS["vllm_mean_acceptance_length"], steps)


def vllm_draft_acceptance_rate(steps: pd.DataFrame) -> float:
    """Return the "Avg Draft acceptance rate" of vLLM (there in per cent): accepted / drafted tokens. Bonus: left out.

    From ``vllm/v1/spec_decode/metrics.py``, which supports chains only; every node of a tree is a drafted token. vLLM
    drops draft tokens that a grammar rejects before it counts; here they count, see ``legal_share``.
    """
    return pooled(SUMMANDS["vllm_draft_acceptance_rate"], steps)


def vllm_per_position_acceptance(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """Return the "Per-position acceptance rate" of vLLM: steps that accepted >= k / drafts, k = 1 .. the deepest draft.

    From ``vllm/v1/spec_decode/metrics.py``. Not conditional on k - 1. Steps without a draft: left out; a draft shorter
    than k: included, with nothing accepted there.
    """
    drafted = steps[steps["nodes"] > 0]
    return np.array([ratio((drafted["accepted"] >= k).sum(), len(drafted)) for k in depths(steps)])


def eagle_alpha(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """Return EAGLE's alpha: steps that accepted >= k / steps that accepted >= k - 1, for k = 1 .. the deepest draft.

    From ``evaluation/alpha.py``, over the counters of ``evaluate_posterior`` in ``model/utils_alpha.py``. These are
    meant to leave out depths without a draft, but count the root as a drafted token: a path that ended at a leaf, all
    of it accepted, counts as rejected at the next depth. So on trees and on chains of several lengths it is below
    ``conditional``; on chains of one length, where the paper measures it, the two agree. Steps without a draft: left
    out, EAGLE has none.
    """
    accepted = steps.loc[steps["nodes"] > 0, "accepted"]
    return np.array([ratio((accepted >= k).sum(), (accepted >= k - 1).sum()) for k in depths(steps)])


def eagle_average_length(steps: pd.DataFrame) -> float:
    """Return EAGLE's average length: mean over prompts of tokens / (steps - 1).

    From ``evaluation/alpha_length.py``. Its loops return the number of the last step, counted from 0, and the script
    divides by it: 2.0 in 20 steps becomes 2.1. Bonus: included. Tokens after a stop: included. Macro: every prompt has
    the same weight. Prompts of one step, where it would divide by zero, are left out.
    """
    prompts = steps.groupby("request")["emitted"]
    tokens, last = prompts.sum(), prompts.size() - 1
    return float((tokens / last)[last > 0].mean())


def specforge_accept_length(tables: Tables, arm: str) -> float:
    """Return SpecForge's "Accept length": output tokens / verify forwards, over all prompts (SGLang: of each prompt).

    From ``benchmarks/benchmarker/utils.py``: SGLang's ``completion_tokens`` / ``spec_verify_ct``. The prefill's
    token is included, its forward is not a verification unless it verifies a draft: with n verifications its token adds
    1 / n. Tokens after a stop: left out. Bonus: included. 1 where nothing was verified. (SpecForge also reports 1 for a
    server without speculation, where here every step of the baseline counts.)
    """
    requests = tables.requests[tables.requests["arm"] == arm]
    tokens = (requests["prefill_tokens"] + requests["decode_tokens"]).sum()
    verifications = len(verify_steps(tables.steps, arm))
    return 1.0 if tokens and not verifications else ratio(tokens, verifications)


def medusa_overhead(forwards: pd.DataFrame, arm: str, baseline: str = "baseline") -> float:
    """Return Medusa's "overhead": average latency of a decoding step / the baseline's.

    From the paper (arXiv 2401.10774, "Common terms"): speed-up = acceleration rate / overhead, where the rate is
    ``tau_with_forced`` at batch size 1. Not to be confused with ``overhead``, the share of time outside module calls.
    """
    latencies = []
    for name in (arm, baseline):
        count = ((forwards["arm"] == name) & ~forwards["prefill"]).sum()
        latencies.append(ratio(decode_seconds(forwards, name), count))
    return ratio(*latencies)


def _spec_bench(steps: pd.DataFrame) -> Summands:
    return steps["emitted"].to_numpy(dtype=float), np.ones(len(steps))


def _vllm_length(steps: pd.DataFrame) -> Summands:
    drafts = (steps["nodes"] > 0).to_numpy(dtype=float)
    return (1.0 + steps["accepted"].to_numpy()) * drafts, drafts


def _vllm_rate(steps: pd.DataFrame) -> Summands:
    return steps["accepted"].to_numpy(dtype=float), steps["nodes"].to_numpy(dtype=float)


SUMMANDS: dict[str, Callable[[pd.DataFrame], Summands]] = {
    "spec_bench_mean_accepted_tokens": _spec_bench,
    "vllm_mean_acceptance_length": _vllm_length,
    "vllm_draft_acceptance_rate": _vllm_rate,
}
"""As ``acceptance.SUMMANDS``."""
