"""``spec-lab explain`` on a terminal of 80 columns."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from spec_lab.cli.commands import command, complete
from spec_lab.cli.explain import terminal

READ = terminal.reference
ONE = "# Mine \u202e.\n_target_: nowhere.load\ndepth: 3   # levels\n"


@pytest.fixture(autouse=True, scope="module")
def configs_are_read_once():
    known = READ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "reference", lambda further=(): READ(further) if further else known)
        yield


def explain(*arguments, width=80):
    console = Console(file=io.StringIO(), width=width, markup=False)
    code = command(["explain", *arguments], console)
    return code, console.file.getvalue()


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("proposer.depth", ["proposer=jacobi  int from 1 to 256, default 8", "number of guesses"]),
        ("proposer", ["medusa", "proposer=medusa by default"]),
        ("proposer=medusa", ["conf/proposer/medusa.yaml", "proposer.tree  str, int of 1 or more, or list"]),
        ("+experiment=batch_size", ["+proposer@arms.medusa=medusa", "batch_size=1,2,4,8,16", "sweeps over"]),
        ("prompts.jsonl", ["prompts.path  str, must be given"]),
        ("seed", ["seed  int from 0 to 9223372036854775807, default 0", "conf/config.yaml"]),
    ],
)
def test_an_answer_has_type_default_meaning_and_file(query, shown):
    code, text = explain(query)
    assert code == 0
    for word in shown:
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_name_groups_and_options_of_every_run_are_listed():
    code, text = explain()
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    for name in (
        "verifier  default token",
        "hydra/launcher  default basic",
        "max_new_tokens  int from 1 to 1048576, default 64",
    ):
        assert name in text


def test_several_names_are_explained_and_an_unknown_one_is_an_error(capsys):
    assert explain("seed", "verifier")[0] == 0
    assert explain("seeed")[0] == 1
    assert capsys.readouterr().err == "spec_lab: there is no option seeed; did you mean seed?\n"


@pytest.mark.nightly
def test_options_of_a_folder_and_of_a_package_are_explained(tmp_path, monkeypatch):
    (tmp_path / "own" / "proposer").mkdir(parents=True)
    (tmp_path / "own" / "proposer" / "mine.yaml").write_text(ONE)
    monkeypatch.syspath_prepend(tmp_path)
    for given in (str(tmp_path / "own"), "pkg://own"):
        code, text = explain("proposer=mine", "--config-dir", given)
        assert code == 0 and "levels" in text
        assert "Mine <U+202E>." in text, "no text changes how other text is displayed"
    assert explain("proposer=mine", "--config-dir", "pkg://absent")[0] == 1


def test_names_are_completed():
    assert complete("spec-lab explain verifier=t") == (
        ["verifier=token", "verifier=traversal", "verifier=typical"],
        False,
    )
    assert complete("spec-lab explain +experiment=certify_")[0] == ["+experiment=certify_all"]
    assert complete("spec-lab explain --c")[0] == ["--config-dir"]


def test_nothing_that_a_config_names_is_imported():
    program = (
        "import sys; from spec_lab.cli.explain import terminal; assert terminal.reference().groups; "
        "print([one for one in ('torch', 'transformers', 'wandb') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
