"""The commands ``spec-lab replay`` and ``spec-lab bounds``: evaluate a recorded run, and print tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.analysis.metrics.intervals import Interval
from spec_lab.core.files import read_text
from spec_lab.core.progress import Progress
from spec_lab.core.terminal import visible
from spec_lab.replay import designs, traces
from spec_lab.replay.bounds import PARTS, ArmBounds
from spec_lab.replay.trees import NOTHING, read
from spec_lab.verify import Lenient

MOST = 40
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
        folder: the run's directory.
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
            found, last = [], None
            for one in designs.evaluate(trees, wanted[name]):
                found.append(one)
                if one.design is not last:
                    bar.update(1)
                last = one.design
            frame = designs.table(found)
            frame.insert(0, "arm", name)
            frames.append(frame)
    return designs.ordered(pd.concat(frames))


def trace(file: Path, written: str = "jsonl", verifiers: Sequence[str] = ()) -> pd.DataFrame:
    """Evaluate a trace of another system; see ``traces.taus`` for the columns.

    Args:
        file: the trace.
        written: its format: "jsonl", "vllm" or "sglang".
        verifiers: of these ``lenient`` adds rules.

    Raises:
        ValueError: it is not of that format, or an unknown verifier.
        OSError: it cannot be read.
    """
    named = [designs.verifier_of(one) for one in verifiers]
    lenience = [one.lenience for one in named if isinstance(one, Lenient)]
    if written == "jsonl":
        return traces.taus(traces.read_trace(file), lenience=lenience)
    if written == "sglang":
        return traces.taus(traces.read_sglang(file))
    text = read_text(file)
    try:
        return traces.taus(traces.from_vllm(text))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def print_trace(frame: pd.DataFrame, console: Console) -> None:
    """Print tau by rule and depth."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("rule", "depth"):
        shown.add_column(name)
    for name in ("tau", "steps"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in frame.to_dict("records"):
        tau = f"{one['tau']:.3f}"
        if np.isfinite(one["low"]):
            tau += f" [{one['low']:.3f}, {one['high']:.3f}]"
        rule = one["rule"] if one["lossless"] is not False else f"{one['rule']}, lossy"
        shown.add_row(visible(rule), one["depth"], tau, f"{one['steps']:.0f}")
    console.print(shown, highlight=False)


def print_table(frame: pd.DataFrame, console: Console) -> None:
    """Print the designs with the most expected tokens a step, lossless ones first, and why others are not
    identified.
    """
    known = frame[frame["needs"] == ""]
    varied = [name for name in ("arm", *OPTIONAL) if known[name].nunique(dropna=False) > 1]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("method", no_wrap=True)
    shown.add_column("verifier", overflow="fold", min_width=9)
    shown.add_column("design", overflow="fold", min_width=13)
    shown.add_column("tau", justify="right", no_wrap=True)
    shown.add_column("open", justify="right", overflow="fold", min_width=8)
    shown.add_column("steps", justify="right", no_wrap=True)
    for one in known.head(MOST).to_dict("records"):
        tau = f"{one['tau']:.3f}"
        if np.isfinite(one["low"]):
            tau += f" [{one['low']:.2f}, {one['high']:.2f}]"
        open_ = f"±{(one['bound_high'] - one['bound_low']) / 2:.2g} {one['bound_kind']}"
        parts = [one["method"], _label(one["verifier"], one["lossless"]), _design(one, varied)]
        shown.add_row(*map(visible, parts), tau, open_, f"{one['effective_steps']:.0f}")
    if shown.row_count:
        console.print(shown, highlight=False)
        console.print(
            "Lossless designs first; lossy verifiers change the distribution of the texts. "
            "tau: tokens per step [95 %, over requests]. open: what tokens that were not recorded leave open of it. "
            "steps: as many as the estimate weighs. See docs/replay.md.", highlight=False,
        )  # fmt: skip
    if len(known) > MOST:
        console.print(f"The first {MOST} of {len(known)}; --csv FILE writes all.", highlight=False)
    for why, each in frame[frame["needs"] != ""].groupby("needs", sort=False):
        console.print(visible(f"{len(each)} design{'s' * (len(each) > 1)}: {why}"), soft_wrap=True, highlight=False)


def _design(row: Mapping[str, Any], varied: Sequence[str]) -> str:
    """Return the shape of a design and the options that vary, in words that lines can break between."""
    shape = row["shape"].replace(",", ", ").replace("+", " + ")
    arm = [row["arm"]] if "arm" in varied else []
    given = [name for name in OPTIONAL if name in varied and row[name] != "" and pd.notna(row[name])]
    options = [f"{OPTIONAL[name]}{row[name]}" for name in given]
    return ", ".join([*arm, shape, *options])


def print_bounds(found: Mapping[str, ArmBounds], console: Console) -> None:
    """Print each arm's shares of the optimum, and where its tokens are lost.

    Raises:
        ValueError: there is no arm.
    """
    if not found:
        raise ValueError(NOTHING)
    for name, arm in found.items():
        if arm.needs:
            console.print(visible(f"{name}: {arm.needs}"), soft_wrap=True, highlight=False)
            continue
        most = {"exact": "optimum", "bound": "at most", "estimate": "estimated optimum"}[arm.kind]
        console.print(
            visible(
                f"{name}: drawn {arm.drawn}, {arm.nodes:.3g} nodes, depth {arm.depth:.3g}, {arm.steps} steps; "
                f"{most} {_interval(arm.optimum)} tokens a step, of at most {arm.depth + 1:.3g}"
            ),
            style="bold",
            highlight=False,
        )
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        labels = [_label(one.name, one.lossless) + " *" * one.used for one in arm.verifiers]
        longest = max((len(word) for label in labels for word in label.split()), default=0)
        shown.add_column("\nverifier", overflow="fold", min_width=max(14, longest))
        for heading in ("\ntau", "share:\nfirst", "\ntree", "lost:\nverifier", "\nopen", "\ntree", "\ndraft"):
            shown.add_column(heading, justify="right", no_wrap=True)
        for one, label in zip(arm.verifiers, labels, strict=True):
            shares = [f"{x.mean:.1%}" if np.isfinite(x.mean) else "" for x in (one.share_first, one.share)]
            lost = [f"{one.lost[part].mean:.2f}" for part in PARTS]
            shown.add_row(visible(label), _interval(one.tau), *shares, *lost)
        console.print(shown, highlight=False)
    if any(not arm.needs for arm in found.values()):
        console.print(
            "*: the run's verifier. Share of the optimum: first: a child of the root is accepted, if only these are "
            "drafted; tree: accepted tokens. Lost tokens sum to depth + 1 - tau. verifier: the best lossless one here "
            "accepts more; open: none here does, but the bound permits it; tree: another tree of as many nodes, an "
            "estimate; draft: the rest. Lossy verifiers may exceed the optimum. See docs/bounds.md.",
            highlight=False,
        )


def _label(verifier: str, lossless: bool) -> str:
    """Return a verifier's name and options in words that lines can break between; long options break after =."""
    name, _, options = verifier.partition(":")
    each = [one if len(one) < 14 else one.replace("=", "= ", 1) for one in options.split(",") if one]
    return ", ".join([" ".join([name, *each[:1]]), *each[1:], *([] if lossless else ["lossy"])])


def _interval(value: Interval) -> str:
    mean = f"{value.mean:.2f}"
    return f"{mean} [{value.low:.2f}, {value.high:.2f}]" if np.isfinite(value.low) else mean
