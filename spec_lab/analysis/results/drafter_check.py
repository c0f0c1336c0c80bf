"""The result of ``task=check_drafter``: acceptance by reading, by depth, along the texts, and of the confidence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures
from spec_lab.analysis.figures.drafter_check import NAMES
from spec_lab.analysis.results.reliability import MEANING, calibrations, shape
from spec_lab.results.result import (
    INTERVAL,
    REAL,
    Cell,
    DataTable,
    Result,
    Section,
    cell,
    ended_run,
    interval,
    run_title,
)

RANGE = {"first": int, "last": int, "steps": int, "tokens": INTERVAL, "beyond": bool}
SUMMARY = {
    "proposer": str, "temperature": float, "depth": int, "tree": bool, "texts": int, "tokens": int,
    "trained_context": (int, None), "gain": float, "best": int, "alike": [int],
    "readings": [{"changed": {}, "label": str, "helps": bool, "?error": str, "?tau": INTERVAL,
                  "?gain": (None, INTERVAL), "?agreed": [REAL], "?alpha": [REAL]}],
    "by_position": {str: [RANGE]}, "by_context": {str: [RANGE]}, "calibration": {str: (None, shape("agreed"))},
    "expected": (None, {"value": float, "by": {"sampling", "reading", "prompts", "nothing"}, "changed": {},
                        "whole": bool}),
}  # fmt: skip
"""Fields that are read of ``summary.json``."""

READINGS = (
    "Expected tau: tokens of a step on the target's own answers, verified losslessly; gain: the difference to the "
    "reading in use, paired by prompt. Intervals of other readings allow for the number of readings and combinations "
    "tried. Readings of prompts have answers of their own."
)
DEPTHS = (
    "After the true tokens. Agreement: the likeliest tokens of target and draft are the same. alpha: sum min(p, q), "
    "the probability that token verification accepts a drafted token; where the temperature is 0, at temperature 1."
)
RANGES = "Expected tokens of a step that begins after so many tokens, with 95 % intervals over texts."
CONFIDENCE = (
    "Confidence: the largest draft probability at temperature 1, against how often the target's likeliest token is "
    f"the same; of a confidence head (DSpark) its prediction, against alpha. {MEANING}"
)
REASONS = {
    "sampling": "The difference is explained by sampling: the interval over texts holds {value:g}.",
    "reading": "The difference is explained by the reading: with {options} tau is {tau}.",
    "prompts": "The difference is explained by how the prompts are sent: with {options} tau is {tau}.",
    "nothing": "Neither sampling, the prompts' template nor a reading explains the difference: compare prompts, "
               "temperature, draft length and trees; these are {drafts}.",
}  # fmt: skip


def result(folder: Path) -> Result:
    """Return the result in a run's directory.

    Raises:
        ValueError: the task has not ended; files that are not readable.
    """
    manifest, summary = ended_run(folder, SUMMARY)
    readings = summary["readings"]
    known = [reading for reading in readings if "tau" in reading]
    if not known or known[0] is not readings[0] or not 0 <= summary["best"] < len(readings):
        raise ValueError(f"{folder}/summary.json lacks the reading in use; run the same command again")
    names = list(dict.fromkeys([0, summary["best"]]))
    shown = {NAMES[key]: readings[number] for key, number in zip(NAMES, names, strict=False)}
    stated = {NAMES.get(name, name): facts for name, facts in summary["calibration"].items() if facts is not None}
    return Result(
        run_title(manifest),
        f"{summary['proposer']}, {_drafts(summary)}, along {summary['texts']} answers of "
        f"{summary['tokens']} tokens at temperature {summary['temperature']:g}",
        [
            Section("Readings", READINGS, _readings(readings, summary["best"]),
                    {"readings": partial(figures.reading_taus, known)}),
            Section("By depth", DEPTHS, _depths(readings, summary["depth"]),
                    {"depths": partial(figures.by_depth, shown)}),
            Section("By position in the output", RANGES, _ranges(summary["by_position"]),
                    {"positions": partial(figures.by_range, _panels(summary), "tokens", "expected tokens per step",
                                          NAMES, _trained(summary["trained_context"]))}),
            Section("By context length", RANGES, _ranges(summary["by_context"]), notes=_context_notes(summary)),
            Section("Calibration of the confidence", CONFIDENCE,
                    calibrations(stated, "reading", "agreed", "agreement or alpha") if stated else None,
                    {"reliability": partial(figures.reliability, stated)} if stated else {},
                    missing="The drafter states no probabilities."),
        ],
        verdict(summary),
        verdict_first=True,
    )  # fmt: skip


def _trained(context: int | None) -> tuple[int, str] | None:
    """Return what the figure along the texts marks: the trained context, if it is known."""
    return None if context is None else (context, f"the trained context, {context}")


def _panels(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the ranges of each panel of the figure along the texts, by the panel's axis."""
    return {f"{axis}, tokens before the step": summary[name] for axis, name in
            (("tokens of the output", "by_position"), ("context", "by_context"))}  # fmt: skip


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines at the top: which reading is best and by how much, and what explains an expected tau."""
    readings = summary["readings"]
    used, best, failed = readings[0], readings[summary["best"]], [reading for reading in readings if "error" in reading]
    tau = interval(used["tau"])
    if len(readings) == 1:
        lines = [f"Expected tau {tau}. The files and prompts leave no other reading open."]
    elif len(failed) == len(readings) - 1:
        lines = [f"Expected tau {tau}, of the reading in use."]
    elif best is used:
        others = len(readings) - len(failed) - 1
        shown = "The other reading is not" if others == 1 else f"None of the {others} other readings is"
        lines = [f"Expected tau {tau}, of the reading in use. {shown} shown to be better."]
    else:
        lines = [
            f"Best reading: {_options(best['changed'])} ({best['label']}): expected tau {interval(best['tau'])}, "
            f"{interval(best['gain'], '+.2f')} over the reading in use, {tau}."
        ]
        lines += [
            f"{_options(reading['changed'])} cannot be told apart from it: tau {interval(reading['tau'])}."
            for number, reading in enumerate(readings)
            if number in summary["alike"] and "tau" in reading
        ]
    if failed:
        reasons = "; ".join(f"{_options(reading['changed'])} ({reading['error']})" for reading in failed)
        lines.append(f"{len(failed)} of {len(readings)} readings could not be measured: {reasons}.")
    lines += [
        f"With {_options(reading['changed'])} ({reading['label']}) tau is {interval(reading['tau'])}, of other answers."
        for reading in readings
        if reading["helps"] and any(name.startswith("prompts.") for name in reading["changed"])
    ]
    if (expected := summary["expected"]) is not None:
        changed = next((reading for reading in readings[1:] if reading["changed"] == expected["changed"]), used)
        reason = REASONS[expected["by"]].format(
            value=expected["value"], options=_options(expected["changed"]), tau=interval(changed.get("tau")),
            drafts=_drafts(summary),
        )  # fmt: skip
        if not expected["whole"]:
            reason = reason.replace("The difference is explained by", "A part of the difference is explained by")
        lines.append(f"Expected {expected['value']:g}, measured {tau}. {reason}")
    return lines


def _drafts(summary: Mapping[str, Any]) -> str:
    return f"{'its own trees' if summary['tree'] else 'chains'} of depth {summary['depth']}"


def _options(changed: Mapping[str, Any]) -> str:
    """Return the options that set conventions, as on the command line."""
    return " ".join(
        f"{name if '.' in name else f'proposer.{name}'}="
        + (value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
        for name, value in changed.items()
    )


def _readings(readings: Sequence[Mapping[str, Any]], best: int) -> DataTable:
    rows = []
    for number, reading in enumerate(readings):
        badge = Cell("")
        if number == 0:
            badge = Cell("in use", badge="good" if best == 0 else "warn")
        elif number == best:
            badge = Cell("best", badge="good")
        label = Cell(reading["error"] if "error" in reading else reading["label"] if number else "")
        rows.append([
            Cell(_options(reading["changed"]) or "as the files are read"), label, badge,
            cell(reading.get("tau")), cell(reading.get("gain") if number else None, "+.2f"),
        ])  # fmt: skip
    columns = [("reading", False), ("meaning", False), ("", False), ("expected tau", True), ("gain", True)]
    return DataTable(columns, rows, len(rows) > 8)


def _depths(readings: Sequence[Mapping[str, Any]], depth: int) -> DataTable:
    columns = [("reading", False), ("figure", False), *((f"depth {level + 1}", True) for level in range(depth))]
    rows = [
        [
            Cell(_options(reading["changed"]) or "in use"),
            Cell(name),
            *(cell(value, ".3f") for value in reading[key][:depth]),
        ]
        for reading in readings
        if "tau" in reading
        for key, name in (("agreed", "agreement"), ("alpha", "alpha"))
    ]
    rows = [[*row, *[cell(None)] * (len(columns) - len(row))] for row in rows]
    return DataTable(columns, rows, len(rows) > 8, ("figure",))


def _ranges(by_name: Mapping[str, Sequence[Mapping[str, Any]]]) -> DataTable:
    rows = [
        [Cell(NAMES.get(name, name)), Cell(f"{row['first']} to {row['last']}"), cell(row["steps"], ".0f"),
         cell(row["tokens"]), Cell("beyond the trained context", badge="warn") if row["beyond"] else Cell("")]
        for name, ranges in by_name.items()
        for row in ranges
    ]  # fmt: skip
    columns = [("reading", False), ("tokens before", False), ("steps", True), ("tokens per step", True), ("", False)]
    return DataTable(columns, rows, filters=("reading",))


def _context_notes(summary: Mapping[str, Any]) -> list[str]:
    trained = summary["trained_context"]
    if trained is None:
        return ["The drafter's files do not state the context that it was trained with."]
    longest = max((row["last"] for row in summary["by_context"].get("used", ())), default=0)
    beyond = "some steps are beyond it" if longest > trained else f"the longest context here is {longest}"
    return [f"The drafter's files state a context of {trained} positions; {beyond}."]
