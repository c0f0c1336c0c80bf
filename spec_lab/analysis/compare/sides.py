"""What is compared with what: folders become runs, runs become pairs, and what sets them apart is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_lab.core.files import Unreadable
from spec_lab.results import sweep
from spec_lab.results.manifest import begun

ABSENT = "not there"
"""The value of an option that a run does not have."""


@dataclass(frozen=True)
class Side:
    """One run.

    Args:
        label: a letter, of sweeps against each other with the pair's number.
        name: its overrides if it belongs to a sweep, else its folder.
        folder: where it is.
    """

    label: str
    name: str
    folder: Path


@dataclass(frozen=True)
class Fact:
    """What is not the same in all runs.

    Args:
        key: dotted, such as "proposer.depth".
        values: each value in words, and the labels of the runs that have it.
    """

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


def sides(
    folders: Sequence[Path], spoilt: list[str] | None = None
) -> tuple[list[Side], list[tuple[Side, Side]], list[str]]:
    """The runs, which of them are compared (reference first), and what was left out, in words.

    A sweep stands for its runs that are done. Sweeps only, two or more: their runs are paired by overrides, the first
    sweep's the references. Else the first run is the reference of all others; one run alone is its own.

    Args:
        folders: runs or sweeps.
        spoilt: where what is not readable of a sweep is named; such a run is left out.

    Raises:
        ValueError: nothing to compare; says which folder is at fault.
    """
    spoilt = [] if spoilt is None else spoilt
    folders = [Path(one) for one in folders]
    if not folders:
        raise ValueError("nothing to compare: give two or more runs or sweeps")
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        if not (sweep.is_run(folder) or sweep.is_sweep(folder)):
            raise ValueError(f"{folder} holds neither a run (manifest.json) nor a sweep (sweep.json)")
    notes: list[str] = []
    found = [_runs(folder, notes, spoilt, len(folders) == 1) for folder in folders]
    _refuse_twice([folder for one in found for _, folder in one])
    if len(folders) > 1 and not any(sweep.is_run(folder) for folder in folders):
        every, pairs = _by_overrides(folders, found, notes)
        return every, pairs, notes
    flat = enumerate(one for runs in found for one in runs)
    every = [Side(_letters(place), name, folder) for place, (name, folder) in flat]
    if len(every) == 1 and sweep.is_sweep(folders[0]):
        said = f"; unreadable: {'; '.join(spoilt)}" if spoilt else ""
        raise ValueError(f"only one run of {folders[0]} is done ({every[0].name}): nothing to compare it with" + said)
    return every, [(every[0], other) for other in every[1:] or every], notes


def _runs(folder: Path, notes: list[str], spoilt: list[str], alone: bool) -> list[tuple[str, Path]]:
    """Names and folders of the runs that ``folder`` stands for; of a sweep ``alone`` what tells them apart."""
    if sweep.is_run(folder):
        return [(str(folder), folder)]
    every = sweep.runs(folder)
    label = sweep.labels({one.folder.name: one.overrides for one in every})
    done = []
    for one in every:
        if not one.unreadable and one.state == "done":
            try:
                arms = set(manifest_of(one.folder)["arms"])
            except Unreadable as error:
                one = replace(one, unreadable=str(error))
        if one.unreadable:
            spoilt.append(one.unreadable)
        elif one.state != "done":
            notes.append(f"Left out, as it is {one.state}: {one.folder}.")
        elif not arms - {"baseline"}:
            notes.append(f"Left out, as it holds the baseline only: {one.folder}.")
        else:
            done.append((label[one.folder.name] if alone else " ".join(one.overrides) or one.folder.name, one.folder))
    if not done and spoilt:
        raise Unreadable(f"no other run of {folder} is done: {'; '.join(spoilt)}")
    if not done:
        raise ValueError(f"no run of the sweep {folder} is done and drafted ({len(every)} were asked for)")
    return done


def _refuse_twice(folders: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise ValueError(f"{folder} is given twice: a run is not compared with itself")
        seen.add(folder.resolve())


def _by_overrides(
    folders: Sequence[Path], found: Sequence[Sequence[tuple[str, Path]]], notes: list[str]
) -> tuple[list[Side], list[tuple[Side, Side]]]:
    """Runs of several sweeps, paired with those of the first that have the same overrides."""
    number = {name: place for place, (name, _) in enumerate(found[0], start=1)}
    others = {name for runs in found[1:] for name, _ in runs}
    references: dict[str, Side] = {}
    every: list[Side] = []
    pairs: list[tuple[Side, Side]] = []
    for place, runs in enumerate(found):
        for name, folder in runs:
            if name not in (number if place else others):
                there = folders[0] if place else "the other sweeps"
                notes.append(f"Left out, as no run of {there} has its overrides: {folder}.")
                continue
            side = Side(f"{_letters(place)}{number[name]}", name, folder)
            every.append(side)
            if place:
                pairs.append((references[name], side))
            else:
                references[name] = side
    if not pairs:
        raise ValueError(
            f"no run of {', '.join(map(str, folders[1:]))} has the overrides of a run of {folders[0]}, so none can be "
            "paired; give the runs' own folders to compare them one by one"
        )
    return every, sorted(pairs, key=lambda pair: number[pair[0].name])


def _letters(place: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    more, last = divmod(place, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)


def facts(runs: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """What is not the same in all of these runs, given as manifests by label: of the configuration, without what says
    only where results go; of code, machine, weights, prompts and draft trees, as far as all of them have these.
    """
    configured = {
        label: {key: value for key, value in one["config"].items() if key not in sweep.PLACES}
        for label, one in runs.items()
    }
    found = _differing({label: _provenance(one) for label, one in runs.items()})
    return tuple(_differing(configured)), tuple(one for one in found if ABSENT not in dict(one.values))


def manifest_of(folder: Path) -> dict[str, Any]:
    """The run's manifest.

    Raises:
        ValueError: it has none.
    """
    there = begun(folder)
    if there is None:
        raise ValueError(f"{folder} holds no run (manifest.json)")
    return there


def _provenance(manifest: Mapping[str, Any]) -> dict[str, Any]:
    machine = {key: manifest["machine"].get(key) for key in ("processor", "cores", "gpus", "system")}
    sums = {key: value[:12] for key, value in manifest["weights_sha256"].items()}
    trees = {arm: {"tree": one["tree"]} for arm, one in manifest["proposers"].items() if "tree" in one}
    return {
        "commit": manifest["commit"],
        "code": manifest.get("code", {}),
        "files_sha256": manifest.get("files_sha256", {}),
        "versions": manifest["versions"],
        "machine": machine,
        "threads": manifest["threads"],
        "weights_sha256": sums,
        "prompts_sha256": manifest["prompts_sha256"][:12],
        "proposers": trees,
    }


def _differing(trees: Mapping[str, Mapping[str, Any]], above: str = "") -> Iterator[Fact]:
    """Where these trees, by label, differ: by leaf where all have the branch, else by branch."""
    for key in dict.fromkeys(key for one in trees.values() for key in one):
        below = {label: one.get(key, ABSENT) for label, one in trees.items()}
        if all(isinstance(one, Mapping) for one in below.values()):
            yield from _differing(below, f"{above}{key}.")
            continue
        values: dict[str, list[str]] = {}
        for label, one in below.items():
            values.setdefault(_words(one), []).append(label)
        if len(values) > 1:
            yield Fact(f"{above}{key}", tuple((value, tuple(labels)) for value, labels in values.items()))


def _words(value: Any) -> str:
    """A value as it is written in a configuration; of a branch, what it builds or its keys."""
    if isinstance(value, Mapping):
        return str(value.get("_target_") or ", ".join(map(str, value)) or "{}")
    return "null" if value is None else str(value)
