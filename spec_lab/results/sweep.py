"""A sweep is a directory: ``sweep.json`` lists its runs, and each run has a folder (``run_state``)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from re import ASCII, fullmatch
from typing import TYPE_CHECKING, Any

from spec_lab.core.files import Unreadable, expect, read_json, write_json
from spec_lab.results.run_figures import NUMBERS, figure_rows, provenance
from spec_lab.results.run_names import NAME, folder_name, identifying, key
from spec_lab.results.run_state import Locked, RunState, file_lock, is_run, look

if TYPE_CHECKING:  # only readers of tables need pandas: composing a run imports nothing heavy
    import pandas as pd


def plan(sweep: Path, jobs: Iterable[Sequence[str]]) -> None:
    """Add runs, each given by its overrides, to ``sweep.json``; a new run's folder is named by what varies.

    Raises:
        ValueError: ``sweep.json`` is not a list of runs.
        OSError: it cannot be written.
    """
    sweep.mkdir(parents=True, exist_ok=True)
    with file_lock(sweep / ".sweep.lock"):
        asked = _asked(sweep)
        unlisted = {run.overrides: run.folder.name for run in _unlisted(sweep, asked)}
        known, new = {*asked.values()}, dict.fromkeys(map(identifying, jobs))
        every = [set(overrides) for overrides in (*asked.values(), *new)]
        shared, taken = set.intersection(*every) if len(every) > 1 else set(), {*asked, *unlisted.values()}
        for overrides in new:
            if overrides not in known:
                varied = [text for text in overrides if text not in shared]
                name = unlisted.get(overrides) or _free_name(overrides, taken, folder_name(varied))
                asked[name] = overrides
                taken.add(name)
        listed = [{"folder": name, "overrides": given} for name, given in asked.items()]
        write_json(sweep / "sweep.json", {"runs": listed})


def folders(sweep: Path, jobs: Iterable[Sequence[str]]) -> list[Path]:
    """Return the folder of each run, given by its overrides: the planned one, else one named by all of them."""
    asked = _asked(sweep)
    planned = {given: name for name, given in asked.items()}
    return [sweep / (planned.get(identifying(job)) or _free_name(job, asked)) for job in jobs]


def _free_name(overrides: Sequence[str], taken: Collection[str], *wanted: str) -> str:
    """Return a name for a run that no other run of the sweep has."""
    names = (*wanted, folder_name(overrides), folder_name(overrides, hashed=True))
    return next(name for name in names if name not in taken)


def _asked(sweep: Path) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each run in ``sweep.json``, by folder."""
    file = sweep / "sweep.json"
    try:
        listed = read_json(file) or {"runs": []}
        expect(listed, {"runs": [{"folder": str, "overrides": [str]}]}, "")
        if bad := [run["folder"] for run in listed["runs"] if not fullmatch(NAME, run["folder"], flags=ASCII)]:
            raise ValueError(f"{bad[0]!r} is not the name of a run's folder")
    except ValueError as error:
        raise Unreadable(f"{file} is not a list of runs ({error}); remove it and sweep again") from error
    return {run["folder"]: tuple(run["overrides"]) for run in listed["runs"]}


def is_sweep(folder: Path) -> bool:
    """Return whether the folder holds a sweep."""
    return (folder / "sweep.json").is_file()


def labels(asked: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the overrides of each run that not all runs share, by folder; the folder's name where there are none."""
    shared = set.intersection(*map(set, asked.values())) if asked else set()
    return {name: " ".join(text for text in given if text not in shared) or name for name, given in asked.items()}


def which_run(folder: Path) -> str:
    """Return which run of its sweep the one in ``folder`` is, such as "2 of 6, proposer.depth=5"."""
    asked = _asked(folder.parent)
    if folder.name not in asked:
        return folder.name
    return f"{list(asked).index(folder.name) + 1} of {len(asked)}, {labels(asked)[folder.name]}"


@contextmanager
def reading(*folders: Path) -> Iterator[None]:
    """Name the folders in errors that their files cause; with HYDRA_FULL_ERROR=1 errors pass with their traceback.

    Raises:
        Unreadable: in place of any error but OSError, ``Locked``, and a ValueError that names one of the folders.
    """
    try:
        yield
    except (OSError, Unreadable, Locked):
        raise
    except Exception as error:
        named = isinstance(error, ValueError) and any(str(folder) in str(error) for folder in folders)
        if named or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise Unreadable(f"the files in {' or '.join(map(str, folders))} are not those of a run ({what})") from error


def runs(sweep: Path) -> list[RunState]:
    """Return every run of the sweep in the order of ``sweep.json``.

    Raises:
        ValueError: the folder holds no sweep, or a ``sweep.json`` that is not a list of runs.
    """
    if not is_sweep(sweep):
        what = "holds a single run" if is_run(sweep) else "holds no sweep" if sweep.is_dir() else "does not exist"
        raise ValueError(f"{sweep} {what}; a sweep is created by --multirun with output_dir=DIR and has a sweep.json")
    asked = _asked(sweep)
    return [look(sweep / name, given) for name, given in asked.items()] + _unlisted(sweep, asked)


def _unlisted(sweep: Path, asked: Collection[str]) -> list[RunState]:
    """Return the runs that ``sweep.json`` does not list: it was removed, or a sweeper plans while it runs."""
    others = (path for path in sorted(sweep.iterdir()) if path.name not in asked and path.is_dir())
    return [look(path) for path in others if is_run(path) or (path / "ended.json").is_file()]


def collect(sweep: Path) -> pd.DataFrame:
    """Return a table with one row for each arm of each run that is done.

    Columns: ``run`` (its folder), ``arm``; one for each option that any run of the sweep sets, named as on the command
    line, numbers as numbers; ``proposer_name``, ``verifier_name`` and the other figures of ``summary.json``, flattened
    (``speedup``, ``speedup_low``, ``phase_verify``, ``survival@2``, ...); ``PROVENANCE``; ``job_seconds``, the time of
    the process that ended the run.

    Raises:
        ValueError: as in ``runs``.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for run in runs(sweep):
        if run.state == "done":
            options = {key(override): _value(override.partition("=")[2]) for override in run.overrides}
            with suppress(Unreadable):  # since ``runs`` has read it
                facts = provenance(run.folder) | {"job_seconds": run.seconds, "code": run.code}
                rows += [options | figures | facts | {"run": run.folder.name} for figures in figure_rows(run.folder)]
    table = pd.DataFrame(rows)
    if len(table):
        table.insert(0, "run", table.pop("run"))
        table.insert(1, "arm", table.pop("arm"))
    for name in table:
        if table[name].dtype == object and f"?{name}" in NUMBERS:  # no run has a number in this column
            table[name] = table[name].astype(float)
        elif table[name].dtype == object and len({type(value) for value in table[name].dropna()}) > 1:
            # A column of numbers and texts cannot be written to a file.
            table[name] = table[name].map(str, na_action="ignore")
    return table


def mixed(runs: Iterable[RunState]) -> dict[str, list[str]]:
    """Return the facts in which finished runs differ although they should be the same, with their values, by name.

    They are commit, processor and GPUs; threads, data type and prompts among runs with the same options for them.
    """
    values: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for run in runs:
        if run.state == "done":
            try:
                known = provenance(run.folder)
            except Unreadable:  # since ``runs`` was read
                continue
            for name, group in (
                ("commit", ""),
                ("processor", ""),
                ("gpus", ""),
                ("threads", "threads"),
                ("dtype", "target"),
                ("prompts_sha256", "prompts"),
            ):
                chosen = (text for text in run.overrides if key(text).partition(".")[0] in (group, "experiment"))
                values.setdefault((name, tuple(chosen) if group else ()), set()).add(str(known[name]))
    return {name: sorted(seen) for (name, _), seen in values.items() if len(seen) > 1}


def _value(text: str) -> Any:
    """Return an option's value: a number if it is one, None for null."""
    if text == "null":
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
