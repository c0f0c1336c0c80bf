"""Names of tables, columns and figures in the files of older versions: the one place that maps them to today's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spec_lab.core.files import read_json
from spec_lab.core.options import OLD_VALUES

TABLES = {"rounds": "forwards"}
NAMED_VALUES = ("way", "drawn")
"""Columns with values of options, which may have another name now."""
COLUMNS = {"round": "forward", "least_seconds": "lower_bound_seconds"}
UNCOUNTED = {"uploads": np.int64, "captures": np.int64, "capture": np.float64}
"""Columns of forwards that older versions do not have."""
FIGURES = {"rounds": "steps"}
"""Entries of a summary."""


def table_names(name: str) -> list[str]:
    """Return the names of a table's files: older ones first, then today's."""
    return [*(old for old, new in TABLES.items() if new == name), name]


def with_columns(table: pa.Table) -> pa.Table:
    """Return a table with today's names of columns and values. What was not counted of forwards is 0."""
    table = table.rename_columns([COLUMNS.get(name, name) for name in table.column_names])
    for name in {*NAMED_VALUES} & {*table.column_names}:
        values = table[name]
        for old, new in OLD_VALUES.items():
            values = pc.if_else(pc.equal(values, old), new, values)
        table = table.set_column(table.column_names.index(name), name, values)
    if "copies_after" in table.column_names:
        for name, dtype in UNCOUNTED.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array(np.zeros(len(table), dtype=dtype)))
    return table


def read_summary(file: Path) -> dict[str, Any] | None:
    """Return the contents of a ``summary.json`` with today's names of figures; None where there is no such file.

    Raises:
        ValueError: it is not readable.
    """
    summary = read_json(file)
    return None if summary is None else {FIGURES.get(name, name): value for name, value in summary.items()}


def target_dtype(facts: Mapping[str, Any]) -> str | None:
    """Return the data type in which a run's target was computed; None where it is not known.

    Args:
        facts: its manifest. Older ones have it in their configuration only.
    """
    named = facts.get("target", {}).get("dtype") or (facts["config"].get("target") or {}).get("dtype")
    return None if named == "auto" else named
