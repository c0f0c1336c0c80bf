"""Overrides that do not compose: the answer names what was meant."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser

from spec_lab.cli.commands import command
from spec_lab.cli.config_checks import check_options
from spec_lab.cli.main import check_composition, check_overrides, conf
from spec_lab.cli.misspelt import undashed
from spec_lab.cli.refusals import Refused

ROOT = Path(__file__).resolve().parents[2]


def check(arguments):
    check_overrides(arguments)
    check_composition(arguments)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ("proposer=ngram proposer.dept=3", "proposer.depth=3?"),
        ("proposer=ngram proposer.tree=2x1", "proposer has depth, max_ngram, min_ngram"),
        ("proposer.dept=3 batchsize=3", "proposer.max_depth=3?"),
        ("proposer=ngram proposer.dept=3 proposer.dept=4", "proposer.depth=4?"),
        ("proposer=eagel", "proposer=eagle "),
        ("proposer=ngram,eagel --multirun", "proposer=eagle "),
        ("proposer=ngram,sam proposer.depth=3 --multirun", "++proposer.depth=3"),
        ("+proposer@arms.x=ngram,sam arms.x.depth=3 --multirun", "++arms.x.depth=3"),
        ("hydra/launcher=jobli --multirun", "hydra/launcher=joblib?"),
        ("+experiment=medusa_tre", "+experiment=medusa_tree "),
        ("+experiment=zzz", "spec-lab explain experiment lists all"),
        ("experiment=medusa_tree", ": +experiment=medusa_tree"),
        ("experiment=medusa_tre", "+experiment=medusa_tree "),
        ("proposer@arms.x=ngram", ": +proposer@arms.x=ngram"),
        ("arms.x.depth=3", "+proposer@arms.x=NAME"),
        ("temperature=1", "sampling.temperature=1?"),
        ("max_tokens=5", "max_new_tokens=5?"),
        ("model=some/model", "target.path=some/model?"),
        ("verifer=token", "verifier=token?"),
        ("num_speculative_tokens=4", "proposer.depth, which this proposer does not have; it has path"),
        ("proposer=ngram num-speculative-tokens=4", "proposer.depth=4?"),
        ("+proposer@arms.x=ngram arms.x.num_speculative_tokens=4", "arms.x.depth=4?"),
        ("~proposer.dept", "proposer.max_depth?"),
        ("zzzzzz=1", "spec-lab explain lists all"),
        ("seed=1,2", "--multirun"),
        ("proposer.depth", "proposer.depth=VALUE"),
        ("heads/eagle3", "a folder? write proposer.path=heads/eagle3"),
        ("prompts=data/mybench.jsonl", "prompts=jsonl prompts.path=data/mybench.jsonl"),
        ("prompt.limit=4", "prompts.limit=4?"),
        ("prompt.path=mine.jsonl", "prompts.path=mine.jsonl?"),
        ("+seed=3", ": seed=3"),
        ("+proposer=ngram", ": proposer=ngram"),
        ("seed=1 proposer.depth = 2", "without spaces"),
        ("--proposer ngram", "options are written without dashes: proposer=ngram"),
        ("--proposer=ngram --num-speculative-tokens 5 --seed", "dashes: proposer=ngram proposer.depth=5 seed=VALUE"),
        ("--proposer.depth=5", "options are written without dashes: proposer.depth=5"),
    ],
)
def test_what_was_meant_is_said_in_one_line(overrides, meant):
    with pytest.raises(ValueError) as refused:
        check(overrides.split())
    assert meant in str(refused.value) and "\n" not in str(refused.value)


def test_flags_and_their_beginnings_are_no_options_with_dashes():
    flags = get_args_parser()._option_string_actions
    given = "--multirun --cfg job --config-dir=mine --config-name other --multi --resolve -m seed=1 --hydra-help"
    assert undashed(given.split(), flags) == ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("proposer = ngram", "write proposer=ngram without spaces"),
        ("proposer =ngram seed=1", "write proposer=ngram without spaces"),
        ("recomend", "unknown command recomend; did you mean recommend?"),
        ("check-drafer", "did you mean check-drafter?"),
        ("xyzzy", "commands are state, collect, "),
    ],
)
def test_what_is_no_command_is_answered_with_what_was_meant(words, meant, capsys):
    assert command(words.split()) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("+prompt.limit=4", "there is no option prompt.limit; did you mean prompts.limit=4?"),
        ("+temperature=1", "there is no option temperature; did you mean sampling.temperature=1?"),
        ("+batchsize=2", "there is no option batchsize; did you mean batch_size=2?"),
        ("+prompt=[x]", "prompt is now called task.prompt"),
        ("+qqq=2", "there is no option qqq; spec-lab explain lists all"),
    ],
)
def test_an_option_that_a_plus_adds_is_answered_like_one_without(override, meant):
    with initialize_config_dir(conf(), version_base="1.3"):
        config = compose("config", [override])
    with pytest.raises(Refused) as refused:
        check_options(config)
    assert str(refused.value) == f"spec_lab: {meant}"


def test_overrides_that_compose_pass():
    of_a_sweep = ["+experiment=draft_length", "proposer.depth=2,4"]  # it says itself that it is one
    for arguments in (["proposer=ngram", "proposer.depth=3"], of_a_sweep, ["--multirun", "seed=1,2"]):
        check(arguments)


def test_choices_of_the_user_s_own_folder_are_known(tmp_path):
    (tmp_path / "proposer").mkdir()
    (tmp_path / "proposer" / "mine.yaml").write_text("_target_: mine.Mine\n")
    folder = f"--config-dir={tmp_path}"
    for override, meant in (("proposer@arms.x=mine", ": +proposer@arms.x=mine"), ("proposer=min", "proposer=mine")):
        with pytest.raises(ValueError, match=re.escape(meant)):
            check([folder, override])
    check([folder, "proposer=mine"])


@pytest.mark.parametrize("flag", ["query=bash", "install=bash"])
def test_shell_completion_goes_on(flag):
    line = {"COMP_LINE": "spec-lab proposer=ngr", "PYTHONPATH": str(ROOT)} if flag == "query=bash" else {}
    done = subprocess.run(
        [sys.executable, "-m", "spec_lab", "-sc", flag], env=os.environ | {"PYTHONPATH": str(ROOT)} | line,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and ("proposer=ngram" in done.stdout or "complete" in done.stdout), done.stderr
