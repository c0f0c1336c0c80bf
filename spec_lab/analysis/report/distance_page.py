"""The page about the distance between masked outputs and the model's own, given that they are valid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.report.facts import ended_summary, page_of_run
from spec_lab.analysis.report.page import Cell, DataTable, Section, render, value_cell
from spec_lab.results.manifest import begun

REAL = (float, None)
SUMMARY = {
    "temperature": float, "max_new_tokens": int, "constraint": (None, {"name": str}), "?guarantee": {str: str},
    "prompts": [{"prompt": str, "method": str, "?sampler": str, "?error": str, "?local_invalid": REAL,
                 "?outputs": int, "?global_samples": int, "?attempts": int}],
}  # fmt: skip
"""What is read of ``summary.json``; ``z``, ``tv`` and ``kl`` of a prompt are numbers or intervals."""

VALUE = {"mean": REAL, "low": REAL, "high": REAL}

DISTANCE = (
    "Masked token by token (local) against the model given a valid output (global). Z: probability of a valid output "
    "without the constraint. Invalid: share of masked outputs that do not end within max_new_tokens. TV: total "
    "variation. KL: KL(global || local) in nats. Intervals: 95 %, bootstrap over samples."
)


def page(folder: Path) -> str:
    """Return the page's text; writes the figure to ``figures/`` as well.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = begun(folder) or {}, ended_summary(folder, SUMMARY)
    rows = [row | {key: _value(row.get(key)) for key in ("z", "tv", "kl")} for row in summary["prompts"]]
    figure = figures.distance(rows)
    name = (summary["constraint"] or {}).get("name", "none")
    content = page_of_run(
        folder,
        manifest,
        lead=f"Constraint {name}, temperature {summary['temperature']:g}, up to {summary['max_new_tokens']} tokens",
        drawn={} if figure is None else {"distance": figure},
        constraint=name,
    )
    used = dict.fromkeys(row.get("sampler", row["method"]) for row in rows)
    notes = [f"{one}: {summary.get('guarantee', {})[one]}." for one in used if one in summary.get("guarantee", {})]
    section = Section("Distance", DISTANCE, _table(rows), ["distance"], notes, missing="No distance was measured.")
    return render("sections", content, folder, sections=[section])


def _value(value: Any) -> Mapping[str, float | None] | float | None:
    """Return a number or an interval of a prompt; None for anything else."""
    if isinstance(value, Mapping):
        ends = {end: value.get(end) for end in VALUE}
        return ends if all(one is None or isinstance(one, int | float) for one in ends.values()) else None
    return float(value) if isinstance(value, int | float) else None


def _table(rows: list[dict[str, Any]]) -> DataTable:
    cells = []
    for row in rows:
        exact = row["method"] == "exact"
        outputs = row.get("outputs") if exact else row.get("global_samples")
        of = "" if exact or row.get("attempts") is None else f" of {row['attempts']}"
        found = [value_cell(row[key], ".3g") for key in ("z", "tv", "kl")]
        count = Cell("" if outputs is None else f"{outputs}{of}", float("nan") if outputs is None else outputs)
        method = Cell(row.get("error") or row.get("sampler") or row["method"])
        cells.append(
            [Cell(row["prompt"]), method, count, found[0], value_cell(row.get("local_invalid"), ".1%"), *found[1:]]
        )
    columns = [("prompt", False), ("method", False)]
    columns += [(name, True) for name in ("outputs", "Z", "invalid", "TV", "KL, nats")]
    return DataTable(columns, cells, len(cells) > 8)
