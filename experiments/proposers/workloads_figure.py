"""Results, figure and table of the study: python -m experiments.proposers.workloads_figure [RUNS]."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.plots import NAMES, study_by_place
from experiments.proposers.workloads import ARMS

CLAIM = "The suffix proposer gains most often; drafts of many nodes lose everywhere on these two cores"
ARM_NAMES = NAMES | {
    "draft_best_first": "draft tree, best first",
    "eagle": "EAGLE-3",
    "union": "union: suffix, Medusa",
    "best_of": "best of: suffix, Medusa",
}


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    return study_by_place(__file__, ARM_NAMES, [*ARMS], arguments, CLAIM, "workloads")


if __name__ == "__main__":
    main()
