"""The result of ``task=train_online``: a drafter that learns from what was served, beside one that does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis.results.serving import RANGE, along_stream, marked_change
from spec_lab.results.result import Cell, DataTable, Result, Section, cell, ended_run, run_title

SUMMARY = {
    "drafter": str, "temperature": float, "requests": int, "round": int, "?change": (int, None),
    "versions": [{"version": int, "sha256": str, "texts": int, "steps": int, "seconds": float}],
    "arms": {str: {"rounds": [RANGE]}},
}  # fmt: skip
"""Fields that are read of ``summary.json``."""

ROUNDS = (
    "Both arms serve the same requests. Frozen: the drafter as it was when the stream began; online: its latest "
    "version, which has learned from the rounds before. 95 % intervals over requests. Speed is not measured: while a "
    "drafter learns, nothing is served."
)


def result(folder: Path) -> Result:
    """Return the result in a run's directory.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = ended_run(folder, SUMMARY)
    size, change = summary["round"], summary.get("change")
    arms = {name: arm["rounds"] for name, arm in summary["arms"].items()}
    marked = None if change is None else (change / size + 0.5, marked_change(change)[1])
    drawn = along_stream({"round": arms}, "online", marked)
    changes = [] if change is None else [f"The workload changes with request {change}, in round {change // size + 1}."]
    return Result(
        run_title(manifest),
        f"{summary['drafter']}, {summary['requests']} requests in rounds of {size}, temperature "
        f"{summary['temperature']:g}",
        [
            Section("Rounds", ROUNDS, _rounds(arms), drawn, changes),
            Section("Versions", "What each version has learned from, and how long it took.", _versions(summary)),
        ],
    )


def _rounds(arms: Mapping[str, Any]) -> DataTable:
    by_round: dict[int, dict[str, Mapping[str, Any]]] = {}
    for arm, rows in arms.items():
        for row in rows:
            by_round.setdefault(row["first"], {})[arm] = row
    each = (("tau_pooled", ".2f", 1), ("draft_token_rate", ".1f", 100))
    rows = [
        [cell(number, ".0f"), *(cell((row.get(arm) or {}).get(name), form, scale) for name, form, scale in each
                                for arm in arms)]
        for number, row in sorted(by_round.items())
    ]  # fmt: skip
    names = [f"{what}, {arm}" for what in ("tau [95 %]", "acceptance rate %") for arm in arms]
    return DataTable([(name, True) for name in ("round", *names)], rows)


def _versions(summary: Mapping[str, Any]) -> DataTable:
    rows = [
        [cell(version["version"], ".0f"), cell(version["texts"], ".0f"), cell(version["steps"], ".0f"),
         cell(version["seconds"], ".1f"), Cell(version["sha256"][:12])]
        for version in summary["versions"]
    ]  # fmt: skip
    columns = [("version", True), ("texts", True), ("steps", True), ("seconds", True), ("SHA-256", False)]
    return DataTable(columns, rows)
