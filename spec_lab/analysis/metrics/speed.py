"""Tokens per second, and speed-ups over the baseline on the same prompts in the same run."""

from __future__ import annotations

import pandas as pd

from spec_lab.analysis.metrics.intervals import Interval, cluster_interval, ratio
from spec_lab.engine.request import BROKEN


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
    return ratio(tokens.sum(), seconds.sum())


def tokens_per_second_interval(requests: pd.DataFrame, arm: str) -> Interval:
    """``tokens_per_second`` with its 95 % interval, by bootstrap over groups.

    Not to be compared between arms: both had the same prompts, so their difference is surer than either
    (``walltime_speedup_paired``).
    """
    tokens, seconds = _tokens_and_seconds(requests, arm)
    return cluster_interval(tokens, seconds, tokens.index)


def walltime_speedup_paired(
    requests: pd.DataFrame, arm: str, baseline: str = "baseline", prefill: bool = False
) -> pd.Series:
    """Of each full group, the arm's tokens per second over the baseline's on the same prompts in the same run.

    Their mean, with ``interval``, is the speed-up: a mean of ratios. Spec-Bench's is a ratio of means
    (``spec_bench_speedup``). Groups in which one of the two emitted nothing after its prefill have no ratio.
    """
    full = requests[~requests["group"].isin(short_groups(requests))]
    ours, theirs = group_speeds(full, arm, prefill), group_speeds(full, baseline, prefill)
    return (ours[ours > 0] / theirs[theirs > 0]).dropna()


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
