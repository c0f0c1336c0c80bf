"""xgrammar walks trees internally with rollback: every mask of a draft equals a new matcher's, 50,000 rows."""

import json

import numpy as np
import pytest

from tests.constrain.decoding import DIGIT, LINKED_LIST, NESTED_ARRAYS, TREE, by_new_states, closed, wrong_rows
from tests.constrain.parts import bundled

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.nightly

EITHER = {
    "$defs": {
        "e": {
            "anyOf": [
                DIGIT,
                {"type": "string"},
                closed({"op": {"enum": ["add", "and", "any"]}, "l": {"$ref": "#/$defs/e"}, "r": {"$ref": "#/$defs/e"}}),
                {"type": "array", "items": {"$ref": "#/$defs/e"}},
            ]
        }
    },
    "$ref": "#/$defs/e",
}
SOURCES = {
    "linked list": ("json_schema", json.dumps(LINKED_LIST)),
    "tree": ("json_schema", json.dumps(TREE)),
    "anyOf expressions": ("json_schema", json.dumps(EITHER)),
    "nested arrays": ("json_schema", json.dumps(NESTED_ARRAYS)),
    "regex": ("regex", "([a-z]{1,6} [0-9]{1,4};)+end"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_masks_of_drafts_are_those_of_new_matchers(name):
    from spec_lab.constrain.engines.xgrammar import XGrammar

    grammar = XGrammar(bundled(), *SOURCES[name])
    assert wrong_rows(grammar, np.random.default_rng(len(name)), 10_000, fresh_masks=by_new_states) == []
