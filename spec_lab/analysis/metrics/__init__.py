# ruff: noqa: F401
"""Every published number, computed from the rows of a run, each under its own name.

Published formulas differ, so a figure is always named with its formula. Conventions, the same throughout:

- ``steps`` are one arm's decode steps (``decode_steps``): the prefill's forward and broken steps are left out.
- Output is counted after cuts (``emitted_kept``): nothing after a stop token or a limit counts. Acceptance (survival,
  conditional, rates, expected_tau) is counted before cuts, because the acceptance probabilities do not depend on them.
- Tokens forced by a constraint (drafted, sampled or appended where it left no choice) are left out of every figure that
  does not name them: they are certain and would inflate it. So under a constraint tau may be below 1, for the baseline
  as well.
- The bonus or recovered token of a step is part of tau.
- Speeds and comparisons of outputs leave out whole groups in which a request of any arm broke (``broken_groups``): its
  output is cut short, perhaps in one arm only. Acceptance and time by phase count what was decoded until then.
- Speeds leave out the prefill, its tokens and its seconds, unless the name states otherwise.
- **Speed-up** (``speedup``) is a ratio of sums: the arm's total tokens per total seconds over the baseline's, on the
  same groups of prompts in the same run. Other means of the same ratios have other names: ``speedup_mean_of_groups``
  (arithmetic mean of the groups' ratios), ``speedup_geometric_mean`` (``paired``), ``spec_bench_speedup``.
- All speeds are over the same groups (``timed_groups``), so that the published speeds of two arms give the published
  speed-up. A last group with fewer prompts than the others (``short_groups``) is left out: it ran at a smaller batch
  size. So are groups in which an arm emitted nothing after its prefill.
- Figures named after another system (``published``) count what its code counts, forced tokens included, so that they
  compare with its numbers. Their ``steps`` are those of ``verify_steps``, with the prefills that verified a draft.
- Shares of the machine's roofline (``roofline``) are over steps after the prefill that computed no part of a prompt.
- Intervals are 95 %, over groups (``intervals``); fewer than ``MIN_CLUSTERS`` have none.
- Every timed result carries a verdict on whether its times can be trusted (``verdict``).

A figure over nothing is NaN. ``own`` computes those of functions of a user's (``conf/metrics``).
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
from spec_lab.analysis.metrics.accuracy import accuracy, correct, correct_totals
from spec_lab.analysis.metrics.experts import expert_figures
from spec_lab.analysis.metrics.intervals import (
    MIN_CLUSTERS,
    Interval,
    cluster_interval,
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
    verify_steps,
    vllm_draft_acceptance_rate,
    vllm_mean_acceptance_length,
    vllm_per_position_acceptance,
)
from spec_lab.analysis.metrics.ranges import along_text
from spec_lab.analysis.metrics.reliability import confidence
from spec_lab.analysis.metrics.roofline import roofline_figures, step_bounds
from spec_lab.analysis.metrics.speed import (
    broken_groups,
    geometric_mean,
    group_speeds,
    group_totals,
    of_timed_groups,
    prefill_seconds,
    short_groups,
    speedup,
    speedup_of_totals,
    time_per_output_token,
    time_to_first_token,
    timed_groups,
    tokens_per_second,
    tokens_per_second_interval,
    walltime_speedup_paired,
)
from spec_lab.analysis.metrics.summary import SCHEMA_VERSION, arms, main_arm, speedups_over_peers, summarise
from spec_lab.analysis.metrics.texts import (
    cached_prompt_shares,
    cut_answers,
    first_differences,
    identical_outputs,
    repeated_8gram_share,
)
from spec_lab.analysis.metrics.units import other_cores, token_slowness, units_of_run
from spec_lab.analysis.metrics.user_metrics import WHOLE, Metric, OwnMetrics, own_metrics, returned_names
from spec_lab.analysis.metrics.verdict import (
    Resources,
    TimingReason,
    TimingVerdict,
    disturbed,
    run_verdict,
    timing_verdict,
)
from spec_lab.results.writer import Tables, load
