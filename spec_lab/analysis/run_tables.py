"""The tables of a sweep, for the terminal and for the page: states of its runs, and figures of their arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.analysis.text import OWN, column, losslessness
from spec_lab.results import run_state
from spec_lab.results.result import Cell, DataTable, cell

if TYPE_CHECKING:
    import pandas as pd

WITH_INTERVAL = ("speedup", "correct", "correct_change")
"""Figures that are shown with their intervals."""

PUBLISHED = ("speedup", "tau_pooled", "draft_token_rate", "tokens_per_second")
"""Figures of the table for papers and issues."""


def figure_table(
    rows: Sequence[Mapping[str, Any]], figures: Sequence[str], heads: Sequence[str], labels: Sequence[Sequence[Cell]]
) -> DataTable:
    """Return the figures of arms of runs, a row for each.

    Args:
        rows: of ``sweep.collect``.
        figures: names of ``text.COLUMNS``, or of ``own_figures``.
        heads: headings of the columns before the figures, and for each row their cells.
        labels: see ``heads``.
    """
    columns = [*((head, False) for head in heads), *((column(name).heading, True) for name in figures)]
    cells = [[*before, *(figure_cell(row, name) for name in figures)] for before, row in zip(labels, rows, strict=True)]
    return DataTable(columns, cells)


def published_table(table: pd.DataFrame, keys: Sequence[str]) -> DataTable:
    """Return the main figures of a sweep, a row for each run and arm but the baseline, for papers and issues.

    Args:
        table: of ``sweep.collect``.
        keys: the sweep's options; those with the same value in all runs are left out.

    Raises:
        ValueError: no run has a figure of ``PUBLISHED``.
    """
    from spec_lab.analysis.metrics import sweeps

    figures = [*(name for name in PUBLISHED if name in table), *own_figures(table)]
    if not figures:
        raise ValueError(f"the runs have none of the figures {', '.join(PUBLISHED)}: a table has nothing to show")
    shown = table[table["arm"] != "baseline"] if (table["arm"] != "baseline").any() else table
    heads = [*sweeps.varied(table, keys), *["arm"] * (shown["arm"].nunique() > 1)]
    rows = shown.to_dict("records")
    return figure_table(rows, figures, heads, [[Cell(sweeps.text(row[name])) for name in heads] for row in rows])


def figure_cell(row: Mapping[str, Any], name: str) -> Cell:
    """Return the cell of a figure of a row of ``sweep.collect``, with its interval where that is shown."""
    from spec_lab.analysis.metrics import sweeps

    with_interval = name in WITH_INTERVAL or name.startswith(OWN)
    return column(name).cell(sweeps.with_bounds(row, name) if with_interval else row.get(name))


def own_figures(table: pd.DataFrame) -> list[str]:
    """Return the columns of ``sweep.collect`` that hold metrics of one's own, without the bounds of intervals."""
    names = [name for name in table if name.startswith(OWN) and not name.endswith(("_low", "_high"))]
    return [name for name in names if name.count(".") == 1 and table[name].dtype.kind in "if"]


def state_table(runs: Iterable[run_state.RunState], names: Mapping[str, str]) -> DataTable:
    """Return the state of each run, its finished groups, its seconds and what went wrong.

    Args:
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


def refuted(table: pd.DataFrame, names: Mapping[str, str]) -> list[str]:
    """Return which arms of a sweep's runs are declared lossless and were refuted by enumeration, and why.

    Args:
        table: of ``sweep.collect``.
        names: of ``metrics.sweeps.run_labels``.
    """
    from spec_lab.analysis.metrics import sweeps

    lines = []
    for row in table.to_dict("records"):
        word, why = losslessness(row)
        if word == "NOT lossless":
            lines.append(f"{names.get(row['run'], row['run'])}: {word}: {row['arm']}; {why}")
    more = len(lines) - sweeps.MAX_VERDICTS
    return lines[: sweeps.MAX_VERDICTS] + [f"and {more} more; spec-lab collect writes all."] * (more > 0)
