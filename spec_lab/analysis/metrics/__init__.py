"""Every published number, computed from the rows a run leaves behind, each under its own name.

Published formulas differ, so there is no bare "acceptance rate" here. Conventions, the same throughout:

- ``steps`` are one arm's decode steps (``decode_steps``): the prefill's forward and broken steps are left out.
- Output is counted after cuts (``emitted_kept``), so nothing after a stop token or a limit counts; what describes the
  acceptance law (survival, conditional, rates, expected_tau) is counted before cuts, as the law knows of none.
- Tokens forced by a constraint are left out of every figure that does not name them, as they are certain and would
  inflate it. (They are those that it left no choice for, drafted, sampled or appended.) So under a constraint tau may
  be below 1, that of the baseline as well.
- The token emitted after the accepted ones (the bonus) is part of tau.
- Speeds and comparisons of outputs leave out whole groups in which a request of any arm broke (``broken_groups``): what
  broke is cut short, perhaps in one arm only. Acceptance and time by phase count what was decoded until then.
- Speeds leave out the prefill, its tokens and its seconds, unless they say otherwise.
- Speed-ups leave out a last group with fewer prompts than the others (``short_groups``), as every group weighs alike.
- Figures named after another system (``published``) count what its code counts, forced tokens included, so that they
  can be set beside its numbers.
- Intervals are of 95 %, by bootstrap over groups: what was decoded together is drawn together.

A figure over nothing is NaN.
"""

from spec_lab.analysis.metrics.acceptance import (
    acceptance_intervals,
    calibration,
    conditional,
    decode_steps,
    depth_bands,
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
from spec_lab.analysis.metrics.intervals import (
    Interval,
    cluster_interval,
    cluster_intervals,
    cluster_variance,
    interval,
    ratio,
)
from spec_lab.analysis.metrics.phases import PHASES, decode_seconds, mask_seconds, overhead, phase_seconds
from spec_lab.analysis.metrics.published import (
    eagle_alpha,
    eagle_average_length,
    medusa_overhead,
    spec_bench_mean_accepted_tokens,
    spec_bench_speedup,
    spec_bench_tokens_per_second,
    specforge_accept_length,
    vllm_draft_acceptance_rate,
    vllm_mean_acceptance_length,
    vllm_per_position_acceptance,
)
from spec_lab.analysis.metrics.speed import (
    broken_groups,
    group_speeds,
    prefill_seconds,
    short_groups,
    tokens_per_second,
    tokens_per_second_interval,
    walltime_speedup_paired,
)
from spec_lab.analysis.metrics.summary import against, arms, summarise
from spec_lab.analysis.metrics.texts import identical_outputs, repeated_8gram_share
from spec_lab.results.writer import Tables, load

__all__ = [
    "PHASES",
    "Interval",
    "Tables",
    "acceptance_intervals",
    "against",
    "arms",
    "broken_groups",
    "calibration",
    "cluster_interval",
    "cluster_intervals",
    "cluster_variance",
    "conditional",
    "decode_seconds",
    "decode_steps",
    "depth_bands",
    "draft_token_rate",
    "eagle_alpha",
    "eagle_average_length",
    "expected_tau",
    "forced_rate",
    "group_speeds",
    "identical_outputs",
    "interval",
    "legal_share",
    "load",
    "mask_seconds",
    "medusa_overhead",
    "overhead",
    "phase_seconds",
    "prefill_seconds",
    "ratio",
    "repeated_8gram_share",
    "short_groups",
    "spec_bench_mean_accepted_tokens",
    "spec_bench_speedup",
    "spec_bench_tokens_per_second",
    "specforge_accept_length",
    "summarise",
    "survival",
    "tau_macro",
    "tau_pooled",
    "tau_pooled_raw",
    "tau_with_forced",
    "tokens_per_second",
    "tokens_per_second_interval",
    "vllm_draft_acceptance_rate",
    "vllm_mean_acceptance_length",
    "vllm_per_position_acceptance",
    "walltime_speedup_paired",
]
