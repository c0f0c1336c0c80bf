"""Every change between the runs that are compared, with its interval and the word on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spec_lab.analysis.compare.pairing import Figure, Matched, Run, arm_by_arm, described
from spec_lab.analysis.compare.sides import Fact, Side, facts, sides
from spec_lab.analysis.metrics.intervals import Interval
from spec_lab.analysis.metrics.paired import Change, factor
from spec_lab.core.files import Unreadable
from spec_lab.results import sweep

Verdict = Literal["real", "not shown", "same", "too few", "not judged"]

FEWEST = 8
"""With fewer units than these nothing is judged: what their spread is worth is not known."""


@dataclass(frozen=True)
class Difference:
    """One figure in both runs.

    Args:
        figure: its name in ``metrics.summarise``.
        reference, other: the figure in both, over what is compared.
        relative: whether the change is the factor other / reference, else other - reference.
        unit: "prompt" or "group".
        units: how many of each run's say something; the same ones if paired.
        paired: whether both have the same ones.
        alone: the change, with its interval at the level asked for.
        together: the same at the level at which all changes that are judged hold at once.
        smallest: the smallest change that would have been called real: a factor above 1, or a difference.
        verdict: "real"; "not shown": the interval holds no change, which is no proof of equality; "same": no unit
            differs; "too few" units; "not judged".
        why: why it is not judged, or what is too few.
    """

    figure: str
    reference: float
    other: float
    relative: bool
    unit: str
    units: tuple[int, int]
    paired: bool
    alone: Interval
    together: Interval
    smallest: float
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Pair:
    """One arm of a run against its like in the reference.

    Args:
        reference, other: labels of the runs.
        arms: the arm of each.
        prompts, groups: how many both have; 0 where none is compared pairwise.
        identical: share of prompts with the same output tokens in both; NaN without prompts that both have.
        differences: the figures.
    """

    reference: str
    other: str
    arms: tuple[str, str]
    prompts: int
    groups: int
    identical: float
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Args:
        sides: the runs.
        described: what each run is, in words, by label.
        configuration, provenance: what is not the same in all of them.
        pairs: what was compared.
        level: of every interval ``alone``.
        judged: how many changes share that level in ``together``.
        notes: what a reader has to know of these runs.
        unreadable: which files are not readable, and why; their runs are left out.
    """

    sides: tuple[Side, ...]
    described: Mapping[str, str]
    configuration: tuple[Fact, ...]
    provenance: tuple[Fact, ...]
    pairs: tuple[Pair, ...]
    level: float
    judged: int
    notes: tuple[str, ...]
    unreadable: tuple[str, ...] = ()


def compare(folders: Sequence[Path], level: float = 0.95) -> Comparison:
    """Runs or sweeps side by side; see the package for how.

    Of two runs the arms that have the same name in both are compared, without such the main ones. One run alone: its
    arms, with the main one as reference. Only finished groups are read, so a run may still be going on; groups in which
    a request broke are left out.

    Args:
        folders: runs or sweeps.
        level: at which all changes called real hold together.

    Raises:
        ValueError: nothing to compare; says which folder is at fault and why.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, not {level:g}")
    spoilt: list[str] = []
    every, matched, notes = sides(folders, spoilt)
    found: list[tuple[str, str, Matched]] = []
    words: dict[str, str] = {}
    manifests: dict[str, Mapping[str, Any]] = {}
    reference: Run | None = None
    for first, second in matched:  # no more than two runs' rows are held at once
        try:
            reference = reference if reference is not None and reference.side == first else Run.read(first)
            other = reference if second == first else Run.read(second)
            with sweep.reading(first.folder, second.folder):
                matching = arm_by_arm(reference, other)
        except Unreadable as error:
            spoilt.append(str(error))
            continue
        for run in (reference, other):
            manifests[run.side.label], words[run.side.label] = run.manifest, described(run)
        found += [(first.label, second.label, one) for one in matching]
    if not found:
        raise Unreadable("; ".join(dict.fromkeys(spoilt)))
    every = [one for one in every if one.label in manifests]
    judged = sum(_enough(figure.change, FEWEST) for *_, one in found for figure in one.figures)
    together = 1 - (1 - level) / max(judged, 1)
    fewest = max(FEWEST, 1 + math.ceil(math.log2(max(judged, 1) / (1 - level))))
    pairs = tuple(
        Pair(
            first,
            second,
            one.arms,
            one.prompts,
            one.groups,
            one.identical,
            tuple(_judge(figure, level, together, fewest) for figure in one.figures),
        )
        for first, second, one in found
    )
    apart = facts({one.label: manifests[one.label] for one in every})
    notes += _unpaired(pairs)
    return Comparison(tuple(every), words, *apart, pairs, level, judged, tuple(notes), tuple(dict.fromkeys(spoilt)))


# Judging -----------------------------------------------------------------------------------------------------------


def _enough(change: Change | None, fewest: int) -> bool:
    return change is not None and min(change.units) >= fewest


def _judge(found: Figure, level: float, together: float, fewest: int) -> Difference:
    """The word on one change.

    By chance alone all of n units go the same way once in 2 ** (n - 1) times. Rarer than that nothing can be called
    without believing in a bell-shaped curve, so ``fewest`` units must be there: as many as the level asks for.
    """
    name, unit, one, values = found.figure, found.unit, found.change, found.values
    if one is None:
        mean = values[1] / values[0] if values[0] > 0 else math.nan
        alone = Interval(mean, math.nan, math.nan)
        return Difference(name, *values, True, unit, (0, 0), False, alone, alone, math.nan, "not judged", found.why)
    verdict: Verdict
    bounds, half, why = one.interval(together), one.half_width(together), ""
    if one.same:
        verdict = "same"
    elif not _enough(one, fewest):
        verdict, why = "too few", f"{min(one.units)} {unit}s, {fewest} needed"
    elif not math.isfinite(half):
        verdict, why = "too few", f"without one {unit} nothing is left"
    else:
        none = 1.0 if one.relative else 0.0
        verdict = "not shown" if bounds.low <= none <= bounds.high else "real"
    smallest = factor(half) if one.relative else half
    alone = one.interval(level)
    return Difference(name, *values, one.relative, unit, one.units, one.paired, alone, bounds, smallest, verdict, why)


def _unpaired(pairs: Sequence[Pair]) -> list[str]:
    """Which runs have no prompts or groups in common."""
    notes = []
    for one in dict.fromkeys((pair.reference, pair.other, pair.prompts, pair.groups) for pair in pairs):
        reference, other, prompts, groups = one
        if not prompts:
            notes.append(f"{other} and {reference} have (almost) no prompts in common: compared as unpaired samples.")
        elif not groups:
            notes.append(f"{other} and {reference} group their prompts differently: their speeds are unpaired.")
    return notes
