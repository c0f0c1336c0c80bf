"""The summary of measured costs, and the verdict on their times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.core.roofline import Roofline
from spec_lab.tasks.cost.predict import OF_ARM, OF_NODES


def summarise(frame: pd.DataFrame, roofline: Roofline | None = None) -> dict[str, Any]:
    """Return medians over repeats, with quartiles, in seconds: t(n) at every point, and what each arm adds.

    With a ``roofline``, ``baseline`` holds the share of it that the target's forward without nodes reaches at every
    batch size and context (``roofline_share``), and whether reading bounds it (``memory_bound_steps``, 1 or 0).
    """
    fixed, measured = frame[frame["fixed"]], frame[~frame["fixed"]]
    return {
        "baseline": [] if roofline is None else _baseline(fixed[fixed["nodes"] == 0], roofline),
        "nodes": _spread(fixed, ["batch", "context", "nodes"], fixed[list(OF_NODES)].sum(axis=1)),
        "arms": _spread(measured, ["arm", "batch", "context"], measured[list(OF_ARM)].sum(axis=1)),
    }


def _baseline(rows: pd.DataFrame, roofline: Roofline) -> list[dict[str, Any]]:
    """Return the roofline share of a forward that computes one token of each sequence after ``context`` others."""
    shares = []
    for (batch, context), cell in rows.groupby(["batch", "context"]):
        ones, none = [1] * batch, [0] * batch
        chosen = [cell["experts"].astype(float).mean()] if "experts" in cell else None
        (read,), (compute,) = roofline.seconds(none, [context + 1] * batch, ones, none, chosen)
        share = max(read, compute) / cell["target_forward"].median()
        figures = {"roofline_share": {"mean": float(share)}, "memory_bound_steps": float(read >= compute)}
        shares.append({"batch": int(batch), "context": int(context), **figures})
    return shares


def _spread(frame: pd.DataFrame, by: list[str], seconds: pd.Series) -> list[dict[str, Any]]:
    three = seconds.groupby([frame[name] for name in by], sort=False).quantile([0.5, 0.25, 0.75]).unstack()
    three.columns = pd.Index(["seconds", "low", "high"])
    return three.reset_index().to_dict("records")


def verdict(frame: pd.DataFrame, manifest: Mapping[str, Any]) -> metrics.TimingVerdict:
    """Return the verdict on the times, measurement by measurement: all arms' steps at one batch size and context.

    Args:
        frame: the rows of ``tables.COST``.
    """
    rows = frame.groupby(["turn", "batch", "context"])
    table = rows.agg(seconds=("whole", "sum"), tokens=("whole", "size"))
    table["other_cores"] = rows["other_cores"].mean() if "other_cores" in frame else np.nan  # older runs lack it
    usual = table["seconds"].groupby(["batch", "context"]).transform(median_of_others)
    table = table.assign(slowness=np.log(table["seconds"] / usual), same_forwards=True).reset_index(drop=True)
    resources = metrics.Resources.of(manifest)
    return metrics.timing_verdict({"all arms": table}, resources, unit="measurement", speed="steps/s")


def median_of_others(values: pd.Series) -> pd.Series:
    """Return for each value the median of the others; itself if it is the only one.

    The median of few values is one of them, which would seem not to vary.
    """
    return pd.Series([values.drop(index).median() for index in values.index], values.index).fillna(values)
