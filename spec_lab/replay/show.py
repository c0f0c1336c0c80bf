"""The command ``spec-lab replay``: evaluate designs of a recorded run, print a table, write a CSV file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from spec_lab.core.terminal import visible
from spec_lab.replay import designs, traces
from spec_lab.replay.trees import read
from spec_lab.verify import Lenient

MOST = 40
"""Rows of the table on the screen."""


def replay(
    folder: Path,
    arms: Sequence[str] = (),
    verifiers: Sequence[str] = (),
    shapes: Sequence[str] = (),
    temperatures: Sequence[float] = (),
    top_ks: Sequence[int] = (),
    confidences: Sequence[float] = (),
    drawn: Sequence[str] = (),
) -> pd.DataFrame:
    """Evaluate all combinations on the recorded trees of a run; see ``designs`` for the columns.

    Args:
        folder: the run's directory.
        arms: of the run; all if empty.
        verifiers, shapes, temperatures, top_ks, confidences, drawn: as of ``designs.designs``.

    Raises:
        ValueError: no recorded run there, an unknown arm, verifier or shape.
        OSError: a file that cannot be read.
    """
    recorded = read(folder, tuple(arms))
    wanted = {
        name: designs.designs(trees, verifiers, shapes, temperatures, top_ks, confidences, drawn)
        for name, trees in recorded.items()
    }
    frames = []
    with tqdm(total=sum(map(len, wanted.values())), desc="replay", unit="design", disable=None) as bar:
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
    return pd.concat(frames).sort_values("tau", ascending=False, kind="stable", ignore_index=True)


def trace(file: Path, written: str = "jsonl", verifiers: Sequence[str] = ()) -> pd.DataFrame:
    """Judge a trace of another system; see ``traces.judge`` for the columns.

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
        return traces.judge(traces.read_trace(file), lenience=lenience)
    text = file.read_text(encoding="utf-8")
    if written == "vllm":
        return traces.judge(traces.from_vllm(text))
    return traces.judge(traces.from_sglang(json.loads(line) for line in text.splitlines() if line.strip()))


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
        shown.add_row(visible(one["rule"]), one["depth"], tau, f"{one['steps']:.0f}")
    console.print(shown, highlight=False)


def print_table(frame: pd.DataFrame, console: Console) -> None:
    """Print the designs with the most expected tokens a step, and why others are not identified."""
    known = frame[frame["needs"] == ""]
    optional = [
        name
        for name in ("arm", "drawn", "draft_temperature", "draft_top_k", "confidence")
        if known[name].nunique(dropna=False) > 1
    ]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("method", "verifier", "shape", *optional):
        shown.add_column(name.replace("_", " "), overflow="fold")
    for name in ("tau", "not recorded", "effective steps"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in known.head(MOST).to_dict("records"):
        tau = f"{one['tau']:.3f}"
        if np.isfinite(one["low"]):
            tau += f" [{one['low']:.3f}, {one['high']:.3f}]"
        parts = [str(one[name]) for name in ("method", "verifier", "shape", *optional)]
        open_ = f"±{(one['bound_high'] - one['bound_low']) / 2:.2g}"
        shown.add_row(*map(visible, parts), tau, open_, f"{one['effective_steps']:.0f}")
    if shown.row_count:
        console.print(shown, highlight=False)
    if len(known) > MOST:
        console.print(f"The first {MOST} of {len(known)}; --csv FILE writes all.", highlight=False)
    for why, each in frame[frame["needs"] != ""].groupby("needs", sort=False):
        console.print(visible(f"{len(each)} designs: {why}"), soft_wrap=True, highlight=False)
