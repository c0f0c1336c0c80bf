"""The table of the runs of a sweep and their states, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spec_lab.results import sweep
from spec_lab.results.result import Cell, DataTable, cell


def state_table(runs: Iterable[sweep.Run], names: Mapping[str, str]) -> DataTable:
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
