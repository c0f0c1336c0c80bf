"""Results, figure and table of the study: python -m experiments.training_free.figure [RUNS]."""

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

KEYS = ("prompts", "temperature")
ARMS = (
    "ngram", "pld_plus", "suffix", "sam", "rest", "recycling", "lookahead", "jacobi", "early_exit", "skip", "medusa",
)  # fmt: skip
"""In the order of figures and tables."""
CLAIM = "Text lookup gains where the output repeats; methods that verify many rows mostly lose here"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each text, temperature and proposer."""
    return kept(swept(runs), *KEYS)


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed-up of every proposer; a panel for each text and temperature."""
    arms = {arm: NAMES[arm] for arm in ordered(list(table["arm"]), ARMS)}
    return speedups_by_place(table, arms)


def written(table: pd.DataFrame) -> str:
    """Return the README's table: speed-up and tau."""
    arms = ordered(list(table["arm"]), ARMS)
    rows = [["proposer", *(title for title, _ in texts_and_temperatures(table))]]
    for arm in arms:
        cells = [row_where(table[here], arm=arm) for _, here in texts_and_temperatures(table)]
        rows.append([NAMES[arm], *(f"{shown(row)}, {row['tau_pooled']:.2f}" if row else "-" for row in cells)])
    known = [row_where(table[here], arm=arms[0]) for _, here in texts_and_temperatures(table)]
    rows.append(["repeated 8-grams", *(percent(row["baseline_repeated_8grams"]) if row else "-" for row in known)])
    return markdown(rows)


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM)


if __name__ == "__main__":
    main()
