"""A projection in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from rich.console import Console

from spec_lab.analysis.console import say, show_table
from spec_lab.analysis.projection.acceptance import RecordedDesign
from spec_lab.analysis.projection.project import Deployment
from spec_lab.results.result import Cell, DataTable, cell

NOTE = (
    "Speed-ups are over autoregressive decoding in the same batch. Intervals are 95 %, over requests: they carry the "
    "uncertainty of acceptance, not that of the cost model. Acceptance is as recorded, whatever the model and batch. "
    "Fastest in: the share of the resamples in which the design is the fastest."
)

OVERLAP = (
    "Overlapped drafting: the devices that draft and verify do not slow each other down, and speed-ups do not count "
    "the one that drafts. Hit rate: the share of the recorded steps whose outcome was foreseen."
)


def show(
    cells: pd.DataFrame, even: pd.DataFrame, notes: Sequence[str], console: Console, verbose: bool = False
) -> None:
    """Print the fastest design at each batch size, each design's best length and break-even batch, and notes.

    Args:
        cells: the projected designs, from ``project``.
        even: break-even batch sizes, from ``break_even``.
        notes: sentences below the tables, from ``notes``.
        verbose: whether every cell is printed as well.
    """
    for hardware, of_hardware in cells.groupby("hardware", sort=False):
        show_table(f"{hardware}: the fastest design", _best(of_hardware), console)
        designs = _designs(of_hardware, even[even["hardware"] == hardware])
        show_table(f"{hardware}: each design at its best length", designs, console)
        if verbose:
            show_table(f"{hardware}: every cell", _every(of_hardware), console)
    for line in (*notes, NOTE):
        say(console, line)


def notes(designs: Sequence[RecordedDesign], deployments: Sequence[Deployment], idle: Sequence[str] = ()) -> list[str]:
    """Return what is not projected, and why, and which costs are assumed.

    Args:
        idle: names of arms that drafted nothing.
    """
    left_out = {name: why for deployment in deployments for name, why in deployment.left_out.items()}
    overlaps = any(deployment.overlap for deployment in deployments)
    assumed = {
        name: drafting.assumed
        for deployment in deployments
        for name, drafting in deployment.drafting.items()
        if drafting.assumed
    }
    cut = {design.name: design.why_not for design in designs if not design.any_length and design.name not in left_out}
    return [
        *(f"Left out: {', '.join(names)}: {why}." for why, names in _by_value(left_out).items()),
        *(f"{', '.join(names)}: {why}." for why, names in _by_value(assumed).items()),
        *([OVERLAP] if overlaps else []),
        *(f"{', '.join(names)}: only the recorded length, since {why}." for why, names in _by_value(cut).items()),
        *([f"Left out: {', '.join(idle)}: no token was drafted."] if idle else []),
    ]


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys of each value."""
    keys: dict[str, list[str]] = {}
    for key, value in values.items():
        keys.setdefault(value, []).append(key)
    return keys


def _best(cells: pd.DataFrame) -> DataTable:
    rows = []
    for batch, of_batch in cells.groupby("batch"):
        best = of_batch[of_batch["best"]]
        if not len(best):
            rows.append([cell(batch, ".0f"), *[cell(None)] * 5, Cell("does not fit")])
            continue
        row = best.iloc[0]
        slower = "" if row["speedup"] > 1 else ", slower than no draft"
        rows.append(
            [cell(batch, ".0f"), *_numbers(row), cell(row["best_share"], ".0%"), Cell(f"{row['design']}{slower}")]
        )
    names = ("batch", "length", "nodes", "tau", "speed-up [95 %]", "fastest in")
    return DataTable([*((name, True) for name in names), ("design", False)], rows)


def _numbers(row: pd.Series) -> list[Cell]:
    speedup = {"mean": row["speedup"], "low": row["speedup_low"], "high": row["speedup_high"]}
    return [cell(row["length"], ".0f"), cell(row["nodes"], ".1f"), cell(row["tau"]), cell(speedup)]


def _hit_rate(cells: pd.DataFrame) -> list[tuple[str, bool]]:
    """Return the column of hit rates; none without overlap."""
    return [("hit rate", True)] * ("hit_rate" in cells)


def _designs(cells: pd.DataFrame, even: pd.DataFrame) -> DataTable:
    smallest, rows = cells["batch"].min(), []
    for design, of_design in cells[(cells["batch"] == smallest) & cells["fits"]].groupby("design", sort=False):
        row = of_design.loc[of_design["speedup"].idxmax()]
        at = even[(even["design"] == design) & (even["length"] == row["length"])]
        length, _, _, speedup = _numbers(row)
        hits = [cell(row["hit_rate"], ".0%") for _ in _hit_rate(cells)]
        rows.append([Cell(str(design)), length, *hits, speedup, Cell(_even(at.iloc[0]) if len(at) else "")])
    names = [(f"length at batch {smallest}", True), *_hit_rate(cells)]
    names += [("speed-up [95 %]", True), ("break-even batch [95 %]", True)]
    return DataTable([("design", False), *names], rows)


def _every(cells: pd.DataFrame) -> DataTable:
    rows = [[Cell(row["design"]), cell(row["batch"], ".0f"), *_numbers(row)] for _, row in cells.iterrows()]
    names = ("batch", "length", "nodes", "tau", "speed-up [95 %]")
    return DataTable([("design", False), *((name, True) for name in names)], rows)


def _even(row: pd.Series) -> str:
    """Return a break-even batch with its interval; "none" where the speed-up is below 1 at batch 1 already."""
    value, low, high = (_batch(row[name], row["end"]) for name in ("break_even", "break_even_low", "break_even_high"))
    return value if np.isnan(row["break_even_low"]) or low == high == value else f"{value} [{low}, {high}]"


def _batch(value: float, end: float) -> str:
    if value == 0:
        return "none"
    return f"> {end:g}" if np.isinf(value) else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
