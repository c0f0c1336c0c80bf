"""Kill -9 of any worker or launcher at any moment: no finished group is lost or counted twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import ceil
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pandas.testing import assert_frame_equal

from spec_lab.results import run_state, schema, sweep
from spec_lab.results.writer import load
from tests import checkpoints
from tests.cli.composing import compose, remember_compositions

ROOT = Path(__file__).parents[2]
TIMES = {
    "forwards": [name for name, (kind, _) in schema.FORWARDS.items() if kind == "double"],
    "steps": [],
    "requests": [*(name for name in schema.REQUESTS if name.endswith("_seconds")), "other_cores"],
}
"""Columns that differ between two equal runs."""
GROUPS = 6


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Tiny models, and prompts for ``GROUPS`` groups."""
    folder = checkpoints.zoo(tmp_path_factory.mktemp("zoo"))
    checkpoints.prompts(folder / "prompts.jsonl", [*checkpoints.TEXTS, "x y z x y ", "to be or not to be"][:GROUPS])
    checkpoints.prompts(folder / "many.jsonl", checkpoints.TEXTS * 30)
    return folder


def options(zoo: Path, *more: str) -> list[str]:
    return [
        "--multirun", f"target.path={zoo / 'target'}", "target.dtype=float32", "prompts=jsonl",
        "sampling=temperature_1", f"prompts.path={zoo / 'prompts.jsonl'}", "max_new_tokens=4", "warmup=0", "threads=1",
        "output_dir=swept", *more,
    ]  # fmt: skip


# Cheap child processes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForkServer:
    """A process that has imported everything and composed the configs, and forks children that run the command line."""

    pipe: Connection

    def ask(self, *what):
        self.pipe.send(what)
        return self.pipe.recv()

    def start(self, folder: Path, arguments: list[str], **how) -> int:
        """Start a child in the directory ``place``; returns its process number. ``how`` is explained at ``_child``."""
        folder.mkdir(exist_ok=True)
        return self.ask("start", folder, arguments, how)

    def wait(self, child: int) -> int:
        """Wait for a child; returns its exit code, or minus the signal that ended it."""
        return self.ask("wait", child, False)

    def kill(self, child: int) -> bool:
        """Kill -9; returns whether the child was still alive."""
        return self.ask("wait", child, True) == -signal.SIGKILL


@pytest.fixture(scope="module")
def fork_server():
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ForkServer(ours)
    ours.send(("stop",))
    process.join(10)
    process.kill()


def _serve(pipe: Connection) -> None:
    from threading import RLock

    from tqdm import tqdm

    import spec_lab.cli.commands
    import spec_lab.results.manifest
    import spec_lab.tasks.benchmark

    spec_lab.tasks.benchmark.in_short = lambda *_: {"certified": None}  # slow, and has tests of its own
    spec_lab.results.manifest.commit = lambda _: None  # as under GIT_DIR=/nowhere
    tqdm.set_lock(RLock())  # its own lock is a semaphore that a killed process would leave behind
    remember_compositions()
    known = set()
    with suppress(EOFError):
        while True:
            match pipe.recv():
                case "start", place, arguments, how:
                    if tuple(arguments) not in known:
                        compose(place.parent / f"composed-{len(known)}", arguments)
                        known.add(tuple(arguments))
                    if not (child := os.fork()):
                        _child(place, arguments, **how)
                    pipe.send(child)
                case ["stop"]:
                    os._exit(0)
                case "wait", child, kill:
                    if kill:
                        os.kill(child, signal.SIGKILL)  # not reaped yet, so the process number is still its own
                    pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _child(folder: Path, arguments: list[str], patience: float = 1.0, moment: tuple[int, str] | None = None) -> None:
    """Run the command line in ``place``; its output goes to ``output.txt`` there.

    Args:
        place: the working directory.
        arguments: of the command line.
        patience: seconds to wait for a run that another process has locked.
        moment: number of a change to the disk, and whether the process dies "after" it or with "half" a file written.
    """
    from spec_lab.cli import main

    signal.alarm(120)
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["spec-lab", *arguments]
    holding = run_state.holding
    run_state.holding = lambda folder, *_: holding(folder, patience)
    if moment:
        _die_at(*moment)
    code = 0
    try:
        main.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else bool(left.code)
    except BaseException as error:
        print(repr(error))
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_at(number: int, when: str) -> None:
    """Kill this process at a change to the disk: a file renamed into place, a file or folder removed."""
    left = [number]

    def now() -> bool:
        left[0] -= 1
        return not left[0]

    def deadly(change):
        def changed(what, *given, **more):
            if when == "half" and now():
                os.truncate(what, os.path.getsize(what) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            change(what, *given, **more)
            if when == "after" and now():
                os.kill(os.getpid(), signal.SIGKILL)

        return changed

    for name in ("replace",) if when == "half" else ("replace", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))


# Checks ------------------------------------------------------------------------------------------------------------


Tables = dict[str, pd.DataFrame]


def rows(folder: Path) -> Tables:
    """The rows of a run's finished groups, by id."""
    tables = load(folder)
    return {name: getattr(tables, name).set_index("id").sort_index() for name in TIMES}


def of_groups(tables: Tables, groups) -> Tables:
    return {name: frame[frame["group"].isin(groups)] for name, frame in tables.items()}


def without_times(tables: Tables) -> Tables:
    return {name: frame.drop(columns=TIMES[name], errors="ignore") for name, frame in tables.items()}


def assert_same(tables: Tables, expected: Tables) -> None:
    for name, frame in tables.items():
        if len(frame):
            assert_frame_equal(frame, expected[name], check_exact=True)
        else:  # a table of a run without rows lacks the optional columns
            assert not len(expected[name])
            assert set(frame) <= set(expected[name]) or set(expected[name]) <= set(frame)


def check(swept: Path, reference: dict[str, Tables], seen: dict[str, Tables], living: bool) -> bool:
    """Check that the files are right and that every group ``seen`` before is still there with the same times.

    Returns:
        Whether every run is done.
    """
    if not sweep.is_sweep(swept):
        assert not seen
        return False
    swept_runs = sweep.runs(swept)
    assert [run.folder.name for run in swept_runs] == list(reference)
    for run in swept_runs:
        name, tables = run.folder.name, rows(run.folder)
        groups = set(tables["requests"]["group"])
        assert run.state in ({"done", "pending", "running"} if living else {"done", "pending"}), run
        assert run.state != "done" or groups == set(reference[name]["requests"]["group"])
        assert living or run.groups == len(groups)
        assert_same(without_times(tables), without_times(of_groups(reference[name], groups)))
        if name in seen:
            assert_same(of_groups(tables, set(seen[name]["requests"]["group"])), seen[name])
        seen[name] = tables
    return all(run.state == "done" for run in swept_runs)


def check_end(swept: Path, reference: dict[str, Tables]) -> None:
    """Check that the sweep is complete and that the kills left nothing behind."""
    assert {run.state for run in sweep.runs(swept)} == {"done"}
    for name, tables in reference.items():
        folder = swept / name
        for table, frame in tables.items():
            raw = pq.read_table(folder / f"{table}.parquet")["id"].to_pylist()
            assert sorted(raw) == list(frame.index), "on disk each row is once, without any help from who reads it"
        assert not list(folder.glob("parts*"))
        assert not list(folder.glob(".lock"))
        groups = tables["requests"]["group"].nunique()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["groups"] == groups
        assert {arm: arm_summary["requests"] for arm, arm_summary in summary["arms"].items()} == {
            arm: group["request"].nunique() for arm, group in tables["requests"].groupby("arm")
        }
    table = sweep.collect(swept)
    assert sorted(zip(table["run"], table["arm"], strict=True)) == sorted(
        (name, arm) for name, tables in reference.items() for arm in tables["requests"]["arm"].unique()
    )
    expected = [
        reference[run]["requests"].query("arm == @arm") for run, arm in zip(table["run"], table["arm"], strict=True)
    ]
    assert table["tokens"].tolist() == [
        int((requests["prefill_tokens"] + requests["decode_tokens"]).sum()) for requests in expected
    ]


def never_killed(fork_server: ForkServer, folder: Path, arguments: list[str]) -> dict[str, Tables]:
    """The rows of each run of an undisturbed sweep."""
    child = fork_server.start(folder, arguments)
    assert fork_server.wait(child) == 0, (folder / "output.txt").read_text()
    return {run.folder.name: rows(run.folder) for run in sweep.runs(folder / "swept")}


# Kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_kills_at_random_moments_lose_nothing_and_count_nothing_twice(fork_server, zoo, tmp_path):
    kills = 50
    draft = f"proposer.path={zoo / 'draft'}"
    arguments = options(zoo, "proposer=draft_chain", draft, "proposer.depth=1,3", "seed=1,2")
    reference = never_killed(fork_server, tmp_path / "reference", arguments)
    one_run = min(run.seconds for run in sweep.runs(tmp_path / "reference" / "swept"))  # the first is slower
    assert all(len(tables["requests"]) == 2 * GROUPS for tables in reference.values())
    generator, hits, sweeps, broken_off = random.Random(0), 0, 0, 0
    while hits < kills or broken_off <= kills // 10:  # some kills must fall into runs, not only between them
        assert hits < 5 * kills
        folder, seen, children, done = tmp_path / str(sweeps), {}, [], False
        while not done:
            while len(children) < 2:  # two workers, or a restarted launcher and an orphan
                children.append(fork_server.start(folder, arguments, patience=generator.choice([0.0, 1.0])))
            time.sleep(generator.uniform(0, generator.choice([1, 2]) * one_run))
            one_run *= 1.02  # so the test ends on a machine that has become slower
            for _ in range(generator.choice([1, 2])):
                hits += fork_server.kill(children.pop(generator.randrange(len(children))))
            done = check(folder / "swept", reference, seen, living=bool(children))
            one_run *= 0.8 if done else 1.0  # and kills are not too late on one that has become faster
            broken_off += any(0 < tables["requests"]["group"].nunique() < GROUPS for tables in seen.values())
        for child in children:
            hits += fork_server.kill(child)
        assert fork_server.wait(fork_server.start(folder, arguments)) == 0, (folder / "output.txt").read_text()
        check(folder / "swept", reference, seen, living=False)
        check_end(folder / "swept", reference)
        sweeps += 1
    print(f"{hits} kills in {sweeps} sweeps; after {broken_off} checks a run was broken off")


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_kill_between_any_two_changes_to_the_disk_is_repaired_by_the_same_command(fork_server, zoo, tmp_path, stride):
    """The short run has every thirteenth of all moments."""
    arguments = options(zoo, "proposer=ngram", "proposer.depth=3", "baseline=false", "prompts.limit=1")
    reference = never_killed(fork_server, tmp_path / "reference", arguments)
    kills = {}
    for when in ("half", "after"):
        for kills[when], number in enumerate(count(1, stride)):
            folder, seen = tmp_path / f"{when}-{number}", {}
            ended = fork_server.wait(fork_server.start(folder, arguments, moment=(number, when)))
            if ended == 0:
                break  # no more changes
            assert ended == -signal.SIGKILL, (folder / "output.txt").read_text()
            check(folder / "swept", reference, seen, living=False)
            assert fork_server.wait(fork_server.start(folder, arguments)) == 0, (folder / "output.txt").read_text()
            check(folder / "swept", reference, seen, living=False)
            check_end(folder / "swept", reference)
    written = 1 + 2 + 4 + 4 + 2 + 1  # sweep.json, manifest (twice), a group's parts, tables, summaries, ended.json
    removed = 4 + 1 + 1  # parts, their folder, the lock
    assert kills["half"] == ceil(written / stride)
    assert kills["after"] >= (written + removed) / stride


# Real launchers and workers ----------------------------------------------------------------------------------------


class Launcher:
    """``python -m spec_lab --multirun`` with the joblib launcher and two workers, in a process group of its own."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        folder.mkdir(exist_ok=True)
        joblib = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
        self.swept = folder / "swept"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spec_lab", *arguments, *joblib],
            env=os.environ | {"PYTHONPATH": str(ROOT), "GIT_DIR": "/nowhere", "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def workers(self) -> list[int]:
        """The processes that hold a run's lock."""
        ours = {file.stat().st_ino for file in self.swept.glob("*/.lock")}
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [int(lock[4]) for lock in locks if lock[1] == "FLOCK" and int(lock[5].rpartition(":")[2]) in ours]

    def groups(self) -> dict[str, int]:
        runs = sweep.runs(self.swept) if sweep.is_sweep(self.swept) else []
        return {run.folder.name: run.groups for run in runs if run.state == "running"}

    def until_two_get_on(self) -> list[int]:
        """Wait until each of two workers has finished another group; returns their process numbers."""
        deadline, before = time.monotonic() + 200, self.groups()
        while True:
            now = self.groups()
            if sum(now[name] > before.get(name, 0) for name in now) == 2 and len(self.workers()) == 2:
                return self.workers()
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a process group of its own
        self.process.communicate()


@pytest.fixture
def launch():
    begun = []

    def start(*given) -> Launcher:
        begun.append(Launcher(*given))
        return begun[-1]

    yield start
    for launched in begun:
        launched.close()


@pytest.mark.nightly
def test_killed_workers_and_launchers_of_joblib_lose_nothing(fork_server, zoo, tmp_path, launch):
    arguments = options(
        zoo, "proposer=ngram", "proposer.depth=3", "baseline=false", f"prompts.path={zoo / 'many.jsonl'}", "seed=1,2,3"
    )
    reference, seen = never_killed(fork_server, tmp_path / "reference", arguments), {}
    folder = tmp_path / "killed"

    first = launch(folder, arguments)
    os.kill(first.until_two_get_on()[0], signal.SIGKILL)
    output, _ = first.process.communicate(timeout=100)
    assert first.process.returncode == 1
    assert "A worker process managed by the executor was unexpectedly terminated" in output
    check(folder / "swept", reference, seen, living=False)

    second = launch(folder, arguments)
    orphan, _ = second.until_two_get_on()
    second.process.kill()
    second.process.wait()
    newcomer = fork_server.start(folder, arguments, patience=0.0)  # while two orphans still run
    check(folder / "swept", reference, seen, living=True)
    with suppress(ProcessLookupError):
        os.kill(orphan, signal.SIGKILL)
    check(folder / "swept", reference, seen, living=True)
    assert fork_server.wait(newcomer) in (0, 1)  # 1 if an orphan holds a run
    assert "Traceback" not in (folder / "output.txt").read_text()
    deadline = time.monotonic() + 60
    while second.workers():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    check(folder / "swept", reference, seen, living=False)
    assert fork_server.wait(fork_server.start(folder, arguments)) == 0, (folder / "output.txt").read_text()
    check(folder / "swept", reference, seen, living=False)
    check_end(folder / "swept", reference)
