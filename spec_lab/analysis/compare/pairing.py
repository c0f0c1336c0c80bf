"""Pair the prompts, groups and arms of two runs, and measure how their figures changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.compare.rows import ArmParts, RunRows
from spec_lab.analysis.metrics.intervals import Interval
from spec_lab.analysis.metrics.paired import Change, Totals, acceptance_totals, change, factor, speedup_totals
from spec_lab.analysis.text import OWN

Verdict = Literal["significant", "not significant", "identical", "too few", "not tested"]


@dataclass(frozen=True)
class FigureChange:
    """One figure in both runs, and its change.

    Args:
        figure: its name in ``metrics.summarise``, or "speedup_geometric_mean".
        unit: "prompt" or "group".
        reference, other: the figure in both, over the compared units.
        change: the change; None for figures that are shown and not tested.
        why: why it is not tested, or how many units are missing.
        verdict: "significant"; "not significant": the interval contains no change, which does not prove equality;
            "identical": no unit differs; "too few" units; "not tested".
        level: of ``interval``.
        simultaneous_level: of ``simultaneous``: at this level the intervals of all tested changes hold at once.
    """

    figure: str
    unit: str
    reference: float
    other: float
    change: Change | None
    why: str = ""
    verdict: Verdict = "not tested"
    level: float = 0.95
    simultaneous_level: float = 0.95

    @property
    def relative(self) -> bool:
        """Whether the change is the factor other / reference; else it is other - reference."""
        return self.change is None or self.change.relative

    @property
    def units(self) -> tuple[int, int]:
        """The number of units with data in each run; the same ones if paired."""
        return (0, 0) if self.change is None else self.change.units

    @property
    def paired(self) -> bool:
        """Whether both runs have the same units."""
        return self.change is not None and self.change.paired

    @property
    def interval(self) -> Interval:
        """The change with its interval."""
        return self._at(self.level)

    @property
    def simultaneous(self) -> Interval:
        """The change with the interval that holds together with those of all other tested changes."""
        return self._at(self.simultaneous_level)

    @property
    def smallest(self) -> float:
        """The smallest change that would have been significant: a factor above 1, or a difference."""
        if self.change is None:
            return math.nan
        half = self.change.half_width(self.simultaneous_level)
        return factor(half) if self.relative else half

    def _at(self, level: float) -> Interval:
        if self.change is None:
            ratio = self.other / self.reference if self.reference > 0 else math.nan
            return Interval(ratio, math.nan, math.nan)
        return self.change.interval(level)


@dataclass(frozen=True)
class ArmComparison:
    """One arm of a run compared with an arm of the reference.

    Args:
        reference, other: labels of the runs.
        arms: keys of the reference's arm and the other's.
        parts: proposer, verifier and prompts of the reference's arm and the other's.
        prompts, groups: number of pairs of units; 0 where the runs are compared unpaired.
        identical: share of the shared prompts with the same output tokens in both; NaN without shared prompts.
    """

    reference: str
    other: str
    arms: tuple[str, str]
    parts: tuple[ArmParts, ArmParts]
    prompts: int
    groups: int
    identical: float
    changes: tuple[FigureChange, ...]


def compare_arms(reference: RunRows, other: RunRows) -> list[ArmComparison]:
    """Measure the changes of each pair of arms of two runs, or of one run with itself; nothing is tested yet.

    Raises:
        ValueError: there is nothing to compare; names the folder and the reason.
    """
    for run in (reference, other):
        if not run.arms:
            raise ValueError(f"{run.selected.folder} holds the baseline only: there is nothing to compare")
    if reference is other:
        if len(reference.arms) == 1:
            raise ValueError(
                f"{reference.selected.folder} is one run with one arm: name another run to compare it with"
            )
        arms = [(reference.arms[0], arm) for arm in reference.arms[1:]]
    else:
        arms = [(arm, arm) for arm in reference.arms if arm in other.arms]
        mains = reference.arms[0], other.arms[0]
        if mains[0] not in other.arms and mains[1] not in reference.arms:
            arms = [mains, *arms]  # of two proposers
    prompts = _shared(_prompts(reference.requests), _prompts(other.requests))
    groups = _shared(_groups(reference.requests), _groups(other.requests))
    return [
        ArmComparison(
            reference.selected.label,
            other.selected.label,
            pair,
            (reference.parts(pair[0]), other.parts(pair[1])),
            0 if prompts is None else len(prompts),
            0 if groups is None else len(groups),
            math.nan if prompts is None else _identical(reference, other, pair, prompts),
            (
                *_speeds(reference, other, pair, groups),
                *_accuracy(reference, other, pair, prompts),
                *_acceptance(reference, other, pair, prompts),
                *_own(reference, other, pair, prompts),
            ),
        )
        for pair in arms
    ]


def _prompts(requests: pd.DataFrame) -> dict[Any, int]:
    """Return the number of each prompt in this run, by what identifies it in any run: name, text, occurrence."""
    rows = requests.drop_duplicates("request").sort_values("request")
    occurrence = rows.groupby(["name", "prompt"]).cumcount()
    return dict(zip(zip(rows["name"], rows["prompt"], occurrence, strict=True), rows["request"], strict=True))


def _groups(requests: pd.DataFrame) -> dict[Any, int]:
    """Return the number of each group in this run, by its prompts in order."""
    group_of = dict(zip(requests["request"], requests["group"], strict=True))
    members: dict[int, list[Any]] = {}
    for key, request in _prompts(requests).items():
        members.setdefault(group_of[request], []).append(key)
    return {tuple(keys): group for group, keys in members.items()}


def _shared(reference: Mapping[Any, int], other: Mapping[Any, int]) -> pd.DataFrame | None:
    """Return the numbers of shared units, a column for each run; None if fewer than half of the smaller run's are."""
    keys = [key for key in reference if key in other]
    if 2 * len(keys) < min(len(reference), len(other)) or not keys:
        return None
    return pd.DataFrame({"reference": [reference[key] for key in keys], "other": [other[key] for key in keys]})


def _change(both: Sequence[pd.DataFrame], shared: pd.DataFrame | None, relative: bool = False) -> Change:
    """Return the change between ``top`` and ``bottom`` of both runs, over the shared units if there are some."""
    if shared is not None:
        both = [
            totals.reindex(list(shared[run]), fill_value=0.0)
            for totals, run in zip(both, ("reference", "other"), strict=True)
        ]
    reference, other = (Totals(totals["top"].to_numpy(), totals["bottom"].to_numpy()) for totals in both)
    return change(reference, other, paired=shared is not None, relative=relative)


# Figures -----------------------------------------------------------------------------------------------------------


def _acceptance(
    reference: RunRows, other: RunRows, arms: tuple[str, str], shared: pd.DataFrame | None
) -> list[FigureChange]:
    runs = zip((reference, other), arms, strict=True)
    both = [acceptance_totals(metrics.decode_steps(run.steps, arm)) for run, arm in runs]
    changes = {name: _change([totals[name] for totals in both], shared) for name in both[0]}
    return [FigureChange(name, "prompt", change.reference, change.other, change) for name, change in changes.items()]


def _accuracy(
    reference: RunRows, other: RunRows, arms: tuple[str, str], shared: pd.DataFrame | None
) -> list[FigureChange]:
    """Return the change of the share of correct answers; nothing where an arm has no checked answer."""
    both = [metrics.correct_totals(run.requests, arm) for run, arm in zip((reference, other), arms, strict=True)]
    if any(totals.empty for totals in both):
        return []
    change = _change(both, shared)
    return [FigureChange("correct", "prompt", change.reference, change.other, change)]


def _own(reference: RunRows, other: RunRows, arms: tuple[str, str], shared: pd.DataFrame | None) -> list[FigureChange]:
    """Return the changes of the metrics of one's own that both runs have; values of a whole arm are not tested."""
    both = [run.own_metrics(arm) for run, arm in zip((reference, other), arms, strict=True)]
    changes = []
    for metric in (name for name in both[0] if name in both[1]):
        values, name = [each[metric] for each in both], OWN + metric
        if any(metrics.WHOLE in value.index for value in values):
            means = [float(value.mean()) for value in values]
            changes.append(FigureChange(name, "prompt", means[0], means[1], None, "one value of the whole arm"))
        else:
            totals = [pd.DataFrame({"top": value, "bottom": 1.0}) for value in values]
            change = _change(totals, shared)
            changes.append(FigureChange(name, "prompt", change.reference, change.other, change))
    return changes


def _speeds(
    reference: RunRows, other: RunRows, arms: tuple[str, str], shared: pd.DataFrame | None
) -> list[FigureChange]:
    """Return the speed-ups over the runs' own baselines, and tokens per second, which are not tested."""
    rows = [
        run.requests if shared is None else run.requests[run.requests["group"].isin(shared[column])]
        for run, column in ((reference, "reference"), (other, "other"))
    ]
    pairs = list(zip(rows, arms, strict=True))
    speeds = [metrics.tokens_per_second(requests, arm) for requests, arm in pairs]
    why = _why_not_tested(reference, other)
    raw = FigureChange("tokens_per_second", "group", speeds[0], speeds[1], None, why)
    for run in (reference, other):
        if "baseline" not in set(run.requests["arm"]):
            why = f"{run.selected.label} has no baseline"
            return [FigureChange("speedup", "group", math.nan, math.nan, None, why), raw]
    pooled = [metrics.speedup(requests, arm).mean for requests, arm in pairs]
    totals = [speedup_totals(run.requests, arm) for run, arm in zip((reference, other), arms, strict=True)]
    if shared is not None:  # a short group has no speed-up
        shared = shared[shared["reference"].isin(totals[0].index) & shared["other"].isin(totals[1].index)]
    change = _change(totals, shared, relative=True)
    return [
        FigureChange("speedup", "group", pooled[0], pooled[1], None, "see its geometric mean"),
        FigureChange("speedup_geometric_mean", "group", change.reference, change.other, change),
        raw,
    ]


def _why_not_tested(reference: RunRows, other: RunRows) -> str:
    """Return why tokens per second of two runs are not compared."""
    if reference is other:
        return "see speed-up"
    machines = [
        [run.manifest["machine"].get(part) for part in ("processor", "cores", "gpus")] for run in (reference, other)
    ]
    if machines[0] != machines[1]:
        return "different machines"
    return "different threads" if reference.manifest["threads"] != other.manifest["threads"] else "different times"


def _identical(reference: RunRows, other: RunRows, arms: tuple[str, str], shared: pd.DataFrame) -> float:
    """Return the share of the shared prompts with the same output tokens."""
    rows = []
    for run, arm, column in zip((reference, other), arms, ("reference", "other"), strict=True):
        pair = dict(zip(shared[column], np.arange(len(shared)), strict=True))
        requests = run.requests[(run.requests["arm"] == arm) & run.requests["request"].isin(pair)]
        rows.append(requests.assign(arm=column, request=requests["request"].map(pair)))
    return metrics.identical_outputs(pd.concat(rows), "other", "reference")
