"""A run's state, which follows from the files in its folder: nothing needs repair after a kill at any moment.

- ``.lock``, held by a process: running (the kernel releases the lock when the process dies);
- ``ended.json``: done, or failed with its traceback;
- ``queued.json``: its last job on a cluster, and how that job ended if it could not record so itself;
- neither: pending, possibly with the rows of finished groups, from which it is resumed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from errno import EINVAL
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, TypeVar

from filelock import FileLock, Timeout

from spec_lab.core.files import Unreadable, write_json
from spec_lab.results.run_figures import figure_rows, provenance, read_begun, read_shaped
from spec_lab.results.run_names import identifying

State = Literal["done", "running", "failed", "pending"]

Known = TypeVar("Known")

INTERRUPTED = 130
"""Exit code after Ctrl-C: the run has not ended, and the same command resumes it."""

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
    ".lock", ".sweep.lock", "ended.json", "manifest.json", "multirun.yaml", "parts", "queued.json", "study.jsonl",
    "sweep.json",
}  # fmt: skip
"""Names of files and folders of runs and sweeps that have begun, and of what is left of them."""


@dataclass(frozen=True)
class RunState:
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


def is_run(folder: Path) -> bool:
    """Return whether the folder holds a run, in any state."""
    return (folder / "manifest.json").is_file()


def is_unrelated(folder: Path) -> bool:
    """Return whether the folder holds files, hidden ones aside, and neither a run or a sweep in any state, nor rows."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    rows = any(name.endswith(".parquet") for name in names)
    return any(name[0] != "." for name in names) and not rows and not names & BEGUN


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
    """Return the record that ``queued`` returns."""
    known = read_shaped(folder / "queued.json", QUEUED, "does not record how the run's job ended")
    return known and {"failure": known.pop("lost", ""), **known}


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
        facts = read_shaped(folder / "ended.json", ENDED, "does not record how the run ended")
        if facts is not None and facts["state"] == "done":
            list(figure_rows(folder)), provenance(folder)
        return facts
    except Unreadable as error:
        message = str(error)
        return {"state": "failed", "code": 1, "config_sha256": "", "error": message, "unreadable": message}


def _running(folder: Path) -> bool:
    """Return whether a process holds the run's lock."""
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


def look(folder: Path, overrides: tuple[str, ...] = ()) -> RunState:
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
    begun: dict[str, Any] = known(read_begun, {})
    job = "" if how or running else known(_on_cluster, "")
    groups = begun.get("groups")
    done = groups or 0 if how and how["state"] == "done" else known(_groups, 0)
    given = overrides or tuple((how or {}).get("overrides", ())) or identifying(begun.get("overrides") or ())
    state: State = how["state"] if how else "running" if running else "pending"
    error = how["error"] if how else "; ".join([*broken_files, *([job] if job else [])])
    code, seconds = (how["code"], how.get("seconds")) if how else (0, None)
    return RunState(folder, given, state, done, groups, code, error, seconds, "; ".join(dict.fromkeys(broken_files)))


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
