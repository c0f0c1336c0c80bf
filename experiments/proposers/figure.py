"""Results, figure and table of the study: python -m experiments.proposers.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    PROPOSERS,
    WORKLOADS,
    bounds,
    colours,
    forest,
    kept,
    markdown,
    no_gain,
    ordered,
    percent,
    row_where,
    shown,
    speed_over,
    study,
    swept,
    tau_beyond,
)
from spec_lab.analysis import metrics

KEYS = ("prompts", "temperature")
REFERENCE = "draft_chain"
CLAIM = "A Medusa tree gains on every text; prompt lookup gains most where the text repeats itself"
PAIRED = ("speed_over_baseline", f"tau_beyond_{REFERENCE}", f"speed_over_{REFERENCE}", "speed_over_best_other")


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each workload, temperature and proposer, with the repeated 8-grams of the baseline's text.

    Each is also compared with ``REFERENCE`` and with the fastest of the others in the same run.
    """
    table = swept(runs)
    rows = [row for run, rows in table.groupby("run", sort=False) for row in versus_others(runs / str(run), rows)]
    table = kept(pd.DataFrame(rows), *KEYS, more=PAIRED)
    named = pd.DataFrame(rows)[[*KEYS, "arm", "best_other"]]
    return table.merge(named, on=[*KEYS, "arm"])


def versus_others(run: Path, table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the run's rows of ``table``, each compared with ``REFERENCE`` and with the fastest of the others."""
    tables = metrics.load(run)
    recorded_names = dict(zip(table["arm"], table["recorded"], strict=True))
    speeds = {arm: speed_over(tables.requests, recorded, "baseline").mean for arm, recorded in recorded_names.items()}
    for row in table.to_dict("records"):
        best = max((arm for arm in recorded_names if arm != row["arm"]), key=lambda arm: speeds[arm])
        row |= {"best_other": best, "speed_over_baseline": speeds[row["arm"]]}
        row |= bounds("speed_over_best_other", speed_over(tables.requests, row["recorded"], recorded_names[best]))
        if row["arm"] != REFERENCE:
            two = (tables, row["recorded"]), (tables, recorded_names[REFERENCE])
            row |= bounds(f"tau_beyond_{REFERENCE}", tau_beyond(*two))
            row |= bounds(
                f"speed_over_{REFERENCE}", speed_over(tables.requests, row["recorded"], recorded_names[REFERENCE])
            )
        yield row


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed-up; a row for each workload and temperature, a colour for each proposer."""
    table = table.assign(
        place=[WORKLOADS.index(name) if name in WORKLOADS else len(WORKLOADS) for name in table["prompts"]],
        text=[f"{name}, T = {at:g}" for name, at in zip(table["prompts"], table["temperature"], strict=True)],
    ).sort_values(["place", "prompts", "temperature"])
    figure = Figure(figsize=(8.2, 0.75 * table["text"].nunique() + 1.4), layout="constrained")
    axes = figure.subplots()
    forest(axes, table, "speedup", "text", "arm", colours(ordered(list(table["arm"]), PROPOSERS)))
    axes.set_xlabel("speed-up over the baseline on the same prompts; 95 % intervals over prompts")
    no_gain(axes, along="x")
    axes.legend(fontsize=8)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's table: speed-up and tau."""
    arms = ordered(list(table["arm"]), PROPOSERS)
    lines = [["text", "T", *(NAMES[arm] for arm in arms), "repeated 8-grams"]]
    for workload in ordered(list(table["prompts"]), WORKLOADS):
        for temperature in sorted(table["temperature"].unique()):
            rows = [row_where(table, prompts=workload, temperature=temperature, arm=arm) for arm in arms]
            if known := [row for row in rows if row]:
                cells = [f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows]
                share = percent(known[0]["baseline_repeated_8grams"])
                lines.append([workload, f"{temperature:g}", *cells, share])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
