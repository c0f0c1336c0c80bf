"""A projection in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from spec_lab.analysis.projection.acceptance import RecordedDesign
from spec_lab.analysis.projection.project import Deployment
from spec_lab.analysis.text import table
from spec_lab.core.terminal import visible
from spec_lab.results.result import interval, number

NOTE = (
    "Speed-ups are over autoregressive decoding in the same batch. Intervals are 95 %, over requests: they carry the "
    "uncertainty of acceptance, not that of the cost model. Acceptance is as recorded, whatever the model and batch. "
    "Fastest in: the share of the resamples in which the design is the fastest."
)


def show(
    cells: pd.DataFrame, even: pd.DataFrame, notes: Sequence[str], console: Console, verbose: bool = False
) -> None:
    """Print the fastest design at each batch size, each design's best length and break-even batch, and notes.

    Args:
        cells: of ``project``.
        even: of ``break_even``.
        notes: of ``notes``.
        console: prints.
        verbose: whether every cell is printed as well.
    """
    for hardware, own in cells.groupby("hardware", sort=False):
        console.print(_best(str(hardware), own))
        console.print(_designs(str(hardware), own, even[even["hardware"] == hardware]))
        if verbose:
            console.print(_every(str(hardware), own))
    for line in (*notes, NOTE):
        console.print(visible(line), highlight=False, markup=False)


def notes(designs: Sequence[RecordedDesign], deployments: Sequence[Deployment], idle: Sequence[str] = ()) -> list[str]:
    """Return what is not projected, and why, and which costs are assumed.

    Args:
        designs: what was recorded.
        deployments: where it is projected to.
        idle: names of arms that drafted nothing.
    """
    left_out = {name: why for deployment in deployments for name, why in deployment.left_out.items()}
    assumed = {
        name: drafting.assumed
        for deployment in deployments
        for name, drafting in deployment.drafting.items()
        if drafting.assumed
    }
    cut = {one.name: one.why_not for one in designs if not one.any_length and one.name not in left_out}
    return [
        *(f"Left out: {', '.join(names)}: {why}." for why, names in _by_value(left_out).items()),
        *(f"{', '.join(names)}: {why}." for why, names in _by_value(assumed).items()),
        *(f"{', '.join(names)}: only the recorded length, since {why}." for why, names in _by_value(cut).items()),
        *([f"Left out: {', '.join(idle)}: no token was drafted."] if idle else []),
    ]


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys of each value."""
    found: dict[str, list[str]] = {}
    for key, value in values.items():
        found.setdefault(value, []).append(key)
    return found


def _best(hardware: str, cells: pd.DataFrame) -> Table:
    shown = table(f"{visible(hardware)}: the fastest design")
    for column in ("batch", "length", "nodes", "tau", "speed-up [95 %]", "fastest in"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.columns[0].justify = "right"
    shown.add_column("design", overflow="fold")
    for batch, own in cells.groupby("batch"):
        best = own[own["best"]]
        if not len(best):
            shown.add_row(f"{batch}", *[""] * 5, "does not fit")
            continue
        row = best.iloc[0]
        slower = "" if row["speedup"] > 1 else ", slower than no draft"
        shown.add_row(
            f"{batch}",
            f"{row['length']}",
            f"{row['nodes']:.1f}",
            f"{row['tau']:.2f}",
            _speedup(row),
            number(row["best_share"], ".0%"),
            f"{visible(row['design'])}{slower}",
        )
    return shown


def _designs(hardware: str, cells: pd.DataFrame, even: pd.DataFrame) -> Table:
    shown = table(f"{visible(hardware)}: each design at its best length")
    shown.add_column("design", overflow="fold")
    smallest = cells["batch"].min()
    for column in (f"length at batch {smallest}", "speed-up [95 %]", "break-even batch [95 %]"):
        shown.add_column(column, justify="right")
    for design, own in cells[(cells["batch"] == smallest) & cells["fits"]].groupby("design", sort=False):
        row = own.loc[own["speedup"].idxmax()]
        at = even[(even["design"] == design) & (even["length"] == row["length"])]
        shown.add_row(visible(str(design)), f"{row['length']}", _speedup(row), _even(at.iloc[0]) if len(at) else "")
    return shown


def _every(hardware: str, cells: pd.DataFrame) -> Table:
    shown = table(f"{visible(hardware)}: every cell")
    shown.add_column("design", overflow="fold")
    for column in ("length", "batch", "nodes", "tau", "speed-up [95 %]"):
        shown.add_column(column, justify="right")
    for row in cells.to_dict("records"):
        values = (f"{row['length']}", f"{row['batch']}", f"{row['nodes']:.1f}", f"{row['tau']:.2f}", _speedup(row))
        shown.add_row(visible(row["design"]), *values)
    return shown


def _speedup(row: Mapping[str, Any] | pd.Series) -> str:
    return interval({"mean": row["speedup"], "low": row["speedup_low"], "high": row["speedup_high"]})


def _even(row: pd.Series) -> str:
    """Return a break-even batch with its interval; "none" where the speed-up is below 1 at batch 1 already."""
    value, low, high = (_batch(row[name], row["end"]) for name in ("break_even", "break_even_low", "break_even_high"))
    return value if np.isnan(row["break_even_low"]) or low == high == value else f"{value} [{low}, {high}]"


def _batch(value: float, end: float) -> str:
    if value == 0:
        return "none"
    return f"> {end:g}" if np.isinf(value) else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
