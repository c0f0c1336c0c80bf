"""Figures as other systems' code computes them, each under its own name, so that numbers can be set beside theirs.

None of these systems forces tokens: what a constraint forced is counted here as any other token, since their counters
would. Each docstring names the file it was read from and says what is counted: the bonus (the token after the accepted
ones), tokens after a stop, the prefill, steps without a draft, and whether steps are pooled or prompts averaged.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.acceptance import Summands, decode_steps, depths, pooled
from spec_lab.analysis.metrics.intervals import ratio
from spec_lab.analysis.metrics.phases import decode_seconds
from spec_lab.analysis.metrics.speed import broken_groups
from spec_lab.results.writer import Tables


def spec_bench_mean_accepted_tokens(steps: pd.DataFrame) -> float:
    """Spec-Bench's "#Mean accepted tokens": mean over all steps of the tokens appended by each.

    From ``evaluation/speed.py``, over the ``accept_lengths`` that each method's loop keeps. Bonus: in. Tokens after a
    stop: in, as lists are not cut. Prefill: of Medusa, EAGLE and other loops that draft after it, no step, as here; of
    prompt lookup and the draft model (``model/pld/pld.py``, ``model/sps/decoding.py``), which draft before it, a step
    like any other: for those, give the prefill's steps as well. Steps without a draft: in. Pooled over prompts.
    """
    return pooled(SUMMANDS["spec_bench_mean_accepted_tokens"], steps)


def spec_bench_tokens_per_second(tables: Tables, arm: str, cut: bool = False) -> float:
    """Spec-Bench's "Tokens per second": mean over prompts of a prompt's tokens / its seconds, the prefill's included.

    From ``evaluation/speed.py``. It counts a method's tokens as its loop does, those after a stop included, and the
    baseline's by tokenising its text again, which was cut: ``cut``. (Rows hold no text that could be tokenised; the
    baseline's kept tokens stand for it.) Of a peer, which has no step rows, tokens are those it returned.

    Groups that broke are left out. At batch sizes above 1 a prompt's seconds are shared with its group's others.
    """
    whole = tables.requests[~tables.requests["group"].isin(broken_groups(tables.requests))]
    own = whole[whole["arm"] == arm]
    prompts = own.groupby("request")
    tokens = (own["prefill_tokens"] + own["decode_tokens"]).groupby(own["request"]).sum()
    if not cut:
        steps = tables.steps[tables.steps["arm"] == arm]
        after = (steps["emitted"] - steps["emitted_kept"]).groupby(steps["request"]).sum()
        tokens = tokens + after.reindex(tokens.index, fill_value=0)
    seconds = prompts["prefill_seconds"].max() + prompts["decode_seconds"].max()
    return float((tokens / seconds)[seconds > 0].mean())


def spec_bench_speedup(tables: Tables, arm: str, baseline: str = "baseline") -> float:
    """Spec-Bench's "Speedup ratio": the arm's mean tokens per second over the baseline's, a ratio of means.

    From ``evaluation/speed.py``; EAGLE's ``evaluation/speed.py`` computes the same. Prompts are not paired: a fast
    prompt weighs more than a slow one. The method's tokens are counted before, the baseline's after cuts
    (``spec_bench_tokens_per_second``), which flatters the method.
    """
    return ratio(spec_bench_tokens_per_second(tables, arm), spec_bench_tokens_per_second(tables, baseline, cut=True))


def vllm_mean_acceptance_length(steps: pd.DataFrame) -> float:
    """The "Mean acceptance length" of vLLM: 1 + accepted / drafts.

    From ``vllm/v1/spec_decode/metrics.py``. Bonus: in, as the 1. Tokens after a stop: in, the scheduler counts before
    it looks for one. Steps without a draft: out, they are no drafts. Pooled. NaN where nothing was drafted.
    """
    return pooled(SUMMANDS["vllm_mean_acceptance_length"], steps)


def vllm_draft_acceptance_rate(steps: pd.DataFrame) -> float:
    """The "Avg Draft acceptance rate" of vLLM (there in per cent): accepted / drafted tokens. Bonus: out.

    From ``vllm/v1/spec_decode/metrics.py``, which knows chains only; of a tree every node is drafted. Drafts that a
    grammar refuses are dropped there before they are counted; here they count, see ``legal_share``.
    """
    return pooled(SUMMANDS["vllm_draft_acceptance_rate"], steps)


def vllm_per_position_acceptance(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """The "Per-position acceptance rate" of vLLM: steps that accepted >= k / drafts, k = 1 .. the deepest draft.

    From ``vllm/v1/spec_decode/metrics.py``. Not conditional on k - 1. Steps without a draft: out; a draft shorter than
    k: in, as one that accepted nothing there.
    """
    drafted = steps[steps["nodes"] > 0]
    return np.array([ratio((drafted["accepted"] >= k).sum(), len(drafted)) for k in depths(steps)])


def eagle_alpha(steps: pd.DataFrame) -> np.ndarray:  # [K]
    """EAGLE's alpha: steps that accepted >= k / steps that accepted >= k - 1, for k = 1 .. the deepest draft.

    From ``evaluation/alpha.py``, over the counters of ``evaluate_posterior`` in ``model/utils_alpha.py``. These mean to
    leave out depths that the path has no draft for, but count the root as one of the path's drafts: a path that ended
    at a leaf, all of it accepted, counts as refused at the next depth. So on trees (and chains of several lengths) it
    is below ``conditional``; on chains of one length, where the paper measures it, the two agree. Steps without a
    draft: out, as EAGLE has none.
    """
    accepted = steps.loc[steps["nodes"] > 0, "accepted"]
    return np.array([ratio((accepted >= k).sum(), (accepted >= k - 1).sum()) for k in depths(steps)])


def eagle_average_length(steps: pd.DataFrame) -> float:
    """EAGLE's average length: mean over prompts of tokens / (steps - 1).

    From ``evaluation/alpha_length.py``. Its loops return the number of the last step, counted from 0, and the script
    divides by that: 2.0 in 20 steps reads 2.1. Bonus: in. Tokens after a stop: in. Macro: every prompt weighs alike.
    Prompts of one step, over which it would divide by zero, are left out.
    """
    prompts = steps.groupby("request")["emitted"]
    tokens, last = prompts.sum(), prompts.size() - 1
    return float((tokens / last)[last > 0].mean())


def specforge_accept_length(tables: Tables, arm: str) -> float:
    """SpecForge's "Accept length": output tokens / verify forwards, over all prompts; SGLang's, prompt by prompt.

    From ``benchmarks/benchmarker/utils.py``: SGLang's ``completion_tokens`` / ``spec_verify_ct``. The prefill's token
    is in, its forward is no verification: of n steps it adds 1 / n. Tokens after a stop: out. Bonus: in. (Where nothing
    is speculated there, it reads 1.)
    """
    own = tables.requests[tables.requests["arm"] == arm]
    tokens = (own["prefill_tokens"] + own["decode_tokens"]).sum()
    return ratio(tokens, len(decode_steps(tables.steps, arm)))


def medusa_overhead(rounds: pd.DataFrame, arm: str, baseline: str = "baseline") -> float:
    """Medusa's "overhead": average latency of a decoding step / the baseline's.

    From the paper (arXiv 2401.10774, "Common terms"): speed-up = acceleration rate / overhead, the rate being
    ``tau_with_forced`` at batch size 1. Not ``overhead``, which is the share of time outside the models' calls.
    """
    each = []
    for one in (arm, baseline):
        count = ((rounds["arm"] == one) & ~rounds["prefill"]).sum()
        each.append(ratio(decode_seconds(rounds, one), count))
    return ratio(*each)


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
