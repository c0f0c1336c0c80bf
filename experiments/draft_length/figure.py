"""Results, figure and table of the study: python -m experiments.draft_length.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    VERSUS,
    WORKLOADS,
    bounds,
    colours,
    kept,
    line,
    markdown,
    no_gain,
    ordered,
    row_where,
    shown,
    speed_over,
    study,
    swept,
    versus,
)
from spec_lab.analysis import metrics

KEYS = ("prompts", "depth")
REFERENCE = 4  # tokens drafted; fixed before anything was measured
ARMS = {"chain": "draft chain", "confident": "draft chain, stopped where unsure", "ngram": "n-gram"}


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each workload, depth and chain.

    Each is also compared with the same chain at depth ``REFERENCE``, and with ``chain`` at the same depth in its run.
    """
    table = versus(
        runs,
        swept(runs).rename(columns={"arms.chain.depth": "depth"}),
        KEYS,
        {"depth": REFERENCE},
        f"depth_{REFERENCE}",
    )
    rows = []
    for row in table.to_dict("records"):
        if row["arm"] != "chain":
            row |= bounds("speed_over_chain", speed_over(metrics.load(runs / row["run"]).requests, row["arm"], "chain"))
        rows.append(row)
    more = [*(f"{what}_depth_{REFERENCE}" for what in VERSUS), "speed_over_chain"]
    return kept(pd.DataFrame(rows), *KEYS, more=more)


def draw(table: pd.DataFrame) -> Figure:
    """Plot tau and speed-up by depth; a column for each workload, a line for each chain."""
    workloads = ordered(list(table["prompts"]), WORKLOADS)
    colour = colours(list(ARMS))
    figure = Figure(figsize=(3.6 * len(workloads) + 0.6, 6.4), layout="constrained")
    grid = figure.subplots(2, len(workloads), squeeze=False, sharex=True, sharey="row")
    for column, workload in zip(grid.T, workloads, strict=True):
        for arm, label in ARMS.items():
            rows = table[(table["prompts"] == workload) & (table["arm"] == arm)]
            line(column[0], rows, "depth", "tau_pooled", colour[arm], label)
            line(column[1], rows, "depth", "speedup", colour[arm], label)
        no_gain(column[1])
        column[0].set_title(workload)
        column[1].set_xlabel("most tokens drafted per step")
    grid[0][0].set_ylabel("tokens per step")
    grid[1][0].set_ylabel("times the baseline's tokens/s,\n95 % bands over prompts")
    grid[0][0].legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and tau; the ratio to depth ``REFERENCE``; speed over ``chain``."""
    depths = sorted(table["depth"].unique())
    head = ["text", "chain", *(f"depth {depth:g}" for depth in depths)]
    alone, paired, chains = [head], [[f"over depth {REFERENCE}", *head[1:]]], [["over `chain`", *head[1:]]]
    for workload in ordered(list(table["prompts"]), WORKLOADS):
        for arm, label in ARMS.items():
            rows = [row_where(table, prompts=workload, arm=arm, depth=depth) for depth in depths]
            alone.append([workload, label, *(f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows)])
            paired.append([workload, label, *(shown(row, f"speed_over_depth_{REFERENCE}") for row in rows)])
            if arm != "chain":
                chains.append([workload, label, *(shown(row, "speed_over_chain") for row in rows)])
    return "\n\n".join(markdown(rows) for rows in (alone, paired, chains))


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
