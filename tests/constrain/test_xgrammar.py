"""xgrammar behind the same interface: masks equal those of plain states, the same languages, errors with the cause."""

import json
import random
import re
import sys

import jsonschema
import numpy as np
import pytest

from spec_lab.constrain import load
from spec_lab.constrain.engines import grammar
from spec_lab.constrain.protocol import ConstraintError, mask_of, masks_by_forking, unpack, width
from spec_lab.core.shape import Shape, chain, forest
from tests.constrain import parts
from tests.constrain.parts import TOKENS, after, allowed, bundled, drafted, request, same, toy, wood

A, B, AB, C, ONE, END = parts.A, parts.B, parts.AB, parts.C, parts.ONE, parts.END

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["x", "yy", 3, None]}},
    "required": ["name", "kind"],
}
SOURCES = {
    "toy regex": lambda engine: engine.regex(toy(), "((a|b)*c(é|1)?)+"),
    "toy that ends at once": lambda engine: engine.regex(toy(), "(ab)?c"),
    "toy with dead ends": lambda engine: engine.regex(toy(), "(a|b)*(aQ|bR|c)"),
    "toy of everything": lambda engine: engine.regex(toy(), "[^Q]*"),
    "toy schema": lambda engine: engine.json_schema(toy(), '{"type": "array", "items": {"enum": [1, true]}}'),
    "regex": lambda engine: engine.regex(bundled(), "[a-z]+ [0-9]{2,4}(é|ü|日本)?"),
    "schema": lambda engine: engine.json_schema(bundled(), PERSON),
    "choice": lambda engine: engine.choice(bundled(), ["apple", "apply", 'b"/\\n', "éa", "applesauce"]),
    "schema and padding": lambda engine: engine.json_schema(bundled(padding=7), PERSON),
}


@pytest.fixture
def engine():
    pytest.importorskip("xgrammar")
    from spec_lab.constrain.engines import xgrammar

    return xgrammar


def walk(constraint, choose: random.Random, most: int) -> bytes | None:
    """A random text under the masks; None if it has not ended soon enough."""
    state, text = constraint.start(request()), b""
    for n in range(most):
        words = allowed(state).tolist()
        short = sorted(words, key=lambda token: (len(constraint.tokens.bytes[token]), token))
        token = choose.choice(short[:6] if n > most // 2 else words)
        state.advance(token)
        if token in constraint.tokens.ends:
            return text
        text += constraint.tokens.bytes[token]
    return None


def accepts(constraint, text: str) -> bool:
    """Whether a state accepts a text and its end, byte by byte or in longer tokens."""
    state, data, spelt = constraint.start(request()), text.encode(), constraint.tokens.bytes
    while data:
        fits = [token for token in allowed(state) if spelt[token] and data.startswith(spelt[token])]
        if not fits:
            return False
        token = max(fits, key=lambda token: len(spelt[token]))
        state.advance(int(token))
        data = data[len(spelt[token]) :]
    return bool(set(allowed(state)) & set(constraint.tokens.ends))


# 1. Masks


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_masks_of_forests_are_those_of_forks_and_of_fresh_matchers(engine, make):
    constraint, rng = make(engine), np.random.default_rng(5)
    below = 0
    for _ in range(20):
        roots = int(rng.integers(1, 4))
        states = [None if rng.random() < 0.2 else constraint.start(request()) for _ in range(roots)]
        begun: list[list[int]] = [[] for _ in states]
        for state, tokens in zip(states, begun, strict=True):
            for _ in range(int(rng.integers(0, 6))):
                words = [] if state is None else allowed(state)
                if len(words):
                    tokens.append(int(rng.choice(words)))
                    state.advance(tokens[-1])
        shape = wood(rng, roots, 10)
        token = drafted(states, shape, rng, constraint.vocabulary)
        row_masks = constraint.masks(states, shape, token)
        assert same(row_masks, masks_by_forking(states, shape, token, constraint.vocabulary))
        for row in np.flatnonzero(row_masks.legal).tolist():
            if states[shape.root[row]] is not None:
                path = [int(token[node - roots]) for node in shape.path(row)]
                fresh = after(constraint, [*begun[shape.root[row]], *path])
                assert np.array_equal(row_masks.bits[row], fresh.mask())
                below += row >= roots
        for state, tokens in zip(states, begun, strict=True):  # the states are not changed
            assert state is None or np.array_equal(state.fork().mask(), after(constraint, tokens).mask())
    assert below > 10


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_state_depends_on_its_path_alone(engine, make):
    constraint, choose = make(engine), random.Random(3)
    for _ in range(8):
        state, path = constraint.start(request()), []
        for _ in range(8):
            words = allowed(state).tolist()
            if not words:
                break
            other = state.fork()
            other.advance(choose.choice(words))  # no effect on the state it was forked from
            path.append(choose.choice(words))
            state.advance(path[-1])
            fresh = constraint.start(request())
            for token in path:
                fresh.advance(token)
            assert np.array_equal(fresh.mask(), state.mask())


def test_tokens_beyond_the_vocabulary_are_illegal_in_drafts(engine):
    constraint, token = engine.regex(toy(), "a*"), np.array([A, -1, 10**9, len(TOKENS), A])
    shape = Shape(2, np.array([0, 0, 1, 1, 3]))  # the last stands below an illegal one
    row_masks = constraint.masks([constraint.start(request()) for _ in range(2)], shape, token)
    assert row_masks.legal.tolist() == [True, True, True, False, False, False, False]
    assert row_masks.bits.any(-1).tolist() == row_masks.legal.tolist()


@pytest.mark.parametrize("padding", [0, 1, 31, 32, 40])
def test_padding_and_special_tokens_are_never_allowed(engine, padding):
    vocabulary = bundled(padding)
    empty = {token for token, data in enumerate(vocabulary.bytes) if not data}
    for pattern in ("(.|\n)*", "[^\\x00-\\x7f]*x", "a{0,3}"):
        constraint, choose = engine.regex(vocabulary, pattern), random.Random(padding)
        state = constraint.start(request())
        shape = forest((chain(1),))
        for _ in range(6):
            words = allowed(state)
            assert not set(words.tolist()) & (empty - set(vocabulary.ends))
            beyond = np.unpackbits(state.mask().view(np.uint8), bitorder="little")[vocabulary.size :]
            assert not beyond.any()
            below = constraint.masks([state], shape, np.array([words[0]])).bits
            assert not unpack(below, width(vocabulary.size) * 32)[:, vocabulary.size :].any()
            token = choose.choice([token for token in words.tolist() if token not in vocabulary.ends] or [0])
            state.advance(token)
            if token in vocabulary.ends:
                break


def test_a_complete_text_allows_only_stop_tokens_and_nothing_after_them(engine):
    state = engine.regex(toy(), "ab").start(request())
    state.advance(AB)
    assert np.array_equal(state.mask(), mask_of([END], len(TOKENS)))
    state.advance(END)
    assert state.ended and not state.mask().any() and not state.fork().mask().any()
    with pytest.raises(ConstraintError, match="request 'one': token 1 "):
        state.advance(A)


def test_a_token_that_the_mask_forbids_is_refused_by_name_and_changes_nothing(engine):
    state = engine.regex(toy(), "a+b").start(request(name="two"))
    state.advance(A)
    before = state.fork().mask()
    for token in (C, END, -1, len(TOKENS), 10**6):
        with pytest.raises(ConstraintError, match=f"request 'two': token {token} "):
            state.advance(token)
    assert np.array_equal(state.fork().mask(), before)
    assert state.action() is None


# 2. Languages

REGEXES = [
    "abc", "a*b+c?", "(a|b)*abb", "(?:ab|abc|b){2,3}", "[a-c]{2,}x?", "[^a-y]*z", ".*", ".+\\n.{1,3}", "\\d{1,3}a",
    "-?(?:0|[1-9][0-9]*)", "a.c", "[0-9-]+", "[+\\-]1", "\\x41b|\\u00e9|\\U0001F600", "[\\x5ca]{2}",
    "[a^]+", "[^\\^]", "^ab$", "^a|b$", "(a|)b{0}c*?", "a\\.b\\\\", "é*日本?", "[^-a]+", "[^a-]+", '"[^"]*"',
    "\\S+ \\W",
]  # fmt: skip
TEXTS = ["", "a", "b", "c", "ab", "abc", "abb", "aabb", "bb", "bbb", "abab", "z", "xz", "az", "a\nb", "\n", "\nz", "x"]
TEXTS += [
    "1",
    "-1",
    "0",
    "01",
    "12a",
    "1234a",
    "a-c",
    "a.c",
    "a\nc",
    "+1",
    "\\1",
    "Ab",
    "é",
    "😀",
    "\\a",
    "a\\",
    "^",
    "^a",
]
TEXTS += [
    "a.b\\",
    "aéb",
    "日本",
    "éé日",
    "-",
    "]x",
    "^x",
    "]",
    '"a"',
    '""',
    '"',
    "ac",
    "acc",
    "bx",
    "aax",
    "w-_",
    "a %",
]
BYTES = toy().__class__.plain([bytes([byte]) for byte in range(256)] + [b"ab", "é".encode(), b"\n\n", b"-1", b""], 260)


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_has_the_same_language_as_in_re_and_llguidance(engine, pattern):
    ours, theirs = engine.regex(BYTES, pattern), grammar.regex(BYTES, pattern)
    matches = {text for text in TEXTS if re.fullmatch(pattern, text)}
    assert {text for text in TEXTS if accepts(ours, text)} == matches
    assert {text for text in TEXTS if accepts(theirs, text)} == matches


@pytest.mark.parametrize("pattern", [".", "[^a]", "[^-a]", "\\D", "\\W", "\\S"])
def test_negated_characters_exclude_halves_of_surrogate_pairs(engine, pattern):
    after_ed = after(engine.regex(BYTES, pattern), [0xED])
    assert set(allowed(after_ed)) == set(range(0x80, 0xA0))  # U+D000 to U+D7FF


SCHEMAS = [
    PERSON,
    {"type": ["integer", "null"]},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "string", "enum": ["red", 'a"b\\', "é\n"]},
    {"type": "string", "pattern": "^[a-c]+\\d{2}$"},
    {"anyOf": [{"const": 12}, {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}]},
    {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}, "$ref": "#/$defs/t"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
@pytest.mark.parametrize("flexible", [False, True])
def test_texts_written_under_the_mask_fit_the_schema(engine, schema, flexible):
    constraint = engine.json_schema(bundled(), schema, whitespace_flexible=flexible)
    choose = random.Random(json.dumps(schema))
    texts = [text for text in (walk(constraint, choose, 60) for _ in range(15)) if text is not None]
    assert texts
    for text in texts:
        value = json.loads(text.decode("utf-8", "surrogatepass"))  # halves of pairs: the engine treats them as text
        jsonschema.validate(value, schema)


def test_strict_schemas_admit_named_properties_only(engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    strict, loose = engine.json_schema(BYTES, schema), engine.json_schema(BYTES, schema, strict=False)
    assert accepts(strict, '{"a": 1}') and accepts(loose, '{"a": 1}')
    assert not accepts(strict, '{"a": 1, "b": 2}') and accepts(loose, '{"a": 1, "b": 2}')
    assert not accepts(engine.json_schema(BYTES, schema, whitespace_flexible=False), '{"a": 1}')


# 3. Sources


def test_a_request_overrides_the_source_and_is_needed_where_there_is_none(engine):
    constraint = engine.regex(toy(), "a+")
    assert set(allowed(constraint.start(request()))) == {A}
    assert set(allowed(constraint.start(request(constraint="b")))) == {B}
    for bare in (engine.regex(toy()), engine.choice(toy()), engine.json_schema(toy())):
        with pytest.raises(ConstraintError, match=f"request 'one' .*{bare.kind}"):
            bare.start(request())
    assert set(allowed(engine.choice(toy()).start(request(constraint='["c", "1"]')))) == {C, ONE}


def test_the_text_may_begin_with_the_prompt_in_any_tokenization(engine):
    constraint = engine.regex(toy(), "abab", prompt=True)
    for prompt in ([AB], [A, B], [END, AB]):  # a token without bytes is ignored
        assert set(allowed(constraint.start(request(tokens=prompt)))) == {A, AB}
    with pytest.raises(ConstraintError, match="request 'two': .*'abb'"):
        constraint.start(request(tokens=[AB, B], name="two"))
    assert set(allowed(engine.regex(toy(), "abab").start(request(tokens=[AB, B])))) == {A, AB}


def test_a_source_is_compiled_once(engine):
    constraint = engine.regex(toy(), "(a|b)+")
    size = constraint._compiler.get_cache_size_bytes()
    for _ in range(3):
        constraint.start(request())
        constraint.start(request(constraint="(a|b)+"))
    assert constraint._compiler.get_cache_size_bytes() == size > 0
    constraint.start(request(constraint="a{3}"))
    assert constraint._compiler.get_cache_size_bytes() > size


def test_facts_name_the_engine_its_version_and_the_source(engine):
    facts = engine.regex(toy(), "a+").facts
    assert (facts["engine"], facts["kind"], facts["source"]) == ("xgrammar", "regex", "a+")
    assert re.fullmatch(r"0\.2\.\d+.*", facts["version"])
    long = engine.regex(toy(), "a+" + "b" * 200).facts
    assert "source" not in long and len(long["source_sha256"]) == 64
    assert engine.choice(toy(), ["a"]).name == "xgrammar_choice"


# 4. Errors


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{3", "a**", "(?=a)b", "(?P<n>a)", "(?i)a", "a\\b", "a^b", "a$b", "\\Aa", "a\\Z", "\\x4", "\\x{41}"]
    + ["\\p{L}", "[[:alpha:]]", "[a&&b]", "[^]a]", "[\\^a]", "[\\x5ea]", "a{99999999999999}", "[b-a]", "\ud800", "[a"],
)  # fmt: skip
def test_patterns_that_do_not_compile_or_would_be_misread_are_refused(engine, pattern):
    with pytest.raises(ValueError, match=r"^regex: .{10,}"):
        engine.regex(toy(), pattern)
    with pytest.raises(ConstraintError, match=r"^request 'one': its regex: .{10,}"):
        engine.regex(toy()).start(request(constraint=pattern))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested"),
        ("3", "Schema should be an object or bool"),
        ("false", "any value"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "minimum greater than maximum"),
        ('{"not": {}}', "misread not at #"),
        ('{"type": "array", "items": {"type": "array", "uniqueItems": true}}', "misread uniqueItems at #/items"),
        ('{"$defs": {"x": {"allOf": [{}, {}]}}}', "misread allOf at #/[$]defs/x"),
        ('{"anyOf": [{"type": "string", "maxLength": 3}]}', "misread maxLength at #/anyOf/0"),
        ('{"type": "object", "required": ["a"]}', "misread required at #"),
        ('{"type": "integer", "enum": ["a"]}', "misread type at #"),
        ('{"type": "integer", "minimum": 2, "multipleOf": 2}', "misread multipleOf at #"),
        ('{"type": "integer", "multipleOf": 2000}', "misread multipleOf at #"),
        ('{"enum": ["a", 9223372036854775808]}', "misread enum at #"),
        ('{"$ref": "http://x/y"}', "misread [$]ref at #"),
        ('{"type": "string", "pattern": "(?=a)"}', "misread '[(][?]' at character 0"),
        ('{"type": "string", "pattern": "a\\"b"}', "misread '\"' at character 1"),
        ('{"minimum": 3}', "misread minimum at #"),
        ('{"type": "string", "pattern": "a", "format": "date"}', "misread format at #"),
        ('{"type": "object", "properties": {"a": {}}, "additionalProperties": {}}', "misread additionalProperties"),
    ],
)
def test_schemas_that_do_not_compile_or_would_be_misread_are_refused(engine, schema, message):
    with pytest.raises(ValueError, match=rf"^json_schema: .*{message}"):
        engine.json_schema(toy(), schema)


def test_configs_reach_the_engine_by_its_name(engine):
    assert load.regex(toy(), "a+", engine="xgrammar").facts["engine"] == "xgrammar"
    assert load.choice(toy(), ["a"], engine="xgrammar").facts["kind"] == "choice"
    made = load.json_schema(toy(), {"const": 1}, engine="xgrammar", whitespace_flexible=False)
    assert set(allowed(made.start(request()))) == {ONE}


def test_without_the_package_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(sys.modules, "spec_lab.constrain.engines.xgrammar", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'spec-lab\[xgrammar\]'"):
        load.regex(toy(), "a", engine="xgrammar")
    assert load.regex(toy(), "a").vocabulary == len(TOKENS)  # llguidance works without it
