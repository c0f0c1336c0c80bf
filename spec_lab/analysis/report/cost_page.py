"""The page about measured step costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.names import names_in_manifest
from spec_lab.analysis.report.facts import ended_summary, page_of_run
from spec_lab.analysis.report.page import Cell, DataTable, Section, render, value_cell
from spec_lab.analysis.roofline_text import roofline_notes
from spec_lab.analysis.text import verdict_line
from spec_lab.results.manifest import begun

PLACE = {"batch": int, "context": int}
SPREAD = {**PLACE, "seconds": float, "low": float, "high": float}
SUMMARY = {
    "turns": int, "rounds": int, "temperature": float, "nodes": [{**SPREAD, "nodes": int}],
    "arms": [{**SPREAD, "arm": str}],
    "?verdict": str, "?verdict_reasons": [str],
    "?baseline": [{**PLACE, "roofline_share": {"mean": (float, None)}, "memory_bound_steps": (float, None)}],
}  # fmt: skip
"""What is read of ``summary.json``."""

NODES = (
    "Milliseconds of a step with n draft nodes of each sequence, t(n), without drafting: median over repeats with "
    "quartiles, and t(n) / t(0)."
)
ARMS = "What each arm adds to a step by drafting and verification, milliseconds: median over repeats with quartiles."


def page(folder: Path) -> str:
    """Return the page's text; writes the figure to ``figures/`` as well.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = begun(folder) or {}, ended_summary(folder, SUMMARY)
    drawn = {"cost": figures.step_costs(summary["nodes"])} if summary["nodes"] else {}
    cases = {f"batch {one['batch']}, context {one['context']}: baseline": one for one in summary.get("baseline", ())}
    content = page_of_run(
        folder,
        manifest,
        lead=f"Step costs, temperature {summary['temperature']:g}, medians of {summary['turns']} repeats of "
        f"{summary['rounds']} steps",
        drawn=drawn,
        verdict=verdict_line(summary),
    )
    sections = [
        Section(
            "Time of a step by nodes", NODES, _nodes(summary), ["cost"], roofline_notes(cases, manifest.get("roofline"))
        ),
        Section("What arms add", ARMS, _arms(summary, names_in_manifest(manifest))),
    ]
    return render("sections", content, folder, sections=sections)


def _nodes(summary: Mapping[str, Any]) -> DataTable:
    first = {(one["batch"], one["context"]): one["seconds"] for one in summary["nodes"] if one["nodes"] == 0}
    rows = []
    for one in summary["nodes"]:
        base = first.get((one["batch"], one["context"]))
        numbers = [value_cell(one[key], ".0f") for key in ("batch", "context", "nodes")]
        rows.append([*numbers, _spread(one), value_cell(one["seconds"] / base if base else None)])
    names = ("batch size", "context", "nodes", "t(n), ms [quartiles]", "t(n) / t(0)")
    return DataTable([(name, True) for name in names], rows, filters=("batch size", "context"))


def _arms(summary: Mapping[str, Any], names: Mapping[str, str]) -> DataTable:
    rows = [
        [Cell(names.get(one["arm"], one["arm"]), colour=figures.colour(names.get(one["arm"], one["arm"]))),
         value_cell(one["batch"], ".0f"), value_cell(one["context"], ".0f"), _spread(one)]
        for one in summary["arms"]
    ]  # fmt: skip
    columns = [("arm", False), ("batch size", True), ("context", True), ("ms [quartiles]", True)]
    return DataTable(columns, rows, filters=("arm", "batch size", "context"))


def _spread(one: Mapping[str, Any]) -> Cell:
    return value_cell({"mean": one["seconds"], "low": one["low"], "high": one["high"]}, ".2f", 1e3)
