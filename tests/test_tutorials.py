"""The tutorials are true: the files that their pages show are written to disk, and their commands run."""

import json
import re
import shlex
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import QUICK
from tests import checkpoints

PAGES = Path(__file__).parents[1] / "docs" / "tutorials"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SHORT = ["prompts.limit=2", "max_new_tokens=8", "warmup=0", "threads=1", "output_dir=here"]
CERTIFY = ["task.samples=500", "task.tokens=0", "task.mask_rows=200"]
ON_PAGES = {
    "write_a_proposer": [0, 0, 0],
    "write_a_verifier": [0, 1, 0, 0, 1],
    "write_a_constraint": [0, 0, 0],
    "write_a_metric": [0, 0],
    "write_a_policy": [0, 0],
}
"""The exit codes of each page's commands, in order."""
TRAINED = "write_a_hidden_state_drafter"
"""The page whose later commands require what the first one has trained."""


def files(page: str) -> dict[str, str]:
    """The content of each file that a page shows, by path."""
    return {title: text for _, title, text in BLOCK.findall((PAGES / f"{page}.md").read_text()) if title}


def commands(page: str) -> list[list[str]]:
    """The arguments of every ``python -m spec_lab`` of a page's shell blocks."""
    arguments = []
    for kind, _, text in BLOCK.findall((PAGES / f"{page}.md").read_text()):
        for line in text.replace("\\\n", " ").splitlines() if kind == "sh" else ():
            words = shlex.split(line, comments=True)
            if words[:3] == ["python", "-m", "spec_lab"]:
                arguments.append(words[3:])
    return arguments


def shortened(arguments: list[str]) -> list[str]:
    """The same command on two prompts and eight tokens."""
    return changed(arguments, SHORT + (CERTIFY if "+experiment=certify" in arguments else ["baseline=false"]))


def changed(arguments: list[str], changes: list[str]) -> list[str]:
    """The same command with other values of some options."""
    replaced = {change.partition("=")[0] for change in changes}
    return [argument for argument in arguments if argument.partition("=")[0] not in replaced] + changes


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a page's files into an empty directory, and put it on the path."""

    def write(page: str) -> None:
        for name, text in (files(page) | {"my_parts/__init__.py": ""}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield write
    forget()


def forget() -> None:
    """Drop the imported modules of the package, since each page has its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_parts"]:
        del sys.modules[name]


FAST = [("write_a_proposer", 1), ("write_a_verifier", 1), ("write_a_verifier", 2), ("write_a_verifier", 4)]
"""Those of the short run, which has the constraint's page in a test of its own."""
CASES = [
    pytest.param(page, number, marks=() if (page, number) in FAST else pytest.mark.nightly)
    for page in ON_PAGES
    if page != "write_a_metric"  # has a test of its own
    for number, _ in enumerate(commands(page))
]


@pytest.mark.parametrize("page", ON_PAGES)
def test_every_command_of_a_page_is_run_here(page):
    assert len(commands(page)) == len(ON_PAGES[page])


@pytest.mark.each_value
@pytest.mark.parametrize(("page", "number"), CASES)
def test_a_page_s_command_does_what_the_page_says(quick_cli, tmp_path, monkeypatch, package, page, number):
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))
    package(page)
    arguments, expected = shortened(commands(page)[number]), ON_PAGES[page][number]
    code, output, errors = quick_cli(*arguments)
    assert code == expected, errors
    chosen = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if arguments[0] == "check":
        assert ("NOT LOSSLESS" in output) == bool(code) and "lossless" in output.lower()
    elif "+experiment=certify" in arguments:
        (pair,) = json.loads((tmp_path / "here" / "certificate.json").read_text())["pairs"]
        assert pair["certified"] == (None if code else "exact"), output
        assert pair["exact"]["drafted"] > 100
    elif code == 0:
        summary = json.loads((tmp_path / "here" / "summary.json").read_text())
        assert summary["proposer"] == chosen["proposer"] and summary["errors"] == []
        assert summary["verifier"] == chosen.get("verifier", "token")
        assert summary["tokens"] > 4
    else:
        assert "chain_rejection" in errors and "draft_tree" in errors


@pytest.mark.nightly
def test_the_metric_and_the_tracker_of_their_page_have_the_values_of_the_run(quick_cli, tmp_path, package):
    package("write_a_metric")
    plain, tracked = commands("write_a_metric")
    assert {*plain} < {*tracked}
    code, _, errors = quick_cli(*shortened(tracked))
    assert code == 0, errors
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    means = {name: value["mean"] for name, value in summary["metrics"].items()}
    assert means.keys() == {"words", "slow_start"} and all(mean > 0 for mean in means.values())
    (line,) = (tmp_path / "here" / "tracked.jsonl").read_text().splitlines()
    assert json.loads(line) == {"arm": summary["proposer"], **means}


@pytest.mark.nightly
def test_a_drafter_of_hidden_states_is_trained_certified_and_measured(quick_cli, tmp_path, monkeypatch, package):
    monkeypatch.setattr("spec_lab.tasks.certify.pair.prove", partial(prove, instances=QUICK))
    package(TRAINED)
    checkpoints.checkpoint(tmp_path / "target")
    texts = checkpoints.prompts(tmp_path / "prompts.jsonl", [f"{letter}bcab" for letter in "abcdefgh"])
    tiny = [f"target.path={tmp_path / 'target'}", "target.dtype=float32", "prompts=jsonl", f"prompts.path={texts}"]
    few = ["task.rows=2", "task.passes=1", "task.held_out=0.25"]
    training, certifying, measuring = commands(TRAINED)
    code, _, errors = quick_cli(*changed(training, [*tiny, "prompts.limit=null", "max_new_tokens=12", *few]))
    assert code == 0, errors
    trained = json.loads((tmp_path / "runs" / "recurrent" / "summary.json").read_text())
    assert trained["drafter"] == "recurrent" and trained["steps"] == 3 and len(trained["accepted"]) == 4
    code, _, errors = quick_cli(*changed(shortened(certifying), tiny))
    assert code == 0, errors
    (pair,) = json.loads((tmp_path / "here" / "certificate.json").read_text())["pairs"]
    assert pair["certified"] == "exact" and pair["exact"]["drafts"] == "proposer" and pair["exact"]["drafted"] > 100
    code, _, errors = quick_cli(*changed(shortened(measuring), [*tiny, "output_dir=measured"]))
    assert code == 0, errors
    summary = json.loads((tmp_path / "measured" / "summary.json").read_text())
    assert summary["proposer"] == "recurrent" and summary["nodes_per_step"] > 0 and summary["errors"] == []


@pytest.mark.nightly
def test_the_constraint_forbids_repeated_n_grams_and_the_controller_ends_after_its_lines(quick_cli, tmp_path, package):
    package("write_a_constraint")
    short = ["prompts.limit=2", "max_new_tokens=40", "warmup=0", "threads=1", "target.dtype=float32", "baseline=false"]
    pairs = ["--config-dir", "my_parts/conf", "constraint=no_repeats", "constraint.size=2"]
    code, _, errors = quick_cli(*pairs, *short, "proposer=ngram", "proposer.depth=3", "output_dir=pairs")
    assert code == 0, errors
    rows = pd.read_parquet(tmp_path / "pairs" / "requests.parquet")
    for tokens in rows["tokens"]:
        items = list(pairwise(tokens))
        assert len(items) == len(set(items)) > 20
    lines = ["constraint=controller", "constraint.make=my_parts.lines.make", "constraint.options={lines: 2}"]
    code, _, errors = quick_cli(*lines, *short, "proposer=ngram", "proposer.depth=3", "output_dir=lines")
    assert code == 0, errors
    rows = pd.read_parquet(tmp_path / "lines" / "requests.parquet")
    assert (rows["text"].str.count("\n") <= 2).all() and (rows["finish"] == "constraint").any()
