"""How many answers are correct, by the checker of each; what a lossy verifier costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.analysis.metrics.speed import broken_groups


def accuracy(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> dict[str, dict[str, Any]]:
    """Return an arm's share of correct answers by checker; empty for a run without checkers.

    Groups that broke are left out, and sequences that a constraint did not keep.

    Args:
        requests: the run's requests.
        arm: the arm.
        baseline: the arm that it is compared with.

    Returns:
        Of each checker: ``answers``, their number; ``correct``, the share with its 95 % interval (mean, low, high), by
        bootstrap over groups; ``change``, the share minus the baseline's over the questions that both answered, paired
        and with its interval; NaN of the baseline itself and without one.
    """
    if "correct" not in requests:
        return {}
    known = requests[requests["correct"].notna() & requests["kept"]]
    known = known[~known["group"].isin(broken_groups(requests))]
    own, base = known[known["arm"] == arm], known[known["arm"] == baseline]
    found = {}
    for checker in sorted(set(own["checker"])):
        mine, theirs = own[own["checker"] == checker], base[base["checker"] == checker]
        correct = mine["correct"].to_numpy(dtype=float)
        both = (
            mine[["group"]]
            .assign(own=correct, key=mine["request"])
            .groupby("key")
            .agg({"group": "first", "own": "mean"})
        )
        expected = theirs["correct"].astype(float).groupby(theirs["request"]).mean()
        both = both.join(expected.rename("baseline"), how="inner")
        if arm == baseline:
            both = both.iloc[:0]
        change = (both["own"] - both["baseline"]).to_numpy(dtype=float)
        found[checker] = {
            "answers": len(mine),
            "correct": cluster_interval(correct, np.ones(len(mine)), mine["group"])._asdict(),
            "change": cluster_interval(change, np.ones(len(both)), both["group"])._asdict(),
        }
    return found
