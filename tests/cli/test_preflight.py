"""The values of a sweep: Hydra's ways to list them, and what is refused before anything is written."""

import pytest

from spec_lab.cli import preflight
from spec_lab.results import run_state, sweep


@pytest.fixture
def sweep_of(cli, monkeypatch, tmp_path):
    """Run a sweep whose runs do nothing: (exit code, output, the last option of each run)."""

    def start(config, out, overrides=None, retried=False):
        (out / "left").touch()
        return 0

    monkeypatch.setattr("spec_lab.cli.jobs.start", start)

    def call(*options: str) -> tuple[int, str, set[str]]:
        code, output, errors = cli("--multirun", *options, "output_dir=swept")
        runs = sweep.runs(tmp_path / "swept") if sweep.is_sweep(tmp_path / "swept") else []
        return code, output + errors, {" ".join(run.overrides) for run in runs}

    return call


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("option", "runs"),
    [
        ("verifier=glob(t*)", {"verifier=token", "verifier=traversal", "verifier=typical"}),
        ("verifier='token',\"typical\"", {"verifier='token'", 'verifier="typical"'}),
        ("verifier=glob(t*,exclude=ty*)", {"verifier=token", "verifier=traversal"}),
        ("seed=range(1,4)", {"seed=1", "seed=2", "seed=3"}),
        ("seed=choice(1,2)", {"seed=1", "seed=2"}),
        ("seed=sort(2,1,reverse=true)", {"seed=1", "seed=2"}),
        ("seed=shuffle(range(0,3))", {"seed=0", "seed=1", "seed=2"}),
        ("name='a b',\"c,d\"", {"name='a b'", 'name="c,d"'}),
        ('+hydra.sweeper.params.seed="1,2"', {"seed=1", "seed=2"}),
    ],
)
def test_values_are_named_in_each_of_hydras_ways(sweep_of, option, runs):
    code, output, planned = sweep_of(option)
    assert code == 0, output
    assert planned == runs


@pytest.mark.parametrize("jobs", [0, 10**20, "null", "1e400", "true", "abc", "1.5"])
def test_no_workers_or_too_many_are_refused(sweep_of, tmp_path, jobs):
    code, printed, _ = sweep_of("seed=1,2", "hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}")
    assert code == 1
    assert "hydra.launcher.n_jobs must be a number of processes" in printed and "Traceback" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "sampler", ["{_target_: a.b}", "{_target_: builtins.dict}", "{_target_: optuna.samplers.TPESampler, seed: x}"]
)
def test_an_unknown_sampler_is_refused_before_anything_is_written(sweep_of, tmp_path, sampler):
    search = ["hydra/sweeper=search", "hydra.sweeper.objective=tau_pooled", f"hydra.sweeper.sampler={sampler}"]
    code, printed, _ = sweep_of("seed=range(0,3)", *search)
    assert code == 1
    assert "hydra.sweeper.sampler" in printed and "Traceback" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("verifier=glob(zzz*)", "verifier=glob(zzz*)"),
        ("seed=glob(*)", "seed=glob(*)"),
        ("seed=interval(1,3)", "interval ... hydra/sweeper=search"),
        ("seed=range(0,5,0)", "seed=range(0,5,0): "),
        ("seed=2,-1", "seed must be ... -1"),
        ("proposer.max_depth=2,x", "proposer.max_depth must be ... 'x'"),
        ("seed=range(0,1000000000000)", f"{preflight.MAX_RUNS} runs"),
        ("verifier=choice(token,tokn)", "verifier=tokn is not an option of conf/verifier; did you mean verifier=token"),
        ("hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size ... 1 or more"),
        ("verifier=5,6", "verifier=5 ... conf/verifier ... cascade, "),
        ("constraint=", "constraint=  ... conf/constraint ... choice, "),
        ("constraint='',none", "constraint=  ... conf/constraint ... choice, "),
        ("verifier=null,token", "verifier ... null ... conf/verifier"),
        ("name='a/b'", "name ... 1 to 100"),
        ("hydra.sweep.subdir=x", "hydra.sweep.subdir"),
    ],
)
@pytest.mark.one_in(3)
def test_values_that_no_sweep_can_have_are_refused_before_anything_is_written(sweep_of, tmp_path, option, message):
    code, printed, _ = sweep_of(option)
    assert code == 1
    assert all(fact in printed for fact in message.split(" ... ")) and "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_a_run_is_composed_for_each_choice_and_for_a_bounded_number_of_other_values(monkeypatch):
    monkeypatch.setattr(preflight, "MAX_COMPOSED", 2)
    jobs = [[f"proposer={name}", f"seed={seed}"] for name in ("ngram", "sam") for seed in range(3)]
    assert [*preflight._first_uses(jobs, {"proposer"})] == [jobs[0], jobs[1], jobs[3]]
    assert [*preflight._first_uses([[]], {"proposer"})] == [[]]


@pytest.mark.parametrize("many", [[], ["--multirun"]])
def test_a_folder_of_other_files_is_refused_as_output_dir(cli, tmp_path, many):
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "notes.txt").touch()
    code, _, errors = cli("output_dir=filled", *many)
    assert code == 1 and "output_dir=filled is not a run's folder and not empty: choose a new output_dir=DIR" in errors
    assert [file.name for file in (tmp_path / "filled").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("names", "unrelated"),
    [
        ([], False), ([".git"], False), ([".git", "notes.txt"], True), (["notes.txt", "manifest.json"], False),
        (["notes.txt", ".lock"], False), (["swept", "sweep.json"], False), (["steps.parquet"], False),
    ],
)  # fmt: skip
def test_a_folder_is_unrelated_if_it_holds_files_and_nothing_that_a_run_begins_with(tmp_path, names, unrelated):
    for name in names:
        (tmp_path / name).touch()
    assert run_state.is_unrelated(tmp_path) == unrelated
    assert not run_state.is_unrelated(tmp_path / "missing")


def test_an_unresolved_interpolation_is_named_with_its_option(flat_cli, tmp_path):
    launcher = ["--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs='${nothing}'", "seed=1,2"]
    for given, named in ((launcher, "hydra.launcher.n_jobs"), (["sampling='${nothing}'"], "sampling=${nothing}")):
        code, _, errors = flat_cli(*given, "output_dir=here")
        assert code == 1 and named in errors and "Traceback" not in errors
        assert not (tmp_path / "here").exists()
