"""Names of tables, columns, arms and figures in files of older versions: the one place that maps them to today's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spec_lab.core.files import read_json
from spec_lab.core.options import OLD_VALUES

TABLES = {"rounds": "forwards"}
NAMED_VALUES = ("way", "drawn", "attention")
"""Columns and keys with values of options, which may have another name now."""
COLUMNS = {"round": "forward", "least_seconds": "lower_bound_seconds"}
UNCOUNTED = {"uploads": np.int64, "captures": np.int64, "capture": np.float64}
"""Columns of forwards that older versions do not have."""
FIGURES = {"rounds": "steps"}
"""Entries of a summary."""
MAIN_ARM = "speculative"
"""Key of the arm of ``proposer``; today it is the name of its proposer."""
ARM_COLUMNS = ("arm", "proposer")
"""Columns with keys of arms; ``proposer`` is that of a verifier study."""


def arm_names(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return today's key of the arm of ``proposer`` by its former one; empty for a run of today.

    It keeps its key where another arm has its proposer's name, or the name is not known.

    Args:
        manifest: as its file states it.
    """
    proposers, arms = manifest.get("proposers"), manifest.get("arms")
    facts = proposers.get(MAIN_ARM) if isinstance(proposers, Mapping) else None
    name = facts.get("name") if isinstance(facts, Mapping) else None
    return {MAIN_ARM: name} if isinstance(name, str) and isinstance(arms, list) and name not in arms else {}


def _arm_names_in(folder: Path) -> dict[str, str]:
    """Return ``arm_names`` of the run in a folder; empty where nothing states them."""
    manifest = None
    with suppress(OSError, ValueError):
        manifest = read_json(folder / "manifest.json")
    return arm_names(manifest or {})


def with_arms(contents: Any, names: Mapping[str, str]) -> Any:
    """Return the contents of a JSON file with today's keys of arms and values of options."""
    if isinstance(contents, Mapping):
        return {
            names.get(key, key): OLD_VALUES.get(value, value)
            if key in NAMED_VALUES and isinstance(value, str)
            else with_arms(value, names)
            for key, value in contents.items()
        }
    if isinstance(contents, list):
        return [with_arms(value, names) for value in contents]
    return names.get(contents, contents) if isinstance(contents, str) else contents


def table_names(name: str) -> list[str]:
    """Return the names of a table's files: older ones first, then today's."""
    return [*(old for old, new in TABLES.items() if new == name), name]


def with_columns(table: pa.Table, folder: Path) -> pa.Table:
    """Return a table with today's names of columns, arms and values. What was not counted of forwards is 0.

    Args:
        folder: of the run, whose manifest names the proposer of each arm.
    """
    table = table.rename_columns([COLUMNS.get(name, name) for name in table.column_names])
    for name in {*NAMED_VALUES} & {*table.column_names}:
        values = table[name]
        for old, new in OLD_VALUES.items():
            values = pc.if_else(pc.equal(values, old), new, values)
        table = table.set_column(table.column_names.index(name), name, values)
    for name in {*ARM_COLUMNS} & {*table.column_names}:
        if pc.any(former := pc.equal(table[name], MAIN_ARM)).as_py():
            key = _arm_names_in(folder).get(MAIN_ARM, MAIN_ARM)
            table = table.set_column(table.column_names.index(name), name, pc.if_else(former, key, table[name]))
    if "copies_after" in table.column_names:
        for name, dtype in UNCOUNTED.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array(np.zeros(len(table), dtype=dtype)))
    return table


def read_summary(file: Path) -> dict[str, Any] | None:
    """Return the contents of a ``summary.json`` with today's names of figures and arms; None where there is no file.

    Raises:
        ValueError: it is not readable.
    """
    summary = read_json(file)
    if summary is None:
        return None
    named = {FIGURES.get(name, name): value for name, value in summary.items()}
    return dict(with_arms(named, _arm_names_in(file.parent)))


def target_dtype(facts: Mapping[str, Any]) -> str | None:
    """Return the data type in which a run's target was computed; None where it is not known.

    Args:
        facts: its manifest. Older ones have it in their configuration only.
    """
    named = facts.get("target", {}).get("dtype") or (facts["config"].get("target") or {}).get("dtype")
    return None if named == "auto" else named
