"""Tables in LaTeX."""

from __future__ import annotations

import pandas as pd

from spec_lab.core.terminal import visible
from spec_lab.results.result import DataTable


def latex(data: DataTable) -> str:
    """Return a table as a ``tabular``; it requires the package booktabs."""
    heads = [name for name, _ in data.columns]
    rows = [[visible(cell.whole) for cell in row] for row in data.rows]
    layout = "".join("r" if numeric else "l" for _, numeric in data.columns)
    return pd.DataFrame(rows, columns=heads).to_latex(index=False, escape=True, column_format=layout)
