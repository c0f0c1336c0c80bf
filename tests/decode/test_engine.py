"""The engine: continuous batching changes no request's tokens, and proposers observe every computed position once."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.constrain.protocol import Constraint, ConstraintState, mask_of
from spec_lab.core.draft import ComputedOnly, Draft, empty
from spec_lab.core.faults import PartError
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import chain, forest, tree
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits, fixed_group
from spec_lab.decode.proposer import Proposer, Requires
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose import Null
from spec_lab.propose.levels import RUN
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.trees import parse
from spec_lab.verify import Token, Traversal
from tests.constrain.scripted import Scripted, after, at
from tests.drafters.test_medusa import heads_of
from tests.propose.lab import COLD, WARM, cascade, draft_model, plain_logits
from tests.tiny import CONTEXT, VOCABULARY, tiny_target

PROMPTS = ((3, 14, 15, 9, 26, 5), (2, 7), (31, 41, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9), (8,), (1, 2, 3, 1, 2))
NEW = 9
SHAPE = tree(((0,), (1,), (0, 0), (1, 0)))
LAYERS = (-1, 1)


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def memo():
    """The target's likeliest tokens, and what requests get alone: the same for every test."""
    return {}


def wanted(sampling=COLD, new=NEW):
    """Requests of unequal prompts and lengths."""
    return [Request(n, f"p{n}", prompt, sampling, new + n % 3) for n, prompt in enumerate(PROMPTS)]


def room_for(requests, nodes, more):
    """A limit of the KV cache that holds the largest request, and ``more`` tokens."""
    return max(len(request.tokens) + request.max_new_tokens for request in requests) + nodes + more


def outputs(engine):
    return {
        (sequence.request.id, sequence.lineage): (sequence.emitted, sequence.finish) for sequence in engine.sequences
    }


def run(engine, requests=()):
    for request in requests:
        engine.add(request)
    steps = list(engine)
    assert not engine.arm.target.lm.cells.references.any() and not engine.has_unfinished()
    return steps


def alone(target, proposer, requests, verifier=None, applied=None):
    """The output of each request in an engine of its own."""
    texts = {}
    for request in requests:
        group = fixed_group(Arm(target, proposer, verifier or Token(), CounterDraws(0), applied), [request])
        list(group)
        texts |= outputs(group)
    return texts


# Continuous batching -------------------------------------------------------------------------------------------------

PROPOSERS = {
    "none": (lambda target: Null(), Token()),
    "ngram_tree": (lambda target: NgramTree(6, 3, 2, 1), Token()),
    "draft_chain": (lambda target: draft_model("1x1x1", "iid"), Token()),
    "draft_tree": (lambda target: draft_model("0 1 0.0 1.0", "without_replacement", 1.0), Traversal()),
    "cascade": (lambda target: cascade(Ngram(3, 2, 1), draft_model("1x1x1").lm), Token()),
    "medusa": (lambda target: Medusa(heads_of(target), parse("0 1 0.0")), Token()),
}
TIGHT = 6
LIMITS = [
    Limits(1), Limits(2), Limits(3, 1), Limits(2, 3), Limits(None, 7), Limits(None, 1), Limits(None, None, TIGHT),
    Limits(3, 3, TIGHT), Limits(2, 7, TIGHT),
]  # fmt: skip
SIMILAR = (Limits(2), Limits(None, 1), Limits(3, 3, TIGHT))


def cases():
    """All combinations except those in which Medusa at temperature 1 starts to draft elsewhere. Its draft depends on
    which positions were computed before the step, and so do the tokens that are sampled; only
    their distribution is the same.
    """
    for name in PROPOSERS:
        for kind, sampling in (("greedy", COLD), ("temperature_1", WARM)):
            for limits in LIMITS:
                if name != "medusa" or sampling == COLD or {limits.max_prefill_tokens, limits.max_kv_tokens} == {None}:
                    marks = [pytest.mark.nightly] if limits in SIMILAR else []
                    yield pytest.param(name, sampling, limits, id=f"{name}-{kind}-{called(limits)}", marks=marks)


def called(limits):
    return "-".join(map(str, vars(limits).values()))


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "sampling", "limits"), list(cases()))
def test_every_request_gets_the_tokens_that_it_gets_alone(target, memo, name, sampling, limits):
    make, verifier = PROPOSERS[name]
    proposer, requests = make(target), wanted(sampling)
    if limits.max_kv_tokens:
        limits = replace(limits, max_kv_tokens=room_for(requests, proposer.nodes, limits.max_kv_tokens))
    engine = Engine(Arm(target, proposer, verifier, CounterDraws(0)), limits=limits)
    for step in run(engine, requests):
        live = {sequence.request.id for sequence in [*step.sequences, *(sequence for sequence, _ in step.chunks)]}
        assert live and len(live) <= (limits.max_batch_size or len(requests))
        computed = sum(count for _, count in step.chunks) + sum(count for count in step.pending if count > 1)
        assert computed <= (limits.max_prefill_tokens or computed)
    if (name, sampling) not in memo:
        memo[name, sampling] = alone(target, proposer, requests, verifier)
    assert outputs(engine) == memo[name, sampling]


@pytest.mark.each_value
@pytest.mark.parametrize("prefill", [None, 2])
@pytest.mark.parametrize("name", ["ngram_tree", "draft_tree"])
def test_requests_added_while_others_decode_get_the_tokens_that_they_get_alone(target, name, prefill):
    make, verifier = PROPOSERS[name]
    proposer, requests = make(target), wanted(WARM)
    engine = Engine(Arm(target, proposer, verifier, CounterDraws(0)), limits=Limits(3, prefill))
    steps = []
    for request in requests:
        engine.add(request)
        steps += [engine.step(), engine.step()]
    steps += engine
    assert max(len({sequence.request.id for sequence in step.sequences}) for step in steps if step) > 1
    assert outputs(engine) == alone(target, proposer, requests, verifier)


@pytest.mark.parametrize("more", [0, 5, 20])
@pytest.mark.parametrize("name", ["none", "draft_chain"])
@pytest.mark.each_value
def test_the_kv_cache_never_holds_more_tokens_than_its_limit(target, monkeypatch, name, more):
    proposer, requests, used = PROPOSERS[name][0](target), wanted(new=14), []
    most, compute = room_for(requests, proposer.nodes, more), target.lm.run

    def watched(prepared):
        used.append(int((target.lm.cells.references > 0).sum()))
        return compute(prepared)

    monkeypatch.setattr(target.lm, "run", watched)
    run(Engine(Arm(target, proposer, Token(), CounterDraws(0)), limits=Limits(max_kv_tokens=most)), requests)
    assert most / 2 < max(used) <= most


class MostlyForced(ConstraintState):
    """Every 30th token is free, the first one too; all others are forced."""

    def __init__(self, length=0):
        self.length = length

    def fork(self):
        return MostlyForced(self.length)

    def advance(self, token):
        self.length += 1

    def mask(self):
        return mask_of([1] if self.length % 30 else range(VOCABULARY), VOCABULARY)


def test_forced_runs_and_rows_computed_only_stay_within_the_limit_of_the_kv_cache(target, monkeypatch):
    used, drafted, compute = [], [], target.lm.run

    def watched(prepared):
        used.append(int((target.lm.cells.references > 0).sum()))
        return compute(prepared)

    monkeypatch.setattr(target.lm, "run", watched)

    class Forcing(Constraint):
        name, vocabulary = "mostly forced", VOCABULARY

        def start(self, request):
            return MostlyForced()

    requests = wanted(new=60)
    for proposer, applied in (
        (draft_model("1x1", "deterministic"), AppliedConstraint(Forcing(), fast_forward=True)),
        (Window(), None),
    ):
        longest = max(min(len(request.tokens) + request.max_new_tokens, CONTEXT) for request in requests)
        most = longest + (0 if applied is None else RUN) + proposer.nodes
        engine = Engine(Arm(target, proposer, Token(), CounterDraws(0), applied), limits=Limits(max_kv_tokens=most))
        used.clear()
        for info in run(engine, requests):
            drafted.append(info.draft.shape.nodes - proposer.nodes * len(info.sequences))
        assert most / 2 < max(used) <= most
    assert max(drafted) > 10, "forced tokens are drafted beyond the declared nodes"


# Aborts --------------------------------------------------------------------------------------------------------------


def test_an_aborted_live_request_keeps_what_it_emitted_and_others_continue(target):
    proposer, requests = draft_model("1x1"), wanted()
    whole = alone(target, proposer, requests)
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0)), limits=Limits(3))
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()
    engine.abort(1)
    engine.abort(77)  # unknown
    list(engine)
    texts = outputs(engine)
    tokens, finish = texts.pop((1, ()))
    expected, _ = whole.pop((1, ()))
    assert finish == "aborted" and 0 < len(tokens) < len(expected) and tokens == expected[: len(tokens)]
    assert texts == whole and not engine.errors
    engine.abort(0)
    assert outputs(engine)[0, ()] == whole[0, ()], "a request that has ended is left as it is"
    assert not target.lm.cells.references.any() and not proposer.lm.cells.references.any()


def test_an_aborted_preempted_request_ends_like_a_live_one(target):
    """Also with the last event of its text."""
    requests, pieces = wanted(new=14), [bytes([97 + n % 26]) for n in range(VOCABULARY)]
    most = room_for(requests, 0, 2)
    engine = Engine(
        Arm(target, Null(), Token(), CounterDraws(0), pieces=pieces), listen=True, limits=Limits(max_kv_tokens=most)
    )
    for request in requests:
        engine.add(request)
    while not (
        preempted := [
            sequence for sequence in engine.sequences if sequence.finish is None and sequence not in engine.live
        ]
    ):
        engine.step()
    (sequence,) = preempted[:1]
    engine.abort(sequence.request.id)
    assert sequence.finish == "aborted" and sequence.stream.finished
    list(engine)
    whole = alone(target, Null(), requests)
    for key, (tokens, finish) in outputs(engine).items():
        assert tokens == whole[key][0][: len(tokens)] and (finish == "aborted") is (key[0] == sequence.request.id)


def test_the_constraint_of_an_aborted_request_chooses_among_its_sequences_also_where_all_are_preempted(target):
    asked = []

    def keep(ended):
        asked.append([(sequence.lineage, sequence.finish) for sequence in ended])
        return [1]

    forks = after(2, [Branch(), Branch()])
    constraint = ControllerConstraint(lambda request: Scripted(forks), VOCABULARY, keep=keep)
    requests = [Request(n, f"p{n}", PROMPTS[n], COLD, 12) for n in range(2)]
    limits = Limits(max_kv_tokens=room_for(requests, 0, 6))
    engine = Engine(Arm(target, Null(), Token(), CounterDraws(0), AppliedConstraint(constraint)), limits=limits)
    for request in requests:
        engine.add(request)

    def own():
        return [sequence for sequence in engine.sequences if sequence.request.id == 1]

    while not (len(own()) == 2 and not any(sequence in engine.live or sequence.finish for sequence in own())):
        engine.step()
    engine.abort(1)
    assert asked == [[((), "aborted"), ((0, 1), "aborted")]]
    assert [sequence.kept for sequence in own()] == [False, True]
    list(engine)
    assert len(asked) == 2 and not target.lm.cells.references.any()


# Refusals ------------------------------------------------------------------------------------------------------------


def test_sampling_that_the_proposer_cannot_draft_for_is_refused_when_the_request_is_added(target):
    engine = Engine(Arm(target, draft_model("2x1", "iid"), Token(), CounterDraws(0)))
    with pytest.raises(ValueError, match=r"request 'p1': proposer 'draft_model': .*proposer.drawn=deterministic"):
        engine.add(wanted(COLD)[1])
    assert not engine.has_unfinished()
    run(engine, wanted(WARM)[1:2])
    assert len(engine.sequences[0].emitted) == NEW + 1


def test_a_request_that_the_kv_cache_can_never_hold_is_refused_by_name(target):
    proposer = draft_model("1x1")
    needed = len(PROMPTS[0]) + NEW + proposer.nodes
    for most in (needed - 1, needed):
        engine = Engine(Arm(target, proposer, Token(), CounterDraws(0)), limits=Limits(max_kv_tokens=most))
        if most < needed:
            with pytest.raises(ValueError, match=rf"request 'p0' .* {needed} tokens .*max_kv_tokens is {most}\b"):
                engine.add(wanted()[0])
            assert not engine.has_unfinished()
        else:
            run(engine, wanted()[:1])
            assert len(engine.sequences[0].emitted) == NEW


@pytest.mark.parametrize("failing", ["init", "propose", "observe"])
def test_a_proposer_that_fails_is_named_and_everything_is_freed(target, failing):
    class Failing(Guess):
        def __init__(self, target):
            super().__init__(target)
            setattr(self, failing, self.fail)
            self.left = 2

        def fail(self, *arguments):
            self.left -= 1
            if not self.left:
                raise RuntimeError("it broke")
            return getattr(Guess, failing)(self, *arguments)

    proposer = Failing(target)
    engine = fixed_group(Arm(target, proposer, Token(), CounterDraws(0)), wanted())
    with pytest.raises(ValueError, match="proposer 'guess' raised RuntimeError: it broke"):
        list(engine)
    assert not target.lm.cells.references.any() and not engine.has_unfinished()
    assert proposer.made == proposer.log.count("c")


class Counts(Proposer):
    """Drafts nothing and counts its open states; one call of one method fails."""

    name, drawn, nodes = "counts", "deterministic", 0

    def __init__(self, failing, at):
        self.failing, self.left, self.opened, self.closed = failing, at, [], []

    def call(self, method):
        self.left -= method == self.failing
        if method == self.failing and self.left == 0:
            raise RuntimeError("it broke")

    def open(self):
        self.opened.append(object())
        return self.opened[-1]

    def init(self, request):
        return self.open()

    def propose(self, batch):
        return empty(len(batch.sequences))

    def fork(self, state):
        self.call("fork")
        return self.open()

    def rewind(self, state, length):
        self.call("rewind")

    def close(self, state):
        self.closed.append(state)
        self.call("close")


def decode(engine):
    """To the end, without the iterator's own ``close``."""
    while engine.has_unfinished():
        engine.step()


@pytest.mark.parametrize("limits", [Limits(), Limits(2), Limits(None, 4)], ids=called)
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize(("failing", "at"), [("fork", 1), ("fork", 3), ("fork", 4), ("rewind", 1), ("rewind", 2),
                                             ("close", 1), ("close", 3), ("close", 5)])  # fmt: skip
@pytest.mark.each_value
def test_whatever_call_of_a_proposer_fails_every_state_is_closed_once_and_no_cell_is_held(
    target, failing, at, start, limits
):
    forks = after(start, [Branch(0), Branch(min(start, 1)), Branch(min(start, 1))])
    if start == 0 and failing == "rewind":
        forks = after(3, [Branch(2), Branch(1)])
    applied = AppliedConstraint(ControllerConstraint(lambda request: Scripted(forks), VOCABULARY, "scripted"))
    proposer = Counts(failing, at)
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0), applied), limits=limits)
    for request in wanted():
        engine.add(request)
    with pytest.raises(PartError, match="proposer 'counts' raised RuntimeError: it broke"):
        decode(engine)
    assert len(proposer.closed) == len(proposer.opened) and set(proposer.closed) == set(proposer.opened)
    assert not target.lm.cells.references.any() and not any(target.lm.cells._users)
    assert not engine.has_unfinished()


# Observations of a proposer ------------------------------------------------------------------------------------------


class Seen:
    """Observations of one sequence's state: a token and a hidden state for each position from 0."""

    def __init__(self, tokens=(), hidden=()):
        self.tokens, self.hidden, self.closed = list(tokens), list(hidden), False


class Guess(Proposer):
    """Drafts the target's likeliest tokens, some of them wrong; checks everything that it observes."""

    name = "guess"
    drawn = "deterministic"
    nodes = SHAPE.nodes

    def __init__(self, target, requires=None, known=None):
        self.target, self.log, self.made, self.longest = target, "", 0, 0
        self.known = {} if known is None else known
        self.requires = Requires(hidden=LAYERS) if requires is None else requires
        self.accepted, self.rewound = 0, []

    def likeliest(self, text):
        if tuple(text) not in self.known:
            self.known[tuple(text)] = int(plain_logits(self.target.lm.model, text).argmax())
        return self.known[tuple(text)]

    def init(self, request):
        self.log += "i"
        self.made += 1
        return Seen()

    def propose(self, batch):
        self.log += "p"
        tokens = []
        for sequence in batch.sequences:
            length = len(sequence.kv)
            assert sequence.state.tokens == sequence.tokens[:length] and not sequence.state.closed
            noise = np.random.default_rng(sequence.tokens)
            right = self.likeliest(sequence.tokens)
            children = [right, (right + 1 + int(noise.integers(VOCABULARY - 1))) % VOCABULARY]
            if noise.random() < 0.4:
                children.reverse()
            tokens += children
            for child in children:
                below = self.likeliest([*sequence.tokens, child])
                tokens.append(below if noise.random() < 0.7 else int(noise.integers(VOCABULARY)))
        return Draft(forest((SHAPE,) * len(batch.sequences)), torch.tensor(tokens, dtype=torch.long))

    def observe(self, observed):
        self.log += "o"
        self.rewound.clear()
        assert len({id(observation.sequence) for observation in observed}) == len(observed)
        for observation in observed:
            state, end = observation.sequence.state, len(observation.sequence.kv)
            count = end - observation.start
            assert observation.start == len(state.tokens) and count > 0
            assert list(observation.tokens) == observation.sequence.tokens[observation.start : end + 1]
            state.tokens += observation.tokens[:count]
            if self.requires.hidden:
                assert len(observation.hidden) == count
                state.hidden += observation.hidden.clone()
            self.accepted += len(observation.accepted)
            self.longest = max(self.longest, count)

    def fork(self, state):
        self.log += "f"
        assert not any(state is rewound for rewound in self.rewound), "forks come before the rewinds of the same step"
        self.made += 1
        return Seen(state.tokens, state.hidden)

    def rewind(self, state, length):
        self.log += "r"
        self.rewound.append(state)
        assert length < len(state.tokens)
        self.check_observed(state)
        del state.tokens[length:], state.hidden[length:]

    def close(self, state):
        self.log += "c"
        assert not state.closed
        state.closed = True
        self.check_observed(state)

    def check_observed(self, state):
        """The observed hidden states are those of a plain forward over the observed tokens."""
        if not state.tokens or not self.requires.hidden:
            return
        with torch.inference_mode():
            output = self.target.lm.model(
                input_ids=torch.tensor([state.tokens]), output_hidden_states=True, use_cache=False
            ).hidden_states
        expected = torch.cat([output[layer][0] for layer in LAYERS], -1)
        torch.testing.assert_close(torch.stack(state.hidden), expected, rtol=0, atol=1e-10)

    def finished(self):
        """Every state was closed once, and the calls came in order."""
        assert self.made == self.log.count("c")
        assert re.fullmatch(r"(i|c|(p?o(f*r*)*))*", self.log)


def removed_then_forks(events):
    """Tokens are removed, one is forced in their place, and the sequence forks, all in one step."""
    if events[-1].backtrack:
        return [Branch(), Branch()]
    return after(4, [Branch(3, None, ((5,),))])(events)


SCRIPTS = {
    "none": None,
    "removed tokens": after(3, [Branch(2)]),
    "forks": after(2, [Branch(), Branch(1), Branch()]),
    "forks of the prompt": at(0, [Branch(), Branch()]),
    "removed and forced": after(4, [Branch(3, None, ((5, 6, 7, 8),))]),
    "removed, forced and forks": removed_then_forks,
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    "limits",
    [Limits(), Limits(2, 1), Limits(None, 3), Limits(3, 4, TIGHT), Limits(None, None, TIGHT)],
    ids=called,
)
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["greedy", "temperature_1"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_committed_position_is_observed_once_with_its_hidden_state(target, memo, script, sampling, limits):
    """In chunks, after backtracking, in forks and after preemptions; and no request's tokens change."""
    requests, applied = wanted(sampling), None
    if SCRIPTS[script] is not None:
        constraint = ControllerConstraint(lambda request: Scripted(SCRIPTS[script]), VOCABULARY, "scripted")
        applied = AppliedConstraint(constraint, fast_forward="forced" in script)
    if limits.max_kv_tokens:
        limits = replace(limits, max_kv_tokens=room_for(requests, SHAPE.nodes, limits.max_kv_tokens))
    proposer = Guess(target, known=memo)
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0), applied), limits=limits)
    run(engine, requests)
    assert not engine.errors
    proposer.finished()
    assert ("r" in proposer.log) is ("removed" in script or "forks" in script)
    assert ("f" in proposer.log) is ("forks" in script)
    if limits.max_kv_tokens:
        assert proposer.log.count("i") > len(requests), "something was preempted"
    if sampling == COLD:
        assert proposer.accepted > 10
    if ("observed", script, sampling) not in memo:
        memo["observed", script, sampling] = alone(target, Guess(target, known=memo), requests, applied=applied)
    assert outputs(engine) == memo["observed", script, sampling]


class Window(Proposer):
    """Has four rows computed below each root, and drafts nothing."""

    name, drawn, nodes = "window", "deterministic", 4

    def propose(self, batch):
        roots = len(batch.sequences)
        extra = ComputedOnly(np.repeat(np.arange(roots), 4), torch.zeros(4 * roots, dtype=torch.long))
        return Draft(forest((chain(0),) * roots), torch.empty(0, dtype=torch.long), computed_only=extra)


def test_cells_of_rows_that_are_computed_only_are_freed(target):
    engine = Engine(Arm(target, Window(), Token(), CounterDraws(0)))
    for request in wanted():
        engine.add(request)
    while engine.has_unfinished():
        engine.step()
        assert (target.lm.cells.references > 0).sum() == sum(len(sequence.kv) for sequence in engine.live)


@pytest.mark.parametrize("sampling", [COLD, replace(WARM, top_k=5, repetition_penalty=1.4)])
def test_required_logits_are_the_raw_ones_of_every_row(target, sampling):
    """Before masks, penalties and temperature; of the root and of all nodes, rejected ones too."""

    class Logits(Guess):
        def propose(self, batch):
            self.texts = {sequence.request.id: list(sequence.tokens) for sequence in batch.sequences}
            self.draft = super().propose(batch)
            return self.draft

        def observe(self, observed):
            for number, observation in enumerate(observed):
                text, shape = self.texts[observation.sequence.request.id], self.draft.shape
                rows = shape.trees[number].tolist()
                assert len(observation.rows) == len(rows) == len(observation.logits) == len(observation.top_k)
                for index, row in enumerate(rows):
                    path = [int(self.draft.token[node - shape.roots]) for node in shape.path(row)]
                    assert observation.rows[index] == [*text, *path][-1]
                    expected = plain_logits(self.target.lm.model, text + path)
                    torch.testing.assert_close(observation.logits[index], expected, rtol=0, atol=1e-10)
                    assert observation.top_k[index].tolist() == expected.topk(3).indices.tolist()
            super().observe(observed)

    proposer = Logits(target, Requires(logits=True, top_k=3))
    run(Engine(Arm(target, proposer, Token(), CounterDraws(0))), wanted(sampling, new=5))
    proposer.finished()


def test_a_request_whose_text_cannot_be_read_is_refused_when_it_is_added(target):
    proposer = draft_model("1x1")
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0)))
    engine.add(wanted()[0])
    with pytest.raises(ValueError, match="request 'p1' .*bytes of the tokens"):
        engine.add(replace(wanted()[1], stop_strings=("x",)))
    list(engine)
    assert outputs(engine) == alone(target, proposer, wanted()[:1])
