"""Select the runs to compare: folders become runs, runs become pairs, and differing settings are listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_lab.core.files import Unreadable
from spec_lab.results import run_names, run_state, sources, sweep
from spec_lab.results.manifest import begun

ABSENT = "not set"
"""The value of an option that a run does not have."""

Pairs = list[tuple["SelectedRun", "SelectedRun"]]


@dataclass(frozen=True)
class SelectedRun:
    """One run to compare.

    Args:
        label: a letter; of sweeps that are compared with each other, with the pair's number.
        name: its overrides if it belongs to a sweep, else its folder.
    """

    label: str
    name: str
    folder: Path


@dataclass(frozen=True)
class SettingValues:
    """A setting that is not the same in all runs.

    Args:
        key: dotted, such as "proposer.depth".
        values: each value as text, and the labels of the runs that have it.
    """

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


def select_runs(folders: Sequence[Path], unreadable: list[str]) -> tuple[list[SelectedRun], Pairs, list[str]]:
    """Return the runs, the pairs to compare (reference first), and notes on runs that were left out.

    A sweep stands for its finished runs. If all folders are sweeps, two or more, their runs are paired by overrides and
    those of the first sweep are the references. Otherwise the first run is the reference of all others; one run alone
    is compared with itself.

    Args:
        folders: runs or sweeps.
        unreadable: receives the problems of unreadable runs of a sweep, which are left out.

    Raises:
        ValueError: there is nothing to compare; names the folder and the reason.
    """
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise ValueError("nothing to compare: name two or more runs or sweeps")
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        if not (run_state.is_run(folder) or sweep.is_sweep(folder)):
            raise ValueError(f"{folder} holds neither a run (manifest.json) nor a sweep (sweep.json)")
    notes: list[str] = []
    listed = [_runs(folder, notes, unreadable, len(folders) == 1) for folder in folders]
    resolved = [folder.resolve() for runs in listed for _, folder in runs]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise ValueError(f"{folder} is given twice: a run is not compared with itself")
    if len(folders) > 1 and not any(run_state.is_run(folder) for folder in folders):
        runs, pairs = _by_overrides(folders, listed, notes)
        return runs, pairs, notes
    every = enumerate(run for runs in listed for run in runs)
    runs = [SelectedRun(_letters(number), name, folder) for number, (name, folder) in every]
    if len(runs) == 1 and sweep.is_sweep(folders[0]):
        problems = f"; unreadable: {'; '.join(unreadable)}" if unreadable else ""
        raise ValueError(
            f"only one run of {folders[0]} is done ({runs[0].name}): there is no other to compare it with{problems}"
        )
    return runs, [(runs[0], other) for other in runs[1:] or runs], notes


def _runs(folder: Path, notes: list[str], unreadable: list[str], alone: bool) -> list[tuple[str, Path]]:
    """Return names and folders of the runs in ``folder``; names of a sweep ``alone`` hold the differing overrides."""
    if run_state.is_run(folder):
        return [(str(folder), folder)]
    every = sweep.runs(folder)
    label = sweep.labels({run.folder.name: run.overrides for run in every})
    done = []
    for run in every:
        if not run.unreadable and run.state == "done":
            try:
                arms = set(manifest_of(run.folder)["arms"])
            except Unreadable as error:
                run = replace(run, unreadable=str(error))
        if run.unreadable:
            unreadable.append(run.unreadable)
        elif run.state != "done":
            notes.append(f"Left out, {run.state}: {run.folder}.")
        elif not arms - {"baseline"}:
            notes.append(f"Left out, holds the baseline only: {run.folder}.")
        else:
            done.append((label[run.folder.name] if alone else " ".join(run.overrides) or run.folder.name, run.folder))
    if not done and unreadable:
        raise Unreadable(f"no other run of {folder} is done: {'; '.join(unreadable)}")
    if not done:
        raise ValueError(f"no run of the sweep {folder} is done and has a proposer ({len(every)} runs in sweep.json)")
    return done


def _by_overrides(
    folders: Sequence[Path], listed: Sequence[Sequence[tuple[str, Path]]], notes: list[str]
) -> tuple[list[SelectedRun], Pairs]:
    """Return the runs of several sweeps, paired with those of the first that have the same overrides."""
    numbers = {name: position for position, (name, _) in enumerate(listed[0], start=1)}
    in_others = {name for runs in listed[1:] for name, _ in runs}
    references: dict[str, SelectedRun] = {}
    selected: list[SelectedRun] = []
    pairs: Pairs = []
    for number, runs in enumerate(listed):
        for name, folder in runs:
            if name not in (numbers if number else in_others):
                where = folders[0] if number else "the other sweeps"
                notes.append(f"Left out, no run of {where} has its overrides: {folder}.")
                continue
            run = SelectedRun(f"{_letters(number)}{numbers[name]}", name, folder)
            selected.append(run)
            if number:
                pairs.append((references[name], run))
            else:
                references[name] = run
    if not pairs:
        raise ValueError(
            f"no run of {', '.join(map(str, folders[1:]))} has the overrides of a run of {folders[0]}, so none can be "
            "paired; name the runs' own folders to compare them one by one"
        )
    return selected, sorted(pairs, key=lambda pair: numbers[pair[0].name])


def _letters(number: int) -> str:
    """Return A, B, ..., Z, AA, AB, ..."""
    more, last = divmod(number, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)


def setting_values(
    manifests: Mapping[str, Mapping[str, Any]],
) -> tuple[tuple[SettingValues, ...], tuple[SettingValues, ...]]:
    """Return the settings that are not the same in all runs, given as manifests by label.

    Returns:
        Of the configuration, without options that only say where results go, with the draft trees that runs chose; and
        of code, machine, weights and prompts, as far as all runs have them.
    """
    configuration = {
        label: {key: value for key, value in manifest["config"].items() if key not in run_names.UNIDENTIFYING}
        for label, manifest in manifests.items()
    }
    options = {setting.key: setting for setting in _differing(configuration)}
    trees, provenance = (
        _in_all({label: of(manifest) for label, manifest in manifests.items()}) for of in (_trees, _provenance)
    )
    return (*options.values(), *(setting for setting in trees if setting.key not in options)), provenance


def _in_all(settings: Mapping[str, Mapping[str, Any]]) -> tuple[SettingValues, ...]:
    """Return the settings that differ, without those that some runs do not have."""
    return tuple(setting for setting in _differing(settings) if ABSENT not in dict(setting.values))


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the run's manifest.

    Raises:
        ValueError: there is none.
    """
    manifest = begun(folder)
    if manifest is None:
        raise ValueError(f"{folder} holds no run (no manifest.json)")
    return manifest


def _provenance(manifest: Mapping[str, Any]) -> dict[str, Any]:
    code = manifest.get("code", {})
    return {
        "commit": manifest["commit"],
        "code": code if manifest["commit"] is None else sources.foreign(code),
        "files_sha256": manifest.get("files_sha256", {}),
        "versions": manifest["versions"],
        "machine": {key: manifest["machine"].get(key) for key in ("processor", "cores", "gpus", "system")},
        "threads": manifest["threads"],
        "weights_sha256": {key: value[:12] for key, value in manifest["weights_sha256"].items()},
        "prompts_sha256": manifest["prompts_sha256"][:12],
    }


def _trees(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the draft tree of each arm, by its option: as the run chose it where the option leaves it open."""
    return {
        f"arms.{arm}.tree" if arm in (manifest["config"].get("arms") or ()) else "proposer.tree": facts["tree"]
        for arm, facts in manifest["proposers"].items()
        if "tree" in facts
    }


def _differing(settings: Mapping[str, Mapping[str, Any]], prefix: str = "") -> Iterator[SettingValues]:
    """Yield the settings that differ between runs, by leaf where all have the branch, else by branch."""
    for key in dict.fromkeys(key for tree in settings.values() for key in tree):
        below = {label: tree.get(key, ABSENT) for label, tree in settings.items()}
        if all(isinstance(value, Mapping) for value in below.values()):
            yield from _differing(below, f"{prefix}{key}.")
            continue
        values: dict[str, list[str]] = {}
        for label, setting in below.items():
            values.setdefault(_text(setting), []).append(label)
        if len(values) > 1:
            yield SettingValues(f"{prefix}{key}", tuple((value, tuple(labels)) for value, labels in values.items()))


def _text(value: Any) -> str:
    """Return a value as it stands in a configuration; of a branch, its target or its keys."""
    if isinstance(value, Mapping):
        return str(value.get("_target_") or ", ".join(map(str, value)) or "{}")
    return "null" if value is None else str(value)
