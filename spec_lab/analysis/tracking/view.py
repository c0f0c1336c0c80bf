"""What Weights & Biases shows of a run: points, tables, tags. Pure functions of rows and manifest; no wandb here.

Points lie over one of three axes: ``group`` (of prompts), ``step`` (an arm's decode steps, as ``metrics.decode_steps``
has them, in the order decoded) and ``round`` (an arm's rounds after the prefill). All arms and runs share the axes, so
that one plot holds any of them. ``keys`` names every series.
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
from spec_lab.results import sweep
from spec_lab.results.manifest import finite

POINTS = 1000
"""Most points of a series over steps or rounds; longer ones are averaged in as many bins."""

ROWS = 500
"""Most rows of the table of requests: those of the first prompts."""

LETTERS = 600
"""Most letters of a text in a table: of a prompt the last, of an output the first."""

Point = dict[str, float]

SERIES = {
    "group": ("tokens_per_second", "speedup"),
    "step": ("emitted", "accepted", "expected", "tau"),
    "round": tuple(f"seconds/{phase}" for phase in PHASES),
}
"""The series of an arm, by axis.

- ``tokens_per_second``, ``speedup``: of a group (``metrics.group_speeds``, ``walltime_speedup_paired``).
- ``emitted``: tokens that a step emitted, after cuts; ``accepted`` and ``expected``: of its drafted tokens, those
  accepted, and the exact expectation of that, before cuts; all without forced ones.
- ``tau``: ``metrics.tau_pooled`` of the steps so far.
- ``seconds/PHASE``: of a round, by phase; all phases make up decode time.
"""


def keys(arms: list[str]) -> dict[str, str]:
    """The axis of each series that such arms can have."""
    named = {f"{arm}/{name}": axis for axis, names in SERIES.items() for arm in arms for name in names}
    return {name: axis for name, axis in named.items() if name != "baseline/speedup"}


def group_figures(requests: pd.DataFrame) -> Point:
    """Tokens per second of each arm in one group; nothing for a group that broke or ended with its prefill."""
    speeds = {f"{arm}/tokens_per_second": metrics.tokens_per_second(requests, arm) for arm in requests["arm"].unique()}
    return {name: speed for name, speed in speeds.items() if math.isfinite(speed)}


def groups(tables: Tables) -> Iterator[tuple[int, Point]]:
    """Each finished group's number and figures, in order: what is also logged while the run goes on."""
    for number, requests in tables.requests.groupby("group"):
        yield int(number), group_figures(requests)


def series(tables: Tables, points: int = POINTS) -> Iterator[Point]:
    """What is shown once decoding is over: speed-ups by group, then every arm's steps and rounds.

    Args:
        tables: the run's rows.
        points: most points of a series over steps or rounds.
    """
    names = metrics.arms(tables)
    paired = pd.DataFrame(
        {f"{arm}/speedup": metrics.walltime_speedup_paired(tables.requests, arm) for arm in names if arm != "baseline"}
    )
    yield from _points("group", [paired])
    found = []
    for arm in names:
        steps = _in_order(metrics.decode_steps(tables.steps, arm))
        edges = _edges(len(steps), points)
        shown = _binned(_step_values(steps), edges)
        shown["tau"] = [metrics.tau_pooled(steps.iloc[:end]) for end in edges[1:]]
        found.append(shown.add_prefix(f"{arm}/"))
    yield from _points("step", found)
    found = []
    for arm in names:
        seconds = _round_seconds(_in_order(tables.rounds[tables.rounds["arm"] == arm]))
        found.append(_binned(seconds, _edges(len(seconds), points)).add_prefix(f"{arm}/seconds/"))
    yield from _points("round", found)


def averaged(tables: Tables, points: int = POINTS) -> dict[str, float]:
    """How many rows stand behind one point, where that is more than one: by arm and axis, such as ``baseline/step``."""
    rows = {}
    for arm in metrics.arms(tables):
        rows[f"{arm}/step"] = len(metrics.decode_steps(tables.steps, arm))
        rows[f"{arm}/round"] = int(((tables.rounds["arm"] == arm) & ~tables.rounds["prefill"]).sum())
    return {name: count / points for name, count in rows.items() if count > points}


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """As decoded, whichever part of a run that was interrupted they come from."""
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


def _round_seconds(rounds: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each round after the prefill, by phase; they add up to ``metrics.phase_seconds``."""
    end = rounds["start"] + rounds["whole"]
    parts = pd.DataFrame(
        {
            "target_forward": rounds["target_forward"],
            "propose_forward": rounds["propose_forward"],
            "target_rest": rounds["target"] - rounds["target_forward"],
            "propose_rest": rounds["propose"] - rounds["propose_forward"],
            **{phase: rounds[phase] for phase in ("mask_wait", "probabilities", "verify", "commit")},
        }
    )
    since = end - end.groupby(rounds["group"]).shift(fill_value=0.0)  # since the round before ended
    parts["between"] = since - parts.sum(axis=1)
    return parts[~rounds["prefill"].astype(bool)].reset_index(drop=True)[list(PHASES)]


def _edges(length: int, points: int) -> np.ndarray:  # [bins + 1]
    """Where the bins of ``length`` rows begin and end: one row each, or ``points`` bins that differ by one at most."""
    return np.arange(length + 1) if length <= points else np.linspace(0, length, points + 1).round().astype(int)


def _binned(values: pd.DataFrame, edges: np.ndarray) -> pd.DataFrame:
    """The mean of each bin, indexed by its first row."""
    sums = np.add.reduceat(values.to_numpy(dtype=float), edges[:-1], axis=0) if len(edges) > 1 else values
    return pd.DataFrame(sums / np.diff(edges)[:, None], index=edges[:-1], columns=values.columns)


def _points(axis: str, series: list[pd.DataFrame]) -> Iterator[Point]:
    """One point for each place on the axis, all series together; what is not finite is left out."""
    whole = pd.concat([one for one in series if len(one)] or [pd.DataFrame()], axis=1).sort_index()
    for place, row in zip(whole.index, whole.to_numpy(dtype=float).tolist(), strict=True):
        known = {name: value for name, value in zip(whole.columns, row, strict=True) if math.isfinite(value)}
        if known:
            yield {axis: int(place), **known}


def requests(tables: Tables, rows: int = ROWS, letters: int = LETTERS) -> pd.DataFrame:
    """One row for each prompt and arm (each sequence of a fork): texts, tokens, tau, speed, and why it ended.

    Prompts stay whole: no more of them are shown than have at most ``rows`` rows together.
    """
    every = tables.requests.sort_values(["request", "order", "sequence"], kind="stable")
    count = every.groupby("request", sort=True).size().cumsum()
    shown = every[every["request"].isin(count.index[count <= rows])]
    steps = {
        which: own
        for arm in metrics.arms(tables)
        for which, own in metrics.decode_steps(tables.steps, arm).groupby(["request", "arm", "sequence"])
    }
    found = []
    for one in shown.itertuples(index=False):
        own = steps.get((one.request, one.arm, one.sequence))
        found.append(
            {
                "request": int(one.request),
                "name": one.name,
                "workload": one.workload,
                "arm": one.arm,
                "sequence": int(one.sequence),
                "prompt": one.prompt if len(one.prompt) <= letters else "…" + one.prompt[-letters:],
                "text": one.text if len(one.text) <= letters else one.text[:letters] + "…",
                "tokens": int(one.prefill_tokens + one.decode_tokens),
                "tau": None if own is None else metrics.tau_pooled(own),
                "tokens_per_second": metrics.ratio(one.decode_tokens, one.decode_seconds),
                "finish": one.finish,
                "error": one.error,
            }
        )
    columns = list(found[0]) if found else ["request"]
    return pd.DataFrame(found, columns=columns).astype(object)


def depths(tables: Tables) -> pd.DataFrame:
    """Acceptance by depth of each arm that drafts, as ``metrics.frames.by_depth`` has it."""
    return by_depth(tables).astype(object)


def summary(tables: Tables, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run that did not get to write ``summary.json``, the figures of the groups that are finished."""
    arms = {arm: metrics.summarise(tables, arm) for arm in metrics.arms(tables)}
    shared = {"experiment": experiment(manifest), "groups": tables.requests["group"].nunique()}
    return dict(finite({**shared, **manifest.get("parts", {}), **next(iter(arms.values())), "arms": arms}))


def experiment(manifest: Mapping[str, Any]) -> str:
    """The experiment's name."""
    return str(manifest["config"].get("name", "spec_lab"))


def group(folder: Path, manifest: Mapping[str, Any]) -> str:
    """What a run stands together with: the other runs of its sweep, else those of its experiment."""
    parent = folder.absolute().parent
    return parent.name if sweep.is_sweep(parent) else experiment(manifest)


def tags(parts: Mapping[str, Any]) -> list[str]:
    """Who drafts, who decides, what binds, and whether that is lossless.

    Args:
        parts: ``proposer``, ``verifier``, ``constraint`` (names) and ``lossless``, of which any may be missing.
    """
    named = [f"{what}={parts[what]}"[:64] for what in ("proposer", "verifier", "constraint") if parts.get(what)]
    lossless = parts.get("lossless")
    return named + ([] if lossless is None else ["lossless" if lossless else "lossy"])


def identity(folder: Path, manifest: Mapping[str, Any]) -> str:
    """An id that is the same whenever this run is tracked: of its manifest and its folder's name."""
    facts = json.dumps([folder.absolute().name, manifest], sort_keys=True, default=str)
    return sha256(facts.encode()).hexdigest()[:16]


def is_view(name: str, number: str) -> bool:
    """Whether a folder of this name, beside others, holds an offline view of the run with this id."""
    return re.fullmatch(rf"offline-run-\d+_\d+-{re.escape(number)}(-\d+)?", name) is not None
