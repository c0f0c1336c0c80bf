"""A sweep's figures as a LaTeX table."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from spec_lab.analysis.metrics import sweeps
from spec_lab.analysis.run_tables import figure_cell
from spec_lab.analysis.text import COLUMNS
from spec_lab.core.terminal import visible

FIGURES = ("speedup", "tau_pooled", "draft_token_rate", "tokens_per_second")
"""Columns of the table, after the options that vary and the arm."""


def latex_table(table: pd.DataFrame, keys: Sequence[str]) -> str:
    """Return a ``tabular`` with a row for each run and arm but the baseline; it requires the package booktabs.

    Args:
        table: of ``sweep.collect``.
        keys: the sweep's options; those with the same value in all runs are left out.

    Raises:
        ValueError: no run has a figure of ``FIGURES``.
    """
    table = sweeps.named(table)
    figures = [name for name in FIGURES if name in table]
    if not figures:
        raise ValueError(f"the runs have none of the figures {', '.join(FIGURES)}: a LaTeX table has nothing to show")
    shown = table[table["arm"] != "baseline"] if (table["arm"] != "baseline").any() else table
    names = [*sweeps.varied(table, keys), *(["arm"] if shown["arm"].nunique() > 1 else [])]
    columns = {name: [visible(sweeps.text(value)) for value in shown[name]] for name in names}
    rows = shown.to_dict("records")
    for name in figures:
        columns[COLUMNS[name].heading] = [figure_cell(row, name).whole for row in rows]
    layout = "l" * len(names) + "r" * len(figures)
    return pd.DataFrame(columns).to_latex(index=False, escape=True, column_format=layout)
