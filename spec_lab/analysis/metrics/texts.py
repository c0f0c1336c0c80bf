"""What the outputs are like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from spec_lab.analysis.metrics.intervals import ratio
from spec_lab.analysis.metrics.speed import broken_groups


def repeated_8gram_share(outputs: Iterable[Sequence[int]], n: int = 8) -> float:
    """Share of the outputs' 8-grams of tokens that occurred before in the same output, pooled: how much text loops."""
    repeated = total = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return ratio(repeated, total)


def identical_outputs(requests: pd.DataFrame, arm: str, baseline: str = "baseline") -> float:
    """Share of requests whose tokens equal the baseline's; at temperature 0 anything below 1 is rounding (or a bug)."""
    whole = requests[~requests["group"].isin(broken_groups(requests))]
    both = [whole[whole["arm"] == one].set_index(["request", "sequence"])["tokens"] for one in (arm, baseline)]
    shared = both[0].index.intersection(both[1].index)
    return ratio(sum(list(both[0][r]) == list(both[1][r]) for r in shared), len(shared))
