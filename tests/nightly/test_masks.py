"""Every mask of a draft equals that of a new matcher that has only read the row's tokens: 100,000 rows and more.

Of 12,000 rows of a walk that rolls back (``by_rollback``) no mask is wrong with new states for each draft and tokens
drawn evenly, which leads into strings and white space; with states that live over many steps 11 are, with tokens that
open and close structure 12, with both 52.
"""

import json

import numpy as np
import pytest

from spec_lab.constrain.engines.grammar import choice, json_schema, lark, regex
from spec_lab.constrain.protocol import Masks, allows, full_mask, width
from tests.constrain.decoding import DIGIT, LINKED_LIST, NESTED_ARRAYS, TREE, closed, wrong_rows
from tests.constrain.parts import bundled

pytestmark = pytest.mark.nightly

ROWS = 4_500  # of each grammar, with and without threads

EITHER = {
    "$defs": {
        "e": {
            "anyOf": [
                {"type": "boolean"},
                DIGIT,
                {"type": "string", "maxLength": 6},
                closed({"op": {"enum": ["add", "and", "any"]}, "l": {"$ref": "#/$defs/e"}, "r": {"$ref": "#/$defs/e"}}),
                {"type": "array", "items": {"$ref": "#/$defs/e"}, "maxItems": 3},
            ]
        }
    },
    "$ref": "#/$defs/e",
}
OPTIONAL = closed({name: closed({"x": DIGIT, "y": {"type": "null"}}, ("x",)) for name in "abc"}, ("a", "c"))

SOURCES = {
    "linked list": (json_schema, json.dumps(LINKED_LIST), {}),
    "linked list without white space": (json_schema, json.dumps(LINKED_LIST), {"whitespace_flexible": False}),
    "tree": (json_schema, json.dumps(TREE), {}),
    "anyOf expressions": (json_schema, json.dumps(EITHER), {}),
    "nested arrays": (json_schema, json.dumps(NESTED_ARRAYS), {}),
    "optional properties": (json_schema, json.dumps(OPTIONAL), {}),
    "any JSON": (json_schema, "{}", {}),
    "lark arithmetic": (lark, 'start: e\ne: e ("+" | "*") e | "(" e ")" | "-" e | /[0-9]{1,3}/', {}),
    "lark blocks": (
        lark,
        'start: block+\nblock: NAME "{" (block | pair)* "}"\npair: NAME "=" (NAME | /"[^"]*"/) ";"\n'
        "NAME: /[a-z]{1,4}/\n%ignore /[ \\n]{1,2}/",
        {},
    ),
    "lark that cannot roll back": (lark, 'start: ("q: " x "\\n" | "(" start ")")+\nx[stop="."]: /.*/', {}),
    "regex": (regex, "(([a-z]+|[0-9]{1,4}|é|日本) ?){3,40}end", {}),
    "choice": (choice, ["apple", "apply", "a plea", "applesauce " * 6, "pear\n" * 9], {}),
}


def by_rollback(states, shape, token):
    """The masks of a forest by a depth-first walk that rolls back, which is unreliable in the engine."""
    size = states[0].vocabulary
    bits, legal = np.zeros((shape.rows, width(size)), dtype=np.uint32), np.zeros(shape.rows, dtype=bool)

    def visit(matcher, row):
        legal[row] = True
        matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits[row].nbytes)
        for child in shape.children[row].tolist():
            drafted = int(token[child - shape.roots])
            if allows(bits[row], drafted):
                ends = drafted == 0  # rolling back a stop token differs: a copy follows it
                below = matcher.deep_copy() if ends else matcher
                if below.consume_token(drafted):
                    visit(below, child)
                    if not ends:
                        below.rollback(1)

    for root, state in enumerate(states):
        visit(state.matcher, root)
    return Masks(bits & full_mask(size), legal, np.zeros(shape.rows, dtype=bool))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_masks_of_drafts_are_those_of_new_matchers(name, threads):
    kind, source, options = SOURCES[name]
    grammar = kind(bundled(), source, threads=threads, **options)
    assert wrong_rows(grammar, np.random.default_rng([threads, len(name)]), ROWS) == []


@pytest.mark.parametrize("name", ["linked list", "tree", "nested arrays"])
def test_the_fuzz_finds_masks_that_rollback_has_corrupted(name):
    kind, source, options = SOURCES[name]
    grammar = kind(bundled(), source, **options)
    assert wrong_rows(grammar, np.random.default_rng(0), ROWS, masks=by_rollback) != []
