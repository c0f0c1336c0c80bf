"""The detokenizer: text is released once, cut at stop strings, and never contains a banned string."""

import codecs
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_lab.text.detokenizer import Finish, Held, Rewind, Rules, Stream, Text, Withdrawn, plain
from spec_lab.text.strings import Strings, Watcher

few = settings(max_examples=200, derandomize=True, deadline=None, database=None)
SIGNS = "aab\n é€😀\u0301\u200d\ufffd"
BROKEN = [b"\xff", b"\xe2", b"\xe2\x82", b"\x80", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf"]
texts = st.text(st.sampled_from(SIGNS) | st.characters(exclude_categories=["Cs"]), max_size=12)
strings = st.lists(st.text(st.sampled_from("aab\n€\ufffd"), min_size=1, max_size=4), max_size=4).map(tuple)


encoded = texts.map(str.encode)
fragments = st.lists(st.one_of(encoded, encoded, st.sampled_from(BROKEN)), max_size=4)


@st.composite
def pieces_of(draw):
    """The bytes of some text, some of it broken, cut anywhere; now and then a token without bytes."""
    data = b"".join(draw(fragments))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data) + 2)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def feed(stream, tokens):
    """Push tokens (with minus their number as log-probability) until the stream finishes; then end it."""
    events = []
    for position, token in enumerate(tokens):
        if stream.finished is None:
            events += stream.push(token, -float(position))
    if stream.finished is None:
        events += stream.end("done")
    return events


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Text))


def text_and_finish(pieces, tokens=None, healed=b"", **rules):
    events = feed(Stream(pieces, Rules(**rules), healed), range(len(pieces)) if tokens is None else tokens)
    return text_of(events), events[-1]


@few
@given(pieces_of())
def test_text_equals_decoding_all_bytes_at_once(pieces):
    assert text_and_finish(pieces) == (b"".join(pieces).decode("utf-8", "replace"), Finish("done"))


@few
@given(pieces_of(), strings, st.integers(0, 4), st.none() | st.integers(4, 9), st.sets(st.integers(0, 5), max_size=2))
@example([b"ab", b"cd"], ("abcd", "bc"), 0, None, set())
@example([b"abc", b"d"], ("abcd", "bc"), 0, None, set())
@example([b"\xe2", b"a", b"b"], ("ab",), 0, None, set())
def test_a_stream_equals_the_plain_oracle(pieces, stops, least, most, stop_tokens):
    stop_tokens = frozenset(token for token in stop_tokens if token < len(pieces))
    rules = Rules(stop_tokens, stops, (), least, most)
    stream = Stream(pieces, rules)
    events = feed(stream, range(len(pieces)))
    assert text_of(events) == stream.text == plain(pieces, range(len(pieces)), rules)
    finish = events[-1]
    given = [event for event in events if isinstance(event, Text)]
    assert all(event.tokens == len(event.logprobs) for event in [*given, finish])
    logprobs = [logprob for event in [*given, finish] for logprob in event.logprobs]
    assert logprobs == [-float(n) for n in range(len(stream.tokens))]  # every token once, in order
    assert (finish.text in stops) == (finish.reason == "stop_string")


@few
@given(pieces_of(), pieces_of(), pieces_of(), strings)
def test_released_text_never_changes(past, more, other, stops):
    pieces, rules, stream = [*past, *more, *other], Rules(stop_strings=stops), None
    begun = range(len(past))
    for future in (range(len(past), len(past) + len(more)), range(len(past) + len(more), len(pieces)), ()):
        stream = Stream(pieces, rules)
        for token in begun:
            if stream.finished is None:
                stream.push(token)
        assert plain(pieces, [*begun, *future], rules).startswith(stream.text)


@few
@given(pieces_of(), strings)
def test_only_an_unfinished_character_and_a_prefix_of_a_stop_string_are_held_back(pieces, stops):
    stream, held, decoder = (
        Stream(pieces, Rules(stop_strings=stops)),
        "",
        codecs.getincrementaldecoder("utf-8")("replace"),
    )
    text = ""
    for token, piece in enumerate(pieces):
        events, text = stream.push(token), text + decoder.decode(piece)
        held = next((event.text for event in events if isinstance(event, Held)), held)
        if stream.finished:
            break
        assert stops or (stream.text, held) == (text, "")
        assert not held or any(string.startswith(held) and string != held for string in stops)
    assert stream.finished is None or held == ""


@few
@given(pieces_of(), strings)
def test_the_cut_does_not_depend_on_the_split(pieces, stops):
    whole = b"".join(pieces)
    single = [bytes([byte]) for byte in whole]
    parts, whole_text, bytewise = (text_and_finish(p, stop_strings=stops) for p in (pieces, [whole], single))
    assert parts[0] == whole_text[0] == bytewise[0]
    assert (
        (parts[1].reason, parts[1].text)
        == (whole_text[1].reason, whole_text[1].text)
        == (bytewise[1].reason, bytewise[1].text)
    )


def test_the_events_of_a_stop_string_across_tokens():
    stream = Stream([b"Hi", b"\n", b"\nUs", b"er", b"\xe2", b"\x82\xac"], Rules(stop_strings=("\n\nUser",)))
    assert stream.push(0, -1.0) == [Text("Hi", 1, (-1.0,))]
    assert stream.push(1, -2.0) == [Held("\n")]
    assert stream.push(4, -3.0) == [Text("\n", 1, (-2.0,)), Held("")]
    assert stream.push(5, -4.0) == [Text("€", 2, (-3.0, -4.0))]
    assert stream.push(1, -5.0) == [Held("\n")]
    assert stream.push(2, -6.0) == [Held("\n\nUs")]
    assert stream.push(3, -7.0) == [Held(""), Finish("stop_string", "\n\nUser", 3, (-5.0, -6.0, -7.0))]
    assert (stream.text, stream.finished, stream.tokens) == ("Hi\n€", "stop_string", [0, 1, 4, 5, 1, 2, 3])


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "which"),
    [
        (("World", "lo"), [b"Hello World"], "Hel", "lo"),  # the first in the text, not the first listed
        (("a", "ab", "b"), [b"xab"], "x", "a"),
        (("ab", "a", "b"), [b"xb", b"a"], "x", "b"),
        (("aab",), [b"a", b"a", b"a", b"b"], "a", "aab"),
        (("abab",), [b"aba", b"bab"], "", "abab"),
        (("abcd", "bc"), [b"xab", b"c", b"d"], "x", "abcd"),  # begins first though complete later
        (("abcd", "bc"), [b"xab", b"c", b"e"], "xa", "bc"),
        (("abcd", "b", "bcx"), [b"xab", b"cx"], "xa", "b"),  # the shortest of those that begin together
        (("abcd", "bc"), [b"xab", b"c"], "xa", "bc"),  # the end came while it was held back
        (("€",), [b"\xe2", b"\x82", b"\xac"], "", "€"),
        (("stop",), [b"stop"], "", "stop"),
        (("b",), [b"\xe2\x82", b"b"], "\ufffd", "b"),
    ],
)
def test_the_text_is_cut_where_the_first_stop_string_begins(stops, pieces, text, which):
    cut, finish = text_and_finish(pieces, stop_strings=stops)
    assert (cut, finish.reason, finish.text) == (text, "stop_string", which)


def test_a_stop_string_with_the_replacement_character_matches_a_genuine_one():
    assert text_and_finish([b"a\xffb"], stop_strings=("\ufffd",)) == ("a\ufffdb", Finish("done"))
    assert text_and_finish(["a\ufffdb".encode()], stop_strings=("\ufffd",))[0] == "a"


def test_an_unfinished_character_is_released_broken_at_the_end():
    stream = Stream([b"\xf0\x9f", b"\x98"], Rules())
    assert stream.push(0, -1.0) == [] and stream.push(1, -2.0) == []
    assert stream.end("gone") == [Text("\ufffd", 2, (-1.0, -2.0)), Finish("gone")]


def test_a_stop_token_ends_the_text_and_is_no_part_of_it():
    stream = Stream([b"a", b"<end>"], Rules(frozenset({1}), ("ab",)))
    assert stream.push(0, -1.0) == [Held("a")]
    assert stream.push(1, -2.0) == [Text("a", 1, (-1.0,)), Held(""), Finish("stop", "", 1, (-2.0,))]
    assert Stream([b"", b"a"], Rules(frozenset({0}))).push(0, -3.0) == [Finish("stop", "", 1, (-3.0,))]


def test_nothing_stops_within_the_first_min_tokens():
    pieces, rules = [b"x", b"", b"ab"], Rules(frozenset({1}), ("x", "ab"), min_tokens=3)
    stream = Stream(pieces, rules)
    assert [stream.push(token, 0.0)[0] for token in (0, 1, 0)] == [
        Text("x", 1, (0.0,)),
        Text("", 1, (0.0,)),
        Text("x", 1, (0.0,)),
    ]
    other = stream.fork()
    assert other.push(2)[-1].reason == "stop_string" and stream.push(1)[-1].reason == "stop"
    assert stream.text == other.text == "xx"


def test_max_tokens_ends_the_text_and_releases_the_held_back_text():
    stream = Stream([b"a"], Rules(stop_strings=("aab",), max_tokens=2))
    assert stream.push(0, -1.0) == [Held("a")]
    assert stream.push(0, -2.0) == [Text("aa", 2, (-1.0, -2.0)), Held(""), Finish("length")]


def test_a_banned_string_is_removed_from_the_token_it_began_in():
    stream = Stream([b"xa", b"b", b"c", b"y"], Rules(banned_strings=("abc",)))
    assert stream.push(3, 0.0) == [Text("y", 1, (0.0,))]
    assert stream.push(0) == [Held("xa")]  # x is held back with its token
    assert stream.push(1) == [Held("xab")]
    assert stream.push(2) == [Rewind(3, 0), Held("")]
    assert (stream.tokens, stream.bans) == ([3], {0})
    with pytest.raises(ValueError, match="token 0 .*banned after 1 "):
        stream.push(0)
    assert stream.push(1, -1.0) == [Text("b", 1, (-1.0,))] and stream.bans == frozenset()


def test_bans_of_a_position_accumulate_and_are_forgotten_before_it():
    stream = Stream([b"a", b"b", b"c", b"d"], Rules(banned_strings=("b", "c", "da")))
    stream.push(3)
    assert stream.push(1) == [Rewind(1, 1)] and stream.push(2) == [Rewind(1, 2)]
    assert stream.bans == {1, 2}
    assert stream.push(0) == [Rewind(2, 3), Held("")]
    assert (stream.bans, stream.tokens) == ({3}, [])
    stream.push(0)
    assert stream.bans == frozenset()
    stream.rewind(1)
    assert stream.bans == {3}


@pytest.mark.parametrize(
    ("stop", "banned", "pieces", "last"),
    [
        ("abc", "b", [b"ab", b"c"], "rewind"),  # the banned one ends first
        ("b", "abc", [b"abc"], "stop"),
        ("abc", "bc", [b"a", b"bc"], "stop"),  # both at once
        ("bc", "abc", [b"abc"], "stop"),
    ],
)
def test_the_first_complete_of_a_stop_and_a_banned_string_decides(stop, banned, pieces, last):
    stream, events = Stream(pieces, Rules(stop_strings=(stop,), banned_strings=(banned,))), []
    for token in range(len(pieces)):
        if not any(isinstance(event, Rewind) for event in events):
            events += stream.push(token)
    assert any(isinstance(event, Rewind) for event in events) == (last == "rewind")
    assert (stream.finished == "stop_string") == (last == "stop")


def test_a_complete_stop_string_that_waits_is_not_undone_by_a_banned_one():
    assert text_and_finish([b"xab", b"c", b"e"], stop_strings=("abcd", "bc"), banned_strings=("ce",))[0] == "xa"
    assert text_and_finish([b"xabcde"], stop_strings=("abcde", "bc"), banned_strings=("cd",))[0] == "x"
    stream = Stream([b"xabc"], Rules(stop_strings=("abcd", "bc"), banned_strings=("ce",)))
    assert stream.push(0) == [Text("x", 0, ()), Held("abc")]


VOCABULARY = [b"a", b"b", b"ab", b"ba", b"\xe2", b"\x82", b"\xac", "€a".encode(), b"", b"c", b"<end>"]
bans = st.lists(st.text(st.sampled_from("ab€"), min_size=1, max_size=3), min_size=1, max_size=3).map(tuple)


@few
@given(bans, strings, st.integers(0, 2**32))
def test_a_driver_that_rewinds_never_shows_a_banned_string(banned, stops, seed):
    wish, tokens, events = random.Random(seed), [], []
    rules = Rules(frozenset({10}), stops, banned, max_tokens=25)
    stream = Stream(VOCABULARY, rules)
    for _ in range(60):
        free = [token for token in range(len(VOCABULARY)) if token not in stream.bans]
        if not free or stream.finished:
            break
        tokens.append(wish.choice(free))
        events += (new := stream.push(tokens[-1]))
        if isinstance(new[0] if new else None, Rewind):
            assert tokens[-new[0].tokens] == new[0].ban and new[0].ban in stream.bans
            del tokens[-new[0].tokens :]
        assert stream.tokens == tokens
    if stream.finished is None:
        events += stream.end("done")
    assert not any(isinstance(event, Withdrawn) for event in events)
    assert text_of(events) == stream.text == plain(VOCABULARY, tokens, rules)
    assert not any(string in stream.text for string in banned)


@few
@given(bans, st.lists(st.integers(0, 9), max_size=20), st.integers(0, 3))
def test_a_watcher_finds_the_first_complete_string_and_its_first_token(banned, tokens, taken):
    watcher, kept = Watcher(VOCABULARY, Strings(banned)), []
    for token in tokens:
        kept.append(token)
        match = watcher.push(token)
        data = b"".join(VOCABULARY[token] for token in kept)
        ends = [end for end in range(len(data) + 1) if data[:end].endswith(tuple(s.encode() for s in banned))]
        assert (match is None) == (not ends)
        if match is not None:
            assert match.end == ends[0]
            shortest = min((s for s in banned if data[: ends[0]].endswith(s.encode())), key=lambda s: len(s.encode()))
            assert match.text == shortest
            begin = ends[0] - len(shortest.encode())
            before = len(b"".join(VOCABULARY[token] for token in kept[: -match.tokens]))
            assert before <= begin < before + len(VOCABULARY[match.ban]) and kept[-match.tokens] == match.ban
            del kept[-match.tokens :]
            watcher.rewind(match.tokens)
        elif taken and len(kept) > 4:
            del kept[-taken:]
            watcher.rewind(taken)
        fork = watcher.fork()
        fork.push(0)
        assert watcher.position.count == len(kept) == fork.position.count - 1


@few
@given(
    strings,
    bans,
    st.lists(st.tuples(st.sampled_from("ppppprf"), st.integers(0, 9)), max_size=30),
    st.sampled_from([b"", b"a", "€".encode()]),
)
def test_after_rewinds_and_forks_a_stream_is_as_if_only_the_kept_tokens_had_come(stops, banned, steps, healed):
    rules, pieces = Rules(frozenset({8}), stops, banned), VOCABULARY
    stream, other, shown, completed = Stream(pieces, rules, healed), None, "", 0

    def replay(stream):
        fresh = Stream(pieces, rules, healed)
        for token in stream.tokens:
            fresh.push(token)
        return fresh

    for what, value in steps:
        if stream.finished is not None:
            break
        if what == "p":
            done = len(b"".join(pieces[token] for token in stream.tokens))
            left = healed[done:]
            if value in stream.bans or not (left.startswith(pieces[value]) or pieces[value].startswith(left)):
                with pytest.raises(ValueError, match="banned after|healed bytes"):
                    stream.push(value)
                continue
            events = stream.push(value)
        elif what == "r":
            events = stream.rewind(min(value, len(stream.tokens)))
        else:
            events, other, seen = [], stream.fork(), stream.text
            other.end("other")
            assert stream.text == seen and stream.finished is None
        for event in events:
            if isinstance(event, Text):
                shown, completed = shown + event.text, completed + event.tokens
            if isinstance(event, Withdrawn):
                assert shown.endswith(event.text)
                shown, completed = shown[: len(shown) - len(event.text)], completed - event.tokens
        assert shown == stream.text == replay(stream).text
    if stream.finished is None:
        fresh = replay(stream)
        events = stream.end("done")
        assert events == fresh.end("done")
        completed += sum(event.tokens for event in events if isinstance(event, Text))
        assert completed == len(stream.tokens) - events[-1].tokens
        assert stream.text == fresh.text == plain(pieces, stream.tokens, rules, healed)


def test_forks_are_independent():
    stream = Stream([b"a", b"b", b"c"], Rules(stop_strings=("abb",), banned_strings=("ac",)))
    stream.push(0)
    stream.push(1)
    first, two = stream.fork(), stream.fork()
    assert first.push(1)[-1] == Finish("stop_string", "abb", 3, (math.nan,) * 3)
    two.rewind(1)
    assert two.push(2)[0] == Rewind(2, 0)
    assert (first.text, two.text, stream.text) == ("", "", "")
    assert (two.bans, stream.bans, stream.finished, stream.tokens) == ({0}, frozenset(), None, [0, 1])
    stream.push(2)
    assert stream.text == "abc" and two.tokens == []


@few
@given(pieces_of(), strings, st.integers(0, 6))
def test_healed_bytes_are_repeated_and_dropped(pieces, stops, size):
    healed = b"".join(pieces)[:size]
    rules = Rules(stop_strings=stops)
    stream = Stream(pieces, rules, healed)
    events = feed(stream, range(len(pieces)))
    after = b"".join(pieces)[len(healed) :]
    assert text_of(events) == plain([after], [0], rules) == plain(pieces, range(len(pieces)), rules, healed)


def test_healing_drops_the_repeated_bytes_and_refuses_others():
    stream = Stream([b"he", b"llo", b"lp", b"x"], Rules(stop_strings=("hello",)), b"hel")
    assert stream.push(0, -1.0) == [Text("", 1, (-1.0,))]
    with pytest.raises(ValueError, match=r"token 3 b'x' after 1 .*b'l'"):
        stream.push(3)
    assert stream.push(1, -2.0) == [Text("lo", 1, (-2.0,))]


def test_a_banned_string_in_the_healing_token_removes_it():
    stream = Stream([b"a", b"ab", b"c"], Rules(banned_strings=("b",)), b"a")
    assert stream.push(1) == [Rewind(1, 1)]
    stream.push(0)
    stream.push(2)
    assert stream.text == "c"


@pytest.mark.parametrize("token", [-1, 2])
def test_a_token_that_does_not_exist_is_refused(token):
    for refused in (Stream([b"a", b"b"], Rules()).push, lambda stop: Stream([b"a", b"b"], Rules(frozenset({stop})))):
        with pytest.raises(ValueError, match="2 pieces"):
            refused(token)


@pytest.mark.parametrize("count", [2, -1])
def test_more_tokens_than_received_cannot_be_removed(count):
    stream = Stream([b"a"], Rules())
    stream.push(0)
    with pytest.raises(ValueError, match=f"{count} tokens of 1"):
        stream.rewind(count)
    assert stream.text == "a"


def test_a_finished_stream_refuses_further_tokens():
    stream = Stream([b"a"], Rules())
    stream.end("done")
    for action in (
        lambda: stream.push(0),
        lambda: stream.rewind(0),
        lambda: stream.end("again"),
    ):
        with pytest.raises(ValueError, match=r"finished \(done\)"):
            action()


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"stop_strings": ("a", "")}, r"stop_strings\[1\] .*empty"),
        ({"banned_strings": ("",)}, r"banned_strings\[0\] .*empty"),
        ({"stop_strings": "ab"}, "stop_strings .*list"),
        ({"stop_strings": ("\ud800",)}, "surrogate"),
        ({"stop_strings": ("a",) * 257}, "maximum .*256"),
        ({"stop_strings": ("€" * 1366,)}, "4098 bytes.* 4096"),
        ({"banned_strings": ("a" * 4096,) * 17}, "maximum .*65536"),
        ({"min_tokens": -1}, "0 or more"),
        ({"max_tokens": 0}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "max_tokens"),
    ],
)
def test_invalid_rules_are_refused_by_name(rules, why):
    with pytest.raises(ValueError, match=why):
        Rules(**rules)


def test_long_streams_read_each_byte_once(monkeypatch):
    rules, step, nodes = Rules(stop_strings=("a" * 40 + "c", "bb")), Strings.step, []
    assert rules.stops.strings == rules.stop_strings  # built before steps are counted
    monkeypatch.setattr(Strings, "step", lambda self, node, byte: nodes.append(node) or step(self, node, byte))
    stream = Stream([b"a", b"ab"], rules)
    for n in range(3000):
        stream.push(int(n % 50 == 49))
    assert len(nodes) == 3060 and len(stream.text) == 3059
