"""The studies of proposers without training, of policies and of hybrids, on tiny models."""

import importlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import runs
from scripts.zoo import repetitive, workloads
from spec_lab.cli.build import zoo
from spec_lab.text.conversations import chat
from spec_lab.text.prompts import jsonl
from tests.test_studies import ROOT, command, figure_of, tiny_zoo  # noqa: F401  (a fixture of the whole module)

ROWS = {
    "training_free": ("--texts code --store store", 2 * 11),  # temperatures, arms
    "hybrids": ("--texts code", 2 * 12),
    "workloads": ("--texts code --arms ngram medusa union", 2 * 3),  # temperatures, arms
    "policies": ("--texts code --sizes 1 2", 2 * 3 * 16),  # temperatures, workloads, arms
}
"""Options that keep its command small, and the number of rows of its results."""


def measure_of(name):
    return importlib.import_module(f"experiments.{name}.measure")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_a_study_measures_draws_and_writes_its_tables(name, tiny_zoo, tmp_path, monkeypatch, capfd):  # noqa: F811
    def run(arguments, check):
        assert check and command(monkeypatch, *arguments[3:], "target.dtype=float32") == 0, capfd.readouterr().err

    monkeypatch.setenv("SPEC_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(runs, "ZOO", tiny_zoo)
    monkeypatch.chdir(tmp_path)
    if name == "training_free":  # a search finds nothing to skip in a model of two layers
        monkeypatch.setitem(measure_of(name).ARMS, "skip", ("skip", {"skipped": "attn 1"}))
        lines = (tiny_zoo / "prompts" / "code.jsonl").read_text().splitlines()
        texts = [{"text": json.loads(line)["prompt"]} for line in lines]
        (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
        assert command(monkeypatch, "index", "corpus.jsonl", "store", "--tokenizer", str(tiny_zoo / "target")) == 0
    options, rows = ROWS[name]
    measure_of(name).main(f"{options} --limit 2 --new 8 --threads 1 --out here".split())
    shutil.copy(ROOT / "experiments" / name / "README.md", tmp_path)
    table = figure_of(name).main(["here", "--folder", str(tmp_path)])
    assert len(table) == rows
    assert (table["tau_pooled"].dropna() >= 1).all() and (table["speedup"].dropna() > 0).all()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "README.md").read_text()
    assert "The baseline is at " in text.partition("<!-- results -->")[2], "of the roofline"
    if name == "hybrids":
        over = table.set_index("arm")["best_part"].dropna().to_dict()
        assert over.keys() == measure_of(name).OF.keys()
        assert all(best in measure_of(name).OF[arm] for arm, best in over.items())
    if name == "policies":
        fixed = table[table["arm"].str.startswith("fixed_")]
        best = fixed[fixed["speed_over_best_fixed"].isna()]
        assert (best["arm"] == best["best_fixed"]).all() and len(best) == 2 * 3
        assert np.isfinite(table.loc[~table.index.isin(best.index), "speed_over_best_fixed"]).all()


def test_an_option_of_an_arm_may_choose_a_config():
    assert runs.option("one", "depth", 3) == "arms.one.depth=3"
    assert runs.option("one", "policy@policy", "ucb") == "+policy@arms.one.policy=ucb"
    assert runs.option("one", "proposer@parts.heads", "eagle") == "proposer@arms.one.parts.heads=eagle"


def test_the_parts_that_hybrids_are_compared_with_are_arms_and_their_parts():
    measure = measure_of("hybrids")
    usual = {"suffix": "suffix", "heads": "medusa"}
    for name, parts in measure.OF.items():
        proposer, options = measure.ARMS[name]
        own = usual | {key.rpartition(".")[2]: value for key, value in options.items() if "@parts." in key}
        assert proposer in ("union", "best_of") and parts == tuple(own.values())
        assert set(parts) <= set(measure.PARTS) <= measure.ARMS.keys()


def test_the_bundled_repetitive_prompts_are_those_that_their_script_writes():
    assert repetitive.FILE.read_text() == repetitive.text()


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_the_bundled_workloads_are_those_that_their_script_writes(name):
    file = workloads.FOLDER / f"{name}.jsonl"
    assert file.read_text() == workloads.text(name)
    prompts = chat(str(file), template="none") if name == "dialogue" else jsonl(zoo(f"workloads/{name}.jsonl"))
    assert len(prompts) == workloads.COUNT and {one.workload for one in prompts} == {name}
    if name == "dialogue":
        assert {one.turns for one in prompts} == {3}
    if name == "retrieval":
        shared = [one.text.partition("Passage [")[0] for one in prompts]
        assert all(len(set(shared[n : n + 3])) == 1 for n in range(0, len(shared), 3)) and len(set(shared)) == 10
        assert all(one.text.partition(" is: ")[2] in prefix for one, prefix in zip(prompts, shared, strict=True))


def test_an_edit_copies_code_with_one_name_changed():
    code = "def area(width):\n    square = width * width\n    return square\n"
    after = "def area(new_width):\n    square = new_width * new_width\n"
    assert repetitive.edits(code) == f"{code.rstrip()}\n\n\n{after}"
    assert repetitive.edits("a = 1\n") is None, "no name occurs twice"


def test_a_conversation_repeats_a_record_with_one_number_changed():
    record = '{\n  "id": 41,\n  "name": "x",\n  "tags": []\n}'
    prompt = repetitive.turns(record)
    assert [line for line in prompt.splitlines() if "id" in line] == [f'  "id": {n},' for n in (41, 42, 43, 44)]
    assert repetitive.turns('{"id": 1}') is None, "no number of two digits"
