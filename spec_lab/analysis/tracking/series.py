"""The points, tables and tags that Weights & Biases shows: pure functions of rows and manifest, without wandb.

Points have one of three axes: ``group`` (of prompts), ``step`` (an arm's decode steps, ``metrics.decode_steps``, in the
order decoded) and ``round`` (an arm's steps of the batch after the prefill). All arms and runs share the axes, so one
plot can show any of them. ``keys`` names every series.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import PHASES, Tables
from spec_lab.analysis.metrics.frames import by_depth
from spec_lab.analysis.metrics.phases import phase_seconds_by_step
from spec_lab.core.roofline import Roofline
from spec_lab.results import sweep
from spec_lab.results.manifest import finite

MAX_POINTS = 1000
"""Most points of a series over steps; longer series are averaged in this many bins."""

MAX_ROWS = 500
"""Most rows of the table of requests: those of the first prompts."""

MAX_LETTERS = 600
"""Most letters of a text in a table: the last of a prompt, the first of an output."""

Point = dict[str, float]

SERIES = {
    "group": ("tokens_per_second", "speedup"),
    "step": ("emitted", "accepted", "expected", "tau"),
    "round": tuple(f"seconds/{phase}" for phase in PHASES),
}
"""The series of an arm, by axis.

- ``tokens_per_second``, ``speedup``: of a group (``metrics.group_speeds``, ``walltime_speedup_paired``).
- ``emitted``: tokens that a step emitted, after cuts; ``accepted`` and ``expected``: accepted draft tokens and their
  exact expectation, before cuts; all without forced ones.
- ``tau``: ``metrics.tau_pooled`` of the steps so far.
- ``seconds/PHASE``: of a step of the batch, by phase; the phases add up to decode time.
"""


def keys(arms: list[str]) -> dict[str, str]:
    """Return the axis of each series that these arms can have."""
    series = {f"{arm}/{name}": axis for axis, names in SERIES.items() for arm in arms for name in names}
    return {name: axis for name, axis in series.items() if name != "baseline/speedup"}


def group_figures(requests: pd.DataFrame) -> Point:
    """Return tokens per second of each arm in one group; empty for a group that broke or ended with its prefill."""
    speeds = {f"{arm}/tokens_per_second": metrics.tokens_per_second(requests, arm) for arm in requests["arm"].unique()}
    return {name: speed for name, speed in speeds.items() if math.isfinite(speed)}


def groups(tables: Tables) -> Iterator[tuple[int, Point]]:
    """Yield each finished group's number and figures, in order; a live run logs the same."""
    for number, requests in tables.requests.groupby("group"):
        yield int(number), group_figures(requests)


def points(tables: Tables, max_points: int = MAX_POINTS) -> Iterator[Point]:
    """Yield what is shown once decoding is over: speed-ups by group, then every arm's steps.

    Args:
        tables: the run's rows.
        max_points: most points of a series over steps.
    """
    names = metrics.arms(tables)
    paired = pd.DataFrame(
        {f"{arm}/speedup": metrics.walltime_speedup_paired(tables.requests, arm) for arm in names if arm != "baseline"}
    )
    yield from _points("group", [paired])
    by_step, by_round = [], []
    for arm in names:
        steps = _in_order(metrics.decode_steps(tables.steps, arm))
        edges = _edges(len(steps), max_points)
        shown = _binned(_step_values(steps), edges)
        shown["tau"] = [metrics.tau_pooled(steps.iloc[:end]) for end in edges[1:]]
        by_step.append(shown.add_prefix(f"{arm}/"))
        seconds = phase_seconds_by_step(_in_order(tables.rounds[tables.rounds["arm"] == arm]))
        by_round.append(_binned(seconds, _edges(len(seconds), max_points)).add_prefix(f"{arm}/seconds/"))
    yield from _points("step", by_step)
    yield from _points("round", by_round)


def rows_per_point(tables: Tables, max_points: int = MAX_POINTS) -> dict[str, float]:
    """Return how many rows a point averages, where more than one, by arm and axis, such as ``baseline/step``."""
    rows = {}
    for arm in metrics.arms(tables):
        rows[f"{arm}/step"] = len(metrics.decode_steps(tables.steps, arm))
        rows[f"{arm}/round"] = int(((tables.rounds["arm"] == arm) & ~tables.rounds["prefill"]).sum())
    return {name: count / max_points for name, count in rows.items() if count > max_points}


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in the order decoded, also of a run that was interrupted and resumed."""
    order = [name for name in ("group", "round", "request", "sequence") if name in rows]
    return rows.sort_values(order, kind="stable", ignore_index=True)


def _step_values(steps: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "emitted": steps["emitted_kept"] - steps["forced_emitted_kept"],
            "accepted": steps["accepted"] - steps["forced_accepted"],
            "expected": steps["expected_accepted"],
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
    joined = pd.concat([one for one in series if len(one)] or [pd.DataFrame()], axis=1).sort_index()
    for place, row in zip(joined.index, joined.to_numpy(dtype=float).tolist(), strict=True):
        known = {name: value for name, value in zip(joined.columns, row, strict=True) if math.isfinite(value)}
        if known:
            yield {axis: int(place), **known}


def requests(tables: Tables, max_rows: int = MAX_ROWS, max_letters: int = MAX_LETTERS) -> pd.DataFrame:
    """Return one row for each prompt and arm (each sequence of a fork): texts, tokens, tau, speed, finish reason.

    All arms of a prompt are shown or none, with at most ``max_rows`` rows together.
    """
    every = tables.requests.sort_values(["request", "order", "sequence"], kind="stable")
    count = every.groupby("request", sort=True).size().cumsum()
    shown = every[every["request"].isin(count.index[count <= max_rows])]
    steps = {
        key: rows
        for arm in metrics.arms(tables)
        for key, rows in metrics.decode_steps(tables.steps, arm).groupby(["request", "arm", "sequence"])
    }
    rows = []
    for one in shown.itertuples(index=False):
        of_sequence = steps.get((one.request, one.arm, one.sequence))
        rows.append(
            {
                "request": int(one.request),
                "name": one.name,
                "workload": one.workload,
                "arm": one.arm,
                "sequence": int(one.sequence),
                "prompt": one.prompt if len(one.prompt) <= max_letters else "…" + one.prompt[-max_letters:],
                "text": one.text if len(one.text) <= max_letters else one.text[:max_letters] + "…",
                "tokens": int(one.prefill_tokens + one.decode_tokens),
                "tau": None if of_sequence is None else metrics.tau_pooled(of_sequence),
                "tokens_per_second": metrics.ratio(one.decode_tokens, one.decode_seconds),
                "finish": one.finish,
                "error": one.error,
            }
        )
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["request"]).astype(object)


def depths(tables: Tables) -> pd.DataFrame:
    """Return acceptance by depth of each arm that drafts (``metrics.frames.by_depth``)."""
    return by_depth(tables).astype(object)


def summary(tables: Tables, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the finished groups, for a run without ``summary.json``."""
    roofline = Roofline.of(manifest.get("roofline"))
    arms = {arm: metrics.summarise(tables, arm, roofline=roofline) for arm in metrics.arms(tables)}
    shared = {"experiment": experiment(manifest), "groups": tables.requests["group"].nunique()}
    return dict(finite({**shared, **manifest.get("parts", {}), **next(iter(arms.values())), "arms": arms}))


def experiment(manifest: Mapping[str, Any]) -> str:
    """Return the experiment's name."""
    return str(manifest["config"].get("name", "spec_lab"))


def group(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return the group of a run: its sweep, else its experiment."""
    parent = folder.absolute().parent
    return parent.name if sweep.is_sweep(parent) else experiment(manifest)


def tags(parts: Mapping[str, Any]) -> list[str]:
    """Return tags for proposer, verifier, constraint and losslessness.

    Args:
        parts: ``proposer``, ``verifier``, ``constraint`` (names) and ``lossless``; each may be missing.
    """
    names = [f"{part}={parts[part]}"[:64] for part in ("proposer", "verifier", "constraint") if parts.get(part)]
    lossless = parts.get("lossless")
    return names + ([] if lossless is None else ["lossless" if lossless else "lossy"])


def identity(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return an id that is the same whenever this run is tracked, from its manifest and its folder's name."""
    facts = json.dumps([folder.absolute().name, manifest], sort_keys=True, default=str)
    return sha256(facts.encode()).hexdigest()[:16]


def is_offline_folder(name: str, run_id: str) -> bool:
    """Return whether wandb gives this name to an offline folder of the run with this id."""
    return re.fullmatch(rf"offline-run-\d+_\d+-{re.escape(run_id)}(-\d+)?", name) is not None
