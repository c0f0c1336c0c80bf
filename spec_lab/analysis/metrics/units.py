"""Tables of an arm's units, from which a verdict on times is computed: of a run its groups, of a stream its segments.

A row for each unit, in the order decoded, with the columns

- ``tokens``, ``seconds``: of the unit;
- ``slowness``: the logarithm of the unit's time over what the same forwards usually take in this arm
  (``forward_slowness``), or of its time per token over the median one's (``token_slowness``);
- ``same_forwards``: whether it is the former;
- ``other_cores``: cores that other processes used on average meanwhile, below 0 where short times were rounded; NaN
  where it is not known.

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

MAX_TREND = 500
"""Largest number of groups between which the effect of the context is estimated."""

ERRORS = 2.0
"""Standard errors of the effect of the context within groups, by which the one between groups may differ from it."""


def units_of_run(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return the table of each arm of a benchmark: its timed groups, without the prefill."""
    units, groups = {}, timed_groups(tables.requests)
    with_forwards = set(tables.forwards["arm"])
    for arm in tables.requests["arm"].unique():
        table = group_totals(tables.requests, arm)
        requests = tables.requests[(tables.requests["arm"] == arm) & tables.requests["group"].isin(groups)]
        forwards = tables.forwards[(tables.forwards["arm"] == arm) & tables.forwards["group"].isin(groups)]
        same = arm in with_forwards
        slowness = forward_slowness(forwards, table) if same else token_slowness(table)
        load = other_cores(requests, "group")
        units[arm] = table.assign(slowness=slowness.reindex(table.index), same_forwards=same, other_cores=load)
    return units


def other_cores(requests: pd.DataFrame, unit: str) -> pd.Series:
    """Return the mean of ``other_cores`` of an arm's requests in each unit; NaN where it was not recorded."""
    known = requests["other_cores"] if "other_cores" in requests else pd.Series(np.nan, index=requests.index)
    return known.astype(float).groupby(requests[unit]).mean()


def token_slowness(table: pd.DataFrame) -> pd.Series:
    """Return the logarithm of each unit's time per token over the median one's."""
    each = np.log(table["seconds"] / table["tokens"])
    return each - each.median()


def forward_slowness(forwards: pd.DataFrame, table: pd.DataFrame) -> pd.Series:
    """Return the logarithm of each group's time over what its forwards usually take in this arm.

    Usual is the median time of the arm's forwards with as many rows. What longer contexts add is taken off
    (``_context_slope``). Waiting for token masks does not count, since it differs between grammars.

    Args:
        forwards: one arm's rows of ``forwards``, prefill included.
        table: the arm's ``seconds`` by group, without the prefill.
    """
    forwards = forwards.sort_values([*together(forwards), "forward"])
    seconds = since_last_step(forwards) - forwards["mask_wait"]
    forwards = forwards[~forwards["prefill"].astype(bool)]
    rows = forwards["live"] + forwards["nodes"] + forwards["computed_only"]
    frame = pd.DataFrame(
        {
            "seconds": seconds[forwards.index],
            "waited": forwards["mask_wait"],
            "usual": _usual(rows.to_numpy(), seconds[forwards.index].to_numpy()),
            "context": forwards["cells"] / forwards["live"].clip(lower=1),
        }
    )
    sums = frame.groupby(forwards["group"]).agg({"waited": "sum", "usual": "sum", "context": "mean"})
    sums = sums[sums["usual"] > 0].join(table["seconds"], how="inner")
    slowness = np.log((sums["seconds"] - sums["waited"]).clip(lower=0.0).replace(0.0, np.nan) / sums["usual"])
    slowness -= _context_slope(frame, forwards["group"], sums["context"], slowness) * (
        sums["context"] - sums["context"].median()
    )
    return slowness - slowness.median()


def _context_slope(forwards: pd.DataFrame, group: pd.Series, context: pd.Series, slowness: pd.Series) -> float:
    """Return by how much the logarithm of a forward's time grows for each token of its context.

    It is estimated between groups (Theil and Sen's slope), which is precise but takes a drift of the machine for an
    effect of the context where prompts are sorted by length. So it may differ from the growth within groups, in which
    the machine hardly changes, by at most ``ERRORS`` standard errors of that. 0 of fewer than ``MIN_CLUSTERS`` groups.

    Args:
        forwards: ``seconds``, ``usual`` and ``context`` of each; ``group``: of each.
        context: mean of each group; ``slowness``: of each group.
    """
    known = slowness.dropna().index
    if len(known) < MIN_CLUSTERS or context[known].nunique() < 2:
        return 0.0
    some = known[:: -(-len(known) // MAX_TREND)]
    between = float(theilslopes(slowness[some], context[some])[0])
    within = _slopes_within(forwards, group)
    if len(within) < MIN_CLUSTERS:
        return between
    slope = float(np.median(within))
    error = 1.2533 * 1.4826 * float(np.median(np.abs(within - slope))) / np.sqrt(len(within))
    return float(np.clip(between, slope - ERRORS * error, slope + ERRORS * error))


def _slopes_within(forwards: pd.DataFrame, group: pd.Series) -> np.ndarray:  # [G]
    """Return the growth within each group: from its first to its last third of forwards by context, of medians."""
    slopes = []
    for _, each in forwards[(forwards["seconds"] > 0) & (forwards["usual"] > 0)].groupby(group):
        each, third = each.sort_values("context", kind="stable"), len(each) // 3
        logs = np.log((each["seconds"] / each["usual"]).to_numpy())
        contexts = each["context"].to_numpy()
        if third and (longer := np.median(contexts[-third:]) - np.median(contexts[:third])) > 0:
            slopes.append((np.median(logs[-third:]) - np.median(logs[:third])) / longer)
    return np.array(slopes)


def _usual(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:  # [N], [N] -> [N]
    """Return the median time of forwards with as many rows; of rare numbers of rows, with about as many."""
    if not len(rows):
        return seconds
    _, number, counts = np.unique(rows, return_inverse=True, return_counts=True)
    joined = (np.cumsum(counts) - counts) // FORWARDS
    return pd.Series(seconds).groupby(joined[number]).transform("median").to_numpy()
