"""Runs from Python: the same files as of the command line, errors as exceptions, results by the returned run."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import spec_lab
from spec_lab.analysis import metrics
from spec_lab.cli.runs import _unused
from spec_lab.results import sweep
from tests import checkpoints

LIGHT = """
import sys
import spec_lab
assert not {"torch", "hydra", "pandas"} & {*sys.modules}
try:
    spec_lab.run("proposer=ngrum")
except ValueError as error:
    assert "ngram" in str(error), error
else:
    raise SystemExit("it was not refused")
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A tiny checkpoint and its prompts."""
    kept = [option for option in checkpoints.short_runs(tmp_path_factory.mktemp("tiny")) if "path" in option]
    return [*kept, "target.dtype=float32", "prompts=jsonl", "max_new_tokens=4", "warmup=0"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spec_lab.results.manifest.commit", lambda _: "here")
    monkeypatch.setattr("spec_lab.tasks.benchmark.in_short", lambda *_: {"certified": None})
    return tmp_path


def test_a_run_has_tables_figures_report_and_markdown(here, options, capsys):
    run = spec_lab.run([*options, "proposer=ngram", "proposer.depth=3", "output_dir=first"], quiet=True)
    assert capsys.readouterr() == ("", "")
    assert (run.folder, run.code) == (Path("first"), 0)
    assert metrics.arms(run.tables) == ["ngram", "baseline"]
    assert run.table.set_index("arm")["tau_pooled"].to_dict() == pytest.approx(
        {"ngram": run.summary["arms"]["ngram"]["tau_pooled"], "baseline": 1.0}
    )
    assert run.result.sections[0].table.rows[0][0].text == "ngram"
    assert run.report() == here.relative_to(here) / "first" / "report.html" and run.report().is_file()
    assert "| ngram |" in run._repr_markdown_()
    assert run.runs == [run]


def test_a_run_is_written_in_one_text_and_its_folder_has_the_time_by_default(here, options, capsys):
    run = spec_lab.run(" ".join([*options, "proposer=none", "baseline=false", "name=timed"]))
    assert run.folder.parent == Path("outputs/timed") and (run.folder / "summary.md").is_file()
    assert "tokens/s" in capsys.readouterr().out
    assert "--config-dir" not in (run.folder / "summary.md").read_text()


def test_the_command_of_the_summary_has_the_metrics_and_the_folder_of_options_that_were_given(here, options):
    (here / "mine" / "proposer").mkdir(parents=True)
    (here / "mine" / "proposer" / "own.yaml").write_text("_target_: spec_lab.propose.Null.load\n")
    given = ["--config-dir", "mine", *options, "proposer=own", "baseline=false", "metrics=[distinct]"]
    run = spec_lab.run([*given, "output_dir=repeated"], quiet=True)
    (command,) = (line for line in (run.folder / "summary.md").read_text().splitlines() if line.startswith("spec-lab"))
    words = shlex.split(command)
    assert words[:3] == ["spec-lab", "--config-dir", "mine"] and set(words[1:]) == set(given)


def test_two_runs_that_begin_in_the_same_second_have_two_folders(tmp_path):
    folder = tmp_path / "12-00-00"
    for name in ("12-00-00", "12-00-00-2", "12-00-00-3"):
        chosen = Path(_unused(str(folder)))
        assert chosen.name == name
        chosen.mkdir()


@pytest.mark.nightly
def test_a_sweep_has_its_runs_and_one_table(here, options):
    swept = spec_lab.run(
        ["--multirun", *options, "proposer=ngram", "proposer.depth=1,2", "output_dir=depths"], quiet=True
    )
    assert [state.state for state in sweep.runs(swept.folder)] == ["done", "done"]
    assert set(swept.table["proposer.depth"]) == {1, 2} and set(swept.table["arm"]) == {"ngram", "baseline"}
    assert [metrics.arms(run.tables)[0] for run in swept.runs] == ["ngram", "ngram"]
    with pytest.raises(ValueError, match="depths is a sweep"):
        swept.tables  # noqa: B018


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("proposer=ngram batch_size=0", "batch_size"),
        ("proposer=ngram proposer.dept=3", "proposer.depth"),
        ("compare a b", "compare is no run"),
        ("train nothing_known", "nothing_known"),
        ("--cfg job", "not supported"),
        ("proposer=ngram --no-such-flag", "--no-such-flag"),
        ("--multirun proposer=ngram tracker=files,wandb", "tracker cannot be swept"),
    ],
)
def test_what_cannot_be_run_is_a_value_error_and_leaves_nothing(here, words, says):
    with pytest.raises(ValueError, match=says):
        spec_lab.run(f"{words} output_dir=nothing", quiet=True)
    assert not list(here.iterdir())


def test_the_package_and_refusals_import_no_torch(tmp_path):
    ended = subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def test_the_package_states_its_version():
    assert spec_lab.__version__.count(".") == 2
