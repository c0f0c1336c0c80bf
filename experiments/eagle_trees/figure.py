"""Results, figure and table of the study: python -m experiments.eagle_trees.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    bounds,
    colours,
    kept,
    line,
    markdown,
    no_gain,
    row_where,
    shown,
    speed_over,
    study,
    swept,
    tau_beyond,
)
from spec_lab.analysis import metrics

KEYS = ("temperature", "verifier_name", "nodes")
ARMS = {
    "chain": "chain",
    "static": "static, without replacement",
    "static_point": "static, likeliest",
    "best_first": "best first, without replacement",
    "best_first_point": "best first, likeliest",
    "eagle2": "EAGLE-2 (reranked)",
}


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each temperature, verifier, number of nodes and tree; compared with EAGLE-2's in its run."""
    rows = []
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        for row in swept(folder).to_dict("records"):
            row["nodes"] = int(folder.name.rpartition("_")[2])
            if row["arm"] != "eagle2":
                tables = metrics.load(folder / row["run"])
                row |= bounds("tau_beyond_eagle2", tau_beyond((tables, row["arm"]), (tables, "eagle2")))
                row |= bounds("speed_over_eagle2", speed_over(tables.requests, row["arm"], "eagle2"))
            rows.append(row)
    return kept(pd.DataFrame(rows), *KEYS, more=("tau_beyond_eagle2", "speed_over_eagle2"))


def panels(table: pd.DataFrame) -> list[tuple[float, str]]:
    """Return the temperatures and verifiers that differ: at temperature 0 all verifiers accept the same."""
    places = sorted(set(zip(table["temperature"], table["verifier_name"], strict=True)))
    return [panel for panel in places if panel[0] > 0 or panel[1] == "token"]


def draw(table: pd.DataFrame) -> Figure:
    """Plot tau and speed-up by nodes; a row for each temperature and verifier, a line for each tree."""
    places, colour = panels(table), colours(list(ARMS))
    figure = Figure(figsize=(9.0, 2.9 * len(places) + 0.4), layout="constrained")
    grid = figure.subplots(len(places), 2, squeeze=False, sharex=True, sharey="col")
    for row, (temperature, verifier) in zip(grid, places, strict=True):
        here = table[(table["temperature"] == temperature) & (table["verifier_name"] == verifier)]
        for arm, label in ARMS.items():
            for axes, value in zip(row, ("tau_pooled", "speedup"), strict=True):
                line(axes, here[here["arm"] == arm], "nodes", value, colour[arm], label)
        no_gain(row[1])
        row[0].set_title(f"T = {temperature:g}" + (f", {verifier}" if temperature else ""))
        row[0].set_ylabel("tokens per step")
        row[1].set_ylabel("times the baseline's tokens/s")
        for axes in row:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(table["nodes"].unique()), [str(size) for size in sorted(table["nodes"].unique())])
    for axes in grid[-1]:
        axes.set_xlabel("drafted nodes per step")
    figure.legend(*grid[0][1].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    figure.suptitle("95 % bands over prompts", fontsize=10)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and tau; speed over EAGLE-2's tree of as many nodes."""
    sizes = sorted(table["nodes"].unique())
    head = ["T", "verifier", "tree", *(f"{size} nodes" for size in sizes)]
    alone, paired = [head], [["T", "verifier", "over EAGLE-2's", *head[3:]]]
    for temperature, verifier in panels(table):
        for arm, label in ARMS.items():
            where = {"temperature": temperature, "verifier_name": verifier, "arm": arm}
            rows = [row_where(table, **where, nodes=size) for size in sizes]
            left = [f"{temperature:g}", verifier if temperature else "all", label]
            alone.append([*left, *(f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows)])
            if arm != "eagle2":
                paired.append([*left, *(shown(row, "speed_over_eagle2") for row in rows)])
    return f"{markdown(alone)}\n\n{markdown(paired)}"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
