"""Sweeps on a real Slurm of two nodes: jobs are cancelled, killed, preempted, requeued; nodes and launchers fail."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spec_lab.results import sweep
from tests.cli.launchers.conftest import GROUPS, ROOT, assert_goes_on, assert_whole, cluster, finished, until

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]

SCRIPT = ROOT / "scripts" / "local_slurm.py"
LAUNCHER = [
    "hydra/launcher=slurm", "hydra.launcher.cpus=1", "hydra.launcher.memory_gb=1", "hydra.launcher.poll=1",
    "hydra.launcher.minutes=10",
]  # fmt: skip


@pytest.fixture(scope="module")
def slurm():
    """Start a cluster of two nodes: its folder."""
    pytest.importorskip("submitit", reason="SLURM IS NOT TESTED: pip install 'spec-lab[slurm]'")
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("SLURM IS NOT TESTED: its daemons are not here; python scripts/local_slurm.py install")
    with cluster("local_slurm.py", "--cpus", "3") as running:
        yield running


@pytest.fixture
def on(slurm, swept, monkeypatch):
    """A sweep to run there."""
    monkeypatch.setenv("SLURM_CONF", slurm[1]["SLURM_CONF"])
    swept.environment |= slurm[1]
    yield swept
    subprocess.run(["scancel", "--me"], check=True)


def asks(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def node(job: str) -> str:
    """The node of a running job; empty for others."""
    return asks("squeue", "--noheader", "--array", "--states=RUNNING", f"--jobs={job}", "--format=%N").strip()


def process(job: str) -> int:
    """The Python process of a job of this cluster."""
    array, _, task = job.partition("_")
    wanted = {"SLURM_CONF": os.environ["SLURM_CONF"], "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            given = dict(line.partition("=")[::2] for line in (path / "environ").read_text().split("\0"))
            python = b"submitit.core._submit" in (path / "cmdline").read_bytes()
            python = python and "srun" not in (path / "comm").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if python and wanted.items() <= given.items():
            return int(path.name)
    raise AssertionError(f"job {job} has no process")


def test_a_sweep_survives_whatever_happens_to_its_jobs_and_launcher(on, slurm, undisturbed):
    launcher = on.start(*LAUNCHER)
    first, second, *_ = until(lambda: len(some := on.at_work(GROUPS // 3)) > 1 and some)

    # One job is cancelled, one worker is killed.
    cancelled, killed = on.job(first), on.job(second)
    asks("scancel", cancelled)
    os.kill(process(killed), signal.SIGKILL)
    until(lambda: "CANCELLED" in on.runs()[first].error)
    until(lambda: re.search(r"FAILED, (exit code (137|9)|signal 9), on n", on.runs()[second].error))
    assert on.runs()[first].state == on.runs()[second].state == "pending"
    was = finished(on, first, second)

    # The launcher is killed and restarted while its jobs run.
    launcher.kill()
    assert launcher.wait() == -signal.SIGKILL
    launcher = on.start(*LAUNCHER)
    until(lambda: re.search(r"[1-9]\d* are queued already", on.output()))

    # A node goes down with its jobs.
    there = until(lambda: [seed for seed in on.at_work() if node(on.job(seed)) == "n2"])
    was |= finished(on, *there)
    subprocess.run([sys.executable, SCRIPT, "node-down", slurm[0], "n2"], check=True)
    until(lambda: all(on.runs()[seed].state != "running" for seed in there))

    # A job of higher priority takes the other node.
    made_room = until(lambda: [seed for seed in on.at_work() if node(on.job(seed)) == "n1"])
    was |= finished(on, *made_room)
    jobs = {seed: on.job(seed) for seed in (*there, *made_room)}
    urgent = ["--partition=urgent", "--nodelist=n1", "--exclusive"]
    asks("sbatch", "--wait", *urgent, "--wrap=sleep 1", "--output=/dev/null")
    subprocess.run([sys.executable, SCRIPT, "node-up", slurm[0], "n2"], check=True)

    assert launcher.wait(timeout=300) == 1, "one run fails"
    assert {seed: on.job(seed) for seed in jobs} == jobs, "Slurm itself has started them again"
    assert_goes_on(on, was)
    restarted = asks("sacct", "--noheader", "--allocations", "--duplicates", "--parsable2", "--format=State")
    assert {"CANCELLED", "NODE_FAIL", "PREEMPTED"} <= {line.split()[0] for line in restarted.splitlines()}
    assert_whole(on, undisturbed)


def test_an_option_that_slurm_refuses_is_reported_with_slurm_s_message(on):
    launcher = on.start(*LAUNCHER, "hydra.launcher.partition=nowhere")
    assert launcher.wait(timeout=60) == 1
    assert "Slurm does not accept the jobs: invalid partition specified: nowhere" in on.output()
    assert "Traceback" not in on.output()


def test_a_job_that_no_node_is_large_enough_for_is_refused(on):
    launcher = on.start(*LAUNCHER, "hydra.launcher.memory_gb=64")
    assert launcher.wait(timeout=60) == 1
    assert "Memory specification can not be satisfied" in on.output() and "Traceback" not in on.output()


def test_jobs_that_would_stay_pending_for_ever_are_cancelled_with_the_reason(on):
    launcher = on.start(*LAUNCHER, "hydra.launcher.partition=short", seeds="0,1")  # a limit of five minutes
    assert launcher.wait(timeout=60) == 1
    for run in on.runs().values():
        assert run.state == "pending"
        assert run.error.endswith(": cancelled, as it would never start: PartitionTimeLimit")
    assert asks("squeue", "--me", "--noheader") == ""


def test_a_job_that_runs_out_of_time_is_restarted_and_resumes_up_to_a_number_of_times(on, zoo):
    time = ["hydra.launcher.minutes=1", "hydra.launcher.restarts=1", "+hydra.launcher.sbatch={signal: USR2@40}"]
    launcher = on.start(*LAUNCHER, *time, f"prompts.path={zoo / 'many.jsonl'}", seeds="0")
    assert launcher.wait(timeout=180) == 1
    (run,) = on.runs().values()
    assert (run.state, run.error) == ("failed", "Job not requeued because: timed-out too many times.")
    assert "1 failed" in on.output() and "Traceback" not in on.output()
    log = next(run.folder.parent.glob(".slurm/**/*_log.out")).read_text()
    assert log.count("Job has timed out") == 2, "it was started twice"
    assert run.groups > 0


def test_a_search_on_slurm_is_resumed_after_a_kill(on):
    pytest.importorskip("optuna", minversion="4", reason="NOT TESTED: pip install 'spec-lab[search]'")
    search = [
        "hydra/sweeper=search",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=2",
        "proposer.max_ngram=2,3,4,5",
    ]
    launcher = on.start(*LAUNCHER, *search, seeds="0")
    until(lambda: any(run.state == "running" for run in on.runs().values()))
    launcher.kill()
    assert launcher.wait() == -signal.SIGKILL
    again = on.start(*LAUNCHER, *search, seeds="0")
    assert again.wait(timeout=240) == 0, on.output()
    assert "best speedup.mean of 4 trials" in on.output()
    assert {run.state for run in sweep.runs(on.folder)} == {"done"}
