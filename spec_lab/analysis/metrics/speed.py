"""Tokens per second, latency, and speed-ups over the baseline on the same prompts in the same run.

``requests`` is a data frame with the columns of ``results.schema.REQUESTS``: one row for each prompt (of conversations,
each turn), sequence and arm. Times are in seconds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import Interval, bootstrap, cluster_interval, ratio
from spec_lab.engine.request import BROKEN


def broken_groups(requests: pd.DataFrame) -> set[int]:
    """Return the groups in which a request of any arm broke."""
    return set(requests.loc[requests["finish"].isin(BROKEN), "group"])


def short_groups(requests: pd.DataFrame) -> set[int]:
    """Return groups with fewer prompts than the largest: the last one, where batch_size does not divide the prompts.

    A conversation is one prompt, whatever number of turns it has.
    """
    firsts = requests[requests["turn"] == 1] if "turn" in requests else requests
    sizes = firsts.groupby("group")["request"].nunique()
    return set(sizes.index[sizes < sizes.max()])


def group_speeds(requests: pd.DataFrame, arm: str, prefill: bool = False) -> pd.Series:
    """Return decode tokens per second of each group: its tokens over the time until its last request ended, summed over
    the turns of conversations.

    With ``prefill`` the prefill's tokens and seconds are included.
    """
    tokens, seconds = _tokens_and_seconds(requests, arm, prefill)
    return (tokens / seconds)[seconds > 0]


def tokens_per_second(requests: pd.DataFrame, arm: str) -> float:
    """Return all decode tokens of the arm over all its decode seconds."""
    tokens, seconds = _tokens_and_seconds(requests, arm)
    return ratio(tokens.sum(), seconds.sum())


def tokens_per_second_interval(requests: pd.DataFrame, arm: str) -> Interval:
    """Return ``tokens_per_second`` with its 95 % interval, by bootstrap over groups.

    Do not compare two arms by these intervals: both decoded the same prompts, so their ratio is known more precisely
    than either speed (``speedup``).
    """
    tokens, seconds = _tokens_and_seconds(requests, arm)
    return cluster_interval(tokens, seconds, tokens.index)


def speedup(requests: pd.DataFrame, arm: str, baseline: str = "baseline", prefill: bool = False) -> Interval:
    """Return the speed-up with its 95 % interval: total tokens per total seconds of the arm over the baseline's.

    Both sums run over the same full groups of prompts, in the same run. The bootstrap draws groups, and each draw takes
    a group's tokens and seconds of both arms together.

    Args:
        requests: the run's requests.
        arm: the arm.
        baseline: the arm that it is compared with.
        prefill: whether the prefill's tokens and seconds are included.

    Returns:
        The ratio and its bounds; NaN of the baseline over itself and without a group that both arms decoded.
    """
    if arm == baseline:
        return Interval(*[float("nan")] * 3)
    full = requests[~requests["group"].isin(short_groups(requests))]
    totals = [one for name in (arm, baseline) for one in _tokens_and_seconds(full, name, prefill)]
    return speedup_of_totals(*totals)


def speedup_of_totals(
    tokens: pd.Series, seconds: pd.Series, baseline_tokens: pd.Series, baseline_seconds: pd.Series
) -> Interval:
    """Return the speed-up with its 95 % interval, from the tokens and seconds of each paired unit.

    Each series is indexed by unit. Units that only one arm has, or in which one of the four is 0, are left out.
    """
    totals = [tokens, seconds, baseline_tokens, baseline_seconds]
    sums = pd.concat(totals, axis=1, join="inner").to_numpy(dtype=float)  # [units, 4]
    sums = sums[(sums > 0).all(axis=1)]

    def ratio_of_speeds(totals: np.ndarray) -> np.ndarray:  # [R, 4] -> [R]
        tokens, seconds, baseline_tokens, baseline_seconds = totals.T
        return tokens / seconds * baseline_seconds / baseline_tokens

    return bootstrap(sums, ratio_of_speeds)


def walltime_speedup_paired(
    requests: pd.DataFrame, arm: str, baseline: str = "baseline", prefill: bool = False
) -> pd.Series:
    """Return of each full group the arm's tokens per second over the baseline's on the same prompts in the same run.

    The speed-up of a run is the ratio of sums over these groups (``speedup``). The arithmetic mean of the ratios is
    ``speedup_mean_of_groups``. Groups in which one of the two emitted nothing after its prefill have no ratio.
    """
    full = requests[~requests["group"].isin(short_groups(requests))]
    speeds, baseline_speeds = group_speeds(full, arm, prefill), group_speeds(full, baseline, prefill)
    return (speeds[speeds > 0] / baseline_speeds[baseline_speeds > 0]).dropna()


def prefill_seconds(requests: pd.DataFrame, arm: str) -> float:
    """Return the seconds that computed the arm's prompts."""
    return float(requests.loc[requests["arm"] == arm, "prefill_compute_seconds"].sum())


def time_to_first_token(requests: pd.DataFrame, arm: str) -> pd.Series:
    """Return of each request the seconds from its arrival to its first token. Broken groups are left out."""
    requests = _unbroken(requests, arm)
    return (requests["queue_seconds"] + requests["prefill_seconds"]).groupby(requests["request"]).max()


def time_per_output_token(requests: pd.DataFrame, arm: str) -> pd.Series:
    """Return of each request its decode seconds / decode tokens (vLLM's TPOT). Broken groups are left out.

    Requests of a batch are decoded together, so at batch size B a token takes about B times the seconds that throughput
    alone suggests. Requests that ended with their prefill have none.
    """
    requests = _unbroken(requests, arm).groupby("request")
    tokens, seconds = requests["decode_tokens"].sum(), requests["decode_seconds"].max()
    return (seconds / tokens)[tokens > 0]


def _unbroken(requests: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Return the arm's rows of groups that did not break."""
    return requests[(requests["arm"] == arm) & ~requests["group"].isin(broken_groups(requests))]


def _tokens_and_seconds(requests: pd.DataFrame, arm: str, prefill: bool = False) -> tuple[pd.Series, pd.Series]:
    """Return the arm's tokens and seconds of each group that did not break.

    The seconds of a group are those until its last request ended, of conversations the sum over their turns.
    """
    requests = _unbroken(requests, arm)
    together = requests.groupby(["group", "turn"] if "turn" in requests else ["group"])
    tokens, seconds = together["decode_tokens"].sum(), together["decode_seconds"].max()
    if prefill:
        tokens, seconds = tokens + together["prefill_tokens"].sum(), seconds + together["prefill_seconds"].max()
    return tokens.groupby("group").sum(), seconds.groupby("group").sum()
