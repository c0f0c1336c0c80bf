"""``spec-lab train NAME`` runs the experiment train_NAME; drafters without a path are refused by the option's name."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spec_lab.cli.commands import trainings
from spec_lab.cli.main import conf, config_folders
from tests import checkpoints


def test_train_composes_what_its_experiment_composes(cli):
    options = ["target.path=there", "task.rows=4", "--cfg", "job"]
    short = cli("train", "eagle3", *options)
    assert short == cli("+experiment=train_eagle3", *options)
    assert short[0] == 0 and OmegaConf.create(short[1]).task.rows == 4


def test_the_help_of_train_names_the_experiments(cli):
    code, output, _ = cli("train", "--help")
    assert code == 0
    assert "+experiment=train_NAME" in output
    assert "eagle3" in trainings() and all(name in output for name in trainings())
    assert all(Path(conf(), "experiment", f"train_{name}.yaml").is_file() for name in trainings())


@pytest.mark.parametrize(
    "given",
    [
        ["--config-dir", "mine", "train", "duo", "seed=1"],
        ["train", "--config-dir=mine", "duo", "seed=1"],
        ["train", "duo", "seed=1", "-cd", "mine"],
    ],
)
def test_the_folder_of_configs_may_stand_anywhere(given):
    assert config_folders(given) == (["train", "duo", "seed=1"], ["mine"])


def test_a_training_of_one_s_own_is_found_and_explained(cli, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "train_duo.yaml").write_text("# @package _global_\nname: duo\n")
    code, output, errors = cli("train", "--config-dir", "own", "duo", "seed=3", "--cfg", "job")
    assert (code, errors) == (0, "") and OmegaConf.create(output).name == "duo" and "seed: 3" in output
    code, output, _ = cli("train", "duo", "--help", "--config-dir", "own")
    assert code == 0 and "+experiment=train_duo" in output


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("given", "code", "facts"),
    [
        ([], 2, ["name"]),
        (["task.rows=4"], 2, ["task.rows=4", "eagle3"]),
        (["nothing"], 1, ["experiment/train_nothing"]),
        (["eagle3", "task.rws=4"], 1, ["rws"]),
    ],
)
def test_a_wrong_training_is_refused_by_its_name(cli, tmp_path, given, code, facts):
    exit_code, _, errors = cli("train", *given)
    assert exit_code == code
    assert all(fact in errors.lower() for fact in facts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["block", "kangaroo", "pard"])
@pytest.mark.parametrize("part", ["proposer", "arms.mine"])
@pytest.mark.each_value
def test_a_drafter_without_a_path_is_refused_before_anything_is_loaded(cli, tmp_path, name, part):
    chosen = [f"proposer={name}"] if part == "proposer" else ["proposer=ngram", f"+proposer@{part}={name}"]
    code, _, errors = cli("target.path=.", *chosen)
    assert code == 1
    assert f"spec_lab: {part}.path has no default: give {part}.path=... on the command line" in errors.splitlines()
    assert not list(tmp_path.glob("outputs/*/*"))


def test_a_target_without_mtp_modules_is_refused_with_the_option_that_names_others(cli, tmp_path):
    checkpoints.checkpoint(tmp_path / "target")
    code, _, errors = cli(f"target.path={tmp_path / 'target'}", "proposer=mtp", "output_dir=here")
    assert code == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("spec_lab: ")]
    assert "proposer.path" in line and str(tmp_path / "target") in line
