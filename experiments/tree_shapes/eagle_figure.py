"""Results, figure and table of the study: python -m experiments.tree_shapes.eagle_figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    bounds,
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
from spec_lab.analysis.figures.palette import option_colours

KEYS = ("temperature", "verifier_name", "nodes")
ARMS = {
    "chain": "chain",
    "static": "static, without replacement",
    "static_point": "static, likeliest",
    "best_first": "best first, without replacement",
    "best_first_point": "best first, likeliest",
    "eagle2": "EAGLE-2 (reranked)",
}
ON_PAGE = (4, 16, 64)  # numbers of nodes in the table of the page
CLAIM = "An EAGLE-3 head's larger trees emit more tokens per step and are slower; at T = 1 sampled trees win"


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
    """Return the temperatures that are shown, with token verification; the other verifier is in the stored results."""
    return [(temperature, "token") for temperature in sorted(table["temperature"].unique())]


def draw(table: pd.DataFrame) -> Figure:
    """Plot tau and speed-up by nodes; a row for each temperature and verifier, a line for each tree."""
    places, colour = panels(table), option_colours(list(ARMS))
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
        row[1].set_ylabel("speed-up, 95 % bands")
        for axes in row:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(table["nodes"].unique()), [str(size) for size in sorted(table["nodes"].unique())])
    for axes in grid[-1]:
        axes.set_xlabel("drafted nodes per step")
    figure.legend(*grid[0][1].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's table: speed-up and tau of some sizes."""
    sizes = [size for size in sorted(table["nodes"].unique()) if size in ON_PAGE]
    lines = [["T", "tree", *(f"{size} nodes" for size in sizes)]]
    for temperature, verifier in panels(table):
        for arm, label in ARMS.items():
            where = {"temperature": temperature, "verifier_name": verifier, "arm": arm}
            rows = [row_where(table, **where, nodes=size) for size in sizes]
            cells = [f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows]
            lines.append([f"{temperature:g}", label, *cells])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM, "eagle_trees")


if __name__ == "__main__":
    main()
