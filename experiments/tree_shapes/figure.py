"""Results, figure and table of the study: python -m experiments.tree_shapes.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    WORKLOADS,
    bounds,
    forest,
    kept,
    markdown,
    no_gain,
    ordered,
    row_where,
    shown,
    speed_over,
    study,
    swept,
    tau_beyond,
)
from spec_lab.analysis import metrics
from spec_lab.analysis.figures.palette import option_colours

REFERENCE = "grown_63"
CLAIM = "No tree of 63 nodes is shown to be faster than the grown one; 23 nodes are 1.2 times as fast"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each workload and tree, also compared with ``REFERENCE``."""
    table = swept(runs)
    over = pd.DataFrame([row for run in table["run"].unique() for row in versus_reference(runs / run)])
    return kept(table.merge(over, on=["run", "arm"]), "prompts", more=("tau_beyond_grown", "speed_over_grown"))


def versus_reference(run: Path) -> Iterator[dict[str, Any]]:
    """Yield for each tree tau less that of ``REFERENCE`` and the ratio of speeds, paired over the run's prompts."""
    tables = metrics.load(run)
    for arm in metrics.arms(tables):
        if arm != "baseline":
            yield {
                "run": run.name,
                "arm": arm,
                **bounds("tau_beyond_grown", tau_beyond((tables, arm), (tables, REFERENCE))),
                **bounds("speed_over_grown", speed_over(tables.requests, arm, REFERENCE)),
            }


def by_size(table: pd.DataFrame) -> list[str]:
    """Return the trees by number of nodes, those of the same size by descending tokens per step."""
    each = table.groupby("arm")[["nodes_per_step", "tau_pooled"]].mean()
    size = each["nodes_per_step"].round()  # trees are cut near the context's end
    return list(each.assign(size=size).sort_values(["size", "tau_pooled"], ascending=[True, False]).index)


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed over that of ``REFERENCE``; a row for each tree, a colour for each workload."""
    trees = [name for name in by_size(table) if name != REFERENCE]
    sizes = table.groupby("arm")["nodes_per_step"].mean()
    table = table.set_index("arm").loc[trees].reset_index()
    table["tree"] = [f"{name} ({sizes[name]:.0f})" for name in table["arm"]]
    figure = Figure(figsize=(8, 0.36 * len(trees) + 1.4), layout="constrained")
    axes = figure.subplots()
    forest(
        axes, table, "speed_over_grown", "tree", "prompts", option_colours(ordered(list(table["prompts"]), WORKLOADS))
    )
    axes.set(ylabel="tree (nodes)", xlabel=f"tokens/s over those of {REFERENCE}, paired over prompts; 95 % intervals")
    no_gain(axes, along="x")
    axes.legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's table: speed-up and tau of each tree and workload."""
    workloads = ordered(list(table["prompts"]), WORKLOADS)
    lines = [["tree", "nodes", *workloads]]
    for tree in by_size(table):
        rows = [row_where(table, arm=tree, prompts=workload) for workload in workloads]
        nodes = f"{table.loc[table['arm'] == tree, 'nodes_per_step'].mean():.0f}"
        lines.append([tree, nodes, *(f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows)])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
