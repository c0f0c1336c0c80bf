"""The points of a run on Weights & Biases: pure functions of its rows, without wandb.

Points have one of four axes: ``prompt_group``, ``decode_step`` (an arm's decode steps, ``metrics.decode_steps``, in the
order decoded), ``batch_step`` (an arm's steps of the batch after the prefill) and ``trainer/global_step``. All arms and
runs share the axes, so one plot can show any of them. Series of the main arm have no prefix, such as ``tau``; those of
another arm that of its key, such as ``baseline/tokens_per_second``. ``keys`` names every series.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import PHASES, Tables
from spec_lab.analysis.metrics.phases import phase_seconds_by_step

MAX_POINTS = 1000
"""Most points of a series over steps; longer series are averaged in this many bins."""

Point = dict[str, float]

GROUP, STEP, BATCH_STEP, TRAIN_STEP = "prompt_group", "decode_step", "batch_step", "trainer/global_step"

SERIES = {
    GROUP: ("tokens_per_second", "speedup"),
    STEP: ("tau", "acceptance_rate", "emitted_tokens", "accepted_tokens", "expected_accepted_tokens"),
    BATCH_STEP: tuple(f"time/{phase}" for phase in PHASES),
}
"""The series of an arm, by axis.

- ``tokens_per_second``, ``speedup``: of a group (``metrics.group_speeds``, ``walltime_speedup_paired``).
- ``tau``, ``acceptance_rate``: ``metrics.tau_pooled`` and ``draft_token_rate`` of the steps so far.
- ``emitted_tokens``: that a step emitted, after cuts; ``accepted_tokens`` and ``expected_accepted_tokens``: accepted
  draft tokens and their exact expectation, before cuts; all without forced ones.
- ``time/PHASE``: seconds of a step of the batch, by phase; the phases add up to decode time.
"""

RUNNING = ("tau", "acceptance_rate")
"""Series whose last point is the run's figure of the same name."""


def name(arm: str, figure: str, main: str) -> str:
    """Return the name of an arm's figure; ``main`` is the main arm, or the first of arms. The baseline is never it."""
    return figure if arm == main != "baseline" else f"{arm}/{figure}"


def keys(arms: Sequence[str]) -> dict[str, str]:
    """Return the axis of each series that these arms can have, of which the first is the main one."""
    series = {name(arm, figure, arms[0]): axis for axis, names in SERIES.items() for arm in arms for figure in names}
    return {key: axis for key, axis in series.items() if key != "baseline/speedup"}


def group_figures(requests: pd.DataFrame, main: str) -> Point:
    """Return tokens per second of each arm in one group; empty for a group that broke or ended with its prefill."""
    speeds = {
        name(arm, "tokens_per_second", main): metrics.tokens_per_second(requests, arm)
        for arm in requests["arm"].unique()
    }
    return {key: speed for key, speed in speeds.items() if math.isfinite(speed)}


def groups(tables: Tables) -> Iterator[tuple[int, Point]]:
    """Yield each finished group's number and figures, in order; a live run logs the same."""
    main = metrics.main_arm(tables) or ""
    for number, requests in tables.requests.groupby("group"):
        yield int(number), group_figures(requests, main)


def points(tables: Tables, max_points: int = MAX_POINTS) -> Iterator[Point]:
    """Yield what is shown once decoding is over: speed-ups by group, then every arm's steps.

    Args:
        max_points: most points of a series over steps.
    """
    names, main = metrics.arms(tables), metrics.main_arm(tables) or ""
    paired = pd.DataFrame(
        {
            name(arm, "speedup", main): metrics.walltime_speedup_paired(tables.requests, arm)
            for arm in names
            if arm != "baseline"
        }
    )
    yield from _points(GROUP, [paired])
    by_step, by_batch_step = [], []
    for arm in names:
        steps = _in_order(metrics.decode_steps(tables.steps, arm))
        edges = _edges(len(steps), max_points)
        shown = _binned(_step_values(steps), edges)
        shown["tau"] = [metrics.tau_pooled(steps.iloc[:end]) for end in edges[1:]]
        shown["acceptance_rate"] = [metrics.draft_token_rate(steps.iloc[:end]) for end in edges[1:]]
        by_step.append(shown.rename(columns={figure: name(arm, figure, main) for figure in shown}))
        seconds = phase_seconds_by_step(_in_order(tables.forwards[tables.forwards["arm"] == arm]))
        binned = _binned(seconds, _edges(len(seconds), max_points))
        by_batch_step.append(binned.rename(columns={phase: name(arm, f"time/{phase}", main) for phase in binned}))
    yield from _points(STEP, by_step)
    yield from _points(BATCH_STEP, by_batch_step)


def mean_seconds(tables: Tables) -> Point:
    """Return the mean of each ``time/PHASE`` over the steps of the batch in timed groups, as figures of the run."""
    shares, main, tables = {}, metrics.main_arm(tables) or "", metrics.of_timed_groups(tables)
    for arm in metrics.arms(tables):
        count = int(((tables.forwards["arm"] == arm) & ~tables.forwards["prefill"]).sum())
        for phase, seconds in metrics.phase_seconds(tables.forwards, arm).items():
            if count:
                shares[name(arm, f"time/{phase}", main)] = seconds / count
    return shares


def rows_per_point(tables: Tables, max_points: int = MAX_POINTS) -> dict[str, float]:
    """Return how many rows a point averages, where more than one, by arm and axis, such as ``baseline/decode_step``."""
    rows, main = {}, metrics.main_arm(tables) or ""
    for arm in metrics.arms(tables):
        rows[name(arm, STEP, main)] = len(metrics.decode_steps(tables.steps, arm))
        rows[name(arm, BATCH_STEP, main)] = int(((tables.forwards["arm"] == arm) & ~tables.forwards["prefill"]).sum())
    return {key: count / max_points for key, count in rows.items() if count > max_points}


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in the order decoded, also of a run that was interrupted and resumed."""
    order = [name for name in ("group", "forward", "request", "sequence") if name in rows]
    return rows.sort_values(order, kind="stable", ignore_index=True)


def _step_values(steps: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "emitted_tokens": steps["emitted_kept"] - steps["forced_emitted_kept"],
            "accepted_tokens": steps["accepted"] - steps["forced_accepted"],
            "expected_accepted_tokens": steps["expected_accepted"],
        }
    )


def _edges(length: int, max_points: int) -> np.ndarray:  # [bins + 1]
    """Return the edges of the bins: one row each, or ``max_points`` bins whose sizes differ by at most one."""
    bins = min(length, max_points)
    return np.linspace(0, length, bins + 1).round().astype(int)


def _binned(values: pd.DataFrame, edges: np.ndarray) -> pd.DataFrame:
    """Return the mean of each bin, indexed by its first row."""
    sums = np.add.reduceat(values.to_numpy(dtype=float), edges[:-1], axis=0) if len(edges) > 1 else values
    return pd.DataFrame(sums / np.diff(edges)[:, None], index=edges[:-1], columns=values.columns)


def _points(axis: str, series: list[pd.DataFrame]) -> Iterator[Point]:
    """Yield one point for each place on the axis, all series together, without values that are not finite."""
    joined = pd.concat([points for points in series if len(points)] or [pd.DataFrame()], axis=1).sort_index()
    for position, row in zip(joined.index, joined.to_numpy(dtype=float).tolist(), strict=True):
        known = {key: value for key, value in zip(joined.columns, row, strict=True) if math.isfinite(value)}
        if known:
            yield {axis: int(position), **known}
