"""Figures of the output texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from spec_lab.analysis.metrics.intervals import ratio
from spec_lab.analysis.metrics.speed import broken_groups


def repeated_8gram_share(outputs: Iterable[Sequence[int]], n: int = 8) -> float:
    """Return the share of the outputs' 8-grams of tokens that occurred before in the same output, pooled.

    Repeating text is easy to draft, so a large share flatters every proposer.
    """
    repeated = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return ratio(repeated, total)


def identical_outputs(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> float:
    """Return the share of sequences whose tokens equal the baseline's.

    At temperature 0 a share below 1 means rounding (near ties in half precision) or an error.
    """
    complete = requests[~requests["group"].isin(broken_groups(requests))]
    tokens, expected = (
        complete[complete["arm"] == one].set_index(["request", "sequence"])["tokens"] for one in (arm, baseline)
    )
    shared = tokens.index.intersection(expected.index)
    return ratio(sum(list(tokens[key]) == list(expected[key]) for key in shared), len(shared))
