"""How many answers are correct, by the checker of each; what a lossy verifier costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import Interval, cluster_interval
from spec_lab.analysis.metrics.speed import broken_groups


def accuracy(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> dict[str, dict[str, Any]]:
    """Return an arm's share of correct answers by checker; empty for a run without checkers.

    Groups that broke are left out, and sequences that a constraint did not keep.

    Args:
        baseline: the arm that it is compared with.

    Returns:
        Of each checker: ``answers``, their number; ``cut``, the share that ``max_new_tokens`` ended, so that they may
        lack what the checker looks for; ``correct``, the share with its 95 % interval (mean, low, high) over
        groups; ``change``, the share minus the baseline's over the questions that both answered, paired
        and with its interval; NaN of the baseline itself and without one.
    """
    known = _checked(requests)
    of_arm, base = known[known["arm"] == arm], known[known["arm"] == baseline]
    shown = {}
    for checker in sorted(set(of_arm["checker"])):
        mine, theirs = of_arm[of_arm["checker"] == checker], base[base["checker"] == checker]
        change = _change(mine, theirs) if arm != baseline else Interval(*[float("nan")] * 3)
        figures = {"correct": _share(mine)._asdict(), "change": change._asdict()}
        shown[checker] = {"answers": len(mine), "cut": _cut(mine), **figures}
    return shown


def correct(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> tuple[Interval, Interval, float]:
    """Return ``correct``, ``change`` and ``cut`` of ``accuracy``, of all checkers together; NaN without checked
    answers.
    """
    known = _checked(requests)
    of_arm, base = known[known["arm"] == arm], known[known["arm"] == baseline]
    return _share(of_arm), _change(of_arm, base if arm != baseline else base.iloc[:0]), _cut(of_arm)


def correct_totals(requests: pd.DataFrame, arm: str) -> pd.DataFrame:
    """Return ``top`` (correct answers) and ``bottom`` (checked answers) of each prompt, indexed by request.

    Their figure (``paired.Totals``) is the share of correct answers; empty without checked answers.
    """
    known = _checked(requests)
    of_arm = known[known["arm"] == arm].assign(correct=lambda rows: rows["correct"].astype(float))
    return of_arm.groupby("request")["correct"].agg(top="sum", bottom="count").astype(float)


def _checked(requests: pd.DataFrame) -> pd.DataFrame:
    """Return the checked answers of kept sequences, in groups that did not break."""
    if "correct" not in requests:
        return requests.iloc[:0].assign(correct=False, checker="")
    known = requests[requests["correct"].notna() & requests["kept"]]
    return known[~known["group"].isin(broken_groups(requests))]


def _share(of_arm: pd.DataFrame) -> Interval:
    return cluster_interval(of_arm["correct"].to_numpy(dtype=float), np.ones(len(of_arm)), of_arm["group"])


def _cut(of_arm: pd.DataFrame) -> float:
    return float((of_arm["finish"] == "length").mean())


def _change(of_arm: pd.DataFrame, base: pd.DataFrame) -> Interval:
    """Return the mean over questions that both arms answered of the share of own answers that are correct minus the
    baseline's.
    """
    shares = [rows["correct"].astype(float).groupby(rows["request"]).mean() for rows in (of_arm, base)]
    change = (shares[0] - shares[1]).dropna()
    groups = of_arm.groupby("request")["group"].first().reindex(change.index)
    return cluster_interval(change.to_numpy(dtype=float), np.ones(len(change)), groups.to_numpy())
