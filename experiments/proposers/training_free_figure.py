"""Results, figure and table of the study: python -m experiments.proposers.training_free_figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import NAMES, kept, ordered, speedups_by_place, study, swept, taus_by_place

KEYS = ("prompts", "temperature")
ARMS = (
    "ngram", "pld_plus", "suffix", "sam", "rest", "recycling", "lookahead", "jacobi", "early_exit", "skip", "medusa",
)  # fmt: skip
"""In the order of figures and tables."""
CLAIM = "Text lookup gains where the output repeats; methods that verify many rows mostly lose here"


def results(runs: Path) -> pd.DataFrame:
    """Return one row for each text, temperature and proposer."""
    return kept(swept(runs), *KEYS)


def named(table: pd.DataFrame) -> dict[str, str]:
    """Return the names of the arms, in order."""
    return {arm: NAMES[arm] for arm in ordered(list(table["arm"]), ARMS)}


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed-up of every proposer; a panel for each text and temperature."""
    return speedups_by_place(table, named(table))


def written(table: pd.DataFrame) -> str:
    """Return the README's table."""
    return taus_by_place(table, named(table))


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM, "training_free")


if __name__ == "__main__":
    main()
