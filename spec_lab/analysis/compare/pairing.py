"""Which prompts, groups and arms of two runs belong together, and what changed between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.compare.sides import Side, manifest_of
from spec_lab.analysis.metrics.paired import Change, Totals, acceptance_totals, change, speedup_totals


@dataclass(frozen=True)
class Run:
    """A run's rows; ``broken`` are the groups in which a request broke."""

    side: Side
    manifest: Mapping[str, Any]
    tables: metrics.Tables
    broken: frozenset[int]

    @staticmethod
    def read(side: Side) -> Run:
        """Read the finished groups.

        Raises:
            ValueError: there is none, or a request broke in each.
        """
        manifest, tables = manifest_of(side.folder), metrics.load(side.folder)
        if tables.requests.empty:
            raise ValueError(f"no group of the run in {side.folder} is finished")
        run = Run(side, manifest, tables, frozenset(metrics.broken_groups(tables.requests)))
        if run.requests.empty:
            raise ValueError(f"in every group of {side.folder} a request broke; see 'errors' in its summary.json")
        return run

    @property
    def requests(self) -> pd.DataFrame:
        """Those of groups that did not break."""
        return self.tables.requests[~self.tables.requests["group"].isin(self.broken)]

    @property
    def steps(self) -> pd.DataFrame:
        """Those of groups that did not break."""
        return self.tables.steps[~self.tables.steps["group"].isin(self.broken)]

    @property
    def arms(self) -> list[str]:
        """Those decoded by the project's loop; the main one first, the baseline not counted."""
        looped = set(self.tables.rounds["arm"])
        return [arm for arm in metrics.arms(self.tables) if arm in looped and arm != "baseline"]


@dataclass(frozen=True)
class Figure:
    """A change before it is judged."""

    figure: str
    unit: str
    change: Change | None  # None where there is nothing to judge
    values: tuple[float, float]
    why: str = ""


@dataclass(frozen=True)
class Matched:
    """One arm of a run and its like in the reference.

    Args:
        arms: the reference's, the other's.
        prompts, groups: how many both have; 0 where none is compared pairwise.
        identical: share of prompts with the same output tokens in both; NaN without prompts that both have.
        figures: what changed.
    """

    arms: tuple[str, str]
    prompts: int
    groups: int
    identical: float
    figures: tuple[Figure, ...]


def described(run: Run) -> str:
    """What a run is, in words."""
    groups, of = run.tables.requests["group"].nunique(), run.manifest.get("groups")
    proposer = run.manifest["proposers"].get(run.arms[0] if run.arms else "", {}).get("name")
    words = [str(proposer)] if proposer else []
    words.append(f"{run.tables.requests['request'].nunique()} prompts in {groups} groups")
    if of is not None and groups < of:
        words.append(f"UNFINISHED: {groups} of {of} groups")
    elif of is None and not (run.side.folder / "summary.json").is_file():
        words.append("UNFINISHED")
    if run.broken:
        words.append(f"{len(run.broken)} of {groups} groups left out: a request broke")
    return ", ".join(words)


def arm_by_arm(reference: Run, other: Run) -> list[Matched]:
    """What is compared of two runs, or of one run with itself.

    Raises:
        ValueError: there is nothing to compare; says why.
    """
    for run in (reference, other):
        if not run.arms:
            raise ValueError(f"{run.side.folder} holds the baseline only: there is nothing to compare")
    if reference is other:
        if len(reference.arms) == 1:
            raise ValueError(f"{reference.side.folder} is one run with one arm: give another run to compare it with")
        arms = [(reference.arms[0], arm) for arm in reference.arms[1:]]
    else:
        alike = [(arm, arm) for arm in reference.arms if arm in other.arms]
        arms = alike or [(reference.arms[0], other.arms[0])]
    prompts = _shared(_prompts(reference.requests), _prompts(other.requests))
    groups = _shared(_groups(reference.requests), _groups(other.requests))
    compared = []
    for pair in arms:
        figures = (
            _speedup(reference, other, pair, groups),
            _raw_speed(reference, other, pair, groups),
            *_acceptance(reference, other, pair, prompts),
        )
        same = _identical(reference, other, pair, prompts) if prompts is not None else math.nan
        shared = [0 if both is None else len(both) for both in (prompts, groups)]
        compared.append(Matched(pair, shared[0], shared[1], same, figures))
    return compared


def _prompts(requests: pd.DataFrame) -> dict[Any, int]:
    """What a prompt is in any run: its name, its text, and which of several like it; and its number in this run."""
    rows = requests.drop_duplicates("request").sort_values("request")
    again = rows.groupby(["name", "prompt"]).cumcount()
    keys = zip(rows["name"], rows["prompt"], again, strict=True)
    return dict(zip(keys, rows["request"], strict=True))


def _groups(requests: pd.DataFrame) -> dict[Any, int]:
    """What a group is in any run: its prompts, in order; and its number in this run."""
    of_request = dict(zip(requests["request"], requests["group"], strict=True))
    members: dict[int, list[Any]] = {}
    for key, request in _prompts(requests).items():
        members.setdefault(of_request[request], []).append(key)
    return {tuple(keys): group for group, keys in members.items()}


def _shared(reference: Mapping[Any, int], other: Mapping[Any, int]) -> pd.DataFrame | None:
    """Numbers of the units that both runs have, as columns; None where fewer than half of the smaller run's are."""
    both = [key for key in reference if key in other]
    if 2 * len(both) < min(len(reference), len(other)) or not both:
        return None
    return pd.DataFrame({"reference": [reference[key] for key in both], "other": [other[key] for key in both]})


def _totals(both: Sequence[pd.DataFrame], shared: pd.DataFrame | None) -> tuple[Totals, Totals]:
    """``top`` and ``bottom`` of both runs; of the shared units, in their order, if there are some."""
    if shared is not None:
        numbers = shared["reference"], shared["other"]
        both = [one.reindex(list(own), fill_value=0.0) for one, own in zip(both, numbers, strict=True)]
    mine, theirs = (Totals(one["top"].to_numpy(), one["bottom"].to_numpy()) for one in both)
    return mine, theirs


# Figures -----------------------------------------------------------------------------------------------------------


def _acceptance(reference: Run, other: Run, arms: tuple[str, str], shared: pd.DataFrame | None) -> list[Figure]:
    runs = zip((reference, other), arms, strict=True)
    both = [acceptance_totals(metrics.decode_steps(run.steps, arm)) for run, arm in runs]
    found = []
    for name in both[0]:
        mine, theirs = _totals([one[name] for one in both], shared)
        changed = change(mine, theirs, paired=shared is not None)
        found.append(Figure(name, "prompt", changed, (changed.reference, changed.other)))
    return found


def _speedup(reference: Run, other: Run, arms: tuple[str, str], shared: pd.DataFrame | None) -> Figure:
    """The runs' speed-ups over their own baselines: geometric means over groups, so that changes multiply."""
    both = []
    for run, arm in zip((reference, other), arms, strict=True):
        if "baseline" not in set(run.requests["arm"]):
            nothing = math.nan, math.nan
            return Figure("speedup", "group", None, nothing, f"{run.side.label} has no baseline")
        both.append(speedup_totals(run.requests, arm))
    if shared is not None:  # a short group has no speed-up
        known = shared["reference"].isin(both[0].index) & shared["other"].isin(both[1].index)
        shared = shared[known]
    mine, theirs = _totals(both, shared)
    changed = change(mine, theirs, paired=shared is not None, relative=True)
    return Figure("speedup", "group", changed, (changed.reference, changed.other))


def _raw_speed(reference: Run, other: Run, arms: tuple[str, str], shared: pd.DataFrame | None) -> Figure:
    """Tokens per second: shown, and never judged."""
    speeds = []
    for run, arm, side in zip((reference, other), arms, ("reference", "other"), strict=True):
        rows = run.requests if shared is None else run.requests[run.requests["group"].isin(shared[side])]
        speeds.append(metrics.tokens_per_second(rows, arm))
    return Figure("tokens_per_second", "group", None, (speeds[0], speeds[1]), _apart(reference, other))


def _apart(reference: Run, other: Run) -> str:
    """What besides the experiment sets the seconds of two runs apart."""
    if reference is other:
        return "see speed-up"
    parts = "processor", "cores", "gpus"
    machines = [[run.manifest["machine"].get(part) for part in parts] for run in (reference, other)]
    threads = [run.manifest["threads"] for run in (reference, other)]
    if machines[0] != machines[1]:
        return "different machines"
    return "different threads" if threads[0] != threads[1] else "different times"


def _identical(reference: Run, other: Run, arms: tuple[str, str], shared: pd.DataFrame) -> float:
    """Share of the shared prompts with the same output tokens."""
    rows = []
    for run, arm, side in zip((reference, other), arms, ("reference", "other"), strict=True):
        number = dict(zip(shared[side], np.arange(len(shared)), strict=True))
        own = run.requests[(run.requests["arm"] == arm) & run.requests["request"].isin(number)]
        rows.append(own.assign(arm=side, request=own["request"].map(number)))
    return metrics.identical_outputs(pd.concat(rows), "other", "reference")
