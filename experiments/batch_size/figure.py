"""Results, figure and table of the study: python -m experiments.batch_size.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    PROPOSERS,
    bounds,
    colours,
    factor,
    kept,
    line,
    markdown,
    no_gain,
    ordered,
    row_where,
    same_prompts,
    shown,
    study,
    swept,
    tau_beyond,
)
from spec_lab.analysis import metrics

BLOCK = 16
"""Number of prompts of a block, the unit of pairing at every batch size."""

PANELS = {
    "block_speedup": "speed-up over the same batches,\n95 % bands over blocks of prompts",
    "tau_pooled": "tau: tokens per sequence and step",
}
CLAIM = "Every proposer's gain halves between batch 1 and 16, though drafts of fixed settings keep their tau"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each batch size and proposer, with ``block_speedup`` over fixed blocks of prompts.

    It and tau are also compared with those at the smallest batch size.

    Raises:
        ValueError: as in ``block_speedups``; runs of different prompts.
    """
    table = swept(runs).sort_values("batch_size")
    read = {run: metrics.load(runs / run) for run in table["run"].unique()}
    rows: list[dict[str, Any]] = []
    for _, arm_rows in table.groupby("arm", sort=False):
        alone = arm_rows.iloc[0]
        first = read[alone["run"]], alone["recorded"]
        before = np.log(block_speedups(first[0].requests, first[1]))
        for row in arm_rows.to_dict("records"):
            now = read[row["run"]], row["recorded"]
            same_prompts(now[0], first[0])
            logs = np.log(block_speedups(now[0].requests, now[1]))
            row |= {"blocks": len(logs), "smallest_batch": alone["batch_size"]}
            row |= bounds("block_speedup", factor(logs.to_numpy()))
            if row["run"] != alone["run"]:
                row |= bounds("block_speedup_over_smallest", factor((logs - before).to_numpy()))
                row |= bounds("tau_beyond_smallest", tau_beyond(now, first))
            rows.append(row)
    frame = pd.DataFrame(rows)
    more = ("block_speedup", "block_speedup_over_smallest", "tau_beyond_smallest")
    numbers = frame[["batch_size", "arm", "blocks", "smallest_batch"]]
    return kept(frame, "batch_size", more=more).merge(numbers, on=["batch_size", "arm"])


def block_speedups(requests: pd.DataFrame, arm: str) -> pd.Series:
    """Return the speed-up of each block of ``BLOCK`` successive prompts.

    It is the arm's tokens over the summed seconds of the block's groups, over the baseline's: the same quantity at any
    batch size. A mean over groups is not: at batch 1 it is a mean of prompts' ratios, in a batch a ratio of sums, which
    is smaller if the quick prompts have the large ratios. A last block of fewer prompts is left out.

    Raises:
        ValueError: a group is in two blocks; a request failed, so that its block has fewer prompts than in other runs.
    """
    block = requests["request"] // BLOCK
    if (block.groupby(requests["group"]).nunique() > 1).any():
        raise ValueError(f"groups lie across blocks of {BLOCK} prompts: batch sizes must divide {BLOCK}")
    if broken := sorted(metrics.broken_groups(requests)):
        raise ValueError(f"requests of groups {broken} broke, so their blocks hold other prompts than elsewhere")
    sizes = requests.groupby(block)["request"].nunique()
    speeds = {
        number: metrics.tokens_per_second(rows, arm) / metrics.tokens_per_second(rows, "baseline")
        for number, rows in requests.groupby(block)
        if sizes[number] == sizes.max()
    }
    return pd.Series(speeds, dtype=float)


def draw(table: pd.DataFrame) -> Figure:
    """Plot speed-up and tau against the batch size; a line for each proposer."""
    arms = ordered(list(table["arm"]), PROPOSERS)
    colour = colours(arms)
    figure = Figure(figsize=(8.6, 3.9), layout="constrained")
    for axes, (value, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for arm in arms:
            line(axes, table[table["arm"] == arm], "batch_size", value, colour[arm], NAMES[arm])
        sizes = sorted(table["batch_size"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.set(xlabel="batch size", ylabel=label)
        if value == "block_speedup":
            no_gain(axes)
            axes.legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's table: speed-up over blocks, tau and nodes."""
    arms = ordered(list(table["arm"]), PROPOSERS)
    lines = [["batch", *(NAMES[arm] for arm in arms)]]
    for size in sorted(table["batch_size"].unique()):
        rows = [row_where(table, batch_size=size, arm=arm) for arm in arms]
        cells = [
            f"{shown(row, 'block_speedup')}, {row['tau_pooled']:.2f}, {row['nodes_per_step']:.1f}" if row else "-"
            for row in rows
        ]
        lines.append([f"{size:g}", *cells])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
