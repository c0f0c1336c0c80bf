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

REFERENCE = "grown_63"


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
    """Plot tau, tau less that of ``REFERENCE``, and speed-up; a row for each tree, a colour for each workload."""
    trees = by_size(table)
    sizes = table.groupby("arm")["nodes_per_step"].mean()
    table = table.set_index("arm").loc[trees].reset_index()
    table["tree"] = [f"{name} ({sizes[name]:.0f})" for name in table["arm"]]
    figure = Figure(figsize=(13, 0.42 * len(trees) + 1.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, value, label in (
        (panels[0], "tau_pooled", "tokens per step"),
        (panels[1], "tau_beyond_grown", f"tokens per step more than {REFERENCE},\npaired over prompts"),
        (panels[2], "speedup", "times the baseline's tokens/s on the same prompts"),
    ):
        forest(axes, table, value, "tree", "prompts", WORKLOADS)
        axes.set_xlabel(label)
    panels[0].set_ylabel("tree (nodes)")
    no_gain(panels[1], along="x", at=0.0)
    no_gain(panels[2], along="x")
    panels[2].legend(loc="lower right", fontsize=8)
    figure.suptitle("Medusa heads with every tree, 95 % intervals over prompts", fontsize=10)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and tau of each tree and workload; both compared with ``REFERENCE``."""
    workloads = ordered(list(table["prompts"]), WORKLOADS)
    alone = [["tree", "nodes", *workloads]]
    paired = [[f"versus `{REFERENCE}`", *(f"{workload}: tau; x speed" for workload in workloads)]]
    for tree in by_size(table):
        rows = [row_where(table, arm=tree, prompts=workload) for workload in workloads]
        nodes = f"{table.loc[table['arm'] == tree, 'nodes_per_step'].mean():.0f}"
        cells = [f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows]
        alone.append([tree, nodes, *cells])
        if tree != REFERENCE:
            both_of = [(shown(row, "tau_beyond_grown"), shown(row, "speed_over_grown")) for row in rows]
            paired.append([tree, *("; x ".join(both) for both in both_of)])
    return f"{markdown(alone)}\n\n{markdown(paired)}"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
