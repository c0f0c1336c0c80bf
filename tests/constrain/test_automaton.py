"""The oracle engine in plain Python: it accepts what re and jsonschema accept, with llguidance's masks."""

import json
import random
import re
from functools import cache
from itertools import islice

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, regex_to_lark

from spec_lab.cli.main import zoo
from spec_lab.constrain.protocol import ConstraintError, allows, masks_by_forking, unpack, width
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.draft import chain, forest
from spec_lab.core.request import Request
from spec_lab.models.target import Target
from tests.oracles import automaton, expressions, languages
from tests.oracles.automaton import Automaton
from tests.oracles.nfa import Language

LONGER = (
    'ab abc aab ba bb the cat 12 01 123 -1 .5 e+ {" {} [] [{ ": ", },{ "} ":" null true false nul se é 日 日本 \\n '
    '\\" \\u \\u00 00 1f 😀 red green gre een'
).split()
PARTS = ["é".encode()[:1], "é".encode()[1:] + b"a", "日".encode()[:2], "日".encode()[1:], "😀".encode()[:3], b'":1,"']
TOKENS = [bytes([byte]) for byte in range(256)] + [one.encode() for one in LONGER] + PARTS + [b"  ", b"\n\n", b""]
END = len(TOKENS) - 1


@cache
def toy() -> Vocabulary:
    return Vocabulary.plain(TOKENS, END)


@cache
def bundled() -> Vocabulary:
    return Vocabulary.of(Target.load(zoo("target")))


def request(tokens=(0,), constraint="") -> Request:
    return Request(7, "seven", tuple(tokens), constraint=constraint)


def accepts(language: Language, text: str | bytes) -> bool:
    at = language.closure(frozenset([0]))
    for byte in text.encode() if isinstance(text, str) else text:
        at = language.row(at)[byte]
        if at is None:
            return False
    return language.accept in at


# llguidance's source of the same language, without forced tokens.
HEADER = '%llguidance {"no_forcing": true}\n'


def as_lark(kind: str, source) -> str:
    if kind == "regex":
        return f"{HEADER}start: /{regex_to_lark(source, '')}/"
    if kind == "choice":
        return HEADER + "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in source)
    if kind == "json_schema":
        return f"{HEADER}start: %json {json.dumps(source | {'x-guidance': {'whitespace_flexible': False}})}"
    return HEADER + source


def matcher(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    found = LLMatcher(vocabulary.engine, grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def walk(vocabulary: Vocabulary, kind: str, source, walks: int, steps: int, seed: str) -> int:
    """Compare all masks along random walks; returns their number."""
    constraint = Automaton(kind, source, vocabulary)
    theirs = matcher(vocabulary, as_lark(kind, source))
    positions, choose = 0, random.Random(seed)
    for _ in range(walks):
        state, other = constraint.start(request()), theirs.deep_copy()
        path = b""
        for _ in range(steps):
            mask = np.frombuffer(other.compute_bitmask(), dtype=np.uint32)[: width(vocabulary.size)]
            assert not other.is_error(), other.get_error()
            mine = state.mask()
            if not np.array_equal(mine, mask):
                ours, them = (set(np.flatnonzero(unpack(one, vocabulary.size)).tolist()) for one in (mine, mask))
                named = {token: vocabulary.bytes[token] for token in ours ^ them}
                pytest.fail(f"after {path!r} only ours: {ours - them}, only llguidance's: {them - ours}; {named}")
            positions += 1
            allowed = np.flatnonzero(unpack(mine, vocabulary.size)).tolist()
            going = [token for token in allowed if token not in vocabulary.ends]
            if not going or (len(going) < len(allowed) and choose.random() < 0.1):
                break
            # half of the time short tokens, which stay in the narrow parts of the language
            token = min(choose.sample(going, min(2, len(going))), key=lambda one: len(vocabulary.bytes[one]))
            state.advance(token)
            assert other.consume_token(token)
            path += vocabulary.bytes[token]
    return positions


REGEXES = [
    "abc",
    "a*b+c?",
    "(a|b)*abb",
    "(?:ab|abc|b){2,3}",
    "[a-c]{2,}x?",
    "[^a-y]*z",
    ".*",
    ".+\\n.{1,3}",
    "\\d{1,3}(?:\\.\\d{1,3}){3}",
    "\\d{4}-\\d{2}-\\d{2}",
    "-?(?:0|[1-9][0-9]*)(?:\\.[0-9]+)?",
    "\\s*the\\s+cat\\s*",
    "\\S+(?: \\S+)*",
    "[\\D]{3}",
    "é*日本?",
    "[é-日]{1,3}😀?",
    "[^\\x00-\\x7f]+",
    "\\x41\\u00e9\\U0001F600*",
    '"(?:[^"\\\\\\x00-\\x1f]|\\\\.)*"',
    "(?:(?:a|)b){0,4}|",
    "(a*)*b(?:c{0}d)+",
    "[]a-]+[\\]\\^.$]?",
    "^(?:yes|no)$|maybe",
    "(?:[01]{8} )*[01]{8}",
    "[A-Za-z_][0-9A-Za-z_]*\\([^()]*\\)",
    "a/b\\/c",
]
CHOICES = [
    ["a"],
    ["yes", "no", "maybe"],
    ["ab", "abc", "b", "aab"],
    ["é", "日本", "日", "😀"],
    ["", "cat"],
    ['"', "\n"],
]


def thing(required=None, **properties) -> dict:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TEXT, INTEGER, NUMBER, NULL = ({"type": one} for one in ("string", "integer", "number", "null"))
SCHEMAS = [
    TEXT,
    INTEGER,
    NUMBER,
    {"type": ["boolean", "null"]},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "minLength": 2},
    {"type": "string", "pattern": "^[a-c]+\\d{2}$"},
    {"type": "string", "pattern": "b."},
    {"type": "string", "pattern": '^[\\s"\\\\]|-\\W{2}$'},
    {"type": "string", "enum": ["red", "green", 'a"b\\', "line\nend\t\x1f\x7f", "é/"]},
    {"enum": [1, -2.5, 0, True, None, "x", [1, "a\n"], {"k": [], "l": {}}, 2.0, 0.001]},
    {"type": "array", "items": INTEGER},
    {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}, "minItems": 2},
    {"type": "array", "items": NULL, "maxItems": 0},
    thing(),
    thing(name=TEXT, age=INTEGER),
    thing([], a=INTEGER, b=NULL, c=TEXT),
    thing(["b"], a=INTEGER, b=NUMBER, c={"type": "boolean"}, d=NULL),
    thing(["c"], a=INTEGER, b=NUMBER, c=NULL),
    thing(who=thing(["first"], first=TEXT, last=TEXT), tags={"type": "array", "items": {"enum": ["red", "green"]}}),
    thing(**{'é"\n': NULL, "a/b": NULL}),
    {"anyOf": [INTEGER, NUMBER, {"const": 12}, thing(x=NULL)]},
    {"$defs": {"point": thing(x=NUMBER, y=NUMBER)}, "type": "array", "items": {"$ref": "#/$defs/point"}, "title": "t"},
]
GRAMMARS = [
    'start: "a" b ("c" | "de")\nb: "b"+  // some\n  | "x"~2..3',
    "start: DATE (\",\" DATE)*\nDATE: /[0-9]{4}-[0-9]{2}/\n# the end",
    'start: "{" [pair ("," pair){0,2}] "}"\npair: NAME "=" value\nvalue: NAME | /[0-9]+/\nNAME: /[a-z]+/',
    'start: LINE{2}\nLINE: WORD (" " WORD)* "\\n"\nWORD: /[^ \\n]+/',
]  # fmt: skip
KINDS = {"regex": REGEXES, "choice": CHOICES, "json_schema": SCHEMAS, "lark": GRAMMARS}
CASES = [pytest.param(kind, source, id=f"{kind}-{n}") for kind, own in KINDS.items() for n, source in enumerate(own)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "source"), CASES)
def test_masks_are_llguidances_on_a_toy_vocabulary(kind, source):
    assert walk(toy(), kind, source, 16, 16, "toy") >= 16


@pytest.mark.parametrize(("kind", "source"), CASES)
@pytest.mark.one_in(36)
def test_masks_are_llguidances_on_the_bundled_vocabulary(kind, source):
    assert walk(bundled(), kind, source, 8, 12, "bundled") >= 8


@pytest.mark.parametrize("pattern", ["abc", "\\d{4}-\\d{2}", '"(?:red|green)": the cat'])
def test_a_token_that_llguidance_forces_is_allowed(pattern):
    vocabulary, forced = bundled(), 0
    other = matcher(vocabulary, LLMatcher.grammar_from_regex(pattern))
    state, choose = automaton.regex(vocabulary, pattern).start(request()), random.Random(0)
    while not other.is_stopped():
        mask = np.frombuffer(other.compute_bitmask(), dtype=np.uint32)[: width(vocabulary.size)]
        theirs = np.flatnonzero(unpack(mask, vocabulary.size)).tolist()
        assert np.array_equal(state.mask() & mask, mask)
        forced += len(theirs) == 1
        token = choose.choice(theirs)
        state.advance(token)
        other.consume_token(token)
    assert state.ended or state.mask().any()
    assert forced


def test_a_text_may_be_read_in_any_way_where_llguidance_reads_greedily():
    grammar = 'start: /a*/ "ab"'
    other = matcher(toy(), LLMatcher.grammar_from_lark(grammar))
    assert accepts(languages.lark(grammar), "aab")
    assert other.try_consume_tokens(list(b"aab")) == 2


LETTERS = "abé\n"
ATOMS = st.sampled_from(["a", "b", "é", ".", "\\n", "[ab]", "[^a]", "[^é\\n]", "[a-é]", "\\x61"])


def patterns():
    def larger(inner):
        grouped = inner.map("(?:{})".format)
        repeat = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}"])
        return st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join).map("({})".format),
            st.lists(inner, min_size=2, max_size=3).map("|".join).map("(?:{})".format),
            st.tuples(grouped, repeat).map("".join),
            grouped.map("({}|)".format),
        )

    return st.recursive(ATOMS, larger, max_leaves=6)


@given(patterns(), st.lists(st.text(LETTERS, max_size=6), max_size=12))
@settings(max_examples=200)
def test_a_pattern_accepts_what_python_matches(pattern, texts):
    language = languages.regex(pattern)
    for one in texts:
        assert accepts(language, one) == (re.fullmatch(pattern, one) is not None)


@pytest.mark.nightly
@given(st.data(), patterns())
@settings(max_examples=60)
def test_a_pattern_accepts_what_is_made_from_it(data, pattern):
    found = data.draw(st.from_regex(pattern, fullmatch=True))
    assume(not any(0xD800 <= ord(letter) < 0xE000 for letter in found))
    assert accepts(languages.regex(pattern), found)


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_a_range_of_characters_is_exactly_their_utf8(one, other, third):
    low, middle, high = sorted([one, other, third])
    assume(not any(0xD800 <= code < 0xE000 for code in (low, middle, high)))
    language = languages.regex(f"[\\U{low:08x}-\\U{high:08x}]")
    for code in {low, middle, high, low - 1, high + 1} - set(range(0xD800, 0xE000)):
        if 0 <= code <= 0x10FFFF:
            assert accepts(language, chr(code)) == (low <= code <= high)
    assert not accepts(language, b"\xff")
    assert not accepts(language, b"\xed\xa0\x80"), "a surrogate"
    assert not accepts(language, b"\xc1\x81"), "a spelling that is too long"


@pytest.mark.parametrize("escape", ["\\d", "\\s"])
def test_escapes_hold_llguidances_characters(escape):
    language = languages.regex(escape)
    other = matcher(toy(), as_lark("regex", escape))
    probes = {0, 0x1C, 0x1F, 0x85, 0xB2, 0x2160, 0x1D7CE, 0x10FFFF}
    for low, high in expressions.DIGIT + expressions.SPACE:
        probes |= {low - 1, low, high, high + 1}
    for code in probes:
        data = chr(code).encode()
        assert accepts(language, data) == (other.validate_tokens([*data, END]) == len(data) + 1), hex(code)


NUMBERS = st.one_of(st.integers(-20, 20), st.sampled_from([0.5, -2.5, 0.001, 1e-7, 1e-300]))
STRINGS = st.text('abred/ é"\\\n\x01', max_size=4) | st.sampled_from(["red", "x", "ab", "abc12"])
LEAVES = [st.none(), st.booleans(), NUMBERS, STRINGS]
VALUES = st.recursive(
    st.one_of(LEAVES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcdx"), inner, max_size=3),
    max_leaves=6,
)
NULLABLE = {
    "anyOf": [{"$ref": "#/$defs/few"}, NULL],
    "$defs": {"few": {"type": "array", "items": NUMBER, "maxItems": 2}},
}
IN_ORDER = [one for one in SCHEMAS if list(one.get("properties", "")) == sorted(one.get("properties", ""))] + [NULLABLE]


@given(VALUES)
@settings(max_examples=150)
def test_a_schema_accepts_what_jsonschema_accepts(value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    for schema, language in known_schemas():
        assert accepts(language, text) == jsonschema.Draft202012Validator(schema).is_valid(value), schema


@cache
def known_schemas():
    return [(schema, languages.json_schema(schema)) for schema in IN_ORDER]


PLAIN = [one for one in SCHEMAS if "\\W" not in one.get("pattern", "")]  # ASCII's in JSON Schema, Unicode's in Python


@pytest.mark.parametrize("schema", PLAIN, ids=range(len(PLAIN)))
@pytest.mark.one_in(3)
def test_jsonschema_accepts_what_a_schema_accepts(schema):
    language, choose = languages.json_schema(json.dumps(schema)), random.Random(0)
    for _ in range(20):
        at, data = language.closure(frozenset([0])), bytearray()
        while language.accept not in at or (choose.random() < 0.5 and any(language.row(at))):
            row = language.row(at)
            data.append(choose.choice([byte for byte in range(256) if row[byte] is not None]))
            at = row[data[-1]]
        value = json.loads(data.decode())
        assert jsonschema.Draft202012Validator(schema).is_valid(value), data.decode()


@pytest.mark.parametrize(("kind", "source"), CASES)
def test_there_are_no_dead_ends(kind, source):
    reader = Automaton(kind, source, toy()).reader
    row = reader.language.row
    known, order = {reader.start}, [reader.start]
    for at in islice(order, 150):  # which grows during the loop
        assert reader.mask(at).any()
        for to in row(at):
            if to is not None and to not in known:
                known.add(to)
                order.append(to)
    if len(order) <= 150:  # all states: from each of them a text can end
        ending = {at for at in order if reader.language.accept in at}
        while more := {at for at in order if at not in ending and any(to in ending for to in row(at))}:
            ending |= more
        assert ending == known


def test_a_text_that_cannot_be_completed_is_not_begun():
    nothing = "[^\\x00-\\U0010ffff]"
    state = automaton.regex(toy(), f"a(?:x{nothing}|by?)|c{nothing}*").start(request())
    assert named(state) == {b"a", b"ab", b"c"}
    state.advance(ord("a"))
    assert named(state) == {b"b"}


def named(state) -> set[bytes]:
    """The bytes of the allowed tokens; those of the stop token are ''."""
    return {TOKENS[token] for token in np.flatnonzero(unpack(state.mask(), len(TOKENS)))}


def test_texts_end_exactly_where_allowed_and_nothing_follows():
    state = automaton.choice(toy(), ["b", "ba"]).start(request())
    assert named(state) == {b"b", b"ba"}
    state.advance(ord("b"))
    assert named(state) == {b"a", b""}
    on = state.fork()
    on.advance(ord("a"))
    assert named(on) == {b""}
    state.advance(END)
    assert not state.mask().any()
    for token in (ord("a"), END):
        with pytest.raises(ConstraintError, match="request 'seven': token"):
            state.advance(token)
    assert state.action() is None


def test_of_the_tokens_without_bytes_only_stop_tokens_are_allowed():
    vocabulary = bundled()
    bare = {token for token, data in enumerate(vocabulary.bytes) if not data}
    assert bare >= set(vocabulary.ends)
    mask = unpack(automaton.regex(vocabulary, "(?:.|\\n)*").start(request()).mask(), 4096)
    assert set(np.flatnonzero(mask)) & bare == set(vocabulary.ends)


def test_forks_are_independent():
    state = automaton.regex(toy(), "a*b").start(request())
    before = state.mask().copy()
    other = state.fork()
    other.advance(ord("b"))
    assert np.array_equal(state.mask(), before)
    state.advance(ord("a"))
    assert named(other) == {b""}
    with pytest.raises(ValueError, match="read-only"):
        state.mask()[0] = 1


def test_masks_of_forests_are_made_by_forks():
    constraint = automaton.regex(toy(), "ab|ac")
    token = np.array([ord("a"), ord("c"), ord("a")])
    masks = masks_by_forking([constraint.start(request())], forest((chain(3),)), token, constraint.vocabulary)
    assert masks.legal.tolist() == [True, True, True, False]
    assert not masks.barrier.any()
    assert allows(masks.bits[2], END)


def test_a_prompt_can_begin_the_text():
    constraint = automaton.json_schema(toy(), json.dumps(thing(x=NULL)), prompt=True)
    state = constraint.start(request([END, *b'{"x":']))
    assert named(state) == {b"n", b"nul", b"null"}
    with pytest.raises(ConstraintError, match="request 'seven'.*prompt"):
        constraint.start(request(b"{x"))
    assert named(automaton.choice(toy(), ["b"]).start(request(b"a"))) == {b"b"}


def test_a_request_may_bring_its_own_source():
    constraint = automaton.regex(toy(), "a")
    first, second = constraint.start(request()), constraint.start(request(constraint="b|c"))
    assert (named(first), named(second)) == ({b"a"}, {b"b", b"c"})
    assert constraint.start(request(constraint="b|c")).reader is second.reader
    assert named(automaton.choice(toy(), ["a"]).start(request(constraint='["cat"]'))) == {b"c", b"cat"}
    with pytest.raises(ConstraintError, match="request 'seven'.*never closed"):
        constraint.start(request(constraint="(b"))


def test_its_facts():
    constraint = automaton.lark(toy(), 'start: "a"')
    assert (constraint.name, constraint.vocabulary, constraint.has_actions) == ("lark", len(TOKENS), False)
    assert constraint.facts == {
        "engine": "automaton", "kind": "lark", "source": 'start: "a"', "prompt": False, "automaton_states": 3,
    }  # fmt: skip


REFUSED = [
    ("regex", "a(?=b)", "character 1: look-arounds"),
    ("regex", "(?i)a", "character 0: look-arounds, flags"),
    ("regex", "(a)\\1", "character 3: the escape .1"),
    ("regex", "\\ba", "the escape .b"),
    ("regex", "\\w+", "character 0: the escape .w "),
    ("regex", "\\p{L}", "the escape .p"),
    ("regex", "a\\", "character 1: the escape"),
    ("regex", "a^b", "anchors"),
    ("regex", "(^a)", "anchors"),
    ("regex", "a$b", "anchors"),
    ("regex", "(a$)", "anchors"),
    ("regex", "a+?", "character 2: lazy"),
    ("regex", "a++", "lazy and possessive"),
    ("regex", "a{2}{3}", "lazy and possessive"),
    ("regex", "*a", "nothing to repeat"),
    ("regex", "a{,2}", "not a count"),
    ("regex", "a{2", "not a count"),
    ("regex", "a{3,2}", "at least 3 and at most 2"),
    ("regex", "(a", "never closed"),
    ("regex", "a)", "never opened"),
    ("regex", "[ab", "never closed"),
    ("regex", "[z-a]", "range"),
    ("regex", "[a-\\d]", "range"),
    ("regex", "[[:alpha:]]", "nested classes"),
    ("regex", "[a&&b]", "set operations"),
    ("regex", "\\x4", "2 hexadecimal"),
    ("regex", "\\ud800", "surrogate"),
    ("regex", "(" * 60 + ")" * 60, "deeper than 50"),
    ("regex", "[^\\x00-\\U0010ffff]", "no text"),
    ("regex", "((a{999}){999}){999}", "50000 states"),
    ("regex", "(){999999999}", "50000 states"),
    ("choice", [], "a list of one text or more"),
    ("choice", ["a", True], "a list of one text or more"),
    ("choice", "a|b", "choices.*JSON"),
    ("choice", ["\ud800"], "surrogate"),
    ("json_schema", "{", "schema .*JSON"),
    ("json_schema", True, "at #: .*object"),
    ("json_schema", {}, "needs a type"),
    ("json_schema", {"type": "integer", "minimum": 3}, "minimum "),
    ("json_schema", {"type": "object", "properties": {"a": INTEGER}}, "additionalProperties false"),
    ("json_schema", thing(["b"], a=INTEGER), "requires 'b'"),
    ("json_schema", thing(a={"type": "string", "format": "date"}), "at #/properties/a: format "),
    ("json_schema", {"type": "array"}, "give items"),
    ("json_schema", {"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 2}, "minItems is 3"),
    ("json_schema", {"type": "string", "minLength": -1}, "minLength "),
    ("json_schema", {"type": "string", "pattern": "a", "maxLength": 1}, "together"),
    ("json_schema", {"type": "string", "pattern": "a(?=b)"}, "at #: the regular expression .* look-arounds"),
    ("json_schema", {"enum": []}, "a list of one or more"),
    ("json_schema", {"type": "string", "enum": ["a", 1]}, "1 is not of type string"),
    ("json_schema", {"const": 1e-9}, "only those from"),
    ("json_schema", {"oneOf": [INTEGER]}, "needs a type"),
    ("json_schema", {"anyOf": [INTEGER], "type": "null"}, "type .*there"),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": thing([], a={"$ref": "#/$defs/a"})}}, "recursive"),
    ("json_schema", {"$ref": "other.json"}, "leads nowhere"),
    ("lark", 'start: "a" start | "b"', "recursive .start -> start"),
    ("lark", "start: x\nx: y\ny: x", "line 3: .*x -> y -> x"),
    ("lark", "start: x", "line 1: .*rule x"),
    ("lark", 'x: "a"', "no rule start"),
    ("lark", 'start: "a"\nstart: "b"', "line 2: .*rule start"),
    ("lark", '%ignore " "\nstart: "a"', "line 1: '%ignore"),
    ("lark", 'start: "a"i', "is not supported"),
    ("lark", "start: /a(?=b)/", "line 1: /a.*look-arounds"),
    ("lark", 'start: ("a"', "not closed"),
    ("lark", 'start: "a")', "was not expected"),
    ("lark", "start: *", "was not expected"),
    ("lark", 'start: "a"~3..2', "at least 3 and at most 2"),
    ("lark", 'start "a"', "'name: ...'"),
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("kind", "source", "why"), REFUSED)
def test_errors_name_the_construct_and_its_place(kind, source, why):
    with pytest.raises(ValueError, match=why):
        getattr(languages, kind)(source)


def test_sources_may_be_left_to_requests_or_stand_in_files(tmp_path):
    constraint = automaton.regex(toy())
    assert named(constraint.start(request(constraint="b"))) == {b"b"}
    with pytest.raises(ConstraintError, match="request 'seven' .*regex"):
        constraint.start(request())
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(NULL))
    assert named(automaton.json_schema(toy(), path=str(file)).start(request())) == {b"n", b"nul", b"null"}
    with pytest.raises(ValueError, match=r"constraint\.schema .*constraint\.path"):
        automaton.json_schema(toy(), "{}", path=str(file))
    with pytest.raises(ValueError, match=r"constraint\.path="):
        automaton.lark(toy(), path=str(tmp_path / "none"))


def test_options_are_checked():
    with pytest.raises(ValueError, match="whitespace_flexible .*false"):
        automaton.json_schema(toy(), NULL, whitespace_flexible=True)
    with pytest.raises(ValueError, match=r"constraint\.prompt "):
        automaton.regex(toy(), "a", prompt=1)
    with pytest.raises(ValueError, match=r"constraint\.kind .*regex, choice"):
        Automaton("peg", "a", toy())
    with pytest.raises(ValueError, match=r"constraint\.kept "):
        Automaton("regex", "a", toy(), kept=0)
    with pytest.raises(ValueError, match="3 states"):
        Automaton("regex", "abcd", toy(), states=3)


def test_a_small_state_cache_changes_no_mask():
    few, many = Automaton("regex", "[ab]*a[ab]{3}c", toy(), kept=40), automaton.regex(toy(), "[ab]*a[ab]{3}c")
    choose, state, other = random.Random(0), few.start(request()), many.start(request())
    for _ in range(60):
        assert np.array_equal(state.mask(), other.mask())
        assert len(few.reader.sets) <= 40
        token = choose.choice([t for t in np.flatnonzero(unpack(state.mask(), len(TOKENS))) if b"c" not in TOKENS[t]])
        state.advance(token)
        other.advance(token)
    assert len(many.reader.sets) > 15


def test_one_mask_that_needs_too_many_states_is_refused_by_name():
    state = Automaton("regex", "[ab]*a[ab]{3}c", toy(), kept=3).start(request())
    with pytest.raises(ConstraintError, match="request 'seven': .*3 states"):
        state.mask()
