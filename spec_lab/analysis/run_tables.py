"""The tables of a sweep, for the terminal and for the page: states of its runs, and figures of their arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_lab.analysis.text import COLUMNS
from spec_lab.results import run_state
from spec_lab.results.result import Cell, DataTable, cell

WITH_INTERVAL = ("speedup", "correct", "correct_change")
"""Figures that are shown with their intervals."""


def figure_table(
    rows: Sequence[Mapping[str, Any]], figures: Sequence[str], heads: Sequence[str], labels: Sequence[Sequence[Cell]]
) -> DataTable:
    """Return the figures of arms of runs, a row for each.

    Args:
        rows: of ``sweep.collect``.
        figures: names of ``text.COLUMNS``.
        heads: headings of the columns before the figures, and for each row their cells.
        labels: see ``heads``.
    """
    columns = [*((head, False) for head in heads), *((COLUMNS[name].heading, True) for name in figures)]
    cells = [[*before, *(figure_cell(row, name) for name in figures)] for before, row in zip(labels, rows, strict=True)]
    return DataTable(columns, cells)


def figure_cell(row: Mapping[str, Any], name: str) -> Cell:
    """Return the cell of a figure of a row of ``sweep.collect``, with its interval where that is shown."""
    from spec_lab.analysis.metrics import sweeps

    return COLUMNS[name].cell(sweeps.with_bounds(row, name) if name in WITH_INTERVAL else row.get(name))


def state_table(runs: Iterable[run_state.Run], names: Mapping[str, str]) -> DataTable:
    """Return the state of each run, its finished groups, its seconds and what went wrong.

    Args:
        runs: the runs.
        names: of ``metrics.sweeps.run_labels``.
    """
    rows = []
    for run in runs:
        error = f"unreadable: {run.unreadable}" if run.unreadable else run.error
        rows.append(
            [
                Cell(names[run.folder.name], title=run.folder.name),
                Cell(run.state, badge=run.state),
                Cell(f"{run.groups}/{'?' if run.of is None else run.of}"),
                cell(run.seconds, ".1f"),
                Cell(error or (f"exit code {run.code}" if run.code else "")),
            ]
        )
    columns = [("run", False), ("state", False), ("groups", True), ("seconds", True), ("error", False)]
    return DataTable(columns, rows)
