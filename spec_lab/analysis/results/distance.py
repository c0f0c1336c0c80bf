"""The result of ``task=constraint_distance``: how far masked outputs are from the model's own, given that they are
valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.results.result import INTERVAL, REAL, Cell, DataTable, Result, Section, Value, cell, ended_run, run_title

SUMMARY = {
    "temperature": float, "max_new_tokens": int, "constraint": (None, {"name": str}), "?guarantee": {str: str},
    "prompts": [{"prompt": str, "method": str, "?sampler": str, "?error": str, "?local_invalid": REAL,
                 "?outputs": int, "?global_samples": int, "?attempts": int}],
}  # fmt: skip
"""Fields that are read of ``summary.json``; ``z``, ``tv`` and ``kl`` of a prompt are numbers or intervals."""

DISTANCE = (
    "Masked token by token (local) against the model given a valid output (global). Z: probability of a valid output "
    "without the constraint. Invalid: share of masked outputs that do not end within max_new_tokens. TV: total "
    "variation. KL: KL(global || local) in nats. Intervals: 95 %, bootstrap over samples."
)


def result(folder: Path) -> Result:
    """Return the result in a run's directory.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = ended_run(folder, SUMMARY)
    rows = [row | {key: _value(row.get(key)) for key in ("z", "tv", "kl")} for row in summary["prompts"]]
    name = (summary["constraint"] or {}).get("name", "none")
    used = dict.fromkeys(row.get("sampler", row["method"]) for row in rows)
    notes = [f"{how}: {known}." for how in used if (known := summary.get("guarantee", {}).get(how))]
    if cut := [row["prompt"] for row in rows if row.get("stopped_by_attempts")]:
        notes.insert(
            0, f"task.attempts ended the sampling of {', '.join(cut)} before there were task.samples global outputs."
        )
    drawn = {"distance": partial(figures.distance, rows)}
    return Result(
        run_title(manifest),
        f"constraint {name}, masked outputs against valid ones, temperature {summary['temperature']:g}, up to "
        f"{summary['max_new_tokens']} tokens",
        [Section("Distance", DISTANCE, _table(rows), drawn, notes, missing="No distance was measured.")],
        constraint=name,
    )


def _value(value: Any) -> Value:
    """Return a number or an interval of a prompt; None for anything else."""
    if isinstance(value, Mapping):
        ends = {end: value.get(end) for end in INTERVAL}
        numbers = all(end is None or isinstance(end, int | float) for end in ends.values())
        return ends if numbers and ends["mean"] is not None else None
    return float(value) if isinstance(value, int | float) else None


def _table(rows: list[dict[str, Any]]) -> DataTable:
    cells = []
    for row in rows:
        outputs = cell(row.get("outputs" if row["method"] == "exact" else "global_samples"), ".0f")
        if row["method"] != "exact" and row.get("attempts") is not None:
            outputs = Cell(f"{outputs.text} of {row['attempts']}", outputs.value)
        z, tv, kl = (cell(row[key], ".3g") for key in ("z", "tv", "kl"))
        method = Cell(row.get("error") or row.get("sampler") or row["method"])
        cells.append([Cell(row["prompt"]), method, outputs, z, cell(row.get("local_invalid"), ".1%"), tv, kl])
    numbers = ("outputs", "Z", "invalid", "TV", "KL, nats")
    columns = [("prompt", False), ("method", False), *((name, True) for name in numbers)]
    return DataTable(columns, cells, len(cells) > 8)
