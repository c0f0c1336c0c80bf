"""The result of ``task=cost``: the time of steps by nodes, and what arms add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.metrics import ratio
from spec_lab.analysis.roofline_text import roofline_notes
from spec_lab.analysis.text import verdict_line
from spec_lab.results.result import REAL, Cell, DataTable, Result, Section, cell, ended_run, run_title

PLACE = {"batch": int, "context": int}
SPREAD = {**PLACE, "seconds": float, "low": float, "high": float}
SUMMARY = {
    "turns": int, "steps": int, "temperature": float, "nodes": [{**SPREAD, "nodes": float}],
    "arms": [{**SPREAD, "arm": str}],
    "?verdict": str, "?verdict_reasons": [str],
    "?baseline": [{**PLACE, "roofline_share": {"mean": REAL}, "memory_bound_steps": REAL}],
}  # fmt: skip
"""Fields that are read of ``summary.json``."""

Row = Mapping[str, Any]


def result(folder: Path) -> Result:
    """Return the result in a run's directory.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = ended_run(folder, SUMMARY)
    cases = {f"{_case(row)}: baseline": row for row in summary.get("baseline", ())}
    nodes = sorted(summary["nodes"], key=lambda row: row["nodes"])
    first = {_case(row): row["seconds"] for row in nodes if row["nodes"] == 0}
    relative = [{**row, "seconds": ratio(row["seconds"], first.get(_case(row), 0)), "low": None} for row in nodes]

    def batch(row: Row) -> tuple[Cell, ...]:
        return tuple(cell(row[name], ".0f") for name in ("batch", "context"))

    def arm(row: Row) -> tuple[Cell, ...]:
        return (Cell(row["arm"], colour=figures.colour(row["arm"])),)

    by_nodes = [("batch", True), ("context", True)], batch, lambda row: f"{row['nodes']:g}"
    return Result(
        run_title(manifest),
        f"step costs, temperature {summary['temperature']:g}, medians of {summary['turns']} repeats of "
        f"{summary['steps']} steps, with quartiles over repeats",
        [
            Section("t(n), milliseconds of a step with n draft nodes per sequence, drafting left out", "",
                    _table(nodes, *by_nodes, 1e3), {"cost": partial(figures.step_costs, nodes)} if nodes else {}),
            Section("t(n) / t(0)", "", _table(relative, *by_nodes, 1),
                    notes=roofline_notes(cases, manifest.get("roofline"))),
            Section("What an arm adds by drafting and verification, milliseconds per step", "",
                    _table(summary["arms"], [("arm", False)], arm, _case, 1e3)),
        ],
        [verdict_line(summary)],
    )  # fmt: skip


def _case(row: Row) -> str:
    return f"batch {row['batch']}, context {row['context']}"


def _table(
    rows: Sequence[Row],
    heads: Sequence[tuple[str, bool]],
    head: Callable[[Row], tuple[Cell, ...]],
    column: Callable[[Row], str],
    scale: float,
) -> DataTable:
    """Return seconds with their quartiles: a row for each ``head`` below ``heads``, a column for each ``column``."""
    columns = list(dict.fromkeys(map(column, rows)))
    cells = {(head(row), column(row)): cell({**row, "mean": row["seconds"]}, ".2f", scale) for row in rows}
    shown = [
        [*key, *(cells.get((key, name), cell(None)) for name in columns)] for key in dict.fromkeys(map(head, rows))
    ]
    return DataTable([*heads, *((name, True) for name in columns)], shown, filters=[name for name, _ in heads])
