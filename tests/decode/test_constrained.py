"""Greedy output under a constraint equals the bundled model's greedy output under its masks, token for token.

The truth is a bare loop over transformers' model in float64 that masks its logits. Every finished output is checked by
Python's ``re`` or by ``jsonschema``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.exactness.greedy import PROPOSERS, ZOO
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.engines.grammar import json_schema, regex
from spec_lab.constrain.protocol import unpack
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.target import Target
from spec_lab.verify import Match, Token, Traversal

NEW = 32

REGEXES = (
    r"[a-z]{3,8}", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"(yes|no|maybe)", r"import [a-z]{2,8}", r"x = [0-9]{1,4}",
    r"[A-Z][a-z]{2,6} [A-Z][a-z]{2,6}", r"#[0-9a-f]{6}", r"def [a-z_]{3,10}\(self\):", r"return (True|False|None)",
    r"\([0-9]{1,2}, [0-9]{1,2}\)", r'"[a-z ]{4,16}"', r"[a-z]{2,6}@[a-z]{2,6}\.(com|org)", r"(ab|ba){2,4}c",
    r"self\.[a-z_]{3,8} = [a-z_]{3,8}", r"[01]{8}", r"(red|green|blue)(, (red|green|blue)){1,2}", r"v[0-9]\.[0-9]{1,2}",
    r"for [a-z] in range\([0-9]{1,3}\):", r"(é|ü|ñ){2,4}!", r"[A-Z]{3}-[0-9]{3}", r"if [a-z]{1,5} (<|>|==) [0-9]{1,3}:",
)  # fmt: skip

CLOSED = {"additionalProperties": False}


def record(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), **CLOSED}


def strings(most: int) -> dict:
    return {"type": "string", "maxLength": most}


SCHEMAS = (
    {"type": "boolean"}, {"type": "null"}, {"enum": ["red", "green", 7, None]}, {"const": {"a": [1, 2]}},
    {"type": "integer", "minimum": 0, "maximum": 999}, strings(6), {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
    record(name=strings(8)), record(ok={"type": "boolean"}, code={"enum": [200, 404]}),
    record(id={"type": "integer", "minimum": 1, "maximum": 99}, tag={"enum": ["x", "y"]}),
    record(user=record(age={"type": "integer", "minimum": 0, "maximum": 120})),
    {"anyOf": [{"type": "null"}, record(x={"type": "boolean"})]},
    {"anyOf": [{"enum": ["a"]}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    record(date={"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]$"}),
    record(level={"enum": ["info", "warn", "error"]}, message=strings(10)),
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}, "required": ["b"], **CLOSED},
    record(items={"type": "array", "items": record(n={"enum": [0, 1]}), "minItems": 1, "maxItems": 2}),
    {"type": "array", "items": strings(4), "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["k"]}], "items": False, "minItems": 2},
)  # fmt: skip

PROMPTS = ("def parse(", '{"name": "', "The next morning", "import os\n")
PAIRS = {"draft_chain": Token(), "draft_tree": Traversal(), "medusa": Match(), "ngram_tree": Token()}


@pytest.fixture(scope="module")
def target():
    return Target.load(str(ZOO / "target"), dtype="float64")


@pytest.fixture(scope="module")
def vocabulary(target):
    return Vocabulary.of(target)


@pytest.fixture(scope="module")
def cases(target, vocabulary):
    """By kind: the constraint, whose sources are in the requests, and the requests."""
    compact = json_schema(vocabulary, whitespace_flexible=False)
    sources = {"regex": (regex(vocabulary), REGEXES), "json": (compact, [json.dumps(schema) for schema in SCHEMAS])}
    by_kind = {}
    for kind, (constraint, each) in sources.items():
        prompts = [tuple(target.tokenizer.encode(PROMPTS[number % len(PROMPTS)])) for number in range(len(each))]
        requests = [
            Request(number, f"{kind} {number}", tokens, max_new_tokens=NEW, stop=target.ends, constraint=source)
            for number, (tokens, source) in enumerate(zip(prompts, each, strict=True))
        ]
        by_kind[kind] = (constraint, requests)
    return by_kind


@pytest.fixture(scope="module")
def truths(target, cases):
    """The output of a bare loop."""
    model = AutoModelForCausalLM.from_pretrained(ZOO / "target", dtype=torch.float64).eval()
    return {
        kind: [bare(model, constraint.start(request), request) for request in requests]
        for kind, (constraint, requests) in cases.items()
    }


@torch.inference_mode()
def bare(model, state, request) -> list[int]:
    cache, tokens, new = DynamicCache(), list(request.tokens), list(request.tokens)
    while len(tokens) - len(request.tokens) < request.max_new_tokens:
        logits = model(input_ids=torch.tensor([new]), use_cache=True, **{cache_argument(model): cache}).logits[0, -1]
        logits[torch.from_numpy(~unpack(state.mask(), len(logits)))] = -torch.inf
        new = [int(logits.argmax())]
        tokens += new
        if new[0] in request.stop:
            break
        state.advance(new[0])
    return tokens[len(request.tokens) :]


def decode(target, proposer, verifier, requests, applied) -> list[list[int]]:
    group = fixed_group(Arm(target, proposer, verifier, CounterDraws(0), applied), requests)
    for _ in group:
        pass
    assert not group.errors
    return [sequence.emitted for sequence in group.sequences]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["regex", "json"])
@pytest.mark.parametrize("name", PAIRS)
def test_speculation_changes_no_token(kind, name, target, cases, truths):
    constraint, requests = cases[kind]
    placement, fast = ("both", True) if name in ("draft_chain", "ngram_tree") else ("target", False)
    applied = AppliedConstraint(constraint, placement, fast_forward=fast)
    outcomes = decode(target, PROPOSERS[name](target), PAIRS[name], requests, applied)
    assert outcomes == truths[kind]


def test_budgets_and_threads_change_no_token(target, cases, truths):
    constraint, requests = cases["json"]
    short = [replace(request, max_new_tokens=12) for request in requests]
    applied = AppliedConstraint(constraint, "both", draft_budget=2, async_masks=True)
    outcomes = decode(target, PROPOSERS["draft_chain"](target), Token(), short, applied)
    assert outcomes == [truth[:12] for truth in truths["json"]]


def test_every_finished_output_is_valid(target, cases, truths):
    for kind, (_, requests) in cases.items():
        for request, out in zip(requests, truths[kind], strict=True):
            if out[-1] not in request.stop:
                continue
            text = target.tokenizer.decode(out[:-1])
            if kind == "regex":
                assert re.fullmatch(request.constraint, text), (request.constraint, text)
            else:
                jsonschema.validate(json.loads(text), json.loads(request.constraint))
