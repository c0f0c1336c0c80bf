"""Measured forwards for a projection: a table, or the steps that a run has timed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import ceil, floor
from pathlib import Path

import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.phases import since_last_step
from spec_lab.analysis.projection.costs import COLUMNS, MINIMUM, PROPOSER, TABLE, MeasuredForward, grids, measured
from spec_lab.analysis.projection.drafting import passes
from spec_lab.analysis.text import verdict_line
from spec_lab.results.manifest import begun

BASELINE = "baseline"


def measured_forwards(path: Path) -> dict[str, MeasuredForward]:
    """Return measured forwards, by model: those of a table, of ``task=cost``, or of the steps of a run.

    Args:
        path: a CSV file with ``costs.COLUMNS``, or the directory of a run.

    Raises:
        OSError: it cannot be read.
        ValueError: a malformed table, or a run without timed steps of the baseline.
    """
    if not path.is_dir():
        return measured(path)
    return measured(path / TABLE) if (path / TABLE).exists() else grids(forwards_of_run(path), path)


def verdict_of_costs(path: Path) -> str:
    """Return the verdict on the times of measured forwards, as a line; empty of a table alone, which has none.

    Args:
        path: as in ``measured_forwards``.

    Raises:
        ValueError: a malformed manifest.
        OSError: it cannot be read.
    """
    manifest = begun(path) if path.is_dir() else None
    if manifest is None:
        return ""
    return f"Of the measured forwards: {verdict_line(manifest)}"


def forwards_of_run(folder: Path) -> pd.DataFrame:
    """Return ``forwards_of`` the steps of a run.

    Raises:
        ValueError: it holds no run, or no steps of a baseline.
        OSError: it cannot be read.
    """
    manifest = begun(folder)
    if manifest is None:
        raise ValueError(f"{folder} holds neither {TABLE} nor a run; --costs requires a CSV file or a run's directory")
    proposers = {arm: str(facts.get("name", "")) for arm, facts in manifest["proposers"].items()}
    tables = metrics.load(folder)
    plain = tables.forwards[tables.forwards["arm"] == BASELINE]
    if plain["prefill"].all():
        raise ValueError(f"{folder} has no steps of the baseline, which --costs requires: run with baseline=true")
    return forwards_of(tables, proposers)


def forwards_of(tables: metrics.Tables, proposers: Mapping[str, str]) -> pd.DataFrame:
    """Return the seconds of recorded decode steps as a table of forwards (``costs.COLUMNS`` and ``PROPOSER``).

    - ``target``: the seconds of whole steps, median by nodes, without drafting and verification, to which the
      baseline's are added. Steps of all arms are pooled, since the target's forward does not know who drafted.
    - each arm: what its drafting and verification take more than the baseline's, for each pass (of lookups, each step);
      medians by depth, weighted. A pass has the same seconds for any number of rows, and of sequences that draft.

    Counted are the steps in which all sequences of a batch live. Contexts are pooled: the table holds the same seconds
    for the shortest and the longest.

    Args:
        tables: the rows, with decode steps of a baseline.
        proposers: name of the proposer of each arm.
    """
    steps = _timed_steps(tables)
    live = steps.loc[steps["arm"] == BASELINE, "live"].max()
    steps = steps[steps["live"] == live]
    usual = steps.loc[steps["arm"] == BASELINE, "drafting"].median()
    target = steps.groupby("nodes")["rest"].median() + usual
    points = [("target", 1 + nodes, live, seconds, "") for nodes, seconds in target.items()]
    for arm, of_arm in steps[steps["arm"] != BASELINE].groupby("arm", sort=False):
        more = (of_arm["drafting"] - usual).groupby(of_arm["depth"])
        proposer = proposers.get(str(arm), "")
        count = sum(len(each) * passes(proposer, depth) for depth, each in more)
        if count:
            seconds = max(float((more.size() * more.median()).sum()) / count, MINIMUM)
            corners = product((1, 1 + target.index.max()), {1, live})
            points += [(str(arm), tokens, batch, seconds, proposer) for tokens, batch in corners]
    contexts = sorted({floor(steps["context"].min()), ceil(steps["context"].max())})
    rows = [(*point, context, seconds, proposer) for *point, seconds, proposer in points for context in contexts]
    return pd.DataFrame(rows, columns=[*COLUMNS, PROPOSER])


def _timed_steps(tables: metrics.Tables) -> pd.DataFrame:
    """Return the decode steps of all arms.

    Columns: arm, live, nodes (of each sequence, rounded), depth (of the deepest draft), context (a mean), drafting
    (seconds of drafting and verification), rest (seconds of all else since the step before).
    """
    key = ["group", "arm", "forward"]
    of_sequences = tables.steps.groupby(key).agg(depth=("depth", "max"), context=("context", "mean"))
    parts = []
    for _, of_arm in tables.forwards.sort_values(key).groupby("arm", sort=False):
        drafting = of_arm["propose"] + of_arm["verify"]
        nodes = (of_arm["nodes"] / of_arm["live"].clip(lower=1)).round().astype(int)
        parts.append(of_arm.assign(nodes=nodes, drafting=drafting, rest=since_last_step(of_arm) - drafting))
    steps = pd.concat(parts)
    steps = steps[~steps["prefill"].astype(bool) & (steps["live"] > 0) & (steps["prefill_chunks"] == 0)]
    return steps.join(of_sequences, on=key)
