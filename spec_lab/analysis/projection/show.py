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
from spec_lab.analysis.text import interval, number, table
from spec_lab.core.terminal import visible

NOTE = (
    "Speed-ups are over autoregressive decoding in the same batch. Intervals are 95 %, over requests: they carry the "
    "uncertainty of acceptance, not that of the cost model. Acceptance is as recorded, whatever the model and batch."
)


def show(
    cells: pd.DataFrame, even: pd.DataFrame, deployments: Sequence[Deployment], console: Console, verbose: bool = False
) -> None:
    """Print the fastest design at each batch size, and each design's best length and break-even batch.

    Args:
        cells: of ``project``.
        even: of ``break_even``.
        deployments: the deployments, whose left-out proposers are named.
        console: prints.
        verbose: whether every cell is printed as well.
    """
    for hardware, own in cells.groupby("hardware", sort=False):
        console.print(_best(str(hardware), own))
        console.print(_designs(str(hardware), own, even[even["hardware"] == hardware]))
        if verbose:
            console.print(_every(str(hardware), own))
    for line in dict.fromkeys(why for deployment in deployments for why in deployment.left_out.values()):
        console.print(f"Left out: {visible(line)}.", highlight=False)
    console.print(NOTE, highlight=False)


def notes(designs: Sequence[RecordedDesign]) -> list[str]:
    """Return why designs were projected at their recorded length only."""
    return [
        f"{visible(one.name)}: only drafts of {one.depth} levels are projected: {one.why_not}."
        for one in designs
        if not one.any_length
    ]


def _best(hardware: str, cells: pd.DataFrame) -> Table:
    shown = table(f"{visible(hardware)}: the fastest design")
    for column in ("batch", "length", "nodes", "tau", "speed-up [95 %]", "fastest in"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.columns[0].justify = "right"
    shown.add_column("design", overflow="fold")
    for batch, own in cells.groupby("batch"):
        best = own[own["best"]]
        if not len(best):
            shown.add_row(f"{batch}", *[""] * 5, "does not fit into memory")
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
    """Return a break-even batch with its interval; "none" where drafting never pays."""
    value, low, high = (row[name] for name in ("break_even", "break_even_low", "break_even_high"))
    if np.isnan(low):
        return _batch(value)
    return f"{_batch(value)} [{_batch(low)}, {_batch(high)}]"


def _batch(value: float) -> str:
    return "none" if value == 0 else "beyond" if np.isinf(value) else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
