"""The package's controllers, with and without drafts."""

import re

import pytest

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint, Event
from spec_lab.constrain.controllers import banned, candidates, choices, pattern, template
from spec_lab.constrain.load import lark, regex
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Ended, Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.tasks.certify.exact import decoded
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import Instance
from spec_lab.tasks.certify.toy_models import RandomToy
from spec_lab.verify import Token, Traversal
from tests.constrain.toys import Table, distance, uneven
from tests.propose.lab import PROMPTS, draft_model, plain_logits
from tests.tiny import VOCABULARY, tiny_model, tiny_target

COLD, WARM = Sampling(), Sampling(1.0)
WORDS = ["ab", "the ", "an", "cat", "ca", "\n\n", "x\n", "\nN", "er", "in", "on", "re", ": ", "12"]
PIECES = [chr(97 + letter).encode() for letter in range(26)] + [
    word.encode() for word in (*WORDS, *"0123456789 :\nNA.,-")
]
END = VOCABULARY - 1
PIECES += [b"\xc3", b"\xa9"] + [b""] * (END - len(PIECES) - 1)
LETTERS = Vocabulary.plain(PIECES[:VOCABULARY], END)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def play(target, constraint, proposer, sampling=COLD, new=24, seed=0, stop=frozenset({END}), fast_forward=True):
    bound = AppliedConstraint(constraint, fast_forward=fast_forward)
    wanted = [Request(number, f"p{number}", prompt, sampling, new, stop) for number, prompt in enumerate(PROMPTS)]
    group = fixed_group(Arm(target, proposer, Token(), CounterDraws(seed), bound), wanted)
    list(group)
    assert not group.errors and not target.lm.cells.references.any()
    return group


def texts(group):
    return [b"".join(LETTERS.bytes[t] for t in s.emitted).decode("utf-8", "replace") for s in group.sequences]


def results(group):
    return sorted((s.request.id, s.lineage, s.emitted, s.finish, s.kept) for s in group.sequences)


def unforced(source):
    """The engine's states of a pattern without forced tokens: every tokenization of a text is allowed."""
    return lark(LETTERS, f'%llguidance {{"no_forcing": true}}\nstart: /{source}/')


def pattern_of(inner):
    """``pattern`` over the states of a constraint."""
    return ControllerConstraint(
        lambda request: pattern.PatternController(inner.start(request), LETTERS.ends), LETTERS.size, "pattern"
    )


MADE = {
    "choices": lambda: choices.load(LETTERS, ["cat", "cab", "cat and dog", "another one", "re"]),
    "pattern": lambda: pattern_of(unforced(r"[a-n]{3,6}(: )?[0-9]+\.")),
    "candidates": lambda: candidates.load(LETTERS, 3),
    "banned": lambda: banned.load(LETTERS, ["a", "in", "\n", "er", "c"]),
    "template": lambda: template.load(
        LETTERS, ["Na: ", {"max_tokens": 6, "stop": "e"}, "\nA: ", {"max_tokens": 3}, "\n", {"max_tokens": 4}]
    ),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", MADE)
def test_greedy_output_with_drafts_is_greedy_output(target, name):
    alone = play(target, MADE[name](), Null())
    for proposer in (
        Ngram(4, 3, 1),
        NgramTree(8, 4, 3, 1),
        draft_model("2x1x1", "deterministic"),
        draft_model("1x1x1", temperature=1.0),
    ):
        assert results(play(target, MADE[name](), proposer)) == results(alone)
    assert results(play(target, MADE[name](), draft_model("2x1x1", "deterministic"), fast_forward=False)) == results(
        alone
    )


# Choices -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [frozenset({END}), frozenset()])
def test_the_output_is_one_of_the_choices(target, stop):
    wanted = ["cat", "cab", "cat and dog", "another one", "re"]
    texts_seen = set()
    for seed in range(6):
        group = play(target, choices.load(LETTERS, wanted), draft_model(), WARM, seed=seed, stop=stop)
        assert {s.finish for s in group.sequences} <= {"constraint", "stop"}
        texts_seen |= set(texts(group))
    assert texts_seen <= set(wanted) and len(texts_seen) > 1


def test_tokens_without_an_alternative_are_forced():
    controller = choices.ChoicesController([(1, 2, 3, 4), (1, 2, 5), (6, 7)], (9,))
    assert controller.step(Event()) == [Branch(allow={1, 6}, ff=((1, 2), (6, 7)))]
    assert controller.fork().step(Event(0, 0, (6, 7))) == []
    assert controller.step(Event(0, 0, (1, 2))) == [Branch(allow={3, 5}, ff=((3, 4), (5,)))]


def test_a_stop_token_distinguishes_a_choice_from_a_longer_one():
    controller = choices.ChoicesController([(1,), (1, 2, 3)], (9,))
    assert controller.step(Event()) == [Branch(allow=None, ff=((1,),))]
    assert controller.step(Event(0, 0, (1,))) == [Branch(allow={2, 9}, ff=((2, 3),))]
    assert controller.fork().step(Event(0, 0, (9,))) == [] == controller.step(Event(0, 0, (2, 3)))


# Pattern -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constraint_of", [regex, lambda _, source: unforced(source)], ids=["forced", "unforced"])
@pytest.mark.parametrize("proposer", [Null(), Ngram(4, 3, 1), draft_model()], ids=["alone", "ngram", "drafted"])
def test_the_output_matches_the_pattern_as_its_own_constraint_has_it(target, constraint_of, proposer):
    source = r"[a-n]{3,6}(: )?[0-9]{1,2}\."
    group = play(target, pattern_of(constraint_of(LETTERS, source)), proposer, WARM)
    assert all(re.fullmatch(source, text) for text in texts(group))
    if proposer.name == "none":
        assert results(group) == results(play(target, constraint_of(LETTERS, source), proposer, WARM))


def test_a_state_wrapped_in_a_controller_has_its_own_distribution():
    table = Table(uneven)
    wrapped = ControllerConstraint(lambda request: pattern.PatternController(table.start(request)), 4, "wrapped")
    of = {"tree": "1x1", "tokens": 3, "toy": RandomToy(8, support=2)}
    wanted = truth(Instance(**of, applied=AppliedConstraint(table)))
    assert distance(decoded(Instance(**of, applied=AppliedConstraint(wrapped)), "iid", Traversal()), wanted) < 1e-12


def test_where_the_request_does_not_stop_the_controller_ends_with_the_text(target):
    group = play(target, pattern.load(LETTERS, "cat"), Null(), stop=frozenset())
    assert texts(group) == ["cat"] * 3 and {s.finish for s in group.sequences} == {"constraint"}


# Candidates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", [Null(), draft_model("2x1", "without_replacement")], ids=["alone", "drafted"])
def test_the_likeliest_of_several_different_texts_is_kept(target, proposer):
    group = play(target, candidates.load(LETTERS, 4), proposer, WARM, new=8)
    model = tiny_model()
    for number, prompt in enumerate(PROMPTS):
        sequences = [s for s in group.sequences if s.request.id == number]
        assert len({tuple(s.emitted) for s in sequences}) == 4
        totals = []
        for sequence in sequences:
            rows = [
                plain_logits(model, [*prompt, *sequence.emitted[:n]]).log_softmax(-1)
                for n in range(len(sequence.emitted))
            ]
            by_hand = [float(row[token]) for row, token in zip(rows, sequence.emitted, strict=True)]
            assert sequence.logprobs == pytest.approx(by_hand, abs=1e-9)
            totals.append(sum(by_hand))
        assert [s.kept for s in sequences] == [total == max(totals) for total in totals]


def test_the_mean_is_another_score_and_a_failed_text_is_never_kept():
    ended = [
        Ended((), (1, 2), (-1.0, -1.0), "stop"),
        Ended((0, 1), (1, 2, 3), (-0.7, -0.7, -0.7), "length"),
        Ended((0, 2), (), (), "stuck"),
    ]
    assert candidates.likeliest(ended) == [0] and candidates.likeliest(ended, "mean") == [1]


# Banned --------------------------------------------------------------------------------------------------------------


def test_banned_strings_do_not_appear(target):
    strings = ["a", "in", "\n", "er", "c"]
    free = play(target, banned.load(LETTERS, ["no such text"]), draft_model(), WARM, new=40)
    assert any(string in text for text in texts(free) for string in strings)
    for proposer in (draft_model(), Ngram(4, 3, 1)):
        group = play(target, banned.load(LETTERS, strings), proposer, WARM, new=40)
        assert not any(string in text for text in texts(group) for string in strings)
        assert sum(s.spent - len(s.emitted) for s in group.sequences) > 0


# Template ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", [Null(), draft_model(), Ngram(4, 3, 1)], ids=["alone", "drafted", "ngram"])
def test_a_template_is_filled_in(target, proposer):
    form = template.load(
        LETTERS, ["Na: ", {"max_tokens": 5, "stop": "r"}, "\nA: ", {"max_tokens": 2}, ".", {"max_tokens": 4}]
    )
    ended_early = 0
    for seed in range(4):
        group = play(target, form, proposer, WARM, new=60, seed=seed)
        for sequence in group.sequences:
            first, rest = b"".join(LETTERS.bytes[t] for t in sequence.emitted).split(b"\nA: ", 1)
            assert first.startswith(b"Na: ") and b"r" not in first and b"." in rest
            assert sequence.finish in ("constraint", "stop") and len(sequence.emitted) < 60
            ended_early += len(first) - 4 < 5
    assert ended_early


def test_text_before_the_stop_inside_a_token_is_written_again():
    controller = template.TemplateController(
        LETTERS, (b"Na: ", (5, template.Strings(("e",))), b"\nA", (2, template.Strings(())))
    )
    tokens = {piece: token for token, piece in enumerate(LETTERS.bytes)}
    forced = controller.step(Event())
    assert forced == [Branch(allow=None, ff=(LETTERS.encode("Na: "),))]
    controller.step(Event(0, 0, tuple(forced[0].ff[0])))
    controller.step(Event(0, 0, (tokens[b"x"],)))
    (branch,) = controller.step(Event(0, 0, (tokens[b"re"],)))
    assert (branch.backtrack, branch.allow) == (1, None)
    assert b"".join(LETTERS.bytes[t] for t in branch.ff[0]) == b"r\nA"


# The bundled tokenizer ------------------------------------------------------------------------------------------------


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: choices.load(LETTERS, []), r"choices .*empty"),
        (lambda: choices.load(LETTERS, "cat"), r"choices .*list"),
        (lambda: candidates.load(LETTERS, 0), r"count .*from 1 to 64"),
        (lambda: candidates.load(LETTERS, 65), r"count .*64.* 65"),
        (lambda: candidates.load(LETTERS, by="best"), r"by .*sum, mean"),
        (lambda: banned.load(LETTERS, []), r"strings .*empty"),
        (lambda: template.load(LETTERS, ["a", {"stop": "b"}]), r"parts\[1\] "),
        (lambda: template.load(LETTERS, [{"most": 1}]), r"parts\[0\]\.most is now called parts\[0\]\.max_tokens"),
        (lambda: template.load(LETTERS, [{"max_tokens": 0}]), r"parts\[0\]\.max_tokens "),
        (lambda: template.load(LETTERS, [{"max_tokens": 1, "stop": ""}]), r"parts\[0\]\.stop "),
    ],
)
def test_invalid_options_are_refused_by_name(load, message):
    with pytest.raises(ValueError, match=message):
        load()
