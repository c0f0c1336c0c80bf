"""Tokens per second, latency, and speed-ups over the baseline on the same prompts in the same run.

``requests`` is a data frame with the columns of ``results.schema.REQUESTS``: one row for each prompt (of conversations,
each turn), sequence and arm. Times are in seconds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import Interval, interval, jackknife, ratio
from spec_lab.core.request import BROKEN
from spec_lab.results.writer import Tables


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


def timed_groups(requests: pd.DataFrame, prefill: bool = False) -> list[int]:
    """Return the groups over which every speed of the run is: full ones, not broken, in which every arm emitted tokens.

    An arm that emitted no token in any group has no speed, and does not count.

    Args:
        prefill: whether the prefill's tokens and seconds are included.
    """
    totals = _totals(requests, prefill)
    emitted = (totals > 0).all(axis=1).unstack("arm", fill_value=False)
    return sorted(emitted.index[emitted.loc[:, emitted.any()].all(axis=1)]) if emitted.any(axis=None) else []


def of_timed_groups(tables: Tables) -> Tables:
    """Return the rows of the ``timed_groups``."""
    groups = timed_groups(tables.requests)
    return Tables(*(rows[rows["group"].isin(groups)] for rows in (tables.forwards, tables.steps, tables.requests)))


def group_speeds(requests: pd.DataFrame, arm: str, prefill: bool = False) -> pd.Series:
    """Return tokens per second of each of the ``timed_groups``: the arm's tokens over the time until its last request
    ended, summed over the turns of conversations.

    With ``prefill`` the prefill's tokens and seconds are included.
    """
    totals = group_totals(requests, arm, prefill)
    return totals["tokens"] / totals["seconds"]


def tokens_per_second(requests: pd.DataFrame, arm: str) -> float:
    """Return all decode tokens of the arm over all its decode seconds, of the ``timed_groups``."""
    totals = group_totals(requests, arm)
    return ratio(totals["tokens"].sum(), totals["seconds"].sum())


def tokens_per_second_interval(requests: pd.DataFrame, arm: str) -> Interval:
    """Return ``tokens_per_second`` with its 95 % interval over groups.

    Do not compare two arms by these intervals: both decoded the same prompts, so their ratio is known more precisely
    than either speed (``speedup``).
    """
    totals = group_totals(requests, arm).to_numpy(dtype=float)
    return jackknife(totals, lambda sums: sums[:, 0] / sums[:, 1], relative=True)


def speedup(requests: pd.DataFrame, arm: str, baseline: str = "baseline", prefill: bool = False) -> Interval:
    """Return the speed-up with its 95 % interval over groups: ``tokens_per_second`` of the arm over the baseline's.

    A group's tokens and seconds of both arms are left out together, as what was decoded on the same prompts.

    Args:
        baseline: the arm that it is compared with.
        prefill: whether the prefill's tokens and seconds are included.

    Returns:
        The ratio and its bounds; NaN of the baseline over itself and without a group that both arms decoded.
    """
    if arm == baseline:
        return Interval(*[float("nan")] * 3)
    return speedup_of_totals(group_totals(requests, arm, prefill), group_totals(requests, baseline, prefill))


def speedup_of_totals(totals: pd.DataFrame, baseline: pd.DataFrame, level: float = 0.95) -> Interval:
    """Return the speed-up with its interval, from the tokens and seconds of each paired unit.

    Args:
        totals: ``tokens`` and ``seconds`` of the arm, indexed by unit; ``baseline``: the baseline's. Units that only
            one arm has, or in which one of the four is 0, are left out.
        level: the interval's nominal coverage.
    """
    sums = pd.concat([totals, baseline], axis=1, join="inner").to_numpy(dtype=float)  # [units, 4]
    sums = sums[(sums > 0).all(axis=1)]

    def ratio_of_speeds(sums: np.ndarray) -> np.ndarray:  # [R, 4] -> [R]
        tokens, seconds, baseline_tokens, baseline_seconds = sums.T
        return tokens / seconds * baseline_seconds / baseline_tokens

    return jackknife(sums, ratio_of_speeds, level, relative=True)


def walltime_speedup_paired(
    requests: pd.DataFrame, arm: str, baseline: str = "baseline", prefill: bool = False
) -> pd.Series:
    """Return of each timed group the arm's tokens per second over the baseline's on the same prompts in the same run.

    The speed-up of a run is the ratio of sums over these groups (``speedup``). The arithmetic mean of the ratios is
    ``speedup_mean_of_groups``, the geometric one ``speedup_geometric_mean``.
    """
    return (group_speeds(requests, arm, prefill) / group_speeds(requests, baseline, prefill)).dropna()


def geometric_mean(ratios: pd.Series) -> Interval:
    """Return the geometric mean of positive ratios with its 95 % interval."""
    return Interval(*np.exp(interval(np.log(ratios))).tolist())


def prefill_seconds(requests: pd.DataFrame, arm: str) -> float:
    """Return the seconds that computed the arm's prompts."""
    return float(requests.loc[requests["arm"] == arm, "prefill_compute_seconds"].sum())


def time_to_first_token(requests: pd.DataFrame, arm: str) -> pd.Series:
    """Return of each request the seconds from its arrival to its first token. Broken and short groups are left out."""
    requests = _complete(requests)
    requests = requests[requests["arm"] == arm]
    return (requests["queue_seconds"] + requests["prefill_seconds"]).groupby(requests["request"]).max()


def time_per_output_token(requests: pd.DataFrame, arm: str) -> pd.Series:
    """Return of each request its decode seconds / decode tokens (vLLM's TPOT). Broken and short groups are left out.

    Requests of a batch are decoded together, so at batch size B a token takes about B times the seconds that throughput
    alone suggests. Requests that ended with their prefill have none.
    """
    requests = _complete(requests)
    by_request = requests[requests["arm"] == arm].groupby("request")
    tokens, seconds = by_request["decode_tokens"].sum(), by_request["decode_seconds"].max()
    return (seconds / tokens)[tokens > 0]


def group_totals(requests: pd.DataFrame, arm: str, prefill: bool = False) -> pd.DataFrame:
    """Return ``tokens`` and ``seconds`` of the arm in each of the ``timed_groups``, indexed by group.

    The seconds of a group are those until its last request ended, of conversations the sum over their turns.
    """
    totals, groups = _totals(requests, prefill), timed_groups(requests, prefill)
    of_arm = totals[totals.index.get_level_values("arm") == arm].droplevel("arm")
    of_arm = of_arm[of_arm.index.isin(groups)]
    return of_arm if (of_arm > 0).all(axis=None) else of_arm.iloc[:0]


def _complete(requests: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of groups that are full and did not break."""
    return requests[~requests["group"].isin(broken_groups(requests) | short_groups(requests))]


def _totals(requests: pd.DataFrame, prefill: bool) -> pd.DataFrame:
    """Return ``tokens`` and ``seconds`` by arm and complete group."""
    requests = _complete(requests)
    together = requests.groupby(["arm", "group", *["turn"] * ("turn" in requests)])
    tokens, seconds = together["decode_tokens"].sum(), together["decode_seconds"].max()
    if prefill:
        tokens, seconds = tokens + together["prefill_tokens"].sum(), seconds + together["prefill_seconds"].max()
    return pd.DataFrame({"tokens": tokens, "seconds": seconds}).groupby(["arm", "group"]).sum()
