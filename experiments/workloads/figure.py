"""Results, figure and table of the study: python -m experiments.workloads.figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import (
    NAMES,
    kept,
    markdown,
    ordered,
    percent,
    row_where,
    shown,
    speedups_by_place,
    study,
    swept,
    texts_and_temperatures,
)
from experiments.workloads.measure import ARMS

KEYS = ("prompts", "temperature")
ARM_NAMES = NAMES | {
    "draft_best_first": "draft tree, best first",
    "eagle": "EAGLE-3",
    "union": "union: suffix, Medusa",
    "best_of": "best of: suffix, Medusa",
}


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each workload, temperature and proposer."""
    return kept(swept(runs), *KEYS)


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed-up of every proposer; a panel for each workload and temperature."""
    return speedups_by_place(table, {arm: ARM_NAMES[arm] for arm in ordered(list(table["arm"]), [*ARMS])})


def written(table: pd.DataFrame) -> str:
    """Return the README's tables: speed-up and tau of each proposer; the fastest of each workload."""
    places = texts_and_temperatures(table)
    titles = [title for title, _ in places]
    arms = ordered(list(table["arm"]), [*ARMS])
    rows, fastest = [["proposer", *titles]], [["fastest", *titles]]
    for arm in arms:
        measured = [row_where(table[here], arm=arm) for _, here in places]
        rows.append([ARM_NAMES[arm], *(f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in measured)])
    known = [row_where(table[here], arm=arms[0]) for _, here in places]
    rows.append(["repeated 8-grams", *(percent(row["baseline_repeated_8grams"]) if row else "-" for row in known)])
    fastest.append(["", *(_fastest(table[here]) for _, here in places)])
    return f"{markdown(rows)}\n\n{markdown(fastest)}"


def _fastest(table: pd.DataFrame) -> str:
    """Return the proposer with the largest speed-up."""
    known = table[table["speedup"].notna()]
    return "-" if known.empty else ARM_NAMES[known.loc[known["speedup"].idxmax(), "arm"]]


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments)


if __name__ == "__main__":
    main()
