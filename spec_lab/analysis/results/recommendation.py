"""The result of ``task=recommend``: the modes, the recommended one with its commands, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_lab.analysis.text import verdict_line
from spec_lab.results.result import INTERVAL, REAL, Cell, DataTable, Result, Section, cell, ended_run, run_title

MODE = {
    "mode": str, "predicted": INTERVAL, "predicted_tau": float, "nodes": float, "measured": (None, INTERVAL),
    "tau": REAL, "state": str, "groups": int,
}  # fmt: skip
PROJECTED = {"hardware": str, "batch": int, "mode": str, "length": int, "speedup": INTERVAL}
SUMMARY = {
    "temperature": float, "batch_size": int, "seconds": float, "minutes": float, "judged": int, "level": float,
    "max_new_tokens": int, "conclusion": str, "modes": [MODE], "refused": [{"mode": str, "reason": str}],
    "recommended": {"mode": str, "command": str, "preset": str, "speedup": INTERVAL}, "engines": {str: str},
    "changes": [str], "batches": [{"batch": int, "mode": str, "predicted": float, "measured": bool}],
    "costs": [{"batch": int, "nodes": int, "seconds": float, "spread": REAL}],
    "projection": (None, {"model": str, "context": int, "rows": [PROJECTED], "why_not": str, "error": str}),
    "?verdict": str, "?verdict_reasons": [str],
}  # fmt: skip
"""Fields that are read of ``summary.json``."""

MODES = (
    "Predicted: tau by replay of a few recordings, over the measured cost of its steps. Measured: in paired groups of "
    "prompts against decoding without speculation. One mode is chosen by half of the prompts and measured on the "
    "others, with an interval that allows for all looks; it is recommended only if the whole interval is above 1. "
    "tau: emitted tokens of a step, as measured; predicted tau: by replay."
)
BADGES = {"recommended": "good", "slower": "bad", "not shown faster": "warn"}


def result(folder: Path) -> Result:
    """Return the result in a run's directory.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = ended_run(folder, SUMMARY)
    chosen = summary["recommended"]
    sections = [Section("Modes", MODES, _modes(summary["modes"]), missing="No mode could be judged.")]
    sections.append(Section("Run it", "", notes=[chosen["command"], f"As a preset: {chosen['preset']}"]))
    if summary["engines"]:
        rows = [[Cell(engine), Cell(flags)] for engine, flags in summary["engines"].items()]
        how = "The same mode in other engines, as their options were collected; they were not run here."
        sections.append(Section("Other engines", how, DataTable([("engine", False), ("flags", False)], rows)))
    if summary["changes"]:
        sections.append(Section("What would have to change", "", notes=summary["changes"]))
    if len(summary["batches"]) > 1:
        how = "The best prediction at each batch size, by the measured cost of steps; drafting as in the recording."
        sections.append(Section("Batch sizes", how, _batches(summary["batches"], summary["modes"])))
    if summary["projection"] is not None:
        sections.append(_projection(summary["projection"]))
    if summary["refused"]:
        rows = [[Cell(line["mode"]), Cell(line["reason"])] for line in summary["refused"]]
        sections.append(Section("Not tried", "", DataTable([("mode", False), ("reason", False)], rows)))
    return Result(
        run_title(manifest),
        f"{summary['judged']} modes judged, {summary['seconds'] / 60:.1f} of {summary['minutes']:g} minutes, "
        f"batch size {summary['batch_size']}, temperature {summary['temperature']:g}, outputs of at most "
        f"{summary['max_new_tokens']} tokens",
        sections,
        [summary["conclusion"], *([verdict_line(summary)] if summary.get("verdict") else [])],
    )  # fmt: skip


def _modes(modes: Sequence[Mapping[str, Any]]) -> DataTable | None:
    rows = [
        [Cell(f"{number}: {row['mode']}"), Cell(row["state"], badge=BADGES.get(row["state"], "plain")),
         cell(row["predicted"]), cell(row["measured"]), cell(row["tau"]), cell(row["predicted_tau"]),
         cell(row["nodes"], ".1f"), cell(row["groups"], ".0f")]
        for number, row in enumerate(modes, 1)
    ]  # fmt: skip
    names = ("predicted", "measured", "tau", "predicted tau", "nodes", "groups")
    columns = [("mode", False), ("verdict", False), *((name, True) for name in names)]
    return DataTable(columns, rows, more=("predicted tau", "nodes", "groups")) if rows else None


def _batches(rows: Sequence[Mapping[str, Any]], modes: Sequence[Mapping[str, Any]]) -> DataTable:
    numbers = {row["mode"]: f"mode {number}" for number, row in enumerate(modes, 1)}
    names = [numbers.get(row["mode"], row["mode"]) for row in rows]
    cells = [[cell(row["batch"], ".0f"), Cell(name if row["predicted"] > 1 else f"none ({name})"),
              cell(row["predicted"])] for row, name in zip(rows, names, strict=True)]  # fmt: skip
    return DataTable([("batch", True), ("mode", False), ("predicted", True)], cells)


def _projection(projection: Mapping[str, Any]) -> Section:
    rows = [[Cell(row["hardware"]), cell(row["batch"], ".0f"), Cell(row["mode"]), cell(row["length"], ".0f"),
             cell(row["speedup"])] for row in projection["rows"]]  # fmt: skip
    columns = [("hardware", False), ("batch", True), ("mode", False), ("length", True), ("projected", True)]
    how = f"The acceptance measured here, with the size of {projection['model']} at {projection['context']} tokens."
    why = [f"Not projected: {projection['why_not']}."] * bool(projection["why_not"])
    return Section(
        "On other hardware", how, DataTable(columns, rows) if rows else None, notes=[*why, projection["error"]]
    )
