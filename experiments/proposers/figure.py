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
    """Plot speed-up and tau; a row for each workload and temperature, a colour for each proposer."""
    table = table.assign(
        place=[WORKLOADS.index(name) if name in WORKLOADS else len(WORKLOADS) for name in table["prompts"]],
        text=[f"{name}, T = {at:g}" for name, at in zip(table["prompts"], table["temperature"], strict=True)],
    ).sort_values(["place", "prompts", "temperature"])
    figure = Figure(figsize=(10.5, 0.75 * table["text"].nunique() + 1.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, value, label in (
        (panels[0], "speedup", "times the baseline's tokens/s on the same prompts"),
        (panels[1], "tau_pooled", "tokens per step"),
    ):
        forest(axes, table, value, "text", "arm", PROPOSERS)
        axes.set_xlabel(label)
    no_gain(panels[0], along="x")
    panels[1].legend(fontsize=8)
    figure.suptitle("95 % intervals over prompts", fontsize=10)
    return figure


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and tau; speed over ``REFERENCE``, and the fastest one's over the next."""
    arms = ordered(list(table["arm"]), PROPOSERS)
    others = [arm for arm in arms if arm != REFERENCE]
    alone = [["text", "temperature", *(NAMES[arm] for arm in arms), "repeated 8-grams"]]
    paired = [[f"over the {NAMES[REFERENCE]}", "temperature", *(NAMES[arm] for arm in others), "fastest over the next"]]
    for workload in ordered(list(table["prompts"]), WORKLOADS):
        for temperature in sorted(table["temperature"].unique()):
            where = workload, f"{temperature:g}"
            row_of = {arm: row_where(table, prompts=workload, temperature=temperature, arm=arm) for arm in arms}
            known = [row for row in row_of.values() if row]
            if known:
                cells = [f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in row_of.values()]
                alone.append([*where, *cells, percent(known[0]["baseline_repeated_8grams"])])
                best = max(known, key=lambda row: float(row["speed_over_baseline"]))
                two = f"{NAMES[best['arm']]} over {NAMES[best['best_other']]}"
                over = [shown(row_of[arm], f"speed_over_{REFERENCE}") for arm in others]
                paired.append([*where, *over, f"{two}: {shown(best, 'speed_over_best_other')}"])
    return f"{markdown(alone)}\n\n{markdown(paired)}"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
