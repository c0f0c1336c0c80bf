"""Many processes lock and unlock one run's folder and remove the lock file: at most one holds it at a time."""

import os
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from spec_lab.results import run_state

pytestmark = pytest.mark.nightly

PROCESSES, SECONDS = 8, 15.0


def take_turns(folder: Path, seconds: float, results) -> None:
    """How often the lock was held, and how often another process held it at the same time."""
    times = both = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with run_state.holding(folder, patience=0.0 if times % 2 else 0.2):
                times += 1
                try:
                    os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    both += 1
                    continue
                time.sleep(0.0002)
                os.unlink(folder / "inside")
        except run_state.Locked:
            time.sleep(0.0001)
    results.put((times, both))


def test_no_two_processes_hold_one_run(tmp_path):
    context = get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=take_turns, args=(tmp_path, SECONDS, queue)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    counts = [queue.get(timeout=10 * SECONDS) for _ in processes]
    for process in processes:
        process.join()
    assert sum(times for times, _ in counts) > 500, "too few turns to tell"
    assert sum(both for _, both in counts) == 0
    assert not (tmp_path / ".lock").exists()
