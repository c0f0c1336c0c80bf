"""Sweeps on a real Ray of two nodes, while workers, a node and the launcher are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launchers.conftest import GROUPS, ROOT, SEEDS, assert_goes_on, assert_whole, cluster, finished, until

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]

SCRIPT = ROOT / "scripts" / "local_ray.py"
LAUNCHER = ["hydra/launcher=ray", "hydra.launcher.cpus=1"]


@pytest.fixture(scope="module")
def nodes():
    """Start a cluster of two nodes: its folder, and the environment of its users."""
    pytest.importorskip("ray", reason="RAY IS NOT TESTED: pip install 'spec-lab[ray]'")
    with cluster("local_ray.py", "--cpus", "2") as running:
        yield running


@pytest.fixture
def on(nodes, swept):
    """A sweep to run there."""
    swept.environment |= nodes[1]
    return swept


def workers(folder: str) -> list[int]:
    """Worker processes of the cluster that run jobs (Ray puts the job into the process title)."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(b"ray::_carry") and folder in (path / "environ").read_text():
                pids.append(int(path.name))
        except (OSError, UnicodeDecodeError):
            continue
    return pids


def test_a_sweep_survives_whatever_happens_to_its_jobs_and_launcher(on, nodes, undisturbed):
    launcher = on.start(*LAUNCHER)

    # Workers are killed: Ray restarts their jobs.
    some = until(lambda: len(some := on.at_work(GROUPS // 3)) > 2 and some)
    was = finished(on, *some)
    first, second, *_ = workers(nodes[0])
    for pid in (first, second):
        os.kill(pid, signal.SIGKILL)

    # A node goes down with its jobs.
    until(lambda: sum(run.state == "done" for run in on.runs().values()) > 2 and len(on.at_work()) > 1)
    was |= finished(on, *on.at_work())
    subprocess.run([sys.executable, SCRIPT, "node-down", nodes[0]], check=True)

    # The launcher is killed, and its jobs with it; the same command resumes.
    until(lambda: sum(run.state == "done" for run in on.runs().values()) > 5 and on.at_work())
    launcher.kill()
    assert launcher.wait() == -signal.SIGKILL
    until(lambda: not any(run.state == "running" for run in on.runs().values()))
    pending = [seed for seed, run in on.runs().items() if run.state == "pending"]
    assert pending
    assert on.start(*LAUNCHER).wait(timeout=300) == 1, "one run fails"
    assert f"{SEEDS + 1} runs, of which {SEEDS + 1 - len(pending)} ended before" in on.output()
    assert_goes_on(on, was)
    assert_whole(on, undisturbed)


def test_a_job_that_is_killed_repeatedly_fails_with_the_cause(on, nodes):
    launcher = on.start(*LAUNCHER, "hydra.launcher.restarts=0", seeds="0,1")
    until(lambda: "0" in on.at_work() or "1" in on.at_work())
    for pid in workers(nodes[0]):
        os.kill(pid, signal.SIGKILL)
    assert launcher.wait(timeout=120) == 1
    failed = [run for run in on.runs().values() if run.state == "pending"]
    assert failed and all("WorkerCrashedError" in run.error for run in failed)
    assert "the same command resumes it" in on.output() and "Traceback" not in on.output()


def test_a_job_that_no_node_is_large_enough_for_is_refused(on):
    assert on.start(*LAUNCHER, "hydra.launcher.cpus=64", seeds="0").wait(timeout=60) == 1
    assert "no node is large enough for a job of 64 CPU" in on.output() and "Traceback" not in on.output()


def test_a_cluster_that_does_not_answer_is_named(on):
    on.environment["RAY_ADDRESS"] = "127.0.0.1:1"
    assert on.start(*LAUNCHER, seeds="0").wait(timeout=120) == 1
    assert (
        "hydra.launcher.address=127.0.0.1:1: no Ray cluster answers" in on.output() and "Traceback" not in on.output()
    )
