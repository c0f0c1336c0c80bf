"""The commands ``spec-lab replay`` and ``spec-lab bounds``: evaluate a recorded run, and print tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from spec_lab.analysis.console import say, show_table
from spec_lab.analysis.results.bounds import NOTE, bounds_table
from spec_lab.core.files import read_text
from spec_lab.core.progress import Progress
from spec_lab.replay import designs, engine_logs, traces
from spec_lab.replay.bounds import ArmBounds
from spec_lab.replay.recorded_trees import NOTHING, read
from spec_lab.results.manifest import finite
from spec_lab.results.result import Cell, DataTable, cell, interval
from spec_lab.verify import Lenient

MAX_ROWS = 40
"""Rows of the table on the screen."""

OPTIONAL = {
    "drawn": "",
    "draft_temperature": "draft T ",
    "draft_top_k": "draft top-k ",
    "confidence": "confidence ",
}
"""Columns that are shown where they vary, and in which words."""


def replay(folder: Path, options: designs.Options, arms: Sequence[str] = ()) -> pd.DataFrame:
    """Evaluate all combinations of the options on the recorded trees of a run; see ``designs`` for the columns.

    Args:
        options: what is combined.
        arms: of the run; all if empty.

    Raises:
        ValueError: no recorded run there, an unknown arm, verifier or shape.
        OSError: a file that cannot be read.
    """
    recorded = read(folder, tuple(arms))
    if not recorded:
        raise ValueError(f"{folder}: {NOTHING}")
    wanted = {name: designs.designs(trees, options) for name, trees in recorded.items()}
    frames = []
    with Progress(total=sum(map(len, wanted.values())), desc="replay", unit="design") as bar:
        for name, trees in recorded.items():
            estimates, last = [], None
            for estimate in designs.evaluate(trees, wanted[name]):
                estimates.append(estimate)
                if estimate.design is not last:
                    bar.update(1)
                last = estimate.design
            frame = designs.table(estimates)
            frame.insert(0, "arm", name)
            frames.append(frame)
    return designs.ordered(pd.concat(frames))


def trace(file: Path, written: str = "jsonl", verifiers: Sequence[str] = ()) -> pd.DataFrame:
    """Evaluate a trace of another system; see ``traces.taus`` for the columns.

    Args:
        written: its format: "jsonl", "vllm", or one of ``RESPONSES``.
        verifiers: of these ``lenient`` adds rules.

    Raises:
        ValueError: it is not of that format, or an unknown verifier.
        OSError: it cannot be read.
    """
    named = map(designs.verifier_of, verifiers)
    lenience = [verifier.lenience for verifier in named if isinstance(verifier, Lenient)]
    if written == "jsonl":
        return traces.taus(traces.read_trace(file), lenience=lenience)
    if written in RESPONSES:
        return traces.taus(engine_logs.read_responses(file, RESPONSES[written]))
    text = read_text(file)
    try:
        return traces.taus(engine_logs.from_vllm(text))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


RESPONSES = {"vllm_requests": engine_logs.vllm_requests, "sglang": engine_logs.sglang, "trtllm": engine_logs.trtllm}
"""Converters of responses, by format."""


def print_trace(frame: pd.DataFrame, console: Console) -> None:
    """Print tau by rule and depth."""
    rows = []
    for row in frame.to_dict("records"):
        rule = row["rule"] if row["lossless"] is not False else f"{row['rule']}, lossy"
        rows.append([Cell(rule), Cell(str(row["depth"])), _tau(row, ".3f"), cell(row["steps"], ".0f")])
    show_table("", DataTable([("rule", False), ("depth", False), ("tau", True), ("steps", True)], rows), console)


def print_table(frame: pd.DataFrame, console: Console) -> None:
    """Print the designs with the most expected tokens a step, lossless ones first, and why others are not
    identified.
    """
    known = frame[frame["needs"] == ""]
    varied = [name for name in ("arm", *OPTIONAL) if known[name].nunique(dropna=False) > 1]
    rows = []
    for row in known.head(MAX_ROWS).to_dict("records"):
        left_open = f"±{(row['bound_high'] - row['bound_low']) / 2:.2g} {row['bound_kind']}"
        parts = [row["method"], _label(row["verifier"], row["lossless"]), _design(row, varied)]
        rows.append([*map(Cell, parts), _tau(row, ".2f"), Cell(left_open), cell(row["effective_steps"], ".0f")])
    columns = [(name, name in ("tau", "steps")) for name in ("method", "verifier", "design", "tau", "open", "steps")]
    if show_table("", DataTable(columns, rows), console):
        say(
            console,
            "Lossless designs first; lossy verifiers change the distribution of the texts. "
            "tau: tokens per step [95 %, over requests]. open: what tokens that were not recorded leave open of it. "
            "steps: as many as the estimate weighs. See docs/replay.md.",
        )
    if len(known) > MAX_ROWS:
        say(console, f"The first {MAX_ROWS} of {len(known)}; --csv FILE writes all.")
    for why, group in frame[frame["needs"] != ""].groupby("needs", sort=False):
        say(console, f"{len(group)} design{'s' * (len(group) > 1)}: {why}", wrap=False)


def _tau(row: Mapping[str, Any], form: str) -> Cell:
    return replace(cell({"mean": row["tau"], "low": row["low"], "high": row["high"]}, form), text=f"{row['tau']:.3f}")


def _design(row: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Return the shape of a design and the options that vary, in words that lines can break between."""
    shape = row["shape"].replace(",", ", ").replace("+", " + ")
    arm = [row["arm"]] if "arm" in varied else []
    given = [name for name in OPTIONAL if name in varied and row[name] != "" and pd.notna(row[name])]
    options = [f"{OPTIONAL[name]}{row[name]}" for name in given]
    return ", ".join([*arm, shape, *options])


def print_bounds(bounds: Mapping[str, ArmBounds], console: Console) -> None:
    """Print each arm's shares of the optimum, and where its tokens are lost.

    Raises:
        ValueError: there is no arm.
    """
    if not bounds:
        raise ValueError(NOTHING)
    for name, arm in bounds.items():
        if arm.needs:
            say(console, f"{name}: {arm.needs}", wrap=False)
            continue
        kind = {"exact": "optimum", "bound": "at most", "estimate": "estimated optimum"}[arm.kind]
        summary = arm.summary()
        say(
            console,
            f"{name}: drawn {arm.drawn}, {arm.nodes:.3g} nodes, depth {arm.depth:.3g}, {arm.steps} steps; "
            f"{kind} {interval(summary['optimum'])} tokens a step, of at most {arm.depth + 1:.3g}",
            "bold",
        )
        table = bounds_table({name: finite(summary)}, ".2f", _label)
        columns = [number for number, (heading, _) in enumerate(table.columns) if heading not in ("arm", *table.more)]
        rows = [[row[at] if table.columns[at][0] == "tau" else replace(row[at], ends="") for at in columns]
                for row in table.rows]  # fmt: skip
        show_table("", DataTable([table.columns[at] for at in columns], rows), console)
    if any(not arm.needs for arm in bounds.values()):
        say(console, NOTE)


def _label(verifier: str, lossless: bool) -> str:
    """Return a verifier's name and options in words that lines can break between; long options break after =."""
    name, _, options = verifier.partition(":")
    words = [option if len(option) < 14 else option.replace("=", "= ", 1) for option in options.split(",") if option]
    return ", ".join([" ".join([name, *words[:1]]), *words[1:], *([] if lossless else ["lossy"])])
