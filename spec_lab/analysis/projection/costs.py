"""Seconds of a forward: measured, or from the roofline of named hardware; and their mean over steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from spec_lab.analysis.projection.catalogue import Hardware, Runtime, rows
from spec_lab.analysis.projection.model_shapes import Precision
from spec_lab.core.grid import Grid
from spec_lab.core.roofline import ForwardWork


class ForwardCost(Protocol):
    """Seconds of one forward of a model."""

    def seconds(self, rows: ArrayLike, batch: ArrayLike, context: ArrayLike) -> np.ndarray:
        """Return the seconds of a forward; arguments broadcast.

        Args:
            rows: tokens of each sequence that the forward computes, all with logits; means may be fractions.
            batch: number of sequences.
            context: tokens of each sequence in the KV cache.
        """


@dataclass(frozen=True)
class RooflineForward:
    """The roofline of a forward, with what a runtime attains of it and adds to it.

    Matrices and attention run one after the other, so each is bounded on its own (Williams et al., 2009, doi
    10.1145/1498765.1498785): max(bytes / bandwidth, FLOPs / peak), with every row over every position of its sequence.
    The rows of all sequences read the experts of a mixture that any of them chooses (``ForwardWork.read``).
    Each layer adds ``Runtime.layer_gap``. Where the host launches kernels, a forward takes at least its
    ``layer_launch``, which overlaps with computing.

    Args:
        precision: of weights, KV cache and products.
    """

    work: ForwardWork
    layers: float
    hardware: Hardware
    runtime: Runtime
    precision: Precision

    def __post_init__(self) -> None:
        """Check that the device has products at this precision."""
        self.hardware.peak(self.precision)

    def seconds(self, rows: ArrayLike, batch: ArrayLike, context: ArrayLike) -> np.ndarray:
        """See ``ForwardCost``."""
        each, sequences, cached = (np.asarray(numbers, dtype=float) for numbers in (rows, batch, context))
        bandwidth = self.hardware.bandwidth * self.runtime.bandwidth_share
        peak = self.hardware.peak(self.precision) * self.runtime.compute_share
        computed, work = each * sequences, self.work
        device = np.maximum(work.read(computed) / bandwidth, (work.row_flops + work.logits_flops) * computed / peak)
        for layers in work.attention:
            read = layers.kv_bytes * sequences * (cached + each)
            device = device + np.maximum(read / bandwidth, float(layers.flops) * computed * (cached + each) / peak)
        launch = self.layers * self.runtime.layer_launch
        return np.maximum(device + self.layers * self.runtime.layer_gap, launch)


@dataclass(frozen=True)
class MeasuredForward:
    """Measured seconds, interpolated linearly in tokens, batch and context.

    Args:
        grid: the seconds.
        proposer: name of the proposer that was measured; empty for the target, or where it was not recorded.
    """

    grid: Grid
    proposer: str = ""

    def seconds(self, rows: ArrayLike, batch: ArrayLike, context: ArrayLike) -> np.ndarray:
        """See ``ForwardCost``.

        Raises:
            ValueError: a point lies outside the measured table; nothing is extrapolated.
        """
        return self.grid(tokens=rows, batch=batch, context=context)


@dataclass(frozen=True)
class ConstantForward:
    """Work that always takes as long.

    Args:
        value: seconds.
    """

    value: float = 0.0

    def seconds(self, rows: ArrayLike, batch: ArrayLike, context: ArrayLike) -> np.ndarray:
        """See ``ForwardCost``."""
        return np.full(np.broadcast(rows, batch, context).shape, self.value)


def mean_seconds(
    forward: ForwardCost, rows: np.ndarray, share: np.ndarray, batch: np.ndarray, context: float
) -> np.ndarray:  # [R]
    """Return the mean over steps of the seconds of a forward.

    With one sequence it is the sum of share x seconds(rows of the step). A batch of B sequences computes the rows of B
    steps, which are taken as independent: their mean has the mean of a step's rows, and 1 / B of the variance. So the
    rows of each step are moved towards their mean, to 1 / sqrt(B) of their distance. That has the right mean and
    variance, and is exact where seconds are linear in rows.

    Args:
        forward: of one sequence or of a batch.
        rows: ``[J]`` rows of each sequence, of every kind of step.
        share: ``[R, J]`` share of the steps of each kind, for R draws; a draw's may sum to 0.
        batch: ``[R]`` number of sequences.
        context: tokens of each.
    """
    values, kind = np.unique(rows, return_inverse=True)
    weight = share @ (kind[:, None] == np.arange(len(values)))  # [R, J]
    total = weight.sum(1, keepdims=True)
    mean = (weight @ values)[:, None] / np.where(total > 0, total, 1.0)
    apart = np.clip(mean + (values - mean) / np.sqrt(batch)[:, None], values[0], values[-1])
    return (weight * forward.seconds(apart, batch[:, None], context)).sum(1)


COLUMNS = ("model", "tokens", "batch", "context", "seconds")
"""Columns of a measured table. ``model`` is "target", the name of an arm or of a proposer, or "draft"; ``tokens`` is
per sequence. Seconds of what drafts are those of a pass, of a lookup those of a step."""

PROPOSER = "proposer"
"""A further column, which may be left out: name of the proposer of an arm's rows, empty for others. The rows then hold
for designs of this proposer only."""

TABLE = "forwards.csv"
"""Name of the measured table that ``task=cost`` writes."""

MAXIMUM = {"tokens": 1e9, "batch": 1e9, "context": 1e9, "seconds": 1e5}
"""Maximum of each column of a measured table."""

MINIMUM = 1e-12
"""Minimum of each column, but for a context of 0."""

AXES = ("tokens", "batch", "context")


def measured(file: Path) -> dict[str, MeasuredForward]:
    """Return the measured forwards of a CSV file with ``COLUMNS``, by model; of equal points the median.

    Raises:
        OSError: it cannot be read.
        ValueError: a column is missing, a value is not a positive number, a model's points are no whole grid, or
            there is no target.
    """
    return grids(pd.DataFrame(rows(file)), file)


def grids(frame: pd.DataFrame, file: Path) -> dict[str, MeasuredForward]:
    """Return the measured forwards of a table with ``COLUMNS``, by model; of equal points the median.

    Args:
        file: where it comes from, for messages.

    Raises:
        ValueError: as in ``measured``; there is no target.
    """
    if missing := [name for name in COLUMNS if name not in frame]:
        raise ValueError(f"{file} has no column {missing[0]}; a table of forwards has the columns {', '.join(COLUMNS)}")
    for name in COLUMNS[1:]:
        values, written = pd.to_numeric(frame[name], errors="coerce"), frame[name].astype(str)
        wrong = ~(np.isfinite(values) & ((values > 0) | ((values == 0) & (name == "context"))))
        if wrong.any():
            least = "0 or more" if name == "context" else "above 0"
            got = written[wrong].iloc[0] or "nothing"
            raise ValueError(f"{file}, line {wrong.argmax() + 2}: {name} must be a number {least} (got {got[:40]})")
        large = (values > MAXIMUM[name]) | ((values < MINIMUM) & (values > 0))
        if large.any():
            raise ValueError(
                f"{file}, line {large.argmax() + 2}: {name} must be a number from {MINIMUM:g} to {MAXIMUM[name]:g} "
                f"(got {written[large].iloc[0][:40]})"
            )
        frame[name] = values
    costs = {}
    for model, of_model in frame.groupby("model", sort=False):
        each = of_model.groupby(list(AXES))["seconds"].median().sort_index()
        points = {name: tuple(sorted(float(value) for value in of_model[name].unique())) for name in AXES}
        shape = [len(values) for values in points.values()]
        if len(each) != np.prod(shape):
            raise ValueError(
                f"{file}: the rows of {model} cover {len(each)} of the {np.prod(shape)} points of their grid; measure "
                "every pair of tokens, batch and context"
            )
        proposers = of_model[PROPOSER].fillna("").astype(str).unique() if PROPOSER in of_model else [""]
        if len(proposers) > 1:
            raise ValueError(
                f"{file}: the rows of {model} name the proposers {' and '.join(map(str, proposers))}; give each "
                "proposer's rows their own model"
            )
        costs[str(model)] = MeasuredForward(Grid(points, each.to_numpy().reshape(shape)), str(proposers[0]))
    if "target" not in costs:
        raise ValueError(f"{file} has no rows whose model is target; the target's forwards are required")
    return costs
