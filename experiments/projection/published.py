"""Project the rows of published tables from their tau, and compare with their speed-ups.

python -m experiments.projection.published

Reads ``published.csv``; writes ``published_results.csv``, ``published.png`` and the tables of the README. No model is
loaded. Of each row, tau and the shape of the drafts are given; what a step takes is projected from nominal hardware.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.plots import fill, markdown, save
from spec_lab.analysis.figures import COLOURS, GREY, STYLE
from spec_lab.analysis.projection import Acceptance, Deployment, speedup
from spec_lab.analysis.projection.catalogue import hardware, model, precision, runtime
from spec_lab.analysis.projection.costs import RooflineForward
from spec_lab.analysis.projection.drafting import by_roofline

HERE = Path(__file__).resolve().parent
CONTEXT = 512
"""Tokens of a sequence: these tables state none. At batch 1 it changes no row by more than 2 %."""

CLAIM = "Published speed-ups are projected too high wherever the code does work between forwards"


def acceptance(tau: float, levels: Sequence[float]) -> Acceptance:
    """Return drafts with so many nodes in each level and this tau; each level adds as many accepted tokens.

    How tau divides over levels decides only how many rows the first pass of a draft model computes.
    """
    nodes = np.array([levels], dtype=float)
    return Acceptance(nodes, np.ones((1, 1)), np.full_like(nodes, (tau - 1) / len(levels)))


def projected(row: dict[str, Any]) -> dict[str, float]:
    """Return the speed-up and the baseline's tokens per second that are projected for a row."""
    (device,), ran = hardware([row["hardware"]]), runtime(row["runtime"])
    weights, target = precision(row["dtype"]), model("--model", row["model"])
    made = partial(RooflineForward, hardware=device, runtime=ran, precision=weights)
    forward = made(target.work(weights), target.layers)
    baseline = {"projected_baseline": 1.0 / float(forward.seconds(1, 1, CONTEXT))}
    if row["proposer"] == "none":
        return {"projected": 1.0, "bound": 1.0, **baseline}
    levels = [int(word) for word in row["levels"].split()]
    draft = model("--draft", row["draft"]) if row["draft"] else None
    drafting = by_roofline(row["proposer"], target, draft, made, weights, len(levels))
    speedups = speedup(acceptance(row["tau"], levels), len(levels), Deployment("", forward, {}), drafting, 1, CONTEXT)
    return {"projected": float(speedups[0]), "bound": row["tau"], **baseline}


def results(file: Path = HERE / "published.csv") -> pd.DataFrame:
    """Return the rows with ``projected``, ``error`` (projected / published - 1) and ``unexplained``.

    ``unexplained`` is the share of a published step, in steps of the baseline, that the projection lacks:
    tau / published - tau / projected.
    """
    frame = pd.read_csv(file, keep_default_na=False)
    for name in ("tau", "speedup", "baseline_tokens_per_second"):
        frame[name] = pd.to_numeric(frame[name])
    frame = frame.join(pd.DataFrame([projected(row) for row in frame.to_dict("records")]))
    frame["error"] = frame["projected"] / frame["speedup"] - 1
    frame["unexplained"] = frame["tau"] / frame["speedup"] - frame["tau"] / frame["projected"]
    frame["baseline_error"] = frame["projected_baseline"] / frame["baseline_tokens_per_second"] - 1
    return frame


def by_table(frame: pd.DataFrame) -> str:
    """Return the errors of each table, and how many pairs of methods with the same model it puts in the right order."""
    table = [["table", "rows", "median error", "smallest", "largest", "within 10 %", "within 25 %", "pairs in order"]]
    for name, rows in frame[frame["proposer"] != "none"].groupby("table", sort=False):
        errors = rows["error"]
        within = [f"{(errors.abs() <= limit).sum()} of {len(rows)}" for limit in (0.10, 0.25)]
        ends = (percent(value) for value in (errors.median(), errors.min(), errors.max()))
        pairs = [
            (a["speedup"] - b["speedup"]) * (a["projected"] - b["projected"]) > 0
            for _, same in rows.groupby("model")
            for a, b in combinations(same.to_dict("records"), 2)
        ]
        table.append([str(name), f"{len(rows)}", *ends, *within, f"{sum(pairs)} of {len(pairs)}" if pairs else "-"])
    return markdown(table)


def percent(value: float, decimals: int = 0) -> str:
    """Return a signed share, as tables show it."""
    return f"{100 * value:+.{decimals}f} %"


def draw(frame: pd.DataFrame) -> Figure:
    """Plot projected against published speed-ups, a colour for each table; tau, the bound, as open circles."""
    drafted = frame[frame["proposer"] != "none"]
    figure = Figure(figsize=(5.4, 5.0), layout="constrained")
    axes = figure.subplots()
    line = np.array([1.0, 7.0])
    axes.fill_between(line, 0.9 * line, 1.1 * line, color=GREY, alpha=0.2, lw=0, label="within 10 %")
    axes.plot(line, line, color=GREY, linestyle="--", linewidth=1)
    for colour, (name, rows) in zip(COLOURS, drafted.groupby("table", sort=False), strict=False):
        axes.plot(rows["speedup"], rows["projected"], "o", color=colour, markersize=5, label=str(name))
        axes.plot(rows["speedup"], rows["tau"], "o", mfc="none", mec=colour, markersize=4, alpha=0.5)
    axes.plot([], [], "o", mfc="none", mec=GREY, markersize=4, label="tau of the same row")
    axes.set(xlabel="published speed-up", ylabel="projected speed-up", xlim=(1.2, 6.0), ylim=(1.2, 7.0))
    axes.legend(fontsize=8.5, loc="upper left")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Write results, figure and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of results, figure and README")
    chosen = parser.parse_args(arguments)
    frame = results()
    frame.to_csv(chosen.folder / "published_results.csv", index=False, float_format="%.4g")
    with rc_context(STYLE):
        save(draw(frame), chosen.folder / "published.png", CLAIM)
    fill(chosen.folder / "README.md", by_table(frame), "tables")
    print(by_table(frame))


if __name__ == "__main__":
    main()
