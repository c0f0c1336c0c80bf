"""What a launcher makes of whatever a cluster does, with a cluster that does as each test says."""

import subprocess
import sys

import pytest

from spec_lab import sweep
from spec_lab.entry.cluster import Ended, Queued
from spec_lab.entry.parts import Refused
from tests import checkpoints


class Scripted:
    """An engine that carries jobs out here, but for those it loses.

    Args:
        lose: seeds of runs whose jobs are lost, with what becomes of them.
        alive: ids of jobs that an earlier launcher handed over, and that still run.
    """

    def __init__(self, lose=(), alive=()):
        self.lose, self.alive = dict(lose), alive
        self.taken, self.waited = [], []

    def living(self, id):
        return id in self.alive

    def launch(self, jobs, ids):
        for number, (job, id) in enumerate(zip(jobs, ids, strict=True)):
            if id is None:
                self.taken.append(job.overrides[-1])
                yield Queued(number, f"7_{number}")
            else:
                self.waited.append(id)
        for number, job in enumerate(jobs):
            if (seed := job.overrides[-1]) in self.lose:
                yield Ended(number, lost=self.lose[seed])
            else:
                yield Ended(number, job())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Options of a run that takes milliseconds to decode."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.checkpoint(folder / "target")
    file = checkpoints.prompts(folder / "prompts.jsonl", checkpoints.TEXTS[:2])
    return [
        f"target.path={folder / 'target'}", "target.dtype=float32", "prompts=jsonl", f"prompts.path={file}",
        "proposer=ngram", "max_new_tokens=4", "warmup=0", "baseline=false", "out=swept",
    ]  # fmt: skip


@pytest.fixture
def on(cli, tiny, tmp_path, monkeypatch):
    """Run a sweep over seeds on an engine: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("spec_lab.manifest.commit", lambda _: "here")
    monkeypatch.setattr("spec_lab.run.in_short", lambda *_: {"certified": None})

    def call(engine, *more):
        monkeypatch.setattr("spec_lab.entry.cluster._engine", lambda *_: engine)
        return cli("--multirun", "hydra/launcher=slurm", *tiny, *more)

    return call


def test_a_job_that_is_lost_spares_the_others_and_is_said_with_what_became_of_it(on, tmp_path, cli):
    code, said, errors = on(Scripted(lose={"seed=2": "CANCELLED by 1000, on n1"}), "seed=1,2,3")
    assert code == 1, "not all that was asked for went well"
    assert "swept: 3 runs, of which 0 ended before, 0 are queued already: 3 go to slurm" in errors
    assert "lost (CANCELLED by 1000, on n1); the same command goes on with it" in errors
    assert "swept: 2 done, 1 waiting" in said
    assert "slurm job 7_1: CANCELLED by 1000, on n1" in said
    second = Scripted()
    code, said, errors = on(second, "seed=1,2,3")
    assert (code, second.taken) == (0, ["seed=2"]), "what is done is not handed over again"
    assert "swept: 3 done" in said and "CANCELLED" not in said


def test_a_job_that_still_waits_is_not_handed_over_twice(on, tmp_path):
    on(Scripted(lose={"seed=1": "killed", "seed=2": "killed"}), "seed=1,2")
    for run in sweep.runs(tmp_path / "swept"):
        sweep.queue(run.folder, "slurm", f"3_{run.overrides[-1]}" if "seed=1" in run.overrides else "3_9")
    (waiting, _) = sweep.runs(tmp_path / "swept")
    assert (waiting.state, waiting.error[:11]) == ("waiting", "slurm job 3")
    id = sweep.queued(waiting.folder)["job"]
    again = Scripted(alive=[id])
    code, _, errors = on(again, "seed=1,2")
    assert (code, again.waited, again.taken) == (0, [id], ["seed=2"])
    assert "2 runs, of which 0 ended before, 1 are queued already: 1 go to slurm" in errors


def test_jobs_of_another_engine_are_of_no_concern(on, tmp_path):
    on(Scripted(lose={"seed=1": "killed"}), "seed=1")
    (run,) = sweep.runs(tmp_path / "swept")
    sweep.queue(run.folder, "ray", "7_0")
    again = Scripted(alive=["7_0"])
    assert on(again, "seed=1")[0] == 0
    assert again.taken == ["seed=1"]


def test_a_run_that_failed_says_of_what_and_is_not_handed_over_again_but_on_request(on):
    code, said, _ = on(Scripted(), "seed=1,-1")
    assert code == 1
    assert "1 done, 1 failed" in said and "seed must" in said
    second, third = Scripted(), Scripted()
    assert on(second, "seed=1,-1")[0] == 1
    assert second.taken == []
    on(third, "retry=true", "seed=1,-1")
    assert third.taken == ["seed=-1"]


def test_a_run_that_ended_before_its_job_was_lost_has_ended(on, tmp_path):
    class Late(Scripted):
        def launch(self, jobs, ids):
            yield Queued(0, "7_0")
            jobs[0]()
            yield Ended(0, lost="NODE_FAIL")

    code, _, _ = on(Late(), "seed=1")
    assert (code, sweep.runs(tmp_path / "swept")[0].error) == (0, "")


def test_what_a_job_raises_ends_the_command_in_one_line(on):
    class Raises(Scripted):
        def launch(self, jobs, ids):
            yield Ended(0, error=Refused("spec_lab: 1 of 1: this is another run"))

    code, _, errors = on(Raises(), "seed=1")
    assert code == 1
    assert "spec_lab: 1 of 1: this is another run" in errors and "Traceback" not in errors


# At the door -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "needs"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(cli, tiny, monkeypatch, engine, needs):
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"spec_lab.entry.cluster.{engine}", raising=False)
    code, _, errors = cli("--multirun", f"hydra/launcher={engine}", *tiny, "seed=1,2")
    assert code == 1
    assert f"hydra/launcher={engine} needs what is not installed" in errors
    assert f"pip install 'spec-lab[{engine}]'" in errors and "Traceback" not in errors


def test_an_option_that_an_engine_does_not_take_is_named(cli, tiny):
    pytest.importorskip("submitit", reason="NOT TESTED: submitit is not installed (pip install 'spec-lab[slurm]')")
    code, _, errors = cli("--multirun", "hydra/launcher=slurm", "+hydra.launcher.partitoin=x", *tiny, "seed=1,2")
    assert code == 1
    assert "hydra.launcher" in errors and "'partitoin'" in errors and "Traceback" not in errors


def test_slurm_is_missed_where_there_is_none(cli, tiny, monkeypatch):
    pytest.importorskip("submitit", reason="NOT TESTED: submitit is not installed (pip install 'spec-lab[slurm]')")
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, errors = cli("--multirun", "hydra/launcher=slurm", *tiny, "seed=1,2")
    assert code == 1
    assert "there is no sbatch here; run this on a node that submits jobs" in errors and "Traceback" not in errors


def test_a_launcher_s_options_are_shown_from_any_directory(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "spec_lab", "--cfg", "hydra", "hydra/launcher=ray"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    ).stdout  # fmt: skip
    assert "_target_: hydra_plugins.spec_lab.Cluster" in shown
