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
ON_PAGE = (1, 4, 12)  # depths in the table of the page
ARMS = {"chain": "draft chain", "confident": "draft chain, stopped where unsure", "ngram": "n-gram"}
DASHED = "confident"  # the same proposer as ``chain``, and so its colour
CLAIM = "A draft chain of more than 4 is slower on code and prose; stopped where unsure it loses nothing"


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
    """Plot the speed-up by depth; a panel for each workload, a line for each chain."""
    workloads, colour = ordered(list(table["prompts"]), WORKLOADS), colours(list(ARMS))
    figure = Figure(figsize=(3.3 * len(workloads) + 0.6, 3.6), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        for arm, label in ARMS.items():
            rows = table[(table["prompts"] == workload) & (table["arm"] == arm)]
            line(axes, rows, "depth", "speedup", colour[arm], label, linestyle="--" if arm == DASHED else "-")
        no_gain(axes)
        axes.set_title(workload)
        axes.set_xlabel("depth: most tokens drafted per step")
    panels[0].set_ylabel("speed-up over the baseline,\n95 % bands over prompts")
    panels[0].legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's table: speed-up and tau of some depths."""
    depths = [depth for depth in sorted(table["depth"].unique()) if depth in ON_PAGE]
    lines = [["text", "chain", *(f"depth {depth:g}" for depth in depths)]]
    for workload in ordered(list(table["prompts"]), WORKLOADS):
        for arm, label in ARMS.items():
            rows = [row_where(table, prompts=workload, arm=arm, depth=depth) for depth in depths]
            lines.append([workload, label, *(f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows)])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
