"""Search: Optuna's trials are runs of a sweep; the same command resumes them after any kill."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from spec_lab.cli.search import _distribution, figures, launch, result
from spec_lab.results import run_state, sweep
from spec_lab.results.writer import load
from spec_lab.tasks.lab import Loop
from tests import checkpoints

WHY = "NO SEARCH IS TESTED: pip install 'spec-lab[search]'"
optuna = pytest.importorskip("optuna", minversion="4", reason=WHY)
from optuna.trial import TrialState  # noqa: E402

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal
from spec_lab.results import manifest
from spec_lab.cli.main import main
from spec_lab.tasks.lab import Loop
manifest.commit = lambda _: "here"
plain, count = Loop.decode, iter(range(99))

def decode(self, requests):
    if next(count) == 4 + 4 + 2:  # in the third trial, after two of its groups
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, requests)

Loop.decode = decode
main()
"""
SPACE = ["proposer.depth=int(interval(1,40))", "proposer.max_ngram=int(interval(1,6))"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Overrides of a search with runs on a tiny checkpoint, without the searched options."""
    short = checkpoints.short_runs(tmp_path_factory.mktemp("tiny"))
    return ["--multirun", "hydra/sweeper=search", "hydra.sweeper.objective=tokens_per_second", *short]


@pytest.fixture
def cli(quick_cli):
    return quick_cli


@pytest.fixture
def decoded(monkeypatch):
    """The draft depth of each group decoded from here on."""
    seen, plain = [], Loop.decode

    def decode(self, requests):
        seen.append(self.proposer.depth)
        return plain(self, requests)

    monkeypatch.setattr(Loop, "decode", decode)
    return seen


def trials(folder: Path, objective: str = "tokens_per_second") -> list:
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "study.jsonl"))
    return optuna.load_study(study_name=objective, storage=optuna.storages.JournalStorage(journal)).trials


def complete(folder: Path) -> list:
    return [trial for trial in trials(folder) if trial.state is TrialState.COMPLETE]


def folder_of(trial, folder: Path) -> Path:
    """The folder of the trial's run."""
    run = [*(f"{name}={value}" for name, value in trial.params.items()), *trial.user_attrs["given"]]
    return sweep.folders(folder, [run])[0]


def files(folder: Path) -> dict[Path, int]:
    """Modification times of all files of the runs."""
    return {file: file.stat().st_mtime_ns for file in folder.glob("*/**/*") if file.is_file()}


@pytest.mark.nightly
def test_a_search_runs_the_requested_trials_and_reports_the_best(cli, tiny, tmp_path, decoded):
    some = [*tiny, *SPACE, "prompts.limit=1", "hydra.sweeper.n_trials=6"]
    code, output, errors = cli(*some)
    assert code == 0, errors
    completion = complete(tmp_path / "swept")
    assert len(completion) == len(trials(tmp_path / "swept")) == 6
    assert {len(trial.params) for trial in completion} == {2}

    for trial in completion:
        assert (
            trial.value
            == json.loads((folder_of(trial, tmp_path / "swept") / "summary.json").read_text())["tokens_per_second"]
        )
    assert {run.folder for run in sweep.runs(tmp_path / "swept")} == {
        folder_of(trial, tmp_path / "swept") for trial in completion
    }

    best = max(completion, key=lambda completed: completed.value)
    written = yaml.safe_load((tmp_path / "swept" / "optimization_results.yaml").read_text())
    assert written == {"name": "optuna", "best_params": best.params, "best_value": best.value}
    last = output.splitlines()[-1]
    assert last.startswith(f"swept: best tokens_per_second of 6 trials: {best.value:.4g} with proposer.")
    assert all(f"{name}={given}" in last for name, given in best.params.items())

    before, ran = files(tmp_path / "swept"), len(decoded)
    assert cli(*some)[0] == 0
    assert files(tmp_path / "swept") == before and len(decoded) == ran, "there was nothing to do"
    code, output, errors = cli(*some[:-1], "hydra.sweeper.n_trials=8")
    assert code == 0, errors
    assert len(complete(tmp_path / "swept")) == len(trials(tmp_path / "swept")) == 8
    assert "best tokens_per_second of 8 trials" in output
    assert len(decoded) <= ran + 2 and all(files(tmp_path / "swept")[file] == at for file, at in before.items())
    assert len({tuple(sorted(trial.params.items())) for trial in trials(tmp_path / "swept")}) > 6, (
        "not the first ones again"
    )

    for command in ("state", "collect", "report"):
        code, output, errors = cli(command, "swept")
        assert code == 0, errors
    code, output, errors = cli("compare", *(str(run.folder) for run in sweep.runs(tmp_path / "swept")[:2]))
    assert code == 0, errors
    assert len(sweep.collect(tmp_path / "swept")["run"].unique()) == len(sweep.runs(tmp_path / "swept"))


@pytest.mark.nightly
def test_a_killed_search_is_resumed_and_no_trial_is_lost_or_repeated(cli, tiny, tmp_path, decoded):
    given = [*tiny, *SPACE, "hydra.sweeper.n_trials=6"]  # four groups each
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *given],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = {file.parent: files(file.parent) for file in tmp_path.glob("swept/*/ended.json")}
    assert [trial.state for trial in trials(tmp_path / "swept")] == [TrialState.COMPLETE] * 2 + [TrialState.RUNNING]
    code, output, errors = cli("state", "swept")
    assert code == 0 and "2 done, 1 pending" in output, errors
    stopped = sweep.runs(tmp_path / "swept")[2]
    assert (stopped.state, stopped.groups, stopped.of) == ("pending", 2, 4)
    rows = load(stopped.folder).requests

    code, _, errors = cli(*given)
    assert code == 0, errors
    assert len(complete(tmp_path / "swept")) == 6
    tried = trials(tmp_path / "swept")
    assert [trial.state for trial in tried] == [TrialState.COMPLETE] * 2 + [TrialState.FAIL] + [TrialState.COMPLETE] * 4
    assert tried[3].params == tried[2].params, "it is tried again, and first"
    runs = sweep.runs(tmp_path / "swept")
    assert {run.state for run in runs} == {"done"}
    assert len(runs) == len({tuple(trial.params.items()) for trial in complete(tmp_path / "swept")})
    assert len(sweep.collect(tmp_path / "swept")) == len(runs)
    for folder, before in ended.items():
        assert files(folder) == before, "what had ended was not touched"
    pd.testing.assert_frame_equal(load(stopped.folder).requests.iloc[:2], rows)
    assert len(decoded) == 2 + 4 * (len(runs) - 3), "it went on from its finished groups"


@pytest.mark.nightly
def test_a_value_not_recorded_before_a_kill_is_read_from_the_run(cli, tiny, tmp_path, decoded, monkeypatch):
    some = [*tiny, SPACE[0], "prompts.limit=1", "hydra.sweeper.n_trials=3"]
    tell, told = optuna.Study.tell, []

    def stopped(self, *given, **options):
        told.append(given)
        if len(told) == 2:
            raise KeyboardInterrupt
        return tell(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "tell", stopped)
        code, _, errors = cli(*some)
    assert code == 130
    assert "The sweep in swept is not finished" not in errors, "printed at the process's end only"
    assert [trial.state for trial in trials(tmp_path / "swept")] == [TrialState.COMPLETE, TrialState.RUNNING]
    ran = list(decoded)
    code, _, errors = cli(*some)
    assert code == 0, errors
    assert decoded[: len(ran)] == ran and len(decoded) <= len(ran) + 1
    assert len(complete(tmp_path / "swept")) == 3
    untold = trials(tmp_path / "swept")[1]
    (again,) = [trial for trial in trials(tmp_path / "swept") if trial.user_attrs.get("retries") == untold.number]
    assert again.params == untold.params and again.value > 0


@pytest.mark.nightly
def test_a_trial_that_fails_is_recorded_and_does_not_end_the_search(cli, tiny, tmp_path, decoded):
    some = [*tiny, "proposer.depth=2,oops,3", "prompts.limit=1", "hydra.sweeper.n_trials=5"]
    code, output, errors = cli(*some)
    assert code == 1, "not all went well"
    states = [trial.state for trial in trials(tmp_path / "swept")]
    assert len(states) == 5 and set(states) == {TrialState.COMPLETE, TrialState.FAIL}
    failed = {trial.params["proposer.depth"] for trial in trials(tmp_path / "swept") if trial.state is TrialState.FAIL}
    assert failed == {"oops"}
    (run,) = [run for run in sweep.runs(tmp_path / "swept") if run.state == "failed"]
    assert "proposer.depth must be a whole number from 0 to 1024 or one of auto, not 'oops'" in run.error
    assert (
        "Traceback" not in errors and f"best tokens_per_second of {states.count(TrialState.COMPLETE)} trials" in output
    )

    ran = len(decoded)
    cli(*some)
    assert len(trials(tmp_path / "swept")) == 5 and len(decoded) == ran, "what failed is a trial too"
    cli(*some, "retry=true")
    tried = trials(tmp_path / "swept")
    assert [trial.params for trial in tried[5:]] == [
        trial.params for trial in tried[:5] if trial.state is TrialState.FAIL
    ]
    assert {trial.state for trial in tried[5:]} == {TrialState.FAIL} and len(decoded) == ran


@pytest.mark.nightly
def test_when_every_trial_fails_one_line_reports_it(cli, tiny):
    code, _, errors = cli(*tiny, "proposer.depth=no,never", "prompts.limit=1", "hydra.sweeper.n_trials=2")
    assert code == 1 and "Traceback" not in errors
    assert "spec_lab: no trial has a value for tokens_per_second: spec-lab state swept prints what failed" in errors


@pytest.mark.nightly
def test_a_study_has_comparable_runs_and_one_process_and_its_runs_serve_others(cli, tiny, tmp_path, decoded):
    swept, few = tmp_path / "swept", [*tiny, "hydra.sweeper.n_trials=2"]
    same, brute = ["prompts.limit=1", "proposer.depth=1,2"], "optuna.samplers.BruteForceSampler"
    assert cli(*tiny, *same, "hydra.sweeper.n_trials=9", f"hydra.sweeper.sampler._target_={brute}")[0] == 0
    depths = sorted(trial.params["proposer.depth"] for trial in complete(swept))
    assert depths == [1, 2] == sorted(decoded), "a sampler without further candidates ends the search"
    lines = (swept / "study.jsonl").read_bytes()
    for more, message in (
        (["prompts.limit=2", same[1]], "began with prompts.limit=1, not with prompts.limit=2"),
        ([*same, "seed=3"], "began with nothing, not with seed=3"),
        ([same[0], "proposer.depth=1,2,3"], "began with other choices for proposer.depth"),
        ([*same, "hydra.sweeper.direction=minimize"], "hydra.sweeper.direction must be maximize"),
    ):
        code, _, errors = cli(*few, *more)
        assert code == 1 and message in errors
    with FileLock(swept / ".search.lock"):
        code, _, errors = cli(*few, *same)
    assert code == 1 and errors.startswith("spec_lab: the search in swept is locked by another process")
    for unfinished in (b'{"op_code":', b"{", b""):
        (swept / "study.jsonl").write_bytes(lines + unfinished)
        assert cli(*few, *same)[0] == 0 and (swept / "study.jsonl").read_bytes() == lines
    for other in ("hydra.sweeper.study_name=other", "hydra.sweeper.objective=tau_pooled"):
        code, _, errors = cli(*few, *same, other)
        assert code == 0, errors
        for trial in trials(swept, other.partition("=")[2]):
            name = "tokens_per_second" if "study_name" in other else "tau_pooled"
            assert trial.value == result(name, folder_of(trial, swept))
    assert len(decoded) == 2, "the same parameters are the same run"


@pytest.mark.nightly
def test_every_figure_that_can_be_an_objective_is_in_a_summary(cli, tiny, tmp_path):
    assert cli(*tiny, "baseline=true", "proposer.depth=1,2", "hydra.sweeper.n_trials=1")[0] == 0
    (run,) = sweep.runs(tmp_path / "swept")
    summary, names = json.loads((run.folder / "summary.json").read_text()), figures(OmegaConf.create(), "")
    assert {"tokens_per_second", "speedup.mean", "tau_pooled", "phase_seconds.probabilities"} <= set(names)
    for name in names:
        figure = summary
        for part in name.split("."):
            figure = figure[part]
        assert result(name, run.folder) == figure, name
    for name in ("nothing", "speedup", "speedup.middle", "tokens_per_second.low", "expected_kind"):
        assert name not in names and result(name, run.folder) is None


def test_a_missing_extra_is_named(cli, tiny, tmp_path, monkeypatch):
    (tmp_path / "swept").mkdir()
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, errors = cli(*tiny, *SPACE)
    assert code == 1 and errors.startswith("spec_lab: hydra/sweeper=search requires the extra search")


@pytest.mark.nightly
def test_a_trial_whose_run_has_not_ended_is_tried_again(cli, tiny, tmp_path):
    """Here another process held the run; the same holds for a job that failed on a cluster."""
    some = [*tiny, "proposer.depth=1,2", "prompts.limit=1", "hydra.sweeper.n_trials=4"]
    given = [
        option.replace("false", "False") for option in some[1:] if not option.startswith(("proposer.depth", "hydra"))
    ]
    run = [*given, "proposer.depth=1"]
    sweep.plan(tmp_path / "swept", [run])
    other = sweep.folders(tmp_path / "swept", [run])[0]
    other.mkdir()
    with run_state.holding(other):
        cli(*some)
    assert len(trials(tmp_path / "swept")) == 4
    left = [trial for trial in trials(tmp_path / "swept") if trial.state is TrialState.FAIL]
    assert left and {folder_of(trial, tmp_path / "swept") for trial in left} == {other}
    code, _, errors = cli(*some)
    assert code == 0, errors
    assert len(complete(tmp_path / "swept")) == 4 and len(trials(tmp_path / "swept")) == 4 + len(left)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["hydra.sweeper.objective=tokens_per_sec"], "tokens_per_sec ... tokens_per_second"),
        (["hydra.sweeper.objective=speedup"], "speedup ... speedup."),
        (["hydra.sweeper.objective=null"], "hydra.sweeper.objective=null"),
        (
            ["hydra.sweeper.objective=speedup.mean"],
            "hydra.sweeper.objective=speedup.mean ... baseline=true",
        ),
        (
            ["hydra.sweeper.objective=speedup.low", "baseline=true", "proposer=none"],
            "baseline ... proposer",
        ),
        (["hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials ... 0"),
        (["hydra.sweeper.n_trials=none"], "hydra.sweeper.n_trials ... 'none'"),
        (["hydra.sweeper.n_jobs=0"], "hydra.sweeper.n_jobs ... 0"),
        (["hydra.sweeper.study_name=null"], "hydra.sweeper.study_name ... null"),
        (["hydra.sweeper.sampler=3"], "hydra.sweeper.sampler ... _target_ ... 3"),
        (["hydra.sweeper.direction=up"], "hydra.sweeper.direction ... maximize, minimize ... 'up'"),
        (["proposer.depth=3"], "range ... choices"),
        (["proposer.depth=glob(*)"], "proposer.depth=glob(*): "),
        (["retry=true,false"], "retry "),
    ],
)
@pytest.mark.one_in(9)
def test_an_invalid_search_is_refused_in_one_line_before_anything_is_written(cli, tiny, tmp_path, given, message):
    space = [] if given == ["proposer.depth=3"] else SPACE
    others = [
        tiny_option
        for tiny_option in tiny
        if tiny_option.partition("=")[0] not in {option.partition("=")[0] for option in given}
    ]
    code, _, errors = cli(*others, *space, *given)
    assert code == 1
    (line,) = errors.splitlines()
    assert line.startswith("spec_lab: ") and all(fact in line for fact in message.split(" ... "))
    assert not (tmp_path / "swept").exists()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "text", ["no journal " * 100, '{"op_code":0}\n{"op_code"\n{"op_code":0}\n', '{"op_code":99}\n']
)
def test_a_damaged_journal_is_named_and_left_as_it_is(cli, tiny, tmp_path, text):
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "study.jsonl").write_text(text)
    code, _, errors = cli(*tiny, *SPACE)
    (line,) = errors.splitlines()
    assert code == 1
    assert line.startswith("spec_lab: swept/study.jsonl is not a journal of Optuna ")
    assert (tmp_path / "swept" / "study.jsonl").read_text() == text


@pytest.mark.parametrize(
    ("given", "low", "high", "options"),
    [
        ("int(interval(1,40))", 1, 40, {"log": False}), ("tag(log,int(interval(1,64)))", 1, 64, {"log": True}),
        ("interval(0.5,2)", 0.5, 2.0, {"log": False}), ("range(1,9)", 1, 8, {"step": 1}),
        ("range(1,9,3)", 1, 7, {"step": 3}), ("range(9,1,-4)", 5, 9, {"step": 4}),
    ],
)  # fmt: skip
def test_intervals_hold_their_ends_and_ranges_end_before_theirs_as_in_a_sweep(given, low, high, options):
    distribution = _distribution(OverridesParser.create().parse_override(f"x={given}"))
    assert (distribution.low, distribution.high) == (low, high) and options.items() <= vars(distribution).items()


def test_choices_are_written_as_in_a_sweep():
    override = OverridesParser.create().parse_override("x=1,2.5,true,null,a b,[1,2],'c,d'")
    choices = _distribution(override).choices
    assert [f"x={choice}" for choice in choices] == [f"x={value}" for value in override.sweep_string_iterator()]


def test_trials_with_the_same_options_share_a_run_and_values_are_read_from_files_unless_it_failed(tmp_path):
    asked = []

    def carry_out(job_overrides, initial_job_idx):
        asked.append((list(job_overrides), initial_job_idx))
        return [
            JobReturn(status=JobStatus.FAILED if override is four else JobStatus.COMPLETED)
            for override in job_overrides
        ]

    first, two, three, four = (((f"seed={seed}", "output_dir=x")) for seed in (1, 2, 3, 4))
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}, "sweeper": {"objective": "tau_pooled"}}})
    for run, value in ((first, 3.5), (two, 2.5), (four, 4.5)):
        (tmp_path / run[0]).mkdir()
        (tmp_path / run[0] / "summary.json").write_text(f'{{"tau_pooled": {value}}}')
        run_state.end(tmp_path / run[0], run, "abc", 0, 1.0)
    values = launch(SimpleNamespace(launch=carry_out), config, [first, two, first, three, first, four], 7)
    assert asked == [([first, two, three, four], 7)]
    assert values == [3.5, 2.5, 3.5, None, 3.5, None]
    assert [run.overrides for run in sweep.runs(tmp_path)] == [(f"seed={seed}",) for seed in (1, 2, 3, 4)]
