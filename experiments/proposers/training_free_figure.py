"""Results, figure and table of the study: python -m experiments.proposers.training_free_figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.plots import NAMES, study_by_place

ARMS = (
    "ngram", "pld_plus", "suffix", "sam", "rest", "recycling", "lookahead", "jacobi", "early_exit", "skip", "medusa",
)  # fmt: skip
CLAIM = "Text lookup gains where the output repeats; methods that verify many rows mostly lose here"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study_by_place(__file__, NAMES, ARMS, arguments, CLAIM, "training_free")


if __name__ == "__main__":
    main()
