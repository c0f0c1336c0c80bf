"""How well predicted probabilities are calibrated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

BINS = 10
"""Equal bins of the predicted probability."""

PREDICTIONS = {"draft": "draft_q", "greedy": "draft_greedy_q", "head": "draft_confidence"}
"""The columns in ``steps`` of what a drafter states of a drafted token: the draft probability it was sampled with; the
one that it had where it was chosen as the likeliest; and the prediction of the drafter's confidence head."""


def reliability(predicted: np.ndarray, happened: np.ndarray, name: str) -> dict[str, Any] | None:
    """Compare predicted probabilities with what happened, in ``BINS`` equal bins.

    An exact probability of the event stands for all its outcomes, each with its weight: Brier score and AUROC are those
    of infinitely many draws of it.

    Args:
        predicted: ``[n]`` probabilities; NaN where there is none.
        happened: ``[n]`` 0 or 1, or the exact probability of the event; NaN where it is not known.
        name: of ``happened`` in what is returned.

    Returns:
        ``ece``, the expected calibration error (1706.04599); ``brier``, the mean squared distance of prediction and
        outcome (Brier 1950); ``auroc``, the probability that an event had a larger prediction than a non-event (ties
        count half; NaN where only one of them occurs); the means ``confidence`` and ``name`` of both; and ``bins`` with
        their ``tokens`` and both means. None where nothing is known.
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
    brier = np.mean(predicted**2 - 2 * predicted * happened + happened)
    figures = {"ece": float(error), "brier": float(brier), "auroc": _auroc(predicted, happened)}
    return figures | means(np.ones(len(predicted), dtype=bool)) | {"bins": bins}


def _auroc(predicted: np.ndarray, happened: np.ndarray) -> float:
    """Return the area under the ROC curve, of pairs of different tokens."""
    level = np.unique(predicted, return_inverse=True)[1]
    events, others = (np.bincount(level, weights) for weights in (happened, 1 - happened))
    below = np.cumsum(others) - others / 2  # non-events with a smaller prediction, and half of those with the same
    with_itself = float((happened * (1 - happened)).sum())
    pairs = float(events.sum() * others.sum()) - with_itself
    return float((events @ below - with_itself / 2) / pairs) if pairs > 1e-9 else float("nan")


def confidence(steps: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return the reliability of what a drafter states of its drafted tokens, by the keys of ``PREDICTIONS``.

    A node's prediction is compared with the exact probability that it is accepted given that its parent is. Forced
    tokens are left out, and so are predictions that are all 1: at temperature 0 a draft distribution is one-hot and
    predicts nothing.

    Args:
        steps: an arm's decode steps; without the columns of ``record=drafts`` nothing is known.
    """
    known = {}
    for name, column in PREDICTIONS.items():
        if not {column, "draft_accept"} <= set(steps):
            continue
        rows = steps[steps[column].notna() & steps["draft_accept"].notna()]
        if not len(rows):
            continue
        predicted, accepted = (_joined(rows[each]) for each in (column, "draft_accept"))
        if "draft_forced" in rows:
            forced = [np.zeros(len(values)) if each is None else each
                      for values, each in zip(rows[column], rows["draft_forced"], strict=True)]  # fmt: skip
            predicted = np.where(_joined(forced) > 0, np.nan, predicted)
        facts = reliability(predicted, accepted, "accepted")
        if facts is not None and not (predicted[~np.isnan(predicted)] == 1).all():
            known[name] = facts
    return known


def _joined(values: Iterable[Any]) -> np.ndarray:
    """Return the numbers of all lists, None as NaN."""
    return np.concatenate([np.asarray(each, dtype=float) for each in values])
