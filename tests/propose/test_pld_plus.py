"""PLD+ against a naive twin, by hand through growth, rewinds and forks, and on a real target; what it refuses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.core.randomness import CounterDraws
from spec_lab.core.readback import Readback
from spec_lab.decode.arm import Arm
from spec_lab.decode.capacity import check_requires
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.proposer import Observation
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose.pld_plus import SCAN, PldPlus
from spec_lab.propose.trees import parse
from spec_lab.propose.union import Union
from spec_lab.runners.runner import Capabilities
from spec_lab.verify import Token, Traversal
from tests.propose.lab import COLD, WARM, decode, emitted, path_tokens, requests, steps_after_texts
from tests.tiny import VOCABULARY

# By hand -------------------------------------------------------------------------------------------------------------

H = 3
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
EDIT = st.tuples(st.integers(0, 8), TOKENS, st.integers(1, 4), st.booleans())


def hidden(text):
    """A made-up state after ``text``: along an axis, so that cosines are exact, and of a length that must not count."""
    state = torch.zeros(H)
    state[sum(text[-3:]) % H] = 1 + len(text) % 5
    return state


def naive(text, depth, state=hidden):
    """Return the text after the last token's occurrence with the most similar state before it, of equals the latest."""
    last = state(text[:-1])
    places = [n for n in range(1, len(text) - 1) if text[n] == text[-1]]
    if not places:
        return []
    best = max(places, key=lambda end: (float(torch.cosine_similarity(state(text[:end]), last, dim=0)), end))
    drafted = list(text)
    for step in range(depth):
        drafted.append(drafted[best + 1 + step])
    return drafted[len(text) :]


def sequence(proposer, text=()):
    return SimpleNamespace(tokens=list(text), state=proposer.init(None))


def compute(proposer, seq, size=99):
    """Observe all tokens but the last one, as computed in chunks of ``size``."""
    start = seq.state.end
    while start < len(seq.tokens) - 1:
        end = min(start + size, len(seq.tokens) - 1)
        states = torch.stack([hidden(seq.tokens[: n + 1]) for n in range(start, end)])
        proposer.observe([Observation(seq, start, seq.tokens[start : end + 1], states)])
        start = end


def drafted(proposer, *sequences):
    """The chain of each sequence."""
    room = [99] * len(sequences)
    draft = proposer.propose(SimpleNamespace(sequences=sequences, device="cpu", read=Readback(), room=lambda: room))
    shape = draft.shape
    return [draft.token[rows[1:] - shape.roots].tolist() for rows in shape.trees]


@given(st.lists(EDIT, min_size=1, max_size=5), st.integers(1, 6))
def test_the_draft_is_a_naive_twin_s_through_growth_rewinds_and_forks(edits, depth):
    """Each edit removes tokens and appends others, which are computed in chunks; forks are independent."""
    proposer = PldPlus(depth, 1)
    live, left = sequence(proposer), []
    for back, new, size, forks in edits:
        if forks:
            left.append(SimpleNamespace(tokens=list(live.tokens), state=proposer.fork(live.state)))
        kept = max(0, len(live.tokens) - back)
        if kept < live.state.end:
            proposer.rewind(live.state, kept)
        live.tokens[kept:] = new
        compute(proposer, live, size)
        assert drafted(proposer, live) == [naive(live.tokens, depth)]
    together = [live, *(other for other in left if len(other.tokens) > 1)]
    assert drafted(proposer, *together) == [naive(each.tokens, depth) for each in together]
    for other in left:
        other.tokens += [1, 2, 1]
        compute(proposer, other)
        assert drafted(proposer, other) == [naive(other.tokens, depth)]


def test_the_context_decides_between_occurrences():
    proposer = PldPlus(2, 1)
    text = [0, 1, 5, 7, 7, 0, 2, 5, 6, 6, 0, 1, 5]  # 5 after 0 1, and after 0 2; now after 0 1
    live = sequence(proposer, text)
    compute(proposer, live)
    assert drafted(proposer, live) == [[7, 7]]


def test_nothing_is_drafted_where_several_tokens_are_pending():
    proposer = PldPlus(2, 1)
    live = sequence(proposer, [1, 2, 1, 2, 1])
    assert drafted(proposer, live) == [[]]
    compute(proposer, live)
    assert drafted(proposer, live) == [[2, 1]]
    live.tokens += [2]
    assert drafted(proposer, live) == [[]]


def test_the_first_position_and_those_after_a_gap_have_no_known_context():
    proposer = PldPlus(1, 1)
    live = sequence(proposer, [4, 3, 4])
    compute(proposer, live)
    assert drafted(proposer, live) == [[]]
    proposer.observe([Observation(live, 5, [3, 4, 3], torch.eye(3))])
    live.tokens[:] = [9, 9, 9, 9, 9, 3, 4, 3, 3]
    assert drafted(proposer, live) == [[3]]
    proposer.rewind(live.state, 2)
    assert live.state.end == 2 and not any(live.state.places.values())


def test_no_more_than_the_most_recent_occurrences_are_compared():
    proposer = PldPlus(1, 1)
    live = sequence(proposer, [0, 1, 8] + [2, 1, 9] * SCAN + [0, 1])
    state = {0: [1.0, 0, 0], 2: [0, 1.0, 0]}
    states = torch.tensor([state.get(token, [0, 0, 1.0]) for token in live.tokens[:-1]])
    proposer.observe([Observation(live, 0, live.tokens, states)])
    assert drafted(proposer, live) == [[9]]
    live.tokens[3:6] = []
    live.state = proposer.init(None)
    proposer.observe([Observation(live, 0, live.tokens, torch.cat([states[:3], states[6:]]))])
    assert drafted(proposer, live) == [[8]]


# On a target ---------------------------------------------------------------------------------------------------------


def with_union(target, layer):
    parts = {"medusa": Medusa(Heads.random(target, 2, False), parse("2x1")), "pld": PldPlus(3, layer)}
    return Union.load(target, parts)


def states_of(target, layer):
    """The hidden states of a text, by a forward without a KV cache."""

    def state(text):
        if not text:
            return None
        with torch.no_grad():
            output = target.lm.model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        return output.hidden_states[layer][0, -1]

    return state


@pytest.mark.each_value
@pytest.mark.parametrize("layer", [1, -1])
@pytest.mark.parametrize("make", [lambda _, layer: PldPlus(3, layer), with_union], ids=["alone", "in a union"])
def test_drafts_follow_the_target_s_hidden_states(target, make, layer):
    every = [tuple(n * step % VOCABULARY for n in range(VOCABULARY)) for step in (1, 7, 25)]  # each token three times
    wanted, compared = requests(WARM, prompts=(sum(every, ()), sum(every[::-1], ()))), 0
    for number, (info, before) in enumerate(steps_after_texts(target, make(target, layer), wanted)):
        for tree, seq in enumerate(before if number else ()):
            expected = naive(seq.tokens, 3, states_of(target, layer))
            paths = [path_tokens(info.draft, row) for row in info.draft.shape.trees[tree].tolist()]
            assert expected in paths
            compared += bool(expected)
    assert compared > 20


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
def test_greedy_output_is_the_target_s_and_drafts_are_accepted(target, truth, verifier):
    group, steps = decode(target, PldPlus(4, 1), requests(), verifier)
    assert emitted(group) == truth
    assert steps[0].draft.shape.nodes == 0 and any(done.path for step in steps for done in step.committed)


@pytest.mark.parametrize("limits", [Limits(2), Limits(None, 3), Limits(3, 3, 40)], ids=["two", "chunks", "preempted"])
def test_requests_that_come_and_go_have_the_same_output(target, truth, limits):
    engine = Engine(Arm(target, PldPlus(4, 1), Token(), CounterDraws(0)), limits=limits)
    for request in requests(COLD):
        engine.add(request)
    list(engine)
    assert emitted(engine) == truth


# What is refused -----------------------------------------------------------------------------------------------------


def with_layers(target, count):
    lm = SimpleNamespace(capabilities=Capabilities(hidden_layers=count), vocabulary=9)
    return replace(target, lm=lm)


def test_the_middle_layer_is_the_default(target):
    assert PldPlus.load(with_layers(target, 6), 10).requires.hidden == (3,)
    assert PldPlus.load(with_layers(target, 6), 10, -1).facts == {"layer": -1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 7}, r"layer must be at most 6, or null for the middle layer"),
    ],
)
def test_wrong_options_are_named(target, options, message):
    with pytest.raises(ValueError, match=message):
        PldPlus.load(with_layers(target, 6), 10, **options)


@pytest.mark.parametrize("layer", [None, 3])
def test_a_target_without_hidden_states_is_refused(target, layer):
    blind = with_layers(target, 0)
    with pytest.raises(ValueError, match="'pld_plus' requires hidden state . .* no hidden states"):
        check_requires(PldPlus.load(blind, 10, layer), blind)
