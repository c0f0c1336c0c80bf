"""How launchers handle what happens to jobs, on a scripted cluster."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from spec_lab.cli.launchers import JobEnded, Queued
from spec_lab.cli.refusals import Refused
from spec_lab.core.files import read_json, write_json
from spec_lab.results import sweep
from tests import checkpoints
from tests.cli.launchers.conftest import FAILS


class Scripted:
    """An engine that runs jobs in this process, except those that fail.

    Args:
        failures: seeds of runs whose jobs fail, with their final states.
        alive: seeds of runs whose jobs an earlier launcher submitted, and that are still running.
    """

    def __init__(self, failures=(), alive=()):
        self.failures, self.alive = dict(failures), alive
        self.taken = []

    def living(self):
        return [run.folder.name for run in sweep.runs(Path("swept")) if {*run.overrides} & {*self.alive}]

    def launch(self, jobs, names):
        living = self.living()
        for number, (job, name) in enumerate(zip(jobs, names, strict=True)):
            if name not in living:
                self.taken.append(job.overrides[-1])
                yield Queued(number, f"7_{number}")
        for number, job in enumerate(jobs):
            if (seed := job.overrides[-1]) in self.failures:
                yield JobEnded(number, failure=self.failures[seed])
            else:
                yield JobEnded(number, job())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Options of a run that takes milliseconds to decode."""
    return checkpoints.short_runs(tmp_path_factory.mktemp("tiny"), checkpoints.TEXTS[:2])


@pytest.fixture
def on(quick_cli, tiny, monkeypatch):
    """Run a sweep over seeds on an engine: (exit code, stdout, stderr)."""

    def call(engine, *more):
        monkeypatch.setattr("spec_lab.cli.launchers._engine", lambda *_: engine)
        return quick_cli("--multirun", "hydra/launcher=slurm", *tiny, *more)

    return call


def counts(errors: str) -> list[int]:
    """The numbers of runs in all, ended before, queued already and submitted, as a launcher prints them."""
    (line,) = (line for line in errors.splitlines() if "submitting" in line)
    return [int(number) for number in re.findall(r"\b\d+\b", line)]


@pytest.mark.nightly
def test_a_failed_job_leaves_the_others_alone_and_is_reported_with_its_state(on, tmp_path, cli):
    code, output, errors = on(Scripted(failures={"seed=2": "CANCELLED by 1000, on n1"}), "seed=1,2,3")
    assert code == 1, "not all that was asked for went well"
    assert counts(errors) == [3, 0, 0, 3]
    (failure,) = (line for line in errors.splitlines() if "seed=2" in line)
    assert "2 of 3" in failure and "CANCELLED by 1000, on n1" in failure
    assert "swept: 2 done, 1 pending" in output
    assert "slurm job 7_1: CANCELLED by 1000, on n1" in output
    second = Scripted()
    code, output, errors = on(second, "seed=1,2,3")
    assert (code, second.taken) == (0, ["seed=2"]), "a finished run is not submitted again"
    assert "swept: 3 done" in output and "CANCELLED" not in output


@pytest.mark.nightly
def test_a_pending_job_is_not_submitted_twice(on):
    on(Scripted(failures={"seed=1": "killed", "seed=2": "killed"}), "seed=1,2")
    again = Scripted(alive=["seed=1"])
    code, _, errors = on(again, "seed=1,2")
    assert (code, again.taken) == (0, ["seed=2"])
    assert counts(errors) == [2, 0, 1, 1]


def test_the_status_of_a_queued_run_names_its_job(on, tmp_path):
    class Leaves(Scripted):
        def launch(self, jobs, names):
            yield Queued(0, "7_0")
            raise Refused("spec_lab: Slurm has not answered for 600 seconds")

    code, _, errors = on(Leaves(), "seed=1")
    (run,) = sweep.runs(tmp_path / "swept")
    assert (code, run.state, run.error) == (1, "pending", "slurm job 7_0")
    assert "Slurm has not answered" in errors and "Traceback" not in errors


@pytest.mark.nightly
def test_a_job_that_ended_without_a_result_has_failed(on):
    class Silent(Scripted):
        def launch(self, jobs, names):
            yield JobEnded(0)

    code, output, _ = on(Silent(), "seed=1")
    assert code == 1
    assert "slurm: its job ended without a result" in output


@pytest.mark.nightly
def test_a_job_runs_in_the_directory_of_the_command(on, tmp_path):
    class Elsewhere(Scripted):
        def launch(self, jobs, names):
            os.chdir("/")
            for number, job in enumerate(jobs):
                yield JobEnded(number, job())

    assert on(Elsewhere(), "seed=1")[0] == 0
    assert [run.state for run in sweep.runs(tmp_path / "swept")] == ["done"], "out, prompts are relative"


@pytest.mark.nightly
def test_a_failed_run_names_its_error_and_is_submitted_again_on_request_only(on):
    code, output, _ = on(Scripted(), f"seed=1,{FAILS}")
    assert code == 1
    assert "1 done, 1 failed" in output and "'NO_SUCH_SEED' not found" in output
    second, third = Scripted(), Scripted()
    assert on(second, f"seed=1,{FAILS}")[0] == 1
    assert second.taken == []
    on(third, "retry=true", f"seed=1,{FAILS}")
    assert third.taken == [f"seed={FAILS}"]


# Checks at start-up ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("engine", "needs"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(cli, tiny, monkeypatch, engine, needs):
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"spec_lab.cli.launchers.{engine}", raising=False)
    code, _, errors = cli("--multirun", f"hydra/launcher={engine}", *tiny, "seed=1,2")
    assert code == 1
    assert f"hydra/launcher={engine}" in errors
    assert f"pip install 'spec-lab[{engine}]'" in errors and "Traceback" not in errors


# Slurm's commands --------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(monkeypatch):
    """The module with Slurm's commands answered by ``answers`` and without waiting times."""
    pytest.importorskip("submitit", reason="NOT TESTED: submitit is not installed (pip install 'spec-lab[slurm]')")
    from spec_lab.cli.launchers import slurm

    class Asked(dict):
        module, now = slurm, 0.0

    answers = Asked()

    def passes(seconds):
        answers.now += seconds

    monkeypatch.setattr(slurm, "_asks", lambda command, *_: answers.get(command))
    monkeypatch.setattr("time.sleep", passes)
    monkeypatch.setattr("time.monotonic", lambda: answers.now)
    return answers


def engine(slurm, folder: Path):
    slurm.setdefault("squeue", "")
    return slurm.module.Slurm(folder, {}, 3, 10, slurm.module._queue())


def job(folder: Path, job_id: str):
    from submitit import SlurmJob

    return SlurmJob(folder / "a" / "%j", job_id)


def test_jobs_are_identified_by_the_array_s_folder_not_by_a_number_that_may_be_reused(slurm, tmp_path):
    for name, runs in (("a", ["seed=1", "seed=2"]), ("b", ["seed=3"])):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "runs.json", {"runs": runs})
    slurm["squeue"] = "\n".join([
        f"5_1|RUNNING|None|{tmp_path}/a", f"6|PENDING|Priority|{tmp_path}/b", f"7_0|RUNNING|None|{tmp_path}/none",
        "8_0|RUNNING|None|/elsewhere/a", "9_0|RUNNING|None|(null)",
    ])  # fmt: skip
    assert engine(slurm, tmp_path).living() == {"seed=2": "5_1", "seed=3": "6"}


def test_a_job_that_left_the_queue_has_failed_with_the_state_from_sacct(slurm, tmp_path):
    slurm["sacct"] = "5_0|CANCELLED by 1000|0:0|n1\n5_1|FAILED|0:9|n2\n5_2|TIMEOUT|1:0|None assigned\n"
    waiting = {number: job(tmp_path, f"5_{number}") for number in range(3)}
    assert list(engine(slurm, tmp_path)._ended(waiting)) == [
        JobEnded(0, failure="CANCELLED by 1000, on n1"),
        JobEnded(1, failure="FAILED, signal 9, on n2"),
        JobEnded(2, failure="TIMEOUT, exit code 1"),
    ]
    assert not waiting


def test_a_job_has_time_to_appear_where_sacct_or_the_disk_lags(slurm, tmp_path):
    slurm["sacct"] = "5_0|RUNNING|0:0|n1\n5_1|COMPLETED|0:0|n1\n"
    waiting = {number: job(tmp_path, f"5_{number}") for number in range(2)}
    ends = engine(slurm, tmp_path)._ended(waiting)
    assert next(ends) == JobEnded(1, failure="COMPLETED, on n1")
    assert slurm.now > slurm.module.SECONDS
    slurm["sacct"] = "5_0|OUT_OF_MEMORY|0:125|n1\n"
    assert list(ends) == [JobEnded(0, failure="OUT_OF_MEMORY, signal 125, on n1")]


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED"])
def test_a_job_that_slurm_starts_again_may_be_out_of_the_queue_for_a_while(slurm, tmp_path, monkeypatch, state):
    slurm["sacct"] = f"5_0|{state}|0:0|n1\n"
    sleep = time.sleep

    def passes(seconds):
        sleep(seconds)
        if slurm.now > 30:  # it runs again, and is cancelled
            slurm["squeue"] = f"5_0|RUNNING|None|{tmp_path}/a" if slurm.now < 60 else ""
            slurm["sacct"] = "5_0|CANCELLED|0:0|n2\n"

    monkeypatch.setattr("time.sleep", passes)
    (ended,) = engine(slurm, tmp_path)._ended({0: job(tmp_path, "5_0")})
    assert ended.failure == "CANCELLED, on n2"


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED"])
def test_a_job_that_slurm_does_not_start_again_is_reported_after_a_while(slurm, tmp_path, state):
    slurm["sacct"] = f"5_0|{state}|0:0|n1\n"
    (ended,) = engine(slurm, tmp_path)._ended({0: job(tmp_path, "5_0")})
    assert ended.failure == f"{state}, on n1" and slurm.now > slurm.module.SECONDS


def test_a_slurm_that_does_not_answer_is_waited_for_up_to_a_limit(slurm, tmp_path):
    waits = engine(slurm, tmp_path)
    del slurm["squeue"]
    with pytest.raises(Refused, match="600 seconds; 1 jobs"):
        list(waits._ended({0: job(tmp_path, "5_0")}))
    assert slurm.now > slurm.module.PATIENCE


def test_a_job_that_can_never_start_is_cancelled_and_the_others_are_waited_for(slurm, tmp_path, monkeypatch, capsys):
    cancelled = []
    monkeypatch.setattr("submitit.SlurmJob.cancel", lambda self, check: cancelled.append(self.job_id))
    slurm["squeue"] = "5_0|PENDING|PartitionTimeLimit|\n5_1|PENDING|JobHeldUser|\n5_2|PENDING|Resources|\n"
    ends = engine(slurm, tmp_path)._ended({number: job(tmp_path, f"5_{number}") for number in range(3)})
    assert next(ends) == JobEnded(0, failure="cancelled, as it would never start: PartitionTimeLimit")
    slurm["squeue"] = ""
    assert len(list(ends)) == 2 and cancelled == ["5_0"]
    output = capsys.readouterr().err
    assert "Slurm job 5_1 is pending: JobHeldUser" in output and "Resources" not in output


def test_a_job_is_submitted_with_its_cores_and_only_the_user_s_options_of_the_cluster(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="NOT TESTED: submitit is not installed (pip install 'spec-lab[slurm]')")
    from spec_lab.cli.launchers import slurm

    for name, does in {"sbatch": f"env >{tmp_path}/env; echo Submitted batch job 5", "srun": "", "squeue": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = {"SLURM_CONF": "here", "SBATCH_ACCOUNT": "lab"}
    for name, value in {**options, "SLURM_JOB_ID": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    made = slurm.engine(tmp_path / "out", cpus=3, memory_gb=None, requeue=False, setup=["module load x"])
    (job,) = made._handed([print], ["seed=1"])
    given = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert options.items() <= given.items()
    assert not {"SLURM_JOB_ID", "RANK", "WORLD_SIZE"} & given.keys()
    script = job.paths.submission_file.read_text()
    (srun,) = [line for line in script.splitlines() if line.startswith("srun")]
    assert "--cpus-per-task=3" in srun
    lines = ["#SBATCH --cpus-per-task=3", "#SBATCH --no-requeue", "export OMP_NUM_THREADS=3", "module load x"]
    assert {*lines} <= {*script.splitlines()}
    assert "--mem" not in script
    assert read_json(job.paths.folder.parent / "runs.json") == {"runs": ["seed=1"]}
