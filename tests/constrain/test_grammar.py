"""Grammars: masks equal those of plain states whatever is drafted; texts under the masks; errors name cause and
place."""

import itertools
import json
import re
import time

import jsonschema
import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.engines.grammar import Grammar, choice, json_schema, lark, regex
from spec_lab.constrain.protocol import ConstraintError, masks_by_forking, unpack, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.tasks.certify.masks import compare_masks
from tests.constrain import parts
from tests.constrain.decoding import NESTED_ARRAYS, TREE, wrong_rows
from tests.constrain.parts import after, allowed, bundled, by_fresh_matchers, drafted, prefix, request, same, toy, wood

AB, A, B, C, E, E1, E2 = parts.AB, parts.A, parts.B, parts.C, parts.E, parts.E1, parts.E2
END, ONE, TWO = parts.END, parts.ONE, parts.TWO
NO_ROLLBACK = 'start: "1" x "c"\nx[max_tokens=3]: /[ab]*/'
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["x", "yy", 3, None]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def engine(vocabulary: Vocabulary, pattern: str) -> LLMatcher:
    return LLMatcher(vocabulary.engine, LLMatcher.grammar_from_regex(pattern), log_level=0)


def bare_mask(matcher: LLMatcher, size: int) -> list[int]:
    mask = np.zeros(width(size), dtype=np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return np.flatnonzero(unpack(mask, size)).tolist()


# 1. Masks of forests


GRAMMARS = {
    "toy regex": lambda threads: regex(toy(), "((a|b)*c(é|1)?)+", threads=threads),
    "toy that ends at once": lambda threads: regex(toy(), "(ab)?c", threads=threads),
    "toy with dead ends": lambda threads: regex(toy(), "(a|b)*(a[QR]|b[^\\x00-\\x7f]|c)", threads=threads),
    "toy without rollback": lambda threads: lark(toy(), NO_ROLLBACK, threads=threads),
    "toy schema": lambda threads: json_schema(
        toy(), '{"type": "array", "items": {"enum": [1, true]}}', threads=threads
    ),
    "regex": lambda threads: regex(bundled(), "[a-z]+ [0-9]{2,4}(é|ü|日本)?", threads=threads),
    "schema": lambda threads: json_schema(bundled(), json.dumps(PERSON), threads=threads),
    "lark": lambda threads: lark(bundled(), 'start: e\ne: e "+" e | "(" e ")" | /[0-9]+/', threads=threads),
    "lark without rollback": lambda threads: lark(
        bundled(), 'start: "q: " x "\\n"\nx[stop="."]: /.*/', threads=threads
    ),
    "choice": lambda threads: choice(bundled(), ["apple", "apply", 'b"/\\n', "éa", "applesauce"], threads=threads),
}


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_of_forests_are_those_of_forks_and_of_fresh_matchers(name, threads):
    grammar, rng = GRAMMARS[name](threads), np.random.default_rng(7)
    size, rows, illegal = grammar.vocabulary, 0, 0
    for _ in range(18):
        roots = int(rng.integers(1, 5))
        begun = [None if rng.random() < 0.1 else prefix(grammar, rng, 8) for _ in range(roots)]
        states = [None if tokens is None else after(grammar, tokens) for tokens in begun]
        shape = wood(rng, roots, 16)
        token = drafted(states, shape, rng, size)
        row_masks = grammar.masks(states, shape, token)
        assert same(row_masks, masks_by_forking(states, shape, token, size))
        assert same(row_masks, by_fresh_matchers(grammar, begun, shape, token))
        for state, tokens in zip(states, begun, strict=True):
            if state is not None:
                assert np.array_equal(state.mask(), after(grammar, tokens).mask())
        rows, illegal = rows + shape.rows, illegal + int((~row_masks.legal).sum())
    assert rows > 150 and illegal > 5


@pytest.mark.parametrize("threads", [1, 2])
def test_states_after_drafts_equal_states_without_drafts(threads):
    grammar, rng = json_schema(bundled(), json.dumps(PERSON), threads=threads), np.random.default_rng(3)
    tokens = list(prefix(grammar, rng, 30))
    state, alone = grammar.start(request()), grammar.start(request())
    for token in tokens:
        shape = wood(rng, 1, 8)
        grammar.masks([state], shape, drafted([state.fork()], shape, rng, 4096))
        state.advance(token)
        alone.advance(token)
        assert np.array_equal(state.mask(), alone.mask())


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("schema", [TREE, NESTED_ARRAYS], ids=["tree", "nested arrays"])
def test_drafts_leave_no_trace_in_long_lived_states(schema, threads):
    grammar = json_schema(bundled(), json.dumps(schema), threads=threads)
    assert wrong_rows(grammar, np.random.default_rng(0), 600) == []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("depth", range(6))
def test_an_illegal_draft_token_is_rejected_with_its_descendants_and_changes_no_other_request(depth, threads):
    patterns = ["(ab)*c", "[abc]*", "(a|b)+1", "ab*"]
    grammar = regex(toy(), threads=threads)
    legal = [[AB, AB, AB, AB, AB, AB], [C, C, A, B, AB, A], [A, B, A, B, AB, A], [A, B, B, B, B, B]]
    begun = [[AB], [A, C], [B], []]
    states = [after(grammar, tokens, pattern) for tokens, pattern in zip(begun, patterns, strict=True)]
    drafts = [list(tokens) for tokens in legal]
    drafts[2][depth] = TWO  # nowhere in its grammar
    shape = forest((chain(6),) * 4)
    row_masks = grammar.masks(states, shape, np.concatenate(drafts))
    nodes = np.arange(4, shape.rows).reshape(4, 6)
    assert not row_masks.legal[nodes[2, depth:]].any() and not row_masks.bits[nodes[2, depth:]].any()
    assert row_masks.legal[nodes[2, :depth]].all() and row_masks.bits[nodes[2, :depth]].any(-1).all()
    for other in (0, 1):
        assert row_masks.legal[nodes[other]].all() and row_masks.bits[nodes[other]].any(-1).all()
    for state, tokens, pattern in zip(states, begun, patterns, strict=True):
        fresh = after(grammar, tokens, pattern)
        for token in (None, *drafts[0]):
            if token is not None:
                if token not in allowed(fresh):
                    break
                state.advance(token)
                fresh.advance(token)
            assert np.array_equal(state.mask(), fresh.mask())


# 2. Engine behaviour and its consequences


def test_a_stop_token_after_the_match_removes_nothing():
    matcher = engine(toy(), "(ab)*c")
    assert matcher.consume_tokens([AB, C]) and matcher.is_stopped()
    assert matcher.consume_token(END) and matcher.rollback(1)  # the engine removed C, not the stop token
    assert bare_mask(matcher, toy().size) == [A, AB, C]

    for threads in (1, 2):
        grammar = regex(toy(), "(ab)*c", threads=threads)
        states = [after(grammar, [AB]), after(grammar, [])]
        shape = forest(
            (Shape(1, np.array([0, 1, 1, 2, 0])), chain(4))
        )  # C, (end, end), end; next to it AB; C end end A
        token = np.array([C, END, END, END, AB, C, END, END, A])
        row_masks = grammar.masks(states, shape, token)
        assert same(row_masks, by_fresh_matchers(grammar, [[AB], []], shape, token))
        assert row_masks.legal.tolist() == [True] * 10 + [False]
        assert unpack(row_masks.bits[6], toy().size).nonzero()[0].tolist() == [A, AB, C]
        assert allowed(states[0]).tolist() == [A, AB, C]


def test_after_the_end_of_a_text_only_stop_tokens_are_allowed():
    state = after(regex(toy(), "(ab)*"), [AB])
    assert allowed(state).tolist() == [END, A, AB]
    for _ in range(3):
        state.advance(END)
        assert allowed(state).tolist() == [END]


def test_an_engine_s_error_is_raised_rather_than_ending_the_text():
    matcher = engine(toy(), "(ab)*c")
    assert not matcher.consume_token(ONE)
    assert bare_mask(matcher, toy().size) == [END]

    state = regex(toy(), "(ab)*c").start(request(name="seven"))
    for wrong in (lambda: state.advance(ONE), state.mask, state.mask):
        with pytest.raises(ConstraintError, match="request 'seven': "):
            wrong()


def test_forced_tokens_are_canonical_and_other_spellings_illegal():
    matcher = engine(toy(), "abc")
    assert bare_mask(matcher, toy().size) == [AB] and matcher.validate_tokens([A, B]) == 2

    shape = forest((chain(3), chain(3), chain(2)))
    for threads in (1, 2):
        grammar = regex(toy(), "(1|2)abc", threads=threads)
        states = [after(grammar, []), after(grammar, []), after(grammar, [TWO])]
        row_masks = grammar.masks(states, shape, np.array([ONE, AB, C, ONE, A, B, A, B]))
        assert row_masks.legal.tolist() == [True] * 7 + [False] * 4
        assert not row_masks.bits[7:].any() and row_masks.forced[2:7].all()


def test_a_matcher_that_cannot_roll_back_is_in_error_afterwards():
    matcher = LLMatcher(toy().engine, LLMatcher.grammar_from_lark(NO_ROLLBACK), log_level=0)
    assert matcher.consume_token(ONE) and not matcher.rollback(1)
    assert "rollback not supported" in matcher.get_error()


def test_the_engine_writes_past_the_rows_it_is_given_and_leaves_some_unwritten():
    rows = np.zeros((4, width(toy().size)), dtype=np.int32)
    fill_next_token_bitmask_par_with_draft_tokens(LLExecutor(1), [(engine(toy(), "[abc]*"), 1, [A, B])], rows[:2])
    assert rows[2].any() and rows[3].any()  # rows outside of the call
    rows[:] = -1
    fill_next_token_bitmask_par_with_draft_tokens(LLExecutor(1), [(engine(toy(), "[abc]*"), 0, [A, ONE, B])], rows)
    assert (rows[:2] != -1).all() and (rows[2:] == -1).all()


def test_states_and_tokens_must_fit_the_shape():
    grammar = regex(toy(), "[abc]*")
    state, other = after(grammar, []), after(regex(bundled(), "[abc]*"), [])
    for states, token in (([state], [A, B]), ([state, state], [A]), ([state, other], [A, B])):
        with pytest.raises(AssertionError):
            grammar.masks(states, forest((chain(1), chain(1))), np.array(token))


@pytest.mark.parametrize("threads", [1, 2])
def test_empty_drafts_and_others_share_a_batch(threads):
    with pytest.raises(ValueError, match="empty"):
        fill_next_token_bitmask_par_with_draft_tokens(
            LLExecutor(1), [(engine(toy(), "a"), 0, [])], np.zeros((1, width(toy().size)), dtype=np.int32)
        )
    grammar = regex(toy(), "[abc]*", threads=threads)
    states = [after(grammar, []) for _ in range(4)]
    for lengths in ((0, 2, 0, 1), (0, 0, 0, 0)):
        shape = forest(tuple(chain(length) for length in lengths))
        token = np.array([A, AB, C][: shape.nodes], dtype=np.int64)
        row_masks = grammar.masks(states, shape, token)
        assert row_masks.legal.all() and same(row_masks, by_fresh_matchers(grammar, [[]] * 4, shape, token))


@pytest.mark.parametrize("threads", [1, 2])
def test_one_state_may_be_the_root_of_several_trees(threads):
    matcher = engine(toy(), "[abc]*")
    with pytest.raises(RuntimeError, match="borrowed"):
        fill_next_token_bitmask_par_with_draft_tokens(
            LLExecutor(1), [(matcher, 0, [A]), (matcher, 2, [B])], np.zeros((4, width(toy().size)), dtype=np.int32)
        )
    grammar = regex(toy(), "(ab)*c", threads=threads)
    state, shape, token = after(grammar, [AB]), forest((chain(2), chain(2))), np.array([AB, C, C, AB])
    row_masks = grammar.masks([state, state], shape, token)
    assert row_masks.legal.tolist() == [True] * 5 + [False]
    assert same(row_masks, by_fresh_matchers(grammar, [[AB], [AB]], shape, token))


@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_outside_the_vocabulary_are_illegal(threads):
    matcher = engine(toy(), "[abc]*")
    assert not matcher.consume_token(10**6) and "out of range" in matcher.get_error()

    grammar = regex(toy(), "[abc]*", threads=threads)
    states = [after(grammar, [A]), after(grammar, []), None]
    for foreign in (toy().size, 10**6, -1):
        shape = forest((chain(2), chain(2), chain(1)))
        row_masks = grammar.masks(states, shape, np.array([A, foreign, B, C, foreign]))
        assert row_masks.legal.tolist() == [True] * 4 + [False, True, True, False]
        with pytest.raises(ConstraintError, match=f"token {foreign} .*{toy().size}"):
            after(grammar, []).advance(foreign)
    assert [allowed(state).tolist() for state in states[:2]] == [[END, A, B, AB, C]] * 2


def test_padding_is_never_allowed():
    vocabulary = bundled(padding=5)
    assert vocabulary.size == 4101 and vocabulary.size % 32
    grammar = lark(vocabulary, "start: /(.|\\n)*/")
    shape = forest((chain(1), chain(1)))
    row_masks = grammar.masks([after(grammar, []), None], shape, np.array([4098, 4098]))
    bits = np.unpackbits(row_masks.bits.view(np.uint8), axis=-1, bitorder="little")
    assert bits.shape == (4, 4128) and bits[0, :4096].sum() > 4000 and not bits[0, 4096:].any()
    assert row_masks.legal.tolist() == [True, True, False, True] and not bits[:, 4101:].any()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_dead_end_is_an_empty_mask_and_changes_no_other_row(threads):
    grammar = regex(toy(), "(a|b)*(a[QR]|c)", threads=threads)
    dead = regex(toy(), "b(a(a[QR]|b)?|c[QR])", threads=threads)
    begun = [after(grammar, [A]), after(dead, [B]), after(dead, [B])]
    shape = forest((chain(2), Shape(1, np.array([0, 0, 2])), chain(2)))
    token = np.array([A, C, C, A, B, C, A])  # below the dead two: c, a and b under a; c and a under c
    row_masks = grammar.masks(begun, shape, token)
    assert same(
        row_masks, masks_by_forking([after(grammar, [A]), after(dead, [B]), after(dead, [B])], shape, token, toy().size)
    )
    assert np.flatnonzero(row_masks.dead_end).tolist() == [5, 8]
    assert row_masks.legal.tolist() == [True] * 9 + [False]
    for state in begun[1:]:
        assert allowed(state).tolist() == [A, AB, C]
        state.advance(A)
        assert allowed(state).tolist() == [END, A, B]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_engine_error_on_a_draft_affects_neither_the_state_nor_other_requests(threads):
    source = 'start: (s | "ab" | "a" s)+\ns: /(ab)*c/ | /a(ab)+c/'
    tight = lark(toy(), source, limits={"max_items_in_row": 1}, threads=threads)
    bad, good = tight.start(request(name="bad")), lark(toy(), source).start(request(name="good"))
    start = allowed(bad).tolist()
    for shape in (forest((chain(2), chain(2))), forest((Shape(1, np.array([0, 0])),) * 2)):
        token = np.array([AB, C, AB, C])
        for way in (tight.masks, lambda *draft: masks_by_forking(*draft, toy().size)):
            row_masks = way([good, bad], shape, token)
            assert row_masks.dead_end[shape.root == 1].any() and not row_masks.dead_end[shape.root == 0].any()
            assert row_masks.legal[:2].all() and row_masks.bits[:2].any(-1).all()
        assert allowed(bad).tolist() == start
        assert tight.masks([good], forest((chain(1),)), np.array([AB])).legal.all()
    with pytest.raises(ConstraintError, match="max is 1"):
        bad.advance(AB)


# 3. Texts


PATTERNS = [
    "a", "abc|abd", "[a-f]{3}", "[0-9]{1,3}", "(ab|cd){2}", "x*y", "[A-Z][a-z]+", "\\(\\d{3}\\) \\d{3}-\\d{4}", "é+ü?",
    "日本(語|人)", "(\\+|-)?[0-9]+(\\.[0-9]{1,2})?", "[^a-z]{2}", "a/b/c?", '"[a-z]*"', "(a|b)*abb", "\\[\\]\\{\\}",
    "[a-z]{2,5}@[a-z]{2,5}\\.(com|org)", "0x[0-9a-f]{1,4}", "(yes|no)( (yes|no)){0,2}", "a?b?c?", "[ \\t]{1,2}\\n",
    "(?i)hello", "\\\\n", "[\\-\\]]{2}",
]  # fmt: skip

SCHEMAS = [
    {"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"const": {"a": [1, "x"]}},
    {"type": "integer", "minimum": 3, "maximum": 17}, {"type": "string", "maxLength": 4},
    {"enum": ["x", "yy", 3, None]},
    {"type": "string", "pattern": "^[a-c]{2}$"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}, PERSON,
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [
        {"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["next"], "additionalProperties": False}}},
    {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}, {"type": ["null", "boolean"]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, {"type": "integer", "multipleOf": 5},
    {"type": "object", "properties": {"é\"": {"const": "\\/\n"}}, "required": ["é\""], "additionalProperties": False},
]  # fmt: skip


def walked(grammar: Grammar, rng: np.random.Generator, most: int = 120) -> str | None:
    """A text drawn from the masks with a preference for stop tokens; None if it does not end."""
    state, tokens = grammar.start(request()), []
    closing = [token for token, text in enumerate(grammar.tokens.bytes) if re.search(rb'["\]}]', text)]
    for _ in range(most):
        words = allowed(state)
        assert len(words), "nothing may come"
        if 0 in words and (len(words) == 1 or rng.random() < 0.5):
            return grammar.tokens.engine.decode_bytes(tokens).decode()
        few = np.intersect1d(words, closing)
        tokens.append(int(rng.choice(few if len(few) and rng.random() < 0.5 else words[words != 0])))
        state.advance(tokens[-1])
    return None


TEXTS = [
    "", "a", "b", "ab", "abc", "abd", "abb", "aabb", "abab", "cdab", "ac", "bc", "abf", "abg", "7", "123",
    "1234", "xxy", "y", "Word", "word", "(123) 456-7890", "é", "éü", "e", "日本語", "日本人", "日本", "-1.25", "+7",
    "1.", "AB", "1 ", "a/b/", "a/b/c", '"ab"', '"a', "[]{}", "ab@cd.com", "ab@cd.net", "0xff", "0xfffff", "yes",
    "yes no", "yes yes no no", "\t\n", "\n", "HeLLo", "hello", "\\n", "-]", "]]", "?\n",
]  # fmt: skip
VALUES = [
    None, True, False, 0, 2, 3, 4, 5, 17, 18, -5, 1.5, "", "x", "yy", "ab", "abc", "abcd", "abcde", "é", [], [True],
    [True, False], [1, 2, 3], [1, 2, 3, 4], [None, True], [None, 1], [None, True, 2], {}, {"a": 1}, {"a": "x"},
    {"a": [1, "x"]}, {"a": True}, {"b": True, "c": False}, {"a": True, "b": True, "c": True}, {"next": None},
    {"next": {"next": None}}, {"next": 1}, {"name": "n", "kind": "x"}, {"name": "n", "age": 3, "kind": None},
    {"name": "n"}, {'é"': "\\/\n"}, {'é"': "/"},
]  # fmt: skip


def compare(grammar: Grammar, rows: int = 60) -> None:
    """The masks of drafts are those of states that saw none."""
    compared = compare_masks(AppliedConstraint(grammar), [request()], rows, 0, grammar.tokens.bytes)
    assert compared.rows >= rows and compared.different == 0, compared.first


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_has_the_language_that_it_has_in_re_and_drafts_change_no_mask(pattern):
    rng, grammar = np.random.default_rng(11), regex(bundled(), pattern)
    assert [text for text in TEXTS if accepts(grammar, text)] == [text for text in TEXTS if re.fullmatch(pattern, text)]
    texts = [text for text in (walked(grammar, rng) for _ in range(3)) if text is not None]
    assert texts
    for text in texts:
        assert re.fullmatch(pattern, text), text
    compare(grammar)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_a_schema_has_the_values_that_it_has_in_jsonschema_and_drafts_change_no_mask(schema):
    rng, judge = np.random.default_rng(11), jsonschema.Draft202012Validator(schema)
    valid = [value for value in VALUES if judge.is_valid(value)] if "format" not in schema else []
    for flexible in (False, True):
        grammar = json_schema(bundled(), json.dumps(schema), whitespace_flexible=flexible)
        spelled = {"separators": None if flexible else (",", ":"), "ensure_ascii": False}
        assert [value for value in VALUES if accepts(grammar, json.dumps(value, **spelled))] == valid
        texts = [text for text in (walked(grammar, rng) for _ in range(2)) if text is not None]
        assert texts
        for text in texts:
            judge.validate(json.loads(text))
    compare(grammar)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ('start: "a" b ("c" | "d")?\nb: "b"+  // some\n  | "x"~2..3', "a(b+|x{2,3})[cd]?"),
        ('start: DATE ("," DATE)*\nDATE: /[0-9]{2}/\n# the end', "[0-9]{2}(,[0-9]{2})*"),
        ('start: "[" [pair ("," pair){0,2}] "]{}"\npair: NAME "=" /[0-9]+/\nNAME: /[a-z]+/',
         r"\[([a-z]+=[0-9]+(,[a-z]+=[0-9]+){0,2})?\]\{\}"),
        ('start: LINE{1,2}\nLINE: WORD? (" " WORD)* "\\n"\nWORD: /[^ \\n]/', "(([^ \n])?( [^ \n])*\n){1,2}"),
    ],
)  # fmt: skip
def test_a_grammar_has_the_language_of_its_rules_and_drafts_change_no_mask(source, pattern):
    rng, grammar = np.random.default_rng(11), lark(bundled(), source)
    assert [text for text in TEXTS if accepts(grammar, text)] == [text for text in TEXTS if re.fullmatch(pattern, text)]
    texts = [text for text in (walked(grammar, rng) for _ in range(3)) if text is not None]
    assert texts
    for text in texts:
        assert re.fullmatch(pattern, text), text
    compare(grammar)


CHOICES = [
    "a|b",
    "a",
    ".*",
    "\n",
    '"',
    "\\",
    "/",
    "é",
    "e\u0301",
    "日本",
    " ",
    "${x}",
    "#[x]",
    "ab",
    "\x00",
    "^$",
    "\\n",
]


def test_choices_are_literal():
    for choices in (CHOICES, ["", "a"], [""]):
        grammar, rng = choice(bundled(), choices), np.random.default_rng(2)
        assert {walked(grammar, rng) for _ in range(4 * len(choices))} <= set(choices)
        for literal in choices:
            spelled = bundled().engine.tokenize_bytes(literal.encode())
            assert 0 in allowed(after(grammar, spelled)), literal


def test_white_space_and_separators_are_options():
    schema = '{"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}'

    def texts(**options):
        grammar = json_schema(bundled(), schema, **options)
        spelled = {}
        for text in ("[1,1]", "[1, 1]", "[ 1 , 1 ]", "[1;1]"):
            state = grammar.start(request())
            spelled[text] = state.matcher.validate_tokens(t := bundled().engine.tokenize_str(text)) == len(t)
        return [text for text, fits in spelled.items() if fits]

    assert texts() == ["[1,1]", "[1, 1]", "[ 1 , 1 ]"]
    assert texts(whitespace_flexible=False) == ["[1,1]"]
    assert texts(whitespace_flexible=False, item_separator=", ") == ["[1, 1]"]
    assert texts(whitespace_flexible=False, item_separator=";") == ["[1;1]"]


# 4. Requests


@pytest.mark.parametrize("spelling", [[AB, C], [A, B, C]])
def test_a_text_may_begin_with_the_prompt_in_any_tokenization(spelling):
    state = regex(toy(), "abcé1", prompt=True).start(request(tokens=spelling))
    assert allowed(state).tolist() == [E]
    fork = state.fork()
    fork.advance(E1)  # half of it
    assert allowed(fork).tolist() == [E2]
    assert allowed(regex(toy(), "abcé1").start(request(tokens=spelling))).tolist() == [AB]


def test_a_prompt_that_does_not_follow_is_named_with_the_place():
    grammar = regex(toy(), "abc1*", prompt=True)
    with pytest.raises(ConstraintError, match="request 'six': .*prompt .*token 2 of 4.*'abc2'"):
        grammar.start(request(tokens=[AB, C, TWO, ONE], name="six"))
    assert END in allowed(grammar.start(request(tokens=[AB, C])))


def test_a_drafted_tree_below_a_prompt_that_was_read():
    grammar = regex(toy(), "abcé1", prompt=True)
    states = [grammar.start(request(tokens=[A, B, C])), grammar.start(request(tokens=[AB, C]))]
    row_masks = grammar.masks(states, forest((chain(2), chain(2))), np.array([E, ONE, E1, E2]))
    assert row_masks.legal.tolist() == [True] * 4 + [False, False]


def test_a_request_brings_its_own_source():
    grammar = regex(toy(), "a+")
    assert allowed(grammar.start(request("[bc]"))).tolist() == [B, C]
    assert allowed(grammar.start(request())).tolist() == [A]
    assert allowed(choice(toy()).start(request('["c", "1"]'))).tolist() == [C, ONE]


def test_a_bad_source_of_one_request_names_it():
    grammar = regex(toy(), limits={"source_characters": 10})
    for source, message in {
        "(a": "request 'one': its regex: .*unclosed group",
        "": "request 'one' .*regex",
        "a" * 11: "request 'one': its regex: .*11 characters.* 10",
    }.items():
        with pytest.raises(ConstraintError, match=message):
            grammar.start(request(source))
    assert allowed(grammar.start(request("[bc]"))).tolist() == [B, C]


# 5. What does not compile


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda v: regex(v, "(a"), "regex: .*unclosed group"),
        (lambda v: regex(v, "(?=a)b"), "regex: .*look-ahead"),
        (lambda v: regex(v, "a[^\\x00-\\x{10FFFF}]"), "regex: .*vocabulary"),
        (lambda v: regex(v, "a\ud800"), "regex: character 1 .*surrogate"),
        (lambda v: regex(v, 7), "pattern .*7"),
        (lambda v: regex(v, "a" * 100_001), "100001 characters.* 100000"),
        (lambda v: regex(v, "a", prompt="no"), "prompt "),
        (lambda v: regex(v, "a", threads=0), "threads .*from 1 to 64"),
        (lambda v: regex(v, "a", threads=65), "threads .*64.* 65"),
        (lambda v: regex(v, "a", limits={"fuel": 1}), "limits .*source_characters"),
        (lambda v: regex(v, "a", limits={"step_lexer_fuel": 0}), "limits.step_lexer_fuel "),
        (lambda v: regex(v, "(ab)*", limits={"step_lexer_fuel": 1}), "regex: lexer error"),
        (lambda v: json_schema(v, '{"type": "strin"}'), "json_schema: Invalid type: strin"),
        (lambda v: json_schema(v, '{"type": "string",}'), "not JSON: .*line 1 column 19"),
        (lambda v: json_schema(v, "[]"), "JSON schema .*'\\[\\]'"),
        (lambda v: json_schema(v, '{"contains": {}}'), 'Unimplemented keys: \\["contains"\\]'),
        (lambda v: json_schema(v, '{"$ref": "http://other"}'), "http://other"),
        (lambda v: json_schema(v, '{"$ref": "#"}'), "no text"),
        (lambda v: json_schema(v, "{}", whitespace_pattern="(("), "unclosed group"),
        (lambda v: json_schema(v, "{}", path="x"), "schema .*path"),
        (lambda v: json_schema(v, path="nowhere.json"), "path=nowhere.json .*No such file"),
        (lambda v: lark(v, "start: foo"), 'lark: .*unknown name: "foo"'),
        (lambda v: lark(v, "start: start"), "no text"),
        (lambda v: lark(v, "x: x", path="x"), "grammar .*path"),
        (lambda v: choice(v, []), "choices .*list"),
        (lambda v: choice(v, ["a", "b", "a"]), "choice 'a' .*twice"),
        (lambda v: choice(v, ["a", 1]), "choice 1 "),
        (lambda v: choice(v, ["\ud800"]), "surrogate"),
        (lambda v: choice(v).start(request("a or b")), "request 'one': its choice: .*JSON"),
        (lambda v: choice(v).start(request('{"a": 1}')), "request 'one': its choice: .*list"),
        (lambda v: Grammar(v, "gbnf", "a"), "kind .*regex, json_schema, lark, choice"),
    ],
)
def test_a_source_that_does_not_compile_is_refused_with_the_reason(build, message):
    with pytest.raises(ValueError, match=message):
        build(bundled())


BEYOND = 2**53 + 1


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "#/maximum"),
        ({"type": "integer", "exclusiveMinimum": -BEYOND}, "#/exclusiveMinimum"),
        ({"type": "number", "maximum": 1e300}, "#/maximum"),
        ({"properties": {"maximum": {"type": "integer", "multipleOf": BEYOND}}}, "#/properties/maximum/multipleOf"),
        ({"anyOf": [{"type": "null"}, {"$defs": {"default": {"const": BEYOND}}}]}, "#/anyOf/1/\\$defs/default/const"),
        ({"enum": [{"a": [10**400]}]}, "#/enum"),
    ],
)
def test_numbers_that_the_engine_would_round_are_refused_with_their_place(schema, where):
    for kind in (json_schema, lambda v, source: json_schema(v).start(request(source))):
        with pytest.raises(ValueError, match=f"at {where} of the schema"):
            kind(bundled(), json.dumps(schema))


def accepts(grammar: Grammar, text: str) -> bool:
    try:
        return END in allowed(after(grammar, grammar.tokens.encode(text)))
    except ConstraintError:
        return False


def test_bounds_of_integers_are_enforced_up_to_the_largest_that_may_be_given():
    rng = np.random.default_rng(5)
    for low, high in [(-(2**53), 2**53), (2**53 - 1, 2**53), *np.sort(rng.integers(-(2**53), 2**53, (20, 2))).tolist()]:
        grammar = json_schema(bundled(), json.dumps({"type": "integer", "minimum": low, "maximum": high}))
        assert [accepts(grammar, str(number)) for number in (low - 1, low, high, high + 1)] == [
            False,
            True,
            True,
            False,
        ]


def test_the_schema_true_allows_all_json_and_false_nothing():
    everything = json_schema(bundled(), "true")
    assert accepts(everything, '[1, {"a": null}]') and not accepts(everything, "[1")
    with pytest.raises(ValueError, match=r"json_schema: .*false"):
        json_schema(bundled(), "false")
    with pytest.raises(ConstraintError, match="request 'one': .*false"):
        json_schema(bundled()).start(request("false"))


def test_schemas_and_grammars_come_from_files(tmp_path):
    (tmp_path / "schema.json").write_text('{"const": "é"}', encoding="utf-8")
    (tmp_path / "grammar.lark").write_text('start: "é"', encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b'{"const": "\xe9"}')
    rng = np.random.default_rng(0)
    assert json.loads(walked(json_schema(bundled(), path=str(tmp_path / "schema.json")), rng)) == "é"
    assert walked(lark(bundled(), path=str(tmp_path / "grammar.lark")), rng) == "é"
    with pytest.raises(ValueError, match=r"path=.*latin\.json .*UTF-8"):
        json_schema(bundled(), path=str(tmp_path / "latin.json"))


def deep(levels: int) -> str:
    return '{"type": "object", "properties": {"a": ' * levels + "{}" + "}}" * levels


HOSTILE = {
    "regex": ["(a|b){0,50000}", "(a|b)*a(a|b){300}", "((((a{0,999}){0,999}){0,999}){0,999}){0,999}", "(" * 49_999,
              "\\w{1000}\\p{L}{2000}", "|".join(f"w{n}" for n in range(14_000)),
              "|".join(f"w{n}" for n in range(10**5))],
    "lark": ["start: " + " | ".join(f'"{n:x}"' for n in range(10_000)), 'start: s\ns: s s s | s s | "a" | "aa"',
             'start: "a" start', 'start: (("a"{1,1000}){1,1000}){1,1000}', "start: " + "(" * 40_000],
    "json_schema": [deep(100), deep(2000), json.dumps({"enum": [f"w{n}" for n in range(8000)]}), "[" * 50_000,
                    json.dumps({"properties": {f"k{n}": {} for n in range(1500)}}),
                    json.dumps({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(8)]}),
                    json.dumps({"type": "array", "items": {"type": "array", "minItems": 99_999}, "minItems": 99_999})],
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "source"), [(k, s) for k, all_of in HOSTILE.items() for s in all_of], ids=itertools.count()
)
def test_hostile_sources_fail_soon_and_other_requests_continue(kind, source):
    grammar = Grammar(bundled(), kind)
    start, message = time.perf_counter(), "request 'one'"
    try:
        state = grammar.start(request(source))
        for token in bundled().engine.tokenize_str('["aaabbbabab'):
            words = allowed(state)
            state.advance(token if token in words else int(words[-1]))
    except ConstraintError as error:
        message = str(error)
    assert "request 'one'" in message and len(message) < 500
    assert time.perf_counter() - start < 5
    other = Grammar(bundled(), "choice").start(request('["x"]'))
    assert [bundled().bytes[token] for token in allowed(other)] == [b"x"]


# 6. Facts


def test_facts_keep_the_source_or_its_hash():
    short, long = regex(toy(), "a+").facts, regex(toy(), "a" * 1000, limits={"step_max_items": 9}).facts
    assert short["kind"] == "regex" and short["source"] == "a+" and short["limits"]["step_max_items"] == 50_000
    assert "source" not in long and len(long["source_sha256"]) == 64 and long["limits"]["step_max_items"] == 9
    assert regex(toy()).facts["source"] is None
    assert json.loads(json.dumps(short)) == short
    assert (
        regex(toy(), "a").name == "regex"
        and regex(toy(), "a").vocabulary == len(parts.TOKENS)
        and not regex(toy()).has_actions
    )
