"""The projected speed-up of recorded designs: at every batch size and draft length, on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from spec_lab.analysis.metrics.intervals import Interval, quantiles
from spec_lab.analysis.projection.acceptance import Acceptance, RecordedDesign
from spec_lab.analysis.projection.costs import ForwardCost, mean_seconds
from spec_lab.analysis.projection.drafting import Drafting
from spec_lab.analysis.projection.overlap import Overlap

STEPS = 60
"""Halvings of the search for the break-even batch."""


@dataclass(frozen=True)
class Prefill:
    """Prompt and output tokens that each request computes, if speed-ups include the prefill.

    Args:
        prompt: tokens of the prompt.
        output: tokens of the output.
    """

    prompt: int
    output: int


@dataclass(frozen=True)
class Deployment:
    """Where designs are projected to.

    Args:
        label: of the hardware, in tables and figures.
        target: seconds of the target's forward.
        drafting: how each design drafts there, by name; others are left out.
        largest_batch: sequences that fit into memory beside the weights, or of the measured table; infinite if it is
            not known.
        smallest_batch: of the measured table.
        left_out: why each of the others is left out.
        overlap: how drafting overlaps with verification there; None: it does not.
    """

    label: str
    target: ForwardCost
    drafting: Mapping[str, Drafting]
    largest_batch: float = float("inf")
    left_out: Mapping[str, str] = field(default_factory=dict)
    smallest_batch: float = 1.0
    overlap: Overlap | None = None

    def tokens(self, acceptance: Acceptance, length: int) -> np.ndarray:  # [R]
        """Return the tokens of a step with drafts of at most ``length`` levels."""
        return acceptance.tau(length) if self.overlap is None else self.overlap.tokens(acceptance, length)


def speedup(
    acceptance: Acceptance,
    length: int,
    deployment: Deployment,
    drafting: Drafting,
    batch: ArrayLike,
    context: float,
    prefill: Prefill | None = None,
) -> np.ndarray:  # [R]
    """Return the speed-up of drafts of at most ``length`` tokens over autoregressive decoding in the same batch.

    Without ``prefill`` it is

        tau(length) x t(1) / mean over steps of (t(1 + nodes of the step) + its drafting)

    with t(rows) the seconds of a forward over so many rows of each sequence. Where all steps draft alike it is
    Sequoia's formula (2402.12374, section 4.3), which for a chain and constant t is theorem 3.8 of Leviathan et al.
    (2211.17192). ``mean_seconds`` says how the steps of a batch are combined. With ``prefill`` both sides add the
    seconds of computing the prompt, and the first token is the prefill's. With an overlap tokens and seconds
    of a step are those of ``Overlap``.

    Args:
        acceptance: of R draws.
        length: number of levels.
        drafting: how the design drafts there.
        batch: sequences decoded together, all the time; one number or ``[R]``.
        context: tokens of each sequence.
        prefill: None leaves the prefill out.
    """
    count = np.broadcast_to(np.asarray(batch, dtype=float), (len(acceptance.share),))
    rows = 1.0 + acceptance.nodes(length)
    plain = deployment.target.seconds(1.0, count, context)
    tau, overlap = deployment.tokens(acceptance, length), deployment.overlap
    if overlap is None:
        step = mean_seconds(deployment.target, rows, acceptance.share, count, context)
        step = step + drafting.seconds(acceptance, length, count, context)
    else:
        step = overlap.seconds(acceptance, length, deployment.target, drafting, count, context)
    if prefill is None:
        return tau * plain / step
    first = deployment.target.seconds(float(prefill.prompt), count, 0.0)
    decoded = prefill.output - 1
    return (first + decoded * plain) / (first + decoded / tau * step)


def project(
    designs: Sequence[RecordedDesign],
    deployments: Sequence[Deployment],
    batches: Sequence[int],
    context: float,
    lengths: Sequence[int] | None = None,
    prefill: Prefill | None = None,
    resamples: int = 999,
) -> pd.DataFrame:
    """Return one row for each deployment, design, draft length and batch size that the recording determines.

    Args:
        context: tokens of each sequence.
        lengths: draft lengths; None for all that are recorded.
        prefill: None leaves the prefill out.
        resamples: of the bootstrap over requests.

    Returns:
        Columns: ``hardware``, ``design``, ``proposer``, ``length``, ``batch``, ``nodes`` (of each sequence, a mean over
        steps), ``tau``, ``hit_rate`` (with an overlap only), ``speedup``, ``speedup_low``, ``speedup_high`` (95 %, of
        acceptance alone; NaN bounds with fewer than ``MIN_CLUSTERS`` requests), ``fits`` (whether the batch is at most
        the deployment's largest; else the speed-up is NaN), ``best`` (whether it is the fastest of its deployment and
        batch), ``best_share`` (of the resamples, those in which it is; NaN where designs recorded different numbers of
        requests).

    Raises:
        ValueError: a length that no design has, or batches that are all too large.
    """
    known = sorted(
        {n for design in designs for n in design.lengths if any(design.name in at.drafting for at in deployments)}
    )
    if unknown := [length for length in lengths or () if length not in known]:
        raise ValueError(
            f"no projected design was recorded at a draft length of {unknown[0]}; recorded are "
            f"{', '.join(map(str, known))}"
        )
    if min(batches) > (largest := max(deployment.largest_batch for deployment in deployments)):
        raise ValueError(
            f"batches of {min(batches)} are too large: at most {largest:g} sequences of {context:g} tokens fit into "
            "memory, or were measured; choose a smaller --batch"
        )
    rows, draws = [], []
    for curve in _curves(designs, deployments, context, lengths, prefill, resamples):
        for batch in batches:
            fits = batch <= curve.deployment.largest_batch
            value = curve.speedup(batch) if fits else np.full(len(curve.acceptance.share), np.nan)
            rows.append(
                {
                    "hardware": curve.deployment.label,
                    "design": curve.design.name,
                    "proposer": curve.design.proposer,
                    "length": curve.length,
                    "batch": batch,
                    **curve.figures(),
                    **_named("speedup", bounded(value)),
                    "fits": fits,
                }
            )
            draws.append(value)
    frame = pd.DataFrame(rows)
    frame["best"], frame["best_share"] = False, np.nan
    paired = len({len(design.steps) for design in designs if design.name in set(frame["design"])}) == 1
    for _, cells in frame[frame["fits"]].groupby(["hardware", "batch"], sort=False):
        frame.loc[cells["speedup"].idxmax(), "best"] = True
        each = [draws[number] for number in cells.index]
        if paired and len(each[0]) > 1:
            wins = np.bincount(np.argmax(np.stack(each)[:, 1:], axis=0), minlength=len(each))
            frame.loc[cells.index, "best_share"] = wins / wins.sum()
    return frame


def break_even(
    designs: Sequence[RecordedDesign],
    deployments: Sequence[Deployment],
    max_batch: float,
    context: float,
    lengths: Sequence[int] | None = None,
    prefill: Prefill | None = None,
    resamples: int = 199,
) -> pd.DataFrame:
    """Return the batch size up to which each design and length is faster than autoregressive decoding.

    It is where the speed-up first falls to 1 as the batch grows; a batch size between two whole numbers is possible.

    Args:
        max_batch: the largest that is looked at.
        designs, deployments, context, lengths, prefill, resamples: as in ``project``.

    Returns:
        Columns: ``hardware``, ``design``, ``length``, ``break_even``, ``break_even_low``, ``break_even_high``: 0 where
        the speed-up is below 1 at the smallest batch already, 1 or the smallest that was measured; infinite where it is
        above 1 up to ``end``, the largest batch that was looked at: ``max_batch``, or fewer where memory has no room.
    """
    rows = []
    for curve in _curves(designs, deployments, context, lengths, prefill, resamples):
        start, end = curve.deployment.smallest_batch, min(max_batch, curve.deployment.largest_batch)
        if end < start:
            continue
        at = crossing(curve.speedup, len(curve.acceptance.share), end, start)
        rows.append(
            {
                "hardware": curve.deployment.label,
                "design": curve.design.name,
                "length": curve.length,
                **_named("break_even", bounded(at, interpolated=False)),
                "end": end,
            }
        )
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Curve:
    """The speed-up of a design at one draft length on one deployment, as a function of the batch.

    Args:
        design, acceptance, length, deployment: as in ``project.speedup``.
        speedup: of one batch or ``[R]``.
    """

    design: RecordedDesign
    acceptance: Acceptance
    length: int
    deployment: Deployment
    speedup: Callable[[ArrayLike], np.ndarray]

    def figures(self) -> dict[str, float]:
        """Return the columns of the recorded steps: ``nodes`` and ``tau``; with overlap, ``hit_rate``."""
        acceptance, length = self.acceptance, self.length
        figures = {
            "nodes": float(acceptance.share[0] @ acceptance.nodes(length)),
            "tau": float(self.deployment.tokens(acceptance, length)[0]),
        }
        if self.deployment.overlap is not None:
            figures["hit_rate"] = float(acceptance.hit_rate(length)[0])
        return figures


def _curves(
    designs: Sequence[RecordedDesign],
    deployments: Sequence[Deployment],
    context: float,
    lengths: Sequence[int] | None,
    prefill: Prefill | None,
    resamples: int,
) -> Iterator[_Curve]:
    for design in designs:
        acceptance = design.draws(resamples)
        for length in [length for length in design.lengths if lengths is None or length in lengths]:
            for deployment in deployments:
                drafting = deployment.drafting.get(design.name)
                if drafting is not None:
                    at = partial(speedup, acceptance, length, deployment, drafting, context=context, prefill=prefill)
                    yield _Curve(design, acceptance, length, deployment, at)


def crossing(
    at: Callable[[np.ndarray], np.ndarray], count: int, maximum: float, minimum: float = 1.0
) -> np.ndarray:  # [R]
    """Return where a function of the batch first falls to 1, by bisection after a scan in steps of a quarter octave.

    Args:
        at: maps batches ``[R]`` to values ``[R]``, one of each draw.
        count: R.
        maximum: the end of the search.
        minimum: its start.

    Returns:
        0 where it is below 1 at the start; infinite where it is not below 1 at any scanned batch.
    """
    points = np.unique(np.append(minimum * np.exp2(np.arange(0.0, np.log2(maximum / minimum), 0.25)), maximum))
    below = np.stack([at(np.full(count, point)) < 1.0 for point in points])  # [P, R]
    first = below.argmax(0)
    low, high = points[np.maximum(first - 1, 0)], points[first]
    for _ in range(STEPS):
        middle = (low + high) / 2
        under = at(middle) < 1.0
        low, high = np.where(under, low, middle), np.where(under, middle, high)
    return np.where(below[0], 0.0, np.where(below.any(0), (low + high) / 2, np.inf))


def bounded(draws: np.ndarray, interpolated: bool = True) -> Interval:
    """Return the value of draw 0 and the central 95 % of the others; NaN bounds without others.

    Args:
        draws: ``[R]``.
        interpolated: False for draws that may be infinite, whose quantiles are draws themselves.
    """
    if len(draws) < 2 or np.isnan(draws).all():
        return Interval(float(draws[0]), float("nan"), float("nan"))
    if not interpolated:
        low, high = np.quantile(draws[1:], [0.025, 0.975], method="inverted_cdf")
        return Interval(float(draws[0]), float(low), float(high))
    low, high = quantiles(draws[1:, None], 0.95)[:, 0]
    return Interval(float(draws[0]), float(low), float(high))


def _named(name: str, value: Interval) -> dict[str, float]:
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
