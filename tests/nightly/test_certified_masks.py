"""Masks of the shipped engines on the bundled tokenizer, under schemas that recurse and nest."""

import json

import pytest
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from spec_lab.cli.main import zoo
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.engines.grammar import json_schema
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request
from spec_lab.tasks.certify.masks import compare_masks

NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]},
    },
    "required": ["v", "n"],
    "additionalProperties": False,
}
MANY = {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "number"}, {"$ref": "#/$defs/t"}]}}
SCHEMAS = {"list": {"$defs": {"t": NODE}, "$ref": "#/$defs/t"}, "array": {"$defs": {"t": MANY}, "$ref": "#/$defs/t"}}


@pytest.fixture(scope="module")
def vocabulary():
    tokenizer = AutoTokenizer.from_pretrained(zoo("target"))
    end = tokenizer.eos_token_id
    return Vocabulary(len(tokenizer), (end,), from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[end]))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_masks_of_drafts_are_those_of_states_that_saw_none(vocabulary, schema, fast_forward, seed):
    grammar = json_schema(vocabulary, json.dumps(SCHEMAS[schema]))
    requests = [Request(number, f"prompt {number}", (1,), stop=frozenset(vocabulary.ends)) for number in range(3)]
    comparison = compare_masks(
        AppliedConstraint(grammar, fast_forward=fast_forward), requests, 20_000, seed, vocabulary.bytes
    )
    assert comparison.different == 0, comparison.first
