"""The roofline model: the least seconds that a machine needs for the forwards of a model.

A forward takes at least max(bytes / bandwidth, FLOPs / peak), whichever resource bounds it (Williams, Waterman and
Patterson, "Roofline", 2009, doi 10.1145/1498765.1498785). The share of the roofline is that bound over the measured
seconds. Where reading bounds every step, as in autoregressive decoding at small batch sizes, it is Databricks' model
bandwidth utilization (MBU), with the bandwidth that was measured in place of the machine's nominal one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike

from spec_lab.core.machine import crowded
from spec_lab.core.options import hints


@dataclass(frozen=True)
class AttentionWork:
    """The work of attention: what it reads and computes, summed over layers with the same window or chunk.

    Args:
        kv_bytes: keys and values of one position.
        flops: of one row over one position: the products with its key and its value.
        window: W; a row at position i attends to positions i - W + 1 to i. None for no window.
        chunk: C; a row at position i attends to positions from the last multiple of C on. None for no chunks.
    """

    kv_bytes: int
    flops: int
    window: int | None = None
    chunk: int | None = None

    def first(self, position: np.ndarray) -> np.ndarray:
        """The first position that rows at these positions attend to."""
        near = np.zeros_like(position) if self.window is None else np.maximum(position - self.window + 1, 0)
        return near if self.chunk is None else np.maximum(near, position - position % self.chunk)


@dataclass(frozen=True)
class ExpertWork:
    """The experts of the layers that have several, of which each row chooses some; experts of every row left out.

    Args:
        layers: that have them.
        experts: E, of each layer.
        per_row: k, that each row chooses.
        expert_bytes: weights of one expert of one layer, a mean.
        effective: number of experts among which uniform choices would read as many as were counted (``fitted``); None:
            all.
    """

    layers: int
    experts: int
    per_row: int
    expert_bytes: float
    effective: float | None = None

    def expected(self, rows: ArrayLike) -> np.ndarray:
        """Return the expected number of different experts that ``rows`` rows choose in a layer.

        Each row chooses k of E, uniformly and independently of the others: E (1 - (1 - k / E)^rows) (MoESD,
        2505.19645). Rows that choose alike read fewer.
        """
        among = float(self.experts if self.effective is None else self.effective)
        return np.asarray(among * (1.0 - (1.0 - self.per_row / among) ** np.asarray(rows, dtype=float)))

    def fitted(self, rows: ArrayLike, read: ArrayLike) -> float:
        """Return the ``effective`` with which forwards of so many rows would read as many experts, in total.

        Args:
            rows: of each forward.
            read: the experts of a layer that each read.
        """
        low, high, total = float(self.per_row), float(self.experts), float(np.sum(read))
        for _ in range(50):
            middle = (low + high) / 2
            below = float(replace(self, effective=middle).expected(rows).sum()) < total
            low, high = (middle, high) if below else (low, middle)
        return high

    def beyond_one_row(self, chosen: ArrayLike) -> np.ndarray:
        """Return the bytes of all layers beyond those of one row, where a layer's rows chose so many experts."""
        return self.layers * self.expert_bytes * (np.asarray(chosen, dtype=float) - self.per_row)


@dataclass(frozen=True)
class ForwardWork:
    """The work of a forward, as far as it depends on the model and the number of rows only.

    Activations, norms and softmax are left out, and of the embedding table the few rows that are read. Of the experts
    of a layer those are read that any row chooses.

    Args:
        weight_bytes: weights that a forward of one row reads: linear layers, norms and the LM head (tied or not, once).
        row_flops: of a row in the layers, attention left out: two for each weight that it is multiplied with.
        logits_flops: of a row with logits in the LM head.
        attention: by window and chunk.
        experts: of a mixture of experts; None of a dense model, and of older records, which
            count those of one row.
    """

    weight_bytes: int
    row_flops: int
    logits_flops: int
    attention: tuple[AttentionWork, ...]
    experts: ExpertWork | None = None

    def read(self, rows: ArrayLike, chosen: ArrayLike | None = None) -> np.ndarray:
        """Return the bytes of weights that forwards of so many rows read, all sequences' rows together.

        Args:
            rows: of each forward.
            chosen: the different experts of a layer that were counted, a mean over layers; NaN or None: as many as
                ``ExpertWork.expected``.
        """
        count = np.asarray(rows, dtype=float)
        if self.experts is None:
            return np.full(count.shape, float(self.weight_bytes))
        expected = self.experts.expected(count)
        if chosen is not None:
            counted = np.asarray(chosen, dtype=float)
            expected = np.where(np.isnan(counted), expected, counted)
        return self.weight_bytes + self.experts.beyond_one_row(expected)


@dataclass(frozen=True)
class MachineLimits:
    """The limits of a forward on this machine (``core.machine_limits.measure``).

    Args:
        bandwidth: bytes per second of reading ``read_bytes`` again and again; ``bandwidth_median``: of the same passes
            the median, which is lower where other processes used the machine.
        read_bytes: as many as the weights, or the largest buffer that is measured.
        peak: FLOP/s of the fastest matrix product; ``peak_median``: as above.
        peak_dtype: of its factors.
        cache_bytes: of the last-level caches; None if not known.
        fits_cache: whether the weights fit into them, so that the bandwidth is the cache's; None if not known.
        threads: of a forward on the CPU.
        cores: that the process may use.
        other_load: cores that other processes used on average meanwhile; None if not known.
        seconds: that the measurement took.
    """

    bandwidth: float
    bandwidth_median: float
    read_bytes: int
    peak: float
    peak_median: float
    peak_dtype: str
    cache_bytes: int | None
    fits_cache: bool | None
    threads: int
    cores: int
    other_load: float | None
    seconds: float

    @property
    def crowded(self) -> bool:
        """Whether other processes needed the cores that were measured, so that the limits may be too low."""
        return crowded(self.other_load, self.threads, self.cores)


@dataclass(frozen=True)
class Roofline:
    """The least seconds of the forwards of one model on one machine."""

    work: ForwardWork
    limits: MachineLimits

    def seconds(
        self,
        step: ArrayLike,
        context: ArrayLike,
        pending: ArrayLike,
        nodes: ArrayLike,
        chosen: ArrayLike | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the least seconds of reading and of computing of each step, ``[S]`` each; their maximum is the bound.

        Of each sequence the keys and values that any of its rows attends to are read once. Products are counted as a
        dense kernel computes them: every row with every position of its sequence, the rows of this step included; in
        layers with windows or chunks with no more than these hold.

        Args:
            step: ``[N]`` number of the step, from 0 to S - 1, that computed for this sequence.
            context: ``[N]`` tokens of the sequence when the step began, pending ones included.
            pending: ``[N]`` of them, those that the step computed.
            nodes: ``[N]`` rows below the last pending token, all with logits.
            chosen: ``[S]`` as in ``ForwardWork.read``.
        """
        columns = (step, context, pending, nodes)
        step, context, pending, nodes = (np.asarray(column, dtype=np.int64) for column in columns)
        rows, positions, work = pending + nodes, context + nodes, self.work
        read, flops = np.zeros(len(step)), work.row_flops * rows + work.logits_flops * (1.0 + nodes)
        for kind in work.attention:
            attended = positions - kind.first(context - pending)
            read += kind.kv_bytes * attended
            flops += float(kind.flops) * rows * np.minimum(attended, min(kind.window or np.inf, kind.chunk or np.inf))
        count = int(step.max(initial=-1)) + 1
        total_read = work.read(np.bincount(step, rows, count), chosen) + np.bincount(step, read, count)
        return total_read / self.limits.bandwidth, np.bincount(step, flops, count) / self.limits.peak

    def facts(self) -> dict[str, Any]:
        """Return what ``manifest.json`` and ``summary.json`` record."""
        return asdict(self)

    @staticmethod
    def of(facts: Mapping[str, Any] | None) -> Roofline | None:
        """Return the roofline of recorded ``facts``, of which only known keys are read; None for a run without any."""
        if not facts:
            return None
        work, limits = facts["work"], facts["limits"]
        attention = tuple(AttentionWork(**_known(AttentionWork, part)) for part in work["attention"])
        experts = work.get("experts")
        mixture = None if experts is None else ExpertWork(**_known(ExpertWork, experts))
        parts: dict[str, Any] = {"attention": attention, "experts": mixture}
        forward_work = ForwardWork(**_known(ForwardWork, work) | parts)
        return Roofline(forward_work, MachineLimits(**_known(MachineLimits, limits)))


def _known(made: type, recorded: Mapping[str, Any]) -> dict[str, Any]:
    return {name: recorded[name] for name in hints(made) if name in recorded}


def _shape(made: type) -> dict[str, Any]:
    """Return the shape of a recorded dataclass (``files.expect``); fields with a default may be missing."""
    shape = {}
    for field in fields(made):
        hint = hints(made)[field.name]
        kinds = tuple(None if kind is type(None) else kind for kind in get_args(hint))
        shape["?" * (field.default is not MISSING) + field.name] = kinds or hint
    return shape


SHAPE = {
    "work": _shape(ForwardWork) | {"attention": [_shape(AttentionWork)], "?experts": (None, _shape(ExpertWork))},
    "limits": _shape(MachineLimits),
}
"""The shape of ``Roofline.facts``."""
