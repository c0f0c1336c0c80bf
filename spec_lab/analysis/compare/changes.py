"""Test every change between the compared runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_lab.analysis.compare.pairing import ArmComparison, FigureChange, Verdict, compare_arms
from spec_lab.analysis.compare.rows import RunRows
from spec_lab.analysis.compare.selection import SelectedRun, SettingValues, select_runs, setting_values
from spec_lab.analysis.metrics import MIN_CLUSTERS, TimingVerdict
from spec_lab.core.files import Unreadable
from spec_lab.results import sweep


@dataclass(frozen=True)
class Comparison:
    """Compared runs.

    Args:
        described: each run in words, by label.
        verdicts: whether each run's times can be trusted, by label.
        lossy: which arms of each run do not preserve the target distribution, and why, by label.
        configuration, provenance: settings that are not the same in all of them.
        level: of every ``interval``.
        tested: number of tested changes, whose ``simultaneous`` intervals hold at once at ``level``.
        notes: what a reader must know of these runs.
        unreadable: files that are not readable, and why; their runs are left out.
    """

    runs: tuple[SelectedRun, ...]
    described: Mapping[str, str]
    verdicts: Mapping[str, TimingVerdict]
    lossy: Mapping[str, Sequence[str]]
    configuration: tuple[SettingValues, ...]
    provenance: tuple[SettingValues, ...]
    pairs: tuple[ArmComparison, ...]
    level: float
    tested: int
    notes: tuple[str, ...]
    unreadable: tuple[str, ...] = ()


def compare(folders: Sequence[Path], level: float = 0.95) -> Comparison:
    """Compare runs or sweeps; the package's docstring says how.

    Arms of the same name are compared, and the main arms if neither run has the other's. Of one run alone, the other
    arms are compared with the main one. Only finished groups are read, so a run may still be running; groups in which
    a request broke are left out.

    Args:
        folders: runs or sweeps.
        level: at which all significant changes hold at once.

    Raises:
        ValueError: there is nothing to compare; names the folder and the reason.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1 (got {level:g})")
    unreadable: list[str] = []
    selected, pairs, notes = select_runs(folders, unreadable)
    comparisons: list[ArmComparison] = []
    described: dict[str, str] = {}
    verdicts: dict[str, TimingVerdict] = {}
    lossy: dict[str, list[str]] = {}
    manifests: dict[str, Mapping[str, Any]] = {}
    reference: RunRows | None = None
    for first, second in pairs:  # the rows of at most two runs are in memory at once
        try:
            reference = reference if reference is not None and reference.selected == first else RunRows.read(first)
            other = reference if second == first else RunRows.read(second)
            with sweep.reading(first.folder, second.folder):
                lossy |= {run.selected.label: run.lossy_arms() for run in (reference, other)}
                comparisons += compare_arms(reference, other)
        except Unreadable as error:
            unreadable.append(str(error))
            continue
        for run in (reference, other):
            label = run.selected.label
            if label not in manifests:
                manifests[label], described[label], verdicts[label] = run.manifest, run.described(), run.verdict()
    if not comparisons:
        raise Unreadable("; ".join(dict.fromkeys(unreadable)))
    selected = [run for run in selected if run.label in manifests]
    tested = sum(_enough(change, MIN_CLUSTERS) for pair in comparisons for change in pair.changes)
    simultaneous = 1 - (1 - level) / max(tested, 1)
    fewest = fewest_units(tested, level)
    arms = [
        replace(pair, changes=tuple(_tested(change, level, simultaneous, fewest) for change in pair.changes))
        for pair in comparisons
    ]
    settings = setting_values({run.label: manifests[run.label] for run in selected})
    notes += _unpaired(arms)
    files = tuple(dict.fromkeys(unreadable))
    return Comparison(
        tuple(selected), described, verdicts, lossy, *settings, tuple(arms), level, tested, tuple(notes), files
    )


def _enough(change: FigureChange, fewest: int) -> bool:
    return change.change is not None and min(change.units) >= fewest


def fewest_units(tested: int, level: float) -> int:
    """Return how many prompts or groups each of several changes that are tested at once requires.

    By chance alone all of n units change in the same direction once in 2 ** (n - 1) times. A rarer event cannot be
    established without assuming a normal distribution.

    Args:
        tested: number of tested changes.
        level: at which all significant changes hold at once.
    """
    return max(MIN_CLUSTERS, 1 + math.ceil(math.log2(max(tested, 1) / (1 - level))))


def _tested(change: FigureChange, level: float, simultaneous: float, fewest: int) -> FigureChange:
    """Return the change with its verdict; ``fewest`` as ``fewest_units``."""
    change = replace(change, level=level, simultaneous_level=simultaneous)
    if change.change is None:
        return change
    verdict: Verdict
    why, bounds = change.why, change.simultaneous
    if change.change.identical:
        verdict = "identical"
    elif not _enough(change, fewest):
        verdict, why = "too few", f"{min(change.units)} {change.unit}s, {fewest} needed"
    elif not math.isfinite(change.change.half_width(simultaneous)):
        verdict, why = "too few", f"without one {change.unit} no data remain"
    else:
        no_change = 1.0 if change.relative else 0.0
        verdict = "not significant" if bounds.low <= no_change <= bounds.high else "significant"
    return replace(change, verdict=verdict, why=why)


def _unpaired(pairs: Sequence[ArmComparison]) -> list[str]:
    """Return which runs have no prompts or groups in common."""
    notes = []
    for pair in pairs:
        runs = f"{pair.other} and {pair.reference}"
        if not pair.prompts:
            notes.append(f"{runs} have (almost) no prompts in common: compared as unpaired samples.")
        elif not pair.groups:
            notes.append(f"{runs} group their prompts differently: their speeds are unpaired.")
    return list(dict.fromkeys(notes))
