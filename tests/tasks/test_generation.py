"""Generation as a call and on the terminal: events add up to the text, and every token has an origin."""

import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import spec_lab
from spec_lab.cli.main import quote_prompt
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.constrain.load import regex
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.probabilities import Sampling
from spec_lab.decode.prefix_cache import PrefixCache
from spec_lab.decode.sequence import ORIGINS
from spec_lab.models.target import Target
from spec_lab.tasks.generation import Dropped
from spec_lab.text.detokenizer import Finish, Rules, Text, Withdrawn, plain
from spec_lab.text.prompts import Prompt
from spec_lab.verify import Traversal
from tests.labs import Repeat
from tests.tiny import tiny_target

END = 60
PIECES = [
    *(bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz \n.,{}"), "é".encode(), b"\xc3", b"\xa9", b"a\xe2",
    b"\x82", b"\xac!", "😀".encode()[:2], "😀".encode()[2:], b"the", b" the", b"ab", b"ba", b"\n\n", b"cd", b"e\n",
    *(bytes([digit]) for digit in b"0123456789"), b"!", b"?", b";", b"",
]  # fmt: skip
VOCABULARY = Vocabulary.plain(PIECES, END)
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add"


class Bytes:
    """A tokenizer whose tokens are the first 32 pieces."""

    eos_token_id = END
    bos_token_id = None

    def encode(self, words: str) -> list[int]:
        return [PIECES.index(bytes([byte])) for byte in words.encode()]


@pytest.fixture(scope="module")
def target() -> Target:
    return replace(tiny_target(), tokenizer=Bytes())


@pytest.fixture(scope="module")
def bundled() -> Target:
    return Target.load(str(Path(spec_lab.__file__).parent / "zoo" / "target"), dtype="float32")


def decode_events(prompts, target, **options):
    """All events by prompt and branch."""
    usual = dict(proposer=Repeat(3), max_new_tokens=24, vocabulary=VOCABULARY)
    events = defaultdict(list)
    for event in spec_lab.generate(prompts, target, **usual | options):
        events[event.prompt, event.branch].append(event)
    return dict(events)


def output_of(events):
    """The text and the tokens of one branch, without what was withdrawn."""
    text, tokens = "", []
    for entry in events:
        if isinstance(entry.event, Withdrawn):
            assert text.endswith(entry.event.text)
            text = text[: len(text) - len(entry.event.text)]
            del tokens[len(tokens) - entry.event.tokens :]
        if isinstance(entry.event, Text):
            assert "".join(share.text for share in entry.shares) == entry.event.text
            text += entry.event.text
        if isinstance(entry.event, Text | Finish):
            assert tuple(token.logprob for token in entry.tokens) == entry.event.logprobs
        tokens += entry.tokens
    return text, tokens


def ids(tokens):
    return [token.id for token in tokens]


def check(events, stop=(), healed=b""):
    """Check that the branch's text is that of its tokens up to the stop; returns both."""
    text, tokens = output_of(events)
    assert text == plain(PIECES, ids(tokens), Rules(frozenset({END}), tuple(stop)), healed)
    assert {token.origin for token in tokens} <= set(ORIGINS)
    assert all(token.logprob <= 0 for token in tokens)
    assert [isinstance(entry.event, Finish) for entry in events if entry.event != Dropped()][-1]
    assert sum(isinstance(entry.event, Finish) for entry in events) == 1
    return text, tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_the_tokens_and_tokens_have_an_origin(target, temperature):
    events = decode_events(["the cat", "ababab", "a"], target, sampling=Sampling(temperature))
    assert sorted(events) == [(0, ()), (1, ()), (2, ())]
    checked = [check(entries) for entries in events.values()]
    assert all(len(tokens) == 24 or tokens[-1].id == END for _, tokens in checked)
    origins = {token.origin for _, tokens in checked for token in tokens}
    assert origins == ({"accepted", "recovered", "bonus"} if temperature == 0 else origins) and "forced" not in origins
    assert target.lm.cells.references.sum() == 0


def test_drafts_change_neither_greedy_text_nor_log_probabilities(target):
    prompts = ["the cat", "ababab", "one two"]
    drafted, alone = decode_events(prompts, target, verifier=Traversal()), decode_events(prompts, target, proposer=None)
    for key in alone:
        text, tokens = check(drafted[key])
        expected, one_by_one = check(alone[key])
        assert (text, ids(tokens)) == (expected, ids(one_by_one))
        torch.testing.assert_close(
            [token.logprob for token in tokens], [token.logprob for token in one_by_one], rtol=0, atol=1e-9
        )
        assert {token.origin for token in one_by_one} == {"bonus"}


@torch.no_grad()
def test_a_log_probability_is_that_of_the_plain_forward(target):
    _, tokens = check(decode_events("the cat", target)[0, ()])
    prompt = Bytes().encode("the cat")
    logits = target.lm.model(torch.tensor([prompt + ids(tokens)])).logits[0, len(prompt) - 1 : -1]
    rows = logits.log_softmax(-1)
    expected = [float(rows[number, token.id]) for number, token in enumerate(tokens)]
    torch.testing.assert_close([token.logprob for token in tokens], expected, rtol=0, atol=1e-6)


def test_the_next_call_takes_the_prompt_from_the_prefix_cache(target):
    prefixes, prompt = PrefixCache(1024), "once upon a time there was"
    calls = [decode_events(prompt, target, prefix_cache=cache) for cache in (None, prefixes, prefixes)]
    assert calls[0] == calls[1] == calls[2] and len(prefixes.texts) == 1
    prefixes.clear()
    assert target.lm.cells.references.sum() == 0


def test_a_stop_string_across_tokens_ends_the_text_before_it(target):
    text, tokens = check(decode_events("the cat", target)[0, ()])
    ends = [len(plain(PIECES, ids(tokens[:count]), Rules())) for count in range(len(tokens))]
    stop = text[ends[3] - 1 : ends[3] + 1]
    assert len(stop.encode()) == 2 and "�" not in stop
    entries = decode_events("the cat", target, stop_strings=(stop,))[0, ()]
    cut, fewer = check(entries, stop=(stop,))
    finish = entries[-1].event
    assert cut == text[: text.index(stop)]
    assert (finish.reason, finish.text) == ("stop_string", stop)
    assert ids(fewer) == ids(tokens)[: len(fewer)] and len(entries[-1].tokens) == finish.tokens > 0


def test_a_banned_string_is_never_streamed_and_nothing_is_withdrawn(target):
    text, _ = check(decode_events("the cat", target)[0, ()])
    ban = next(letter for letter in text if letter.isascii())
    for proposer in (None, Repeat(3)):
        entries = decode_events("the cat", target, banned_strings=(ban,), proposer=proposer)[0, ()]
        other, tokens = check(entries)
        assert ban not in other and len(tokens) == 24
        assert not any(isinstance(entry.event, Withdrawn) for entry in entries)


def test_stop_tokens_are_masked_up_to_min_new_tokens(target):
    model = target.lm.model
    keen = replace(target, tokenizer=Bytes())
    bias = torch.zeros(len(PIECES), dtype=torch.float64)
    bias[END] = 1e4
    handle = model.get_output_embeddings().register_forward_hook(lambda *now: now[2] + bias)
    try:
        assert ids(check(decode_events("the cat", keen)[0, ()])[1]) == [END]
        _, tokens = check(decode_events("the cat", keen, min_new_tokens=5)[0, ()])
    finally:
        handle.remove()
    assert len(tokens) == 6 and ids(tokens).index(END) == 5


def test_healed_bytes_are_repeated_and_not_streamed(target):
    entries = decode_events("the ca", target, token_healing=True)[0, ()]
    text, tokens = check(entries, healed=b"a")
    assert PIECES[tokens[0].id].startswith(b"a")
    assert text.encode() == b"".join(PIECES[token.id] for token in tokens)[1:] or "�" in text


def test_forced_tokens_are_marked(target):
    bound = regex(VOCABULARY, "(ab|ac)thethe[0-9]+;")
    for applied in (bound, AppliedConstraint(bound, fast_forward=False)):
        text, tokens = check(decode_events("the cat", target, constraint=applied)[0, ()])
        assert text.startswith(("abthethe", "acthethe"))
        forced = [token for token in tokens if token.origin == "forced"]
        assert len(forced) >= 2 and all(token.logprob == 0 for token in forced)


class Forking:
    """After three tokens removes two and forks; one fork removes everything and writes something else."""

    def __init__(self, step: int = 0, branch: int = 0) -> None:
        self.count, self.branch = step, branch

    def fork(self):
        return Forking(self.count, self.branch)

    def step(self, event):
        self.count += 1
        self.branch = max(self.branch, event.branch)
        if self.count == 4:
            return [Branch(2), Branch(0, None, [[0, 1]])]
        if self.count == 7 and self.branch:
            return [Branch(5, None, [[2, 3]])]
        return [Branch()]


@pytest.mark.parametrize("proposer", [None, Repeat(3)])
def test_every_fork_streams_its_whole_text(target, proposer):
    applied = AppliedConstraint(ControllerConstraint(lambda request: Forking(), len(PIECES)))
    events = decode_events(["the cat", "ababab"], target, proposer=proposer, constraint=applied, max_new_tokens=10)
    assert sorted(events) == [(0, ()), (0, (0, 1)), (1, ()), (1, (0, 1))]
    for prompt in (0, 1):
        first, other = (ids(check(events[prompt, branch])[1]) for branch in ((), (0, 1)))
        assert len(first) == len(other) == 10
        assert first[:1] == other[:1] and other[1:3] != [0, 1]
    alone = decode_events(["the cat", "ababab"], target, proposer=None, constraint=applied, max_new_tokens=10)
    assert {key: ids(output_of(entries)[1]) for key, entries in events.items()} == {
        key: ids(output_of(entries)[1]) for key, entries in alone.items()
    }
    assert target.lm.cells.references.sum() == 0


def test_the_last_event_of_a_dropped_branch_is_its_end(target):
    controlled = ControllerConstraint(lambda request: Forking(), len(PIECES), keep=lambda ended: [1])
    events = decode_events("the cat", target, constraint=controlled)
    check(events[0, ()])
    check(events[0, (0, 1)])
    assert events[0, ()][-1].event == Dropped()
    assert isinstance(events[0, (0, 1)][-1].event, Finish)


def test_an_error_ends_only_its_request_and_is_named(target):
    class Broken(Forking):
        def step(self, event):
            self.count += 1
            return [Branch(0, [])] if self.count == 4 else [Branch()]

    controlled = ControllerConstraint(lambda request: Broken() if request.id == 0 else Forking(-100), len(PIECES))
    events = decode_events(["the cat", "ababab"], target, constraint=controlled)
    finish = events[0, ()][-1]
    assert finish.event.reason == "stuck" and "request 'prompt 0', step " in finish.error
    assert len(output_of(events[0, ()])[1]) == 3
    _, tokens = check(events[1, ()])
    assert len(tokens) == 24 or tokens[-1].id == END
    assert events[1, ()][-1].error == ""


def test_closing_early_frees_every_cell(target):
    saying = spec_lab.generate(["the cat", "ab"], target, Repeat(3), vocabulary=VOCABULARY)
    next(saying)
    assert target.lm.cells.references.sum() > 0
    saying.close()
    assert target.lm.cells.references.sum() == 0


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ([], {}, "prompts "),
        (3, {}, "prompts .*Prompt.* 3"),
        (["a", 3], {}, "prompts .*Prompt.* 3"),
        ([{"role": "user"}], {}, "prompt 0: 'messages\\[0\\]'.content must be text"),
        ([{"role": "assistant", "content": "a"}], {}, "prompt 0: 'messages' must end with a message of the user"),
        ("", {}, "'prompt 0' .*no tokens"),
        ([Prompt("x", "a"), Prompt("x", "b")], {}, "same name"),
        (Prompt("x", "a", later=("b",)), {}, "checks none, and prompt 'x' has later turns or a checker"),
        (Prompt("x", "a", checker="exact", answer="b"), {}, "checks none, and prompt 'x' has later turns or a checker"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens .*from 1"),
        ("a", {"stop_strings": "x"}, "stop_strings .*list"),
        ("a" * 300, {}, "context .*256"),
        ("a", {"vocabulary": Vocabulary.plain(PIECES[:5], 4)}, "bytes .*61 tokens"),
    ],
)
def test_invalid_arguments_are_refused_at_the_call(target, prompts, options, named):
    with pytest.raises(ValueError, match=named):
        spec_lab.generate(prompts, target, **{"vocabulary": VOCABULARY} | options)


def test_messages_are_answered_as_their_text(target):
    """The tokenizer has no chat template: messages are plain text."""
    chat = [{"role": "user", "content": "the cat"}]
    more = [*chat, {"role": "assistant", "content": " sat"}, {"role": "user", "content": "on"}]
    alone, both = decode_events(chat, target), decode_events([chat, more, "the cat"], target)
    texts = [output_of(both[number, ()])[0] for number in range(3)]
    assert output_of(alone[0, ()])[0] == texts[0] == texts[2]
    assert texts[1] == output_of(decode_events("the cat sat\n\non", target)[0, ()])[0]


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, spec_lab; assert 'torch' not in sys.modules and 'generate' in spec_lab.__all__"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


# On the terminal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "def f(",
        'a "b" c',
        "x\\",
        '\\"',
        "${x}",
        "\\${x}",
        "tab\tnew\nline\\\n",
        "it's",
        "a=b, c:[1]{2}",
        " x ",
        '"',
        "42",
    ],
)
def test_a_prompt_with_special_characters_is_literal(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    value = OverridesParser.create().parse_override(quote_prompt(f"task.prompt={text}")).value()
    config = OmegaConf.create({"task": {"prompt": value}})
    assert OmegaConf.to_container(config, resolve=True)["task"]["prompt"] == text


@pytest.mark.nightly
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("options", "pattern", "same"),
    [
        (["token_healing=true"], None, {"token_healing": True}),
        (["constraint=regex", "constraint.pattern='[a-e ]{20}'"], "[a-e ]{20}", {}),
        (["stop_strings=[turn]", "banned_strings=[a]"], None, {"stop_strings": ("turn",), "banned_strings": ("a",)}),
    ],
)
def test_the_command_line_prints_the_text_and_writes_no_files(cli, tmp_path, bundled, options, pattern, same):
    few = ["target.dtype=float32", "proposer=ngram", "proposer.depth=3", "max_new_tokens=12"]
    code, printed, errors = cli("+experiment=stream", *few, f"task.prompt={PROMPT}", *options)
    assert code == 0, errors
    bound = None if pattern is None else regex(Vocabulary.of(bundled), pattern)
    alone = spec_lab.generate(PROMPT, bundled, max_new_tokens=12, constraint=bound, **same)
    assert printed == output_of(list(alone))[0] != ""
    assert errors.splitlines()[-1].split(" in ")[0].endswith(" tokens")
    assert not list(tmp_path.iterdir())


def words_tokenizer(decoder):
    """A fast tokenizer of words without an end-of-text token."""
    words = {word: number for number, word in enumerate(["<unk>", *(f"w{n}." for n in range(40)), "é", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(".", "merged_with_previous")
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")


@pytest.mark.parametrize("decoder", [decoders.Fuse(), decoders.Sequence([decoders.Fuse()])], ids=["alone", "in a row"])
def test_text_requires_no_constraint_engine(decoder):
    """llguidance supports no tokenizer whose decoder only joins tokens, nor one without an end-of-text token."""
    target = replace(tiny_target(), tokenizer=words_tokenizer(decoder))
    text, tokens = output_of(decode_events("w3.w1.", target, vocabulary=None)[0, ()])
    pieces = [b"<unk>", *(f"w{n}.".encode() for n in range(40)), "é".encode()]
    assert len(tokens) == 24 and text.encode() == b"".join((pieces + [b""] * 61)[token.id] for token in tokens)
    assert target.tokenizer.decode([token.id for token in tokens if token.id < 42]) == text
    stop = next(token.id for token in tokens if 0 < token.id < 41)
    stopped, _ = output_of(decode_events("w3.w1.", target, vocabulary=None, stop_strings=[f"w{stop - 1}."])[0, ()])
    assert stopped == text[: text.index(f"w{stop - 1}.")]
