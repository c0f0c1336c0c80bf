"""Figures of a drafter along texts: by depth, by position, by context length, and of its confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_lab.analysis.metrics.intervals import Interval, cluster_interval
from spec_lab.analysis.metrics.paired import Totals
from spec_lab.analysis.metrics.ranges import doubled, in_ranges
from spec_lab.analysis.metrics.reliability import reliability
from spec_lab.tasks.check_drafter.along_text import Predicted


def expected_steps(accepted: np.ndarray) -> float:
    """Return the expected number of steps that emit the last n tokens of a text.

    A step that begins at token s accepts the next d drafted tokens, and no more, with a known probability, and emits
    one token after them; so u(t), the probability that a step begins at token t, follows from all earlier u(s). The
    steps are the sum of u (``replay.steps_along_texts``).

    Args:
        accepted: ``[n, K]`` as in ``Predicted``.
    """
    n, depth = accepted.shape
    reached = np.concatenate([np.ones((n, 1)), _reached(accepted), np.zeros((n, 1))], axis=1)  # [n, K + 2]
    emits = reached[:, :-1] - reached[:, 1:]  # column k: the step emits k + 1 tokens
    begins = np.zeros(n + depth + 1)
    begins[0] = 1.0
    for start in range(n):
        begins[start + 1 : start + depth + 2] += begins[start] * emits[start]
    return float(begins[:n].sum())


def _reached(accepted: np.ndarray) -> np.ndarray:  # [n, K]
    """Return the probability that a step accepts each depth and all above it."""
    return np.nan_to_num(accepted).cumprod(axis=1)


def totals(texts: Sequence[Predicted]) -> Totals:
    """Return each conversation's tokens and expected steps, whose ratio is the expected tau: the prompts' steps are
    left out.
    """
    _, number = np.unique(conversations(texts), return_inverse=True)
    return Totals(
        np.bincount(number, [float(len(text.accepted)) for text in texts]),
        np.bincount(number, [expected_steps(text.accepted) for text in texts]),
    )


def conversations(texts: Sequence[Predicted]) -> list[int]:
    """Return the number of each text's conversation."""
    return [number if text.conversation is None else text.conversation for number, text in enumerate(texts)]


def tau(texts: Sequence[Predicted], level: float = 0.95) -> Interval:
    """Return the expected tokens of a step, with an interval of this level over conversations."""
    tokens, steps = totals(texts)
    return cluster_interval(tokens, steps, np.arange(len(tokens)), level)


def by_depth(texts: Sequence[Predicted], figure: str) -> list[float]:
    """Return the mean of a figure at each depth; NaN where it is not known."""
    values = np.concatenate([getattr(text, figure) for text in texts])
    known = ~np.isnan(values)
    sums, counts = np.where(known, values, 0).sum(0), known.sum(0)
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0).tolist()


def mean_alpha(texts: Sequence[Predicted]) -> float:
    """Return the mean of alpha over all positions and depths."""
    return float(np.nanmean(np.concatenate([text.alpha.ravel() for text in texts])))


def by_range(texts: Sequence[Predicted], context: bool, trained: int | None = None) -> list[dict[str, Any]]:
    """Return the expected tokens of steps that begin in ranges of positions, whose ends double.

    Steps whose draft the end of the text cuts are left out.

    Args:
        texts: along which was drafted.
        context: ranges are of the tokens before the step, prompt included; otherwise of those of the output.
        trained: positions that the drafter was trained with: a range ends there.

    Returns:
        For each range its ends ``first`` and ``last``, the number of ``steps``, the tokens with their interval over
        conversations, and whether it is ``beyond`` the trained positions.
    """
    whole = [text.accepted[: max(0, len(text.accepted) - text.accepted.shape[1] + 1)] for text in texts]
    position = np.concatenate(
        [np.arange(len(steps)) + 1 + text.prompt * context for steps, text in zip(whole, texts, strict=True)]
    )  # tokens before the step
    tokens = np.concatenate([1 + _reached(steps).sum(1) for steps in whole])
    number = np.repeat(conversations(texts), [len(steps) for steps in whole])
    ends = doubled(int(position.max(initial=0)), [trained] if context and trained is not None else [])
    ranges = in_ranges(position, ends, {"tokens": (tokens, np.ones(len(tokens)))}, number)
    return [row | {"beyond": context and trained is not None and row["first"] > trained} for row in ranges]


def calibration(texts: Sequence[Predicted], head: bool = False) -> dict[str, Any] | None:
    """Return how well the drafter's confidence is calibrated (``metrics.reliability``); None without one.

    Args:
        texts: along which was drafted.
        head: the prediction of its confidence head, against alpha; otherwise its largest probability, against whether
            the target's likeliest token is the same.
    """
    figures = ("predicted", "alpha") if head else ("confidence", "agreed")
    predicted, happened = (np.concatenate([getattr(text, figure).ravel() for text in texts]) for figure in figures)
    return reliability(predicted, happened, "agreed")
