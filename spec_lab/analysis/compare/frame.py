"""A comparison as a frame."""

from __future__ import annotations

import pandas as pd

from spec_lab.analysis.compare.changes import Comparison


def as_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row for each figure of a pair of arms, for notebooks and CSV.

    Columns: ``reference`` and ``other`` (labels), their folders, arms, ``figure``,
    ``reference_value``, ``other_value``, ``change`` (a factor where ``relative``, else a difference), its own interval
    (``low``, ``high``) and the one that holds together with all others (``simultaneous_low``, ``simultaneous_high``),
    ``smallest``, ``unit``, ``units``, ``paired``, ``verdict``, ``why``; ``identical_outputs`` belongs to the pair.
    """
    folders = {run.label: str(run.folder) for run in comparison.runs}
    rows = []
    for pair in comparison.pairs:
        runs = {
            "reference": pair.reference,
            "other": pair.other,
            "reference_folder": folders[pair.reference],
            "other_folder": folders[pair.other],
            "reference_arm": pair.arms[0],
            "other_arm": pair.arms[1],
        }
        for change in pair.changes:
            values = {"figure": change.figure, "reference_value": change.reference, "other_value": change.other}
            changes = {"change": change.interval.mean, "relative": change.relative, "smallest": change.smallest}
            bounds = {"low": change.interval.low, "high": change.interval.high}
            _, low, high = change.simultaneous
            bounds |= {"simultaneous_low": low, "simultaneous_high": high}
            tests = {
                "unit": change.unit,
                "units": min(change.units),
                "paired": change.paired,
                "verdict": change.verdict,
            }
            rows.append(
                runs | values | changes | bounds | tests | {"why": change.why, "identical_outputs": pair.identical}
            )
    return pd.DataFrame(rows)
