"""Fixtures of the tests on real clusters: a sweep whose runs take some seconds each, and checks of its results."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pandas as pd
import pytest
from filelock import FileLock
from pandas.testing import assert_frame_equal

from spec_lab.results import run_state, schema, sweep
from spec_lab.results.writer import load
from tests import checkpoints

ROOT = Path(__file__).parents[3]
SEEDS = 12
GROUPS = 15
FAILS = "'${oc.env:NO_SUCH_SEED}'"
"""A seed that only the run itself refuses."""
ALL = ",".join(map(str, [*range(SEEDS), FAILS]))


def until(what: Callable[[], object], seconds: float = 120) -> object:
    """Wait until ``what()`` is true; returns it."""
    end = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < end, f"not within {seconds:g} seconds"
        time.sleep(0.1)
    return result


@contextmanager
def cluster(script: str, *options: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Start a cluster of two nodes: its folder, and the environment of its users."""
    folder = mkdtemp()  # it holds sockets, whose paths must be short
    command = [sys.executable, ROOT / "scripts" / script]
    try:
        started = subprocess.run([*command, "start", folder, *options], check=True, capture_output=True, text=True)
        yield folder, dict(word.split("=", 1) for word in shlex.split(started.stdout)[1:])
    finally:
        subprocess.run([*command, "stop", folder], check=True)
        shutil.rmtree(folder)


@dataclass
class Swept:
    """A sweep of ``SEEDS`` runs and one that fails, in ``folder``.

    Args:
        folder: the sweep's.
        options: of the command, but for the launcher.
        environment: of the command.
    """

    folder: Path
    options: list[str]
    environment: dict[str, str]

    def start(self, *more: str, seeds: str = ALL) -> subprocess.Popen:
        """The sweep's command, as a process."""
        output = (self.folder.parent / "output.txt").open("a")
        command = [sys.executable, "-m", "spec_lab", "--multirun", *self.options, *more, f"seed={seeds}"]
        return subprocess.Popen(command, cwd=self.folder.parent, env=self.environment, stdout=output, stderr=output)

    def output(self) -> str:
        """The output of all commands."""
        return " ".join((self.folder.parent / "output.txt").read_text().split())

    def runs(self) -> dict[str, run_state.RunState]:
        """The runs by seed."""
        if not sweep.is_sweep(self.folder):
            return {}
        return {
            next(override[5:] for override in run.overrides if override[:5] == "seed="): run
            for run in sweep.runs(self.folder)
        }

    def at_work(self, most: int = GROUPS - 1) -> list[str]:
        """Seeds of runs with at least one finished group and some left."""
        return [seed for seed, run in self.runs().items() if run.state == "running" and 0 < run.groups <= most]

    def job(self, seed: str) -> str:
        """The engine's id of the run's job."""
        return run_state.queued(self.runs()[seed].folder)["job"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Shared by all test processes: tiny models with prompts, and an undisturbed sweep on them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").exists():
            zoo = checkpoints.zoo(folder)
            checkpoints.prompts(zoo / "prompts.jsonl", (checkpoints.TEXTS * GROUPS)[:GROUPS])
            checkpoints.prompts(zoo / "many.jsonl", checkpoints.TEXTS * 200)
            seeds = ",".join(map(str, range(SEEDS)))
            command = [sys.executable, "-m", "spec_lab", "--multirun", *options(zoo, "swept"), f"seed={seeds}"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment())
            (folder / "whole").touch()
    return folder


@pytest.fixture(scope="session")
def zoo(shared):
    return shared


@pytest.fixture(scope="session")
def undisturbed(shared):
    """The requests' rows of each run of the same sweep in one undisturbed process, by folder."""
    return {run.folder.name: load(run.folder).requests for run in sweep.runs(shared / "swept")}


def options(zoo: Path, out: str) -> list[str]:
    return [
        f"target.path={zoo / 'target'}", "target.dtype=float32", "prompts=jsonl", "sampling=temperature_1",
        f"prompts.path={zoo / 'prompts.jsonl'}", "proposer=ngram", "proposer.depth=3", "max_new_tokens=48",
        "warmup=0", "threads=1", f"output_dir={out}",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Return the environment of a command."""
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def swept(zoo, tmp_path):
    """A sweep that has not begun."""
    return Swept(tmp_path / "swept", options(zoo, str(tmp_path / "swept")), environment())


def finished(swept: Swept, *seeds: str) -> dict[str, pd.DataFrame]:
    """The rows of the finished groups of some runs, with the seconds they took."""
    return {seed: load(swept.runs()[seed].folder).requests for seed in seeds}


def assert_goes_on(swept: Swept, was: dict[str, pd.DataFrame]) -> None:
    """Groups that were finished before are not decoded again: their seconds are the same."""
    assert was and all(len(rows) for rows in was.values())
    for seed, rows in was.items():
        now = load(swept.runs()[seed].folder).requests
        assert len(rows.merge(now, on=["group", "arm", *TIMES])) == len(rows)


TIMES = [name for name in schema.REQUESTS if name.endswith("_seconds")]
MEASURED = [*TIMES, *schema.TIMING_COLUMNS]


def assert_whole(swept: Swept, undisturbed: dict) -> None:
    """Every run is done and counted once, with the rows of an undisturbed one; the failing one has its error."""
    runs = swept.runs()
    assert {seed: run.state for seed, run in runs.items()} == {
        **{str(seed): "done" for seed in range(SEEDS)}, FAILS: "failed"
    }  # fmt: skip
    assert "'NO_SUCH_SEED' not found" in runs[FAILS].error
    table = sweep.collect(swept.folder)
    assert sorted(table[table["arm"] == "ngram"]["seed"]) == list(range(SEEDS))
    for seed in range(SEEDS):
        requests, wanted = load(runs[str(seed)].folder).requests, undisturbed[runs[str(seed)].folder.name]
        assert not requests.duplicated(["group", "arm", "request"]).any()
        assert_frame_equal(
            *(
                table.drop(columns=MEASURED).sort_values(["group", "arm"], ignore_index=True)
                for table in (requests, wanted)
            )
        )
