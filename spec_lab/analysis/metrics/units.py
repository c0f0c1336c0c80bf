"""Tables of an arm's units, from which a verdict on times is computed: of a run its groups, of a stream its segments.

A row for each unit, in the order decoded, with the columns

- ``tokens``, ``seconds``: of the unit;
- ``slowness``: the logarithm of the unit's time over what the same forwards usually take in this arm
  (``forward_slowness``), or of its time per token over the median one's (``token_slowness``);
- ``other_cores``: cores that other processes used on average meanwhile; NaN where it is not known.

Time per token differs between prompts without any disturbance, since drafts are accepted more or less often; so units
are compared by the time of their forwards, each against the median of the arm's forwards with as many rows, and
contexts of other lengths are allowed for.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import theilslopes

from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS
from spec_lab.analysis.metrics.phases import since_last_step, together
from spec_lab.analysis.metrics.speed import group_totals, timed_groups
from spec_lab.results.writer import Tables

FORWARDS = 32
"""Forwards of equally many rows whose median is their usual time; fewer are joined with those of the next numbers."""

MOST_TREND = 500
"""Most units from which the effect of the context is estimated."""


def units_of_run(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return the table of each arm of a benchmark: its timed groups, without the prefill."""
    found, groups = {}, timed_groups(tables.requests)
    with_rounds = set(tables.rounds["arm"])
    for arm in tables.requests["arm"].unique():
        table = group_totals(tables.requests, arm)
        own = tables.requests[(tables.requests["arm"] == arm) & tables.requests["group"].isin(groups)]
        rounds = tables.rounds[(tables.rounds["arm"] == arm) & tables.rounds["group"].isin(groups)]
        slowness = forward_slowness(rounds, table) if arm in with_rounds else token_slowness(table)
        found[arm] = table.assign(slowness=slowness.reindex(table.index), other_cores=other_cores(own, "group"))
    return found


def other_cores(requests: pd.DataFrame, unit: str) -> pd.Series:
    """Return the mean of ``other_cores`` of an arm's requests in each unit; NaN where it was not recorded."""
    known = requests["other_cores"] if "other_cores" in requests else pd.Series(np.nan, index=requests.index)
    return known.astype(float).groupby(requests[unit]).mean()


def token_slowness(table: pd.DataFrame) -> pd.Series:
    """Return the logarithm of each unit's time per token over the median one's."""
    each = np.log(table["seconds"] / table["tokens"])
    return each - each.median()


def forward_slowness(rounds: pd.DataFrame, table: pd.DataFrame) -> pd.Series:
    """Return the logarithm of each group's time over what its forwards usually take in this arm.

    Usual is the median time of the arm's forwards with as many rows. What longer contexts add is estimated from all
    groups (Theil and Sen's slope, from ``MIN_CLUSTERS`` groups on) and taken off. Waiting for token masks does not
    count, since it differs between grammars.

    Args:
        rounds: one arm's rows of ``rounds``, prefill included.
        table: the arm's ``seconds`` by group, without the prefill.
    """
    rounds = rounds.sort_values([*together(rounds), "round"])
    seconds = since_last_step(rounds) - rounds["mask_wait"]
    rounds = rounds[~rounds["prefill"].astype(bool)]
    rows = rounds["live"] + rounds["nodes"] + rounds["computed_only"]
    frame = pd.DataFrame(
        {
            "waited": rounds["mask_wait"],
            "usual": _usual(rows.to_numpy(), seconds[rounds.index].to_numpy()),
            "context": rounds["cells"] / rounds["live"].clip(lower=1),
        }
    )
    sums = frame.groupby(rounds["group"]).agg({"waited": "sum", "usual": "sum", "context": "mean"})
    sums = sums[sums["usual"] > 0].join(table["seconds"], how="inner")
    slowness = np.log((sums["seconds"] - sums["waited"]).clip(lower=0.0).replace(0.0, np.nan) / sums["usual"])
    if len(sums) >= MIN_CLUSTERS and sums["context"].nunique() > 1:
        some = slowness.dropna().index[:: -(-len(sums) // MOST_TREND)]
        slope = theilslopes(slowness[some], sums.loc[some, "context"])[0]
        slowness -= slope * (sums["context"] - sums["context"].median())
    return slowness - slowness.median()


def _usual(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:  # [N], [N] -> [N]
    """Return the median time of forwards with as many rows; of rare numbers of rows, with about as many."""
    if not len(rows):
        return seconds
    _, number, counts = np.unique(rows, return_inverse=True, return_counts=True)
    joined = (np.cumsum(counts) - counts) // FORWARDS
    return pd.Series(seconds).groupby(joined[number]).transform("median").to_numpy()
