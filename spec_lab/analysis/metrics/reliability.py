"""How well predicted probabilities are calibrated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

BINS = 10
"""Equal bins of the predicted probability."""


def reliability(predicted: np.ndarray, happened: np.ndarray, name: str) -> dict[str, Any] | None:
    """Compare predicted probabilities with what happened, in ``BINS`` equal bins.

    Args:
        predicted: ``[n]`` probabilities; NaN where there is none.
        happened: ``[n]`` 0 or 1, or the exact probability of the event; NaN where it is not known.
        name: of ``happened`` in what is returned.

    Returns:
        ``ece``, the expected calibration error (1706.04599); the means ``confidence`` and ``name`` of both; and
        ``bins`` with their ``tokens`` and both means. None where nothing is known.
    """
    known = ~(np.isnan(predicted) | np.isnan(happened))
    predicted, happened = predicted[known], happened[known]
    if not len(predicted):
        return None

    def means(inside: np.ndarray) -> dict[str, float]:
        return {"confidence": float(predicted[inside].mean()), name: float(happened[inside].mean())}

    number = np.minimum((predicted * BINS).astype(int), BINS - 1)
    bins = [
        {"tokens": int(inside.sum()), **means(inside)}
        for inside in (number == bin_number for bin_number in range(BINS))
        if inside.any()
    ]
    error = sum(entry["tokens"] * abs(entry["confidence"] - entry[name]) for entry in bins) / len(predicted)
    return {"ece": float(error), **means(np.ones(len(predicted), dtype=bool)), "bins": bins}


def confidence_head(steps: pd.DataFrame) -> dict[str, Any] | None:
    """Return the reliability of a drafter's confidence head; None without one, or where drafts are not recorded.

    A node's confidence is compared with the exact probability that it is accepted given that its parent is.

    Args:
        steps: an arm's decode steps.
    """
    if "draft_confidence" not in steps or "draft_accept" not in steps:
        return None
    rows = steps[steps["draft_confidence"].notna() & steps["draft_accept"].notna()]
    if not len(rows):
        return None
    predicted, accepted = (
        np.concatenate([np.asarray(values, dtype=float) for values in rows[column]])
        for column in ("draft_confidence", "draft_accept")
    )
    return reliability(predicted, accepted, "accepted")
