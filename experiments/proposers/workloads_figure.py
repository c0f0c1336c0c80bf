"""Results, figure and table of the study: python -m experiments.proposers.workloads_figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.plots import NAMES, kept, ordered, speedups_by_place, study, swept, taus_by_place
from experiments.proposers.workloads import ARMS

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


def named(table: pd.DataFrame) -> dict[str, str]:
    """Return the names of the arms, in order."""
    return {arm: ARM_NAMES[arm] for arm in ordered(list(table["arm"]), [*ARMS])}


def draw(table: pd.DataFrame) -> Figure:
    """Plot the speed-up of every proposer; a panel for each workload and temperature."""
    return speedups_by_place(table, named(table))


def written(table: pd.DataFrame) -> str:
    """Return the README's table."""
    return taus_by_place(table, named(table))


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study(__file__, results, draw, written, arguments, CLAIM, "workloads")


if __name__ == "__main__":
    main()
