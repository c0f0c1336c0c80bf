"""A sweep is a directory: ``sweep.json`` lists its runs, and each run has a folder.

A run's state follows from the files in its folder, so that nothing needs repair after a kill at any moment:

- ``.lock``, held by a process: running (the kernel releases the lock when the process dies);
- ``ended.json``: done, or failed with its traceback;
- ``queued.json``: its last job on a cluster, and how that job ended if it could not record so itself;
- neither: pending, possibly with the rows of finished groups, from which it is resumed.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from errno import EINVAL
from hashlib import sha256
from pathlib import Path
from re import ASCII, fullmatch, sub
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from filelock import FileLock, Timeout

from spec_lab.core.files import Unreadable, expect, read_json, write_json
from spec_lab.results.redact import redacted

if TYPE_CHECKING:  # only readers of tables need pandas: composing a run imports nothing heavy
    import pandas as pd

State = Literal["done", "running", "failed", "pending"]

Known = TypeVar("Known")

UNIDENTIFYING = ("output_dir", "tracker", "retry", "verbose")
"""Options about where results go, what is printed and retries: they do not make it another run."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: the run has not ended, and the same command resumes it."""

BY_DEPTH = ("survival", "conditional", "eagle_alpha", "vllm_per_position_acceptance")
"""Figures that are lists, one value for each depth from 1."""

MAX_NAME = 120  # characters of a folder's name

NAME = r"(?!\.+$)[\w.,=+@~-]{1,255}"
"""The pattern of ``folder_name``: the name of one folder inside the sweep's."""

ENDED = {
    "state": {"done", "failed"},
    "error": str,
    "code": int,
    "?config_sha256": str,
    "?seconds": (float, None),
    "?overrides": [str],
    "?traceback": str,
}
"""The shape of ``ended.json``."""

QUEUED = {"engine": str, "job": str, "?failure": str, "?lost": str}
"""The shape of ``queued.json``; "lost" is an earlier name of "failure"."""

BEGUN = {
    "?groups": (int, None),
    "?overrides": (None, [str]),
    "?commit": (str, None),
    "?prompts_sha256": (str, None),
    "?weights_sha256": {str: str},
    "?threads": (int, None),
    "?machine": {"?processor": (str, None), "?gpus": [str]},
    "?code": {str: {}},
    "?files_sha256": {str: str},
}
"""The shape of the part of ``manifest.json`` that is read here."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Args:
        folder: of its files.
        overrides: its options on the command line, without ``UNIDENTIFYING``.
        state: done, running, failed or pending.
        groups: number of finished groups on disk.
        of: number of groups in total; None while it is not known.
        code: exit code of a run that is done.
        error: one line: the error of a failed run, or the cluster job of a pending one and how it ended; else empty.
        seconds: time that the process which ended the run spent on it; None for a run that has not ended.
        unreadable: which of its files is not readable, and why; empty for none.
    """

    folder: Path
    overrides: tuple[str, ...]
    state: State
    groups: int = 0
    of: int | None = None
    code: int = 0
    error: str = ""
    seconds: float | None = None
    unreadable: str = ""


# Requested runs ----------------------------------------------------------------------------------------------------


def identifying(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides that identify a run, sorted, with secrets blanked."""
    kept = (redacted(text) for text in overrides if key(text).partition(".")[0].partition("@")[0] not in UNIDENTIFYING)
    return tuple(sorted(kept, key=lambda override: override.lstrip("+")))


def key(override: str) -> str:
    """Return the option that an override sets: the part before "=", without leading "+"."""
    return override.partition("=")[0].lstrip("+")


def folder_name(overrides: Iterable[str]) -> str:
    """Return the folder name of a run: no slashes, bounded length, different for different overrides."""
    text = ",".join(override.lstrip("+") for override in identifying(overrides)) or "default"
    plain = sub(r"[^\w.,=+@~-]", "_", text, flags=ASCII)
    if len(plain) <= MAX_NAME and plain == text:
        return plain
    return f"{plain[: MAX_NAME - 13]}-{sha256(text.encode()).hexdigest()[:12]}"


def plan(sweep: Path, jobs: Iterable[Sequence[str]]) -> None:
    """Add runs, each given by its overrides, to ``sweep.json``.

    Raises:
        ValueError: ``sweep.json`` is not a list of runs.
        OSError: it cannot be written.
    """
    sweep.mkdir(parents=True, exist_ok=True)
    with file_lock(sweep / ".sweep.lock"):
        asked = _asked(sweep) | {folder_name(job): identifying(job) for job in jobs}
        listed = [{"folder": name, "overrides": given} for name, given in asked.items()]
        write_json(sweep / "sweep.json", {"runs": listed})


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


def is_run(folder: Path) -> bool:
    """Return whether the folder holds a run, in any state."""
    return (folder / "manifest.json").is_file()


def labels(asked: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the overrides of each run that not all runs share, by folder."""
    shared = set.intersection(*(set(given) for given in asked.values())) if len(asked) > 1 else set()
    return {name: " ".join(text for text in given if text not in shared) or name for name, given in asked.items()}


def which_run(folder: Path) -> str:
    """Return which run of its sweep the one in ``folder`` is, such as "2 of 6, proposer.depth=5"."""
    asked = _asked(folder.parent)
    if folder.name not in asked:
        return folder.name
    return f"{list(asked).index(folder.name) + 1} of {len(asked)}, {labels(asked)[folder.name]}"


# One run -----------------------------------------------------------------------------------------------------------


class Locked(Exception):
    """The run is locked by another process."""


def file_lock(file: Path) -> FileLock:
    """Return a lock on the file; a symlink is refused, since its target would be opened.

    Raises:
        OSError: it is a symlink, or no regular file.
    """
    with suppress(FileNotFoundError):
        if not S_ISREG(os.lstat(file).st_mode):
            raise OSError(EINVAL, "is not a regular file, so it cannot be a lock; remove it", str(file))
    return FileLock(file)


@contextmanager
def holding(folder: Path, patience: float = 1.0) -> Iterator[None]:
    """Lock the run in ``folder`` for this process.

    Args:
        folder: the run's.
        patience: seconds to wait for processes that hold the lock briefly (``runs`` does).

    Raises:
        Locked: another process holds the lock.
    """
    lock = file_lock(folder / ".lock")
    try:
        lock.acquire(timeout=patience)
    except Timeout as error:
        raise Locked(f"the run in {folder} is locked by another process") from error
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(folder / ".lock")  # while it is locked, so that a waiting process sees that it is gone
        lock.release()


def begin(folder: Path) -> None:
    """Remove the record of how the run ended before, and of how its last job on a cluster ended."""
    (folder / "ended.json").unlink(missing_ok=True)
    if (known := queued(folder)) and known["failure"]:
        write_json(folder / "queued.json", known | {"failure": ""})


def queue(folder: Path, engine: str, job: str) -> None:
    """Record that a launcher (Slurm, Ray) has queued the run, and the name of its job."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "queued.json", {"engine": engine, "job": job, "failure": "", "at": _now()})


def fail_job(folder: Path, engine: str, why: str) -> None:
    """Record how the run's job ended where it cannot do so itself: cancelled, killed, out of time."""
    folder.mkdir(parents=True, exist_ok=True)
    known = queued(folder) or {"engine": engine, "job": ""}
    write_json(folder / "queued.json", known | {"failure": why, "at": _now()})


def queued(folder: Path) -> dict[str, Any] | None:
    """Return the record of the run's last cluster job: engine, job, failure (or empty); None if there was none."""
    with suppress(ValueError):  # an incomplete file is ignored
        return _queued(folder)
    return None


def _queued(folder: Path) -> dict[str, Any] | None:
    """Return the record that ``queued`` returns.

    Raises:
        Unreadable: the file is not what ``queue`` writes.
    """
    known = _shaped(folder / "queued.json", QUEUED, "does not record how the run's job ended")
    return known and {"failure": known.pop("lost", ""), **known}


def _shaped(file: Path, shape: Mapping[str, Any], what: str = "is not readable") -> dict[str, Any] | None:
    """Return the contents of a JSON file; None if there is no file.

    Raises:
        Unreadable: its contents have another shape; names the file, with ``what`` as the reason.
    """
    try:
        if (contents := read_json(file)) is not None:
            expect(contents, shape, "")
    except Unreadable:
        raise
    except OSError as error:
        raise Unreadable(f"{file} is not readable ({error.strerror})") from error
    except ValueError as error:
        raise Unreadable(f"{file} {what} ({error})") from error
    return contents


def end(folder: Path, overrides: Sequence[str], config: str, code: int, seconds: float) -> None:
    """Record that the run is done; ``config`` identifies its configuration."""
    facts = {"state": "done", "code": code, "config_sha256": config, "error": "", "traceback": ""}
    write_json(folder / "ended.json", facts | _when(overrides, seconds))


def fail(
    folder: Path,
    overrides: Sequence[str],
    error: BaseException,
    message: str,
    seconds: float,
    redact: Callable[[str], str] = str,
) -> None:
    """Record that the run failed, with the error in one line; ``redact`` removes secrets from the traceback."""
    facts = {"state": "failed", "code": 1, "config_sha256": "", "error": message}
    trace = redact("".join(traceback.format_exception(error)))
    write_json(folder / "ended.json", facts | {"traceback": trace} | _when(overrides, seconds))


def _when(overrides: Sequence[str], seconds: float) -> dict[str, Any]:
    return {"overrides": identifying(overrides), "seconds": round(seconds, 3), "at": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def ended(folder: Path) -> dict[str, Any] | None:
    """Return the record of how the run ended; None if it has not. A run with unreadable files counts as failed."""
    try:
        facts = _shaped(folder / "ended.json", ENDED, "does not record how the run ended")
        if facts is not None and facts["state"] == "done":
            list(_rows(folder)), _provenance(folder)
        return facts
    except Unreadable as error:
        message = str(error)
        return {"state": "failed", "code": 1, "config_sha256": "", "error": message, "unreadable": message}


def _running(folder: Path) -> bool:
    """Return whether a process holds the run's lock.

    Raises:
        Unreadable: its lock cannot be opened.
    """
    lock = folder / ".lock"
    if not os.path.lexists(lock):
        return False
    try:
        with file_lock(lock).acquire(blocking=False):
            return False
    except Timeout:
        return True
    except OSError as error:
        raise Unreadable(f"{lock} is not readable ({error.strerror})") from error


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


# All of them -------------------------------------------------------------------------------------------------------


def runs(sweep: Path) -> list[Run]:
    """Return every run of the sweep in the order of ``sweep.json``.

    Raises:
        ValueError: the folder holds no sweep, or a ``sweep.json`` that is not a list of runs.
    """
    if not is_sweep(sweep):
        what = "holds a single run" if is_run(sweep) else "holds no sweep" if sweep.is_dir() else "does not exist"
        raise ValueError(f"{sweep} {what}; a sweep is created by --multirun with output_dir=DIR and has a sweep.json")
    asked = _asked(sweep)
    others = (path for path in sorted(sweep.iterdir()) if path.name not in asked and path.is_dir())
    # from a sweeper that plans while it runs
    unlisted = [path for path in others if is_run(path) or (path / "ended.json").is_file()]
    return [look(sweep / name, given) for name, given in asked.items()] + [look(path) for path in unlisted]


def look(folder: Path, overrides: tuple[str, ...] = ()) -> Run:
    """Return the state of the run in ``folder``."""
    broken_files: list[str] = []

    def known(of: Callable[[Path], Known], otherwise: Known) -> Known:
        try:
            return of(folder)
        except Unreadable as error:
            broken_files.append(str(error))
            return otherwise

    running = known(_running, False)  # read first: a run that ends meanwhile counts as ended
    how = ended(folder)
    if how is not None and "unreadable" in how:
        broken_files.append(how["unreadable"])
    begun: dict[str, Any] = known(_begun, {})
    job = "" if how or running else known(_on_cluster, "")
    groups = begun.get("groups")
    done = groups or 0 if how and how["state"] == "done" else known(_groups, 0)
    given = overrides or tuple((how or {}).get("overrides", ())) or identifying(begun.get("overrides") or ())
    state: State = how["state"] if how else "running" if running else "pending"
    error = how["error"] if how else "; ".join([*broken_files, *([job] if job else [])])
    code, seconds = (how["code"], how.get("seconds")) if how else (0, None)
    return Run(folder, given, state, done, groups, code, error, seconds, "; ".join(dict.fromkeys(broken_files)))


def _begun(folder: Path) -> dict[str, Any]:
    """Return the part of the manifest that a sweep reads; empty if there is none.

    Raises:
        Unreadable: the file is not readable.
    """
    return _shaped(folder / "manifest.json", BEGUN) or {}


def _on_cluster(folder: Path) -> str:
    known = _queued(folder)
    if known is None:
        return ""
    job = f"{known['engine']} job {known['job']}" if known["job"] else str(known["engine"])
    return f"{job}: {known['failure']}" if known["failure"] else job


def _groups(folder: Path) -> int:
    """Return the number of groups of prompts whose rows are on disk."""
    import pyarrow as pa

    from spec_lab.core.tables import read_table

    names = (file.stem.partition("-")[2] for file in folder.glob("parts/requests-*.parquet"))
    numbers = {int(text) for text in names if text.isdecimal()}
    file = folder / "requests.parquet"
    with suppress(pa.ArrowException, OSError, ValueError, KeyError):  # is reported by the reader of its rows
        numbers |= set(read_table(file, ["group"])["group"].to_pylist())
    return len(numbers)


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
                facts = _provenance(run.folder) | {"job_seconds": run.seconds, "code": run.code}
                rows += [options | figures | facts | {"run": run.folder.name} for figures in _rows(run.folder)]
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


def left_behind(folder: Path) -> dict[str, Any]:
    """Return the figures of a run: ``summary.json``, or ``certificate.json``; empty if there is neither.

    Raises:
        ValueError: it is not readable.
    """
    return read_json(folder / "summary.json") or read_json(folder / "certificate.json") or {}


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of each arm of a run that is done, flattened.

    Raises:
        Unreadable: its files are not readable, or a figure is not a number.
    """
    name = "summary.json" if os.path.lexists(folder / "summary.json") else "certificate.json"
    try:
        rows = [figures | {"arm": arm} for arm, figures in _arms(left_behind(folder))]
        for row in rows:
            expect(row, dict.fromkeys(NUMBERS, (float, None)), "")
    except Unreadable:
        raise
    except OSError as error:
        raise Unreadable(f"{error.filename or folder / name} is not readable ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = error if isinstance(error, ValueError) else f"it is not nested as a run's: {error!r}"
        raise Unreadable(f"{folder / name} is not readable ({why})") from error
    return rows


NUMBERS = tuple(
    f"?{name}{end}"
    for name in (
        "speedup", "tau_pooled", "expected_tau", "tokens_per_second", "baseline_tokens_per_second", "nodes_per_step",
        "draft_token_rate", "overhead", "roofline_share", "baseline_roofline_share", "repeated_8gram_share", "requests",
        "correct", "correct_change", "correct_cut",
    )
    for end in ("", "_low", "_high")
)  # fmt: skip
"""Figures that are compared, plotted and sorted: they must be numbers if a run has them."""


PROVENANCE = ("commit", "prompts_sha256", "weights_sha256", "processor", "gpus", "threads")
"""Columns on which a run's figures depend besides its options."""


def _provenance(folder: Path) -> dict[str, Any]:
    begun = _begun(folder)
    weights = sha256(json.dumps(begun.get("weights_sha256"), sort_keys=True).encode()).hexdigest()
    machine = begun.get("machine", {})
    known = begun | {"processor": machine.get("processor"), "gpus": ", ".join(machine.get("gpus", ()))}
    known["weights_sha256"] = weights
    return {name: known.get(name) for name in PROVENANCE}


def mixed(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Return the facts that finished runs should share and do not, by name with the values.

    They are commit, processor and GPUs; threads and prompts among runs with the same options for them.
    """
    values: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for run in runs:
        if run.state == "done":
            try:
                known = _provenance(run.folder)
            except Unreadable:  # since ``runs`` was read
                continue
            for name, group in (
                ("commit", ""),
                ("processor", ""),
                ("gpus", ""),
                ("threads", "threads"),
                ("prompts_sha256", "prompts"),
            ):
                chosen = (text for text in run.overrides if key(text).partition(".")[0] in (group, "experiment"))
                values.setdefault((name, tuple(chosen) if group else ()), set()).add(str(known[name]))
    return {name: sorted(seen) for (name, _), seen in values.items() if len(seen) > 1}


def _arms(summary: Mapping[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each arm's figures with those that all arms share; of a summary without arms, the summary's own."""
    shared = {name: value for name, value in summary.items() if not isinstance(value, dict | list)}
    if reasons := summary.get("verdict_reasons"):
        shared["verdict_reasons"] = "; ".join(map(str, reasons))
    by_arm = summary.get("arms")  # a task without arms may use the name for a list
    arms: dict[str | None, dict[str, Any]] = by_arm if isinstance(by_arm, dict) and by_arm else {None: {}}
    for arm, figures in arms.items():
        both = shared | figures if arm else shared
        parts = ("proposer", "verifier", "constraint", "target")  # options too
        named = {f"{name}_name" if name in parts else name: value for name, value in both.items()}
        yield arm, dict(_flat(named))


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the figures without nesting."""
    for name, value in figures.items():
        if name == "intervals":
            for inner, bounds in value.items():
                yield from ((f"{inner}_{end}", bounds[end]) for end in ("low", "high"))
        elif isinstance(value, dict) and {"mean", "low", "high"} <= value.keys():
            for end, inner in value.items():
                yield str({"mean": name, "low": f"{name}_low", "high": f"{name}_high"}.get(end, end)), inner
        elif name == "phase_seconds":
            yield from ((f"phase_{phase}", seconds) for phase, seconds in value.items())
        elif name in BY_DEPTH:
            yield from ((f"{name}@{depth}", rate) for depth, rate in enumerate(value, start=1))
        elif not isinstance(value, dict | list):
            yield name, value


def _value(text: str) -> Any:
    """Return an option's value: a number if it is one, None for null."""
    if text == "null":
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
