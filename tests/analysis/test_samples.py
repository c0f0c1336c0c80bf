"""Files of samples for the evaluators of code."""

import json
import shutil
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from spec_lab.analysis.samples import FORMATS, write_samples
from spec_lab.cli.commands import command
from spec_lab.results.writer import load
from spec_lab.tasks.benchmark import run
from spec_lab.text.datasets import DATASETS
from tests.labs import lab, settings

CONFIG = {"target": {"path": "tiny"}, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run whose texts were replaced by answers to both datasets."""
    out = tmp_path_factory.mktemp("run") / "out"
    laboratory = lab()
    sources = ["HumanEval", "HumanEval", "LiveCodeBench", "LiveCodeBench", "elsewhere"]
    prompts = [replace(prompt, source=source) for prompt, source in zip(laboratory.prompts, sources, strict=True)]
    assert run(replace(laboratory, prompts=prompts), settings(out), CONFIG, Console(file=StringIO())) == 0
    texts = {
        "p0": "    return 1\n\ndef g(): pass",
        "p1": "<think>x</think>So:\n```python\ndef f():\n    return 2\n```\n",
        "p2": "```python\nprint(3)\n```",
        "p3": "```\nthinks\n```",
        "p4": "x",
    }
    table = load(out).requests
    prompt = table["prompt"].where(table["name"] != "p3", "What?<think>\n")
    table.assign(text=table["name"].map(texts), prompt=prompt).to_parquet(out / "requests.parquet")
    return out


@pytest.mark.nightly
def test_samples_have_the_formats_of_the_evaluators(done):
    files = {file.name: file.read_text() for file in write_samples(done)}
    arms = ("repeat", "baseline")
    assert set(files) == {f"HumanEval-{arm}.jsonl" for arm in arms} | {f"LiveCodeBench-{arm}.json" for arm in arms}
    lines = [json.loads(line) for line in files["HumanEval-baseline.jsonl"].splitlines()]
    assert lines == [
        {"task_id": "p0", "completion": "    return 1\n"},
        {"task_id": "p1", "completion": "\ndef f():\n    return 2\n"},
    ]
    assert json.loads(files["LiveCodeBench-repeat.json"]) == [
        {"question_id": "p2", "code_list": ["print(3)\n"]},
        {"question_id": "p3", "code_list": [""]},
    ]


def changed(done, folder, config=None, **columns):
    """A copy of the run with other columns of its requests, and another configuration."""
    shutil.copytree(done, folder)
    table = load(folder).requests
    table.assign(**{name: table[name].map(how) for name, how in columns.items()}).to_parquet(
        folder / "requests.parquet"
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"config": manifest["config"] | (config or {})}))
    return folder


def test_of_a_model_that_completes_texts_blocks_are_no_answers(done, tmp_path):
    here = changed(
        done, tmp_path / "out", {"prompts": {"template": "none"}}, text=lambda _: "    a\n```\nSo:\n```\nb\n```"
    )
    lines = next(file for file in write_samples(here) if file.name == "HumanEval-baseline.jsonl").read_text()
    assert [json.loads(line)["completion"] for line in lines.splitlines()] == ["    a"] * 2


@pytest.mark.nightly
def test_the_command_prints_the_files_and_refuses_other_runs(done, tmp_path, capsys):
    console = Console(file=StringIO(), width=300)
    assert command(["samples", str(done)], console) == 0
    assert "HumanEval-repeat.jsonl" in console.file.getvalue()
    assert command(["samples", str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
    assert run(lab(), settings(tmp_path / "other"), CONFIG, Console(file=StringIO())) == 0
    assert command(["samples", str(tmp_path / "other")]) == 1
    assert "holds no answers to HumanEval or LiveCodeBench" in capsys.readouterr().err


def test_formats_are_those_of_datasets():
    assert set(FORMATS) <= {dataset.source for dataset in DATASETS.values()}
