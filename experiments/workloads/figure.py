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
CLAIM = "The suffix proposer gains most often; drafts of many nodes lose everywhere on these two cores"
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
    """Return the README's table: speed-up and tau of each proposer."""
    places = texts_and_temperatures(table)
    arms = ordered(list(table["arm"]), [*ARMS])
    lines = [["proposer", *(title for title, _ in places)]]
    for arm in arms:
        rows = [row_where(table[here], arm=arm) for _, here in places]
        lines.append([ARM_NAMES[arm], *(f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in rows)])
    known = [row_where(table[here], arm=arms[0]) for _, here in places]
    lines.append(["repeated 8-grams", *(percent(row["baseline_repeated_8grams"]) if row else "-" for row in known)])
    return markdown(lines)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
