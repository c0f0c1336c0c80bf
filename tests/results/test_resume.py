"""Ctrl-C and the same command again: a run with calibrated trees is resumed with the same trees."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest

from spec_lab.analysis import metrics
from spec_lab.cli.main import main
from spec_lab.propose.calibrate import calibrate, time_steps
from spec_lab.propose.trees import parse
from spec_lab.results.manifest import JUDGED
from spec_lab.tasks.lab import Loop
from tests import checkpoints


@pytest.fixture
def zoo(tmp_path):
    return checkpoints.zoo(tmp_path / "zoo")


@pytest.fixture
def command(zoo, tmp_path, monkeypatch):
    """Run two groups of two Medusa arms into ``tmp_path / "here"``; returns the exit code."""
    medusa = f"path={zoo / 'medusa'}"
    arguments = [
        f"target.path={zoo / 'target'}", "target.dtype=float64", "prompts=jsonl", "prompts.limit=2",
        f"prompts.path={zoo / 'prompts' / 'code.jsonl'}", "proposer=medusa", f"proposer.{medusa}",
        "+proposer@arms.other=medusa", f"arms.other.{medusa}", "arms.other.max_nodes=3",
        "max_new_tokens=8", "warmup=0", "output_dir=here",
    ]  # fmt: skip

    def run(*more: str) -> int | None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["spec-lab", *arguments, *more])
        try:
            main()
        except SystemExit as left:
            if isinstance(left.code, str):  # as the interpreter prints it
                print(left.code, file=sys.stderr)
                return 1
            return left.code
        return 0

    return run


def calibrating(monkeypatch, *trees: str) -> None:
    """Make calibrations choose these trees, one after the other."""
    left = [parse(tree) for tree in trees]

    def chosen(*given, **named):
        calibration = calibrate(*given, **named, timing=partial(time_steps, seconds=0.0))
        return replace(calibration, choices=left.pop(0))

    monkeypatch.setattr("spec_lab.drafters.medusa.propose.calibrate", chosen)


@pytest.fixture
def interrupted(command, monkeypatch, tmp_path):
    """A run that chose a chain of 2 and a pair, interrupted in its second group; its directory."""
    plain = Loop.decode

    def decode(self, requests):
        if requests[0].id == 1:
            raise KeyboardInterrupt
        return plain(self, requests)

    calibrating(monkeypatch, "0 0.0", "0 1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "decode", decode)
        assert command() == 130
    assert metrics.load(tmp_path / "here").requests["group"].unique().tolist() == [0]
    return tmp_path / "here"


@pytest.mark.nightly
def test_a_run_is_resumed_with_the_trees_it_began_with(command, interrupted, monkeypatch, capsys):
    before = json.loads((interrupted / "manifest.json").read_text())
    calibrating(monkeypatch)  # none is left: calibrating again would fail
    assert command() == 0, capsys.readouterr().err
    after = json.loads((interrupted / "manifest.json").read_text())
    assert {name: fact for name, fact in after.items() if name not in JUDGED} == before
    assert before["config"]["proposer"]["tree"] == "calibrated"
    assert before["proposers"]["medusa"]["expected_speedup"] > 0
    tables = metrics.load(interrupted)
    for arm, drafted in (("medusa", (2, 2)), ("other", (2, 1))):
        steps = metrics.decode_steps(tables.steps, arm)
        assert set(steps["group"]) == {0, 1}
        assert set(zip(steps["nodes"], steps["depth"], strict=True)) == {drafted}


@pytest.mark.nightly
def test_other_accuracies_of_the_heads_identify_another_run(command, interrupted, zoo, capsys):
    (zoo / "medusa" / "calibration.json").write_text(json.dumps({"accuracy": [[0.9, 0.1]] * 3}))
    assert command() == 1
    assert "already holds another run (weights_sha256.proposer: " in capsys.readouterr().err


@pytest.mark.nightly
def test_another_commit_is_another_run(command, interrupted, monkeypatch, capsys):
    monkeypatch.setattr("spec_lab.results.manifest.commit", lambda _: "later")
    assert command() == 1
    output = capsys.readouterr().err
    assert "already holds another run (commit: " in output and "'later' here); choose another output_dir=DIR" in output


@pytest.mark.nightly
def test_a_run_is_resumed_with_any_cache_of_costs(command, interrupted, monkeypatch, capsys):
    calibrating(monkeypatch)  # nothing is calibrated again
    assert command("proposer.recalibrate=true", "arms.other.cache=elsewhere") == 0, capsys.readouterr().err
    assert metrics.load(interrupted).requests["group"].unique().tolist() == [0, 1]
