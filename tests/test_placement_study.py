"""The placement study: its schema, grammar and patterns, and its figures."""

import importlib.util
import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from scripts.zoo.records import HELD_OUT_SEED, record
from spec_lab.cli.main import conf, main, zoo
from spec_lab.constrain.load import json_schema, lark, regex
from spec_lab.constrain.protocol import ConstraintError, allows, single_token, unpack
from spec_lab.core.request import Request
from tests import checkpoints
from tests.constrain.parts import bundled

STUDY = Path(__file__).parents[1] / "experiments" / "constraint_placement"
PROMPTS = Path(zoo("prompts"))
SEEDS = [*range(40), *range(HELD_OUT_SEED, HELD_OUT_SEED + 40)]
KINDS = ("records", "records_exact")
SPACE = {
    name: value
    for name, value in OmegaConf.load(Path(conf(), "constraint", "records.yaml")).items()
    if name in ("whitespace_pattern", "item_separator", "key_separator")
}


def script(name):
    spec = importlib.util.spec_from_file_location(f"placement_{name}", STUDY / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses read it
    spec.loader.exec_module(module)
    return module


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(zoo("target"))


@cache
def constraint(kind):
    """The constraint of the config, for whole texts."""
    config = OmegaConf.to_container(OmegaConf.load(Path(conf(), "constraint", f"{kind}.yaml")), resolve=True)
    load = {"json_schema": json_schema, "lark": lark}[config.pop("_target_").rpartition(".")[2]]
    applied = ("placement", "draft_budget", "fast_forward", "async_masks", "distribution", "max_prefixes")
    return load(bundled(), **{key: value for key, value in config.items() if key not in applied})


def lines(text):
    """The JSON values of a document, and what begins each."""
    return text.splitlines() if text.startswith('{"') else [text]


def walk(kind, text):
    """(place where the masks refuse the text, None if nowhere; share of forced tokens)."""
    first, *rest = [*tokenizer().encode(text), *bundled().ends]
    state, forced = constraint(kind).start(Request(0, "one", (first,))), 0
    for place, token in enumerate(rest):
        mask = state.mask()
        if not allows(mask, token):
            return place, forced / len(rest)
        forced += single_token(mask) == token
        if place < len(rest) - 1:
            state.advance(token)
    return None, forced / len(rest)


def prompts(name, folder="prompts"):
    return [json.loads(line) for line in Path(zoo(folder), f"{name}.jsonl").read_text().splitlines()]


# 1. Records


@pytest.mark.nightly
def test_the_schema_is_one_and_holds_every_record_that_is_generated():
    schema = json.loads((PROMPTS / "records.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema)
    for seed in [*range(300), *range(HELD_OUT_SEED, HELD_OUT_SEED + 300)]:
        for value in map(json.loads, lines(record(seed)[1])):
            assert valid.is_valid(value), seed
    value = json.loads(record(0)[1] if not record(0)[1].startswith('{"') else lines(record(0)[1])[0])
    assert not valid.is_valid(value | {"more": 1}) and not valid.is_valid({})


@pytest.mark.nightly
def test_the_masks_of_the_schema_allow_every_record_as_it_is_laid_out():
    for seed in SEEDS:
        text = lines(record(seed)[1])[0].rstrip("\n")  # JSON ends with its value, and one line is one value
        assert walk("records", text)[0] is None, seed


@pytest.mark.nightly
def test_the_grammar_allows_every_document_literally_and_forces_more_tokens():
    shares = []
    for seed in SEEDS:
        refused, forced = walk("records_exact", record(seed)[1])
        assert refused is None, seed
        shares.append((forced, walk("records", lines(record(seed)[1])[0].rstrip("\n"))[1]))
    exact, schema = np.mean(shares, axis=0)
    assert exact > 0.5 and schema < 0.3


@pytest.mark.parametrize(
    "text",
    ['{\n "pipeline"', '{\n  "pipeline": "a-ci", ', '{"id": 1, "name"', "[{", '{"status": "ok", "code": 201', "{ "],
    ids=["indent", "layout", "key", "list", "value", "space"],
)
def test_the_grammar_refuses_other_layouts(text):
    assert walk("records_exact", text)[0] is not None


def test_the_grammar_is_the_schema_s():
    schema = json.loads((PROMPTS / "records.schema.json").read_text())
    assert script("exact").grammar(schema) == (PROMPTS / "records.lark").read_text()


def refused(made):
    """The bundled JSON prompts that do not begin a text the constraint allows."""
    found = []
    for prompt in prompts("json"):
        try:
            made.start(Request(0, prompt["id"], tuple(tokenizer().encode(prompt["prompt"]))))
        except ConstraintError:
            found.append(prompt["prompt"])
    return found


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_bundled_json_prompt_is_an_allowed_beginning(kind):
    assert refused(constraint(kind)) == []


@pytest.mark.nightly
def test_the_study_s_schema_is_of_one_json_value_and_refuses_json_lines(measure):
    config = measure.configured("records", 0, [])["constraint"]
    assert config["lines"] is False
    found = refused(json_schema(bundled(), path=str(PROMPTS / "records.schema.json"), prompt=True, **SPACE))
    assert len(found) == 7 and all("\n{" in text and text.startswith('{"') for text in found)


@pytest.mark.nightly
def test_the_masks_of_the_schema_allow_json_lines_to_the_last_line_feed():
    several = [text for text in (record(seed)[1] for seed in SEEDS) if text.startswith('{"') and "\n{" in text]
    assert several
    for text in several:
        assert walk("records", text)[0] is None
        assert walk("records", text.replace("\n{", "\n{ ", 1))[0] is not None


# 2. Patterns


def test_every_prompt_of_the_patterns_has_one_that_both_engines_read_alike():
    held_out = {one["prompt"].rstrip("\n") for name in ("code", "json", "prose") for one in prompts(name)}
    rng, free = np.random.default_rng(0), regex(bundled(), None)
    for prompt in prompts("patterns", "constraints"):
        assert prompt["prompt"].rstrip("\n") in held_out
        for _ in range(2):
            state, tokens = free.start(Request(0, prompt["id"], (1,), constraint=prompt["constraint"])), []
            for _ in range(1500):
                tokens.append(int(rng.choice(np.flatnonzero(unpack(state.mask(), bundled().size)))))
                if tokens[-1] in bundled().ends:
                    break
                state.advance(tokens[-1])
            assert tokens[-1] in bundled().ends, prompt["id"]
            assert re.fullmatch(prompt["constraint"], tokenizer().decode(tokens[:-1])), prompt["id"]


# 3. The study


@pytest.fixture(scope="module")
def measure():
    return script("measure")


def test_arms_are_compared_with_decoding_of_the_same_distribution(measure):
    every = measure.ways(0)
    assert len({way.arm for way in every}) == len(every) == 5 * 6 + 3
    both = measure.Way("medusa", "both", True)
    assert both.plain.arm == "autoregressive:target" and both.best.arm == "autoregressive:target:forward"
    assert both.best in every and both.plain in every
    draft = measure.Way("medusa", "draft")
    assert draft.plain == draft.best and draft.plain.arm == "baseline"


def test_a_pooled_share_is_of_sums_and_its_interval_over_requests(measure):
    part, whole, request = pd.Series([1, 0, 3]), pd.Series([2, 2, 4]), pd.Series([0, 0, 1])
    found = measure.pooled(part, whole, request)
    assert found.mean == 0.5 and (found.low, found.high) == (0.25, 0.75)
    assert np.isnan(measure.pooled(part, whole * 0, request).mean)


def test_nodes_are_counted_until_the_output_violates_the_constraint(measure):
    requests = pd.DataFrame({"arm": ["a"] * 2, "request": [0, 1], "prompt_tokens": [5, 7], "violated": [-1, 3]})
    steps = pd.DataFrame({"request": [0, 1, 1, 1], "context": [60, 8, 10, 11]})
    assert measure.not_violated(steps, requests, "a").tolist() == [True, True, True, False]


def test_tables_are_written_between_the_marks_only(measure, tmp_path):
    file = tmp_path / "README.md"
    file.write_text("a\n<!-- results -->\nold\n<!-- end of results -->\nb\n")
    measure.fill(file, "results", r"new \1")
    measure.fill(file, "results", r"new \1")
    assert file.read_text() == "a\n<!-- results -->\nnew \\1\n<!-- end of results -->\nb\n"
    with pytest.raises(ValueError, match="<!-- other -->"):
        measure.fill(file, "other", "")


def tiny_zoo(folder):
    """Tiny models with the bundled tokenizer, whose tokens' bytes the engine can read."""
    for name, changes in (("target", {}), ("draft", {"seed": 1, "num_hidden_layers": 1})):
        checkpoints.checkpoint(folder / name, vocab_size=4096, eos_token_id=0, **changes)
        for file in Path(zoo("target")).glob("*token*.json"):
            shutil.copy(file, folder / name / file.name)
    heads = checkpoints.zoo(folder / "letters") / "medusa"
    heads.rename(folder / "medusa")
    config = folder / "medusa" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 4096}))
    checkpoints.prompts(folder / "prompts.jsonl")
    return folder


@pytest.mark.nightly
def test_the_study_measures_draws_and_writes_and_is_resumed(measure, tmp_path, monkeypatch):
    folder = tiny_zoo(tmp_path / "zoo")
    options = ["constraint=regex", "constraint.pattern='[a-z ]{12,}'", "prompts=code"]
    monkeypatch.setattr(measure, "WORKLOADS", {"patterns": ("toy", options)})
    monkeypatch.setattr(measure, "TEMPERATURES", {0: ("medusa",), 1: ("draft_chain",)})
    (tmp_path / "README.md").write_text("<!-- results -->\n<!-- end of results -->\n")
    draft = f"path={folder / 'draft'}"
    arguments = [
        "--out", f"{tmp_path / 'out'}", "--folder", f"{tmp_path}", "--prompts", "2", f"target.path={folder / 'target'}",
        "target.dtype=float64", f"proposer.{draft}", f"arms.draft_tree.{draft}", "arms.medusa.tree=2x1",
        f"arms.medusa.path={folder / 'medusa'}", f"prompts.path={folder / 'prompts.jsonl'}",
        "max_new_tokens=10", "warmup=0", "threads=1",
    ]  # fmt: skip
    measure.main(arguments)
    table = pd.read_csv(tmp_path / "results.csv")
    assert len(table) == 9 + 9 and (table["requests"] == 2).all() and (table["broken_groups"] == 0).all()
    bound = table["placement"].isin(["target", "both"])
    assert (table.loc[bound, "violated"] == 0).all()
    greedy = table[table["temperature"] == 0]
    assert (greedy["identical_outputs"] == 1).all()
    drafted = greedy[(greedy["proposer"] == "medusa") & greedy["placement"].isin(["draft", "both"])]
    assert (drafted["legal_share"] == 1).all()
    alone = table[(table["proposer"] == measure.NULL) & (table["placement"] == "target") & ~table["fast_forward"]]
    assert (alone["speedup_mean_of_groups"] == 1).all()
    text = (tmp_path / "README.md").read_text()
    assert text.count("| Medusa tree |") == 2 and text.count("| draft chain |") == 2
    shown = table[table["proposer"] == "medusa"].iloc[-1]
    assert f"| {shown['speedup_over_best_mean_of_groups']:.2f} [" in text
    assert (tmp_path / "placement.png").stat().st_size > 10_000

    def never(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(measure.Loop, "decode", never)
    measure.main(arguments)
    assert pd.read_csv(tmp_path / "results.csv").equals(table)


@pytest.mark.nightly  # as is the study on tiny models
def test_the_experiment_runs_on_the_bundled_models(monkeypatch, tmp_path):
    short = [
        "target.dtype=float64",
        "max_new_tokens=20",
        "warmup=0",
        "prompts.limit=2",
        "~arms.medusa",
        "output_dir=here",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["spec_lab", "+experiment=constraint_placement", *short])
    main()
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    assert summary["constraint"] == "json_schema" and summary["constraint_facts"]["placement"] == "both"
    assert all(arm["identical_outputs"] in (1, None) for arm in summary["arms"].values())
    assert summary["legal_share"] == 1 and 0 < summary["mask_exposed_share"] < 1
