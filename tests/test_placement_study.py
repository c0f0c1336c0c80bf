"""The placement study: its schema, grammar and patterns, and its figures."""

import importlib
import json
import re
import shutil
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest
from hydra.utils import get_method
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from experiments.constraint_placement import exact
from scripts.zoo.records import HELD_OUT_SEED, record
from spec_lab.cli.main import conf, zoo
from spec_lab.constrain.load import regex
from spec_lab.constrain.protocol import ConstraintError, allows, single_token, unpack
from spec_lab.core.request import Request
from tests import checkpoints
from tests.constrain.parts import bundled

PROMPTS = Path(zoo("prompts"))
SEEDS = [*range(40), *range(HELD_OUT_SEED, HELD_OUT_SEED + 40)]
KINDS = ("records", "records_exact")


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(zoo("target"))


@cache
def constraint(kind):
    """The constraint of the config, for whole texts."""
    config = OmegaConf.to_container(OmegaConf.load(Path(conf(), "constraint", f"{kind}.yaml")), resolve=True)
    load = get_method(config.pop("_target_"))
    applied = ("placement", "draft_budget", "fast_forward", "async_masks", "distribution", "max_prefixes")
    return load(bundled(), **{key: value for key, value in config.items() if key not in applied})


def lines(text):
    """The JSON values of a document, and what begins each."""
    return text.splitlines() if text.startswith('{"') else [text]


def walk(kind, text):
    """(place where the masks refuse the text, None if nowhere; share of forced tokens)."""
    first, *rest = [*tokenizer().encode(text), *bundled().ends]
    state, forced = constraint(kind).start(Request(0, "one", (first,))), 0
    for number, token in enumerate(rest):
        mask = state.mask()
        if not allows(mask, token):
            return number, forced / len(rest)
        forced += single_token(mask) == token
        if number < len(rest) - 1:
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
def test_both_allow_every_document_as_it_is_laid_out_and_the_grammar_forces_more_tokens():
    shares = []
    for seed in SEEDS:
        refused, forced = walk("records_exact", record(seed)[1])
        text = lines(record(seed)[1])[0].rstrip("\n")  # JSON ends with its value, and one line is one value
        loosely_refused, loosely_forced = walk("records", text)
        assert refused is None and loosely_refused is None, seed
        shares.append((forced, loosely_forced))
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
    assert exact.grammar(schema) == (PROMPTS / "records.lark").read_text()


def refused(made):
    """The bundled JSON prompts that do not begin a text the constraint allows."""
    texts = []
    for prompt in prompts("json"):
        try:
            made.start(Request(0, prompt["id"], tuple(tokenizer().encode(prompt["prompt"]))))
        except ConstraintError:
            texts.append(prompt["prompt"])
    return texts


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_every_bundled_json_prompt_is_an_allowed_beginning(kind):
    assert refused(constraint(kind)) == []


@pytest.mark.nightly
def test_the_masks_of_the_schema_allow_json_lines_to_the_last_line_feed():
    several = [text for text in (record(seed)[1] for seed in SEEDS) if text.startswith('{"') and "\n{" in text]
    assert several
    for text in several:
        assert walk("records", text)[0] is None
        assert walk("records", text.replace("\n{", "\n{ ", 1))[0] is not None


# 2. Patterns


def test_every_prompt_of_the_patterns_has_one_that_both_engines_read_alike():
    held_out = {prompt["prompt"].rstrip("\n") for name in ("code", "json", "prose") for prompt in prompts(name)}
    rng, free = np.random.default_rng(0), regex(bundled(), "")
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
def test_the_study_measures_draws_and_writes_and_is_resumed(tmp_path, monkeypatch):
    measure = importlib.import_module("experiments.constraint_placement.measure")
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
    text = (tmp_path / "README.md").read_text()
    assert text.count("| Medusa tree |") == 1 and text.count("| draft chain |") == 1
    assert (tmp_path / "placement.png").stat().st_size > 10_000

    def never(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(measure.Loop, "decode", never)
    measure.main(arguments)
    assert pd.read_csv(tmp_path / "results.csv").equals(table)
