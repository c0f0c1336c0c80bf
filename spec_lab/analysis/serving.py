"""Figures of a served stream of requests: throughput, latencies, goodput, and speed-ups paired by segment.

The rows are those of ``task=serve_trace``: for each request and arm the times of its arrival, its admission, its first
and its last token, in seconds from the start of its segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Interval, TimingVerdict, cluster_interval, ratio, speedup_of_totals
from spec_lab.analysis.metrics.ranges import in_ranges

PERCENTILES = (50, 90, 99)


def latencies(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with their latencies in seconds.

    Columns: ``queue``, ``prefill`` (from the admission to the first token), ``ttft`` (time to first token: both) and
    ``tpot`` (time per further token; NaN where there is at most one token, which ``mean`` and ``quantile`` leave out).
    """
    further = frame["tokens"] - 1
    return frame.assign(
        queue=frame["admitted"] - frame["arrival"],
        prefill=frame["first_token"] - frame["admitted"],
        ttft=frame["first_token"] - frame["arrival"],
        tpot=(frame["end"] - frame["first_token"]) / further.where(further > 0),
    )


def summarise(
    frame: pd.DataFrame, arms: Sequence[str], ttft_bound: float, tpot_bound: float, baseline: str | None = "baseline"
) -> dict[str, Any]:
    """Return throughput, latencies and goodput of every arm, and its speed-up over the baseline.

    Throughput is the number of tokens over the seconds from a segment's first arrival to its last token, both summed
    over segments. The speed-up is the ratio of the two throughputs on the same requests (``metrics.speedup``), with an
    interval over segments; NaN of the baseline itself, and without a baseline. Figures over no rows are
    NaN.

    The share of the roofline is that of the target's forwards in steps that computed no part of a prompt
    (``metrics.roofline_figures``); ``memory_bound_share`` is the part of their least seconds that reading bounds. Both
    are NaN in runs without the columns that they require.

    Requests without a further token have no time per further token: its mean and percentiles leave them out, and for
    goodput they are within ``tpot_bound``, as in vLLM's benchmark.
    """
    frame = latencies(frame)
    good = (frame["ttft"] <= ttft_bound) & ~(frame["tpot"] > tpot_bound)
    each = frame.assign(good=good).groupby(["arm", "segment"])
    spans = pd.DataFrame(
        {
            "seconds": each["end"].max() - each["arrival"].min(),
            "tokens": each["tokens"].sum(),
            "good": each["good"].sum(),
        }
    )
    arm_of = spans.index.get_level_values("arm")
    figures: dict[str, Any] = {}
    for arm in arms:
        of_arm, mine = frame[frame["arm"] == arm], spans[arm_of == arm].droplevel("arm")
        base = spans[arm_of == baseline].droplevel("arm")
        speedup = Interval(*[float("nan")] * 3)
        if arm != baseline:
            speedup = speedup_of_totals(mine[["tokens", "seconds"]], base[["tokens", "seconds"]])
        figures[arm] = {
            "requests": len(of_arm),
            "tokens": int(mine["tokens"].sum()),
            "seconds": float(mine["seconds"].sum()),
            "tokens_per_second": ratio(mine["tokens"].sum(), mine["seconds"].sum()),
            "goodput": ratio(mine["good"].sum(), mine["seconds"].sum()),
            **_roofline(of_arm),
            "speedup": speedup._asdict(),
            **{
                name: {f"p{p}": float(of_arm[name].quantile(p / 100)) for p in PERCENTILES}
                | {"mean": float(of_arm[name].mean())}
                for name in ("queue", "prefill", "ttft", "tpot")
            },
        }
    return figures


def drift_figures(frame: pd.DataFrame, arms: Sequence[str], change: int, window: int) -> dict[str, Any]:
    """Return tau and the acceptance rate of each arm that drafts, in windows of the stream.

    Args:
        change: number of the first request of the other workload, with which a window begins.
        window: requests of a window; the first and the last one may have fewer.

    Returns:
        ``at``, the change; ``window``; and ``arms``: of each its windows, with the ``first`` and the ``last`` request,
        the number of ``requests``, and ``tau_pooled`` and ``draft_token_rate`` of their steps after the prefill, with
        intervals over requests.
    """
    last = int(frame["request"].max()) if len(frame) else 0
    ends = sorted({*range(change, 0, -window), *range(change, last + 1 + window, window)})  # one after the last request
    by_arm = {}
    for arm in arms:
        rows = frame[frame["arm"] == arm]
        if not rows["drafted"].sum():
            continue
        number = rows["request"].to_numpy(dtype=np.int64)
        columns = {"tau_pooled": ("emitted", "decode_steps"), "draft_token_rate": ("accepted", "drafted")}
        terms = {
            name: (rows[top].to_numpy(dtype=float), rows[bottom].to_numpy(dtype=float))
            for name, (top, bottom) in columns.items()
        }
        by_arm[arm] = [
            {"first": row.pop("first") - 1, "last": row.pop("last") - 1, "requests": row.pop("steps"), **row}
            for row in in_ranges(number + 1, ends, terms, number)
        ]
    return {"at": change, "window": window, "arms": by_arm}


def serving_verdict(frame: pd.DataFrame, manifest: Mapping[str, Any], baseline: str = "baseline") -> TimingVerdict:
    """Return the verdict on the times of a served stream (``metrics.timing_verdict``), segment by segment.

    Args:
        frame: the rows of segments in which no request broke.
        baseline: the arm that others are compared with.
    """
    arms = {}
    for arm, rows in frame.groupby("arm", sort=False):
        each = rows.groupby("segment")
        table = pd.DataFrame({"tokens": each["tokens"].sum(), "seconds": each["end"].max() - each["arrival"].min()})
        table = table[(table > 0).all(axis=1)]
        slowness, load = metrics.token_slowness(table), metrics.other_cores(rows, "segment")
        arms[str(arm)] = table.assign(slowness=slowness, same_forwards=False, other_cores=load)
    return metrics.timing_verdict(arms, metrics.Resources.of(manifest), baseline, "segment")


def _roofline(forwards: pd.DataFrame) -> dict[str, Any]:
    """Return ``roofline_share`` of an arm's rows with its interval over segments, and ``memory_bound_share``."""
    if "lower_bound_seconds" not in forwards:
        return {"roofline_share": Interval(*[float("nan")] * 3)._asdict(), "memory_bound_share": float("nan")}
    known = forwards.dropna(subset=["lower_bound_seconds"])
    share = cluster_interval(known["lower_bound_seconds"], known["forward_seconds"], known["segment"])
    memory = ratio(known["read_seconds"].sum(), known["lower_bound_seconds"].sum())
    return {"roofline_share": share._asdict(), "memory_bound_share": memory}
