"""The prefix cache changes no token, keeps what it may keep, and is refused where every prompt must be computed."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.draft import Draft
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import chain, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.prefix_cache import BLOCK, PrefixCache, check_prefix_cache
from spec_lab.decode.proposer import Proposer, Requires
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose import Null
from spec_lab.propose.best_of import BestOf
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.recycling import Recycling
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.train.record import StateRecorder
from spec_lab.verify import Token, Traversal
from tests import recurrent
from tests.constrain.scripted import Scripted, after
from tests.drafters.test_early_exit import early_exit
from tests.drafters.test_medusa import heads_of
from tests.models import families
from tests.propose.lab import COLD, WARM, cascade, draft_model
from tests.tiny import VOCABULARY, tiny_model, tiny_target

COMMON = (3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 2, 3, 8, 4)
ENDS = ((6, 2), (6, 2, 6, 4), (3, 3, 8, 3), (1,), (6, 2, 6, 4, 3, 3))
NEW = 6


@pytest.fixture
def target():
    return tiny_target()


def wanted(sampling=COLD):
    """Requests that begin equally, the last two with most of another's prompt; and one that begins otherwise."""
    prompts = [COMMON + end for end in ENDS] + [(9, 9, 2)]
    return [Request(n, f"p{n}", prompt, sampling, NEW + n % 3) for n, prompt in enumerate(prompts)]


def cache(tokens=4096):
    return PrefixCache(tokens, min_tokens=1)


def decode(target, proposer, requests, verifier=None, applied=None, limits=None, prefixes=None):
    arm = Arm(target, proposer, verifier or Token(), CounterDraws(0), applied, prefix_cache=prefixes)
    engine = Engine(arm, limits=limits or Limits())
    for request in requests:
        engine.add(request)
    list(engine)
    if prefixes is not None:
        held = sum(len(kept_text.kv) for kept_text in prefixes.texts)
        assert target.lm.cells.references.sum() == held, "only kept texts hold cells"
        prefixes.clear()
    assert not target.lm.cells.references.any()
    outputs = {
        (sequence.request.id, sequence.lineage): (sequence.emitted, sequence.finish) for sequence in engine.sequences
    }
    return outputs, {sequence.request.id: sequence.reused for sequence in engine.sequences if not sequence.lineage}


PROPOSERS = {
    "none": (lambda target: Null(), Token(), COLD),
    "ngram_tree": (lambda target: NgramTree(6, 3, 2, 1), Token(), WARM),
    "recycling": (lambda target: Recycling(target.vocabulary, parse("0 1 0.0"), "request"), Token(), COLD),
    "draft_chain": (lambda target: draft_model("1x1x1", "iid"), Token(), WARM),
    "draft_tree": (lambda target: draft_model("0 1 0.0 1.0", "without_replacement", 1.0), Traversal(), WARM),
    "cascade": (lambda target: cascade(Ngram(3, 2, 1), draft_model("1x1x1").lm), Token(), WARM),
    "early_exit": (lambda target: early_exit(target, layers=1), Token(), COLD),
    "medusa": (lambda target: Medusa(heads_of(target), parse("0 1 0.0")), Token(), COLD),
}
LIMITS = {
    "one at a time": Limits(1),
    "batches": Limits(3),
    "chunks": Limits(2, 3),
    "preemption": Limits(3, 5, 50),
}


@pytest.mark.each_value
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_prefix_cache_changes_no_token(target, name, limits):
    """At a temperature above 0 where drafts do not depend on which positions were computed before the step."""
    make, verifier, sampling = PROPOSERS[name]
    requests = wanted(sampling)
    expected, _ = decode(target, make(target), requests, verifier, limits=LIMITS[limits])
    outputs, reused = decode(target, make(target), requests, verifier, limits=LIMITS[limits], prefixes=cache())
    assert outputs == expected
    assert reused[0] == 0 and sum(reused.values()) > 2 * len(COMMON)


@pytest.mark.parametrize("make", [
    partial(tiny_model, "mistral-windows"), partial(tiny_model, "llama4_text"),
    partial(families.tiny_family, "deepseek_v2-dense"), partial(families.tiny_family, "bloom"),
])  # fmt: skip
def test_nor_do_layers_with_windows_chunks_latents_and_biases(target, make):
    target = replace(target, lm=CausalLM(make()))
    expected, _ = decode(target, NgramTree(6, 3, 2, 1), wanted(), limits=Limits(2))
    outputs, reused = decode(target, NgramTree(6, 3, 2, 1), wanted(), limits=Limits(2), prefixes=cache())
    assert outputs == expected and sum(reused.values()) > 2 * len(COMMON)


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [COLD, WARM])
@pytest.mark.parametrize("acts", [0, 2])
def test_forks_get_the_same_tokens_where_their_prompt_comes_from_the_cache(target, acts, sampling):
    """Also those that are made before the first token: they wait for the step that computes the rest of the prompt."""
    constraint = ControllerConstraint(lambda request: Scripted(after(acts, [Branch(), Branch()])), VOCABULARY)
    applied = AppliedConstraint(constraint)
    both = [
        decode(target, Ngram(3, 2, 1), wanted(sampling), applied=applied, limits=Limits(2), prefixes=prefixes)
        for prefixes in (None, cache())
    ]
    assert both[0][0] == both[1][0] and len(both[0][0]) == 2 * len(wanted())
    assert sum(both[1][1].values()) > 2 * len(COMMON)


def test_the_prompt_of_a_live_request_is_reused_and_neither_changes_the_other(target):
    requests = wanted()
    engine = Engine(Arm(target, Null(), Token(), CounterDraws(0), prefix_cache=cache()))
    engine.add(requests[0])
    engine.step()
    engine.add(requests[1])
    list(engine)
    assert [sequence.reused for sequence in engine.sequences] == [0, len(COMMON) + 2]
    alone, _ = decode(tiny_target(), Null(), requests[:2])
    assert {(sequence.request.id, ()): (sequence.emitted, sequence.finish) for sequence in engine.sequences} == alone


def test_the_next_turn_of_a_chat_computes_only_what_is_new(target):
    prefixes, text, steps = cache(), COMMON, []
    for turn in range(3):
        engine = Engine(Arm(target, Null(), Token(), CounterDraws(0), prefix_cache=prefixes))
        engine.add(Request(turn, "turn", text, COLD, NEW))
        first, *_ = list(engine)
        steps.append(first.pending)
        text = (*engine.sequences[0].tokens, 5, 6, 7)
    assert steps == [[len(COMMON)], [4], [4]], "the last token of an answer was never computed"
    assert len(prefixes.texts) == 1, "a text that another begins with is not kept twice"


class Watch(Proposer):
    """Notes which positions are observed, with which tokens, and drafts nothing."""

    name, drawn, nodes = "watch", "deterministic", 1

    def __init__(self):
        self.seen = {}

    def init(self, request):
        return []

    def propose(self, batch):
        return Draft(forest((chain(1),) * len(batch.sequences)), torch.zeros(len(batch.sequences), dtype=torch.long))

    def observe(self, observed):
        for observation in observed:
            state = observation.sequence.state
            assert len(state) == observation.start
            count = len(observation.sequence.kv) - observation.start
            state += observation.tokens[:count]
            self.seen[observation.sequence.request.id] = state


def test_every_position_is_observed_once_whether_computed_or_reused(target):
    proposer, requests = Watch(), wanted()
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0), prefix_cache=cache()), limits=Limits(2, 3, 60))
    for request in requests:
        engine.add(request)
    list(engine)
    for sequence in engine.sequences:
        assert proposer.seen[sequence.request.id] == sequence.tokens[: len(proposer.seen[sequence.request.id])]
        assert len(proposer.seen[sequence.request.id]) >= len(sequence.tokens) - 1
    assert any(sequence.reused for sequence in engine.sequences)


# What is kept --------------------------------------------------------------------------------------------------------


class Runner:
    """Counts what is copied; a KV cache is its length."""

    def __init__(self):
        self.open_ones = 0

    def open(self, reserve=0):
        return Cache(self, 0)

    def open_copy(self, source, length, reserve, exact=False):
        assert len(source) >= length and source.runner is self
        return Cache(self, length)


class Cache:
    def __init__(self, runner, length):
        self.runner, self.length = runner, length
        runner.open_ones += 1

    def __len__(self):
        return self.length

    def close(self):
        self.runner.open_ones -= 1


def keep(prefixes, lm, tokens):
    kv = Cache(lm, len(tokens))
    prefixes.keep(lm, tokens, kv)
    kv.close()


def text(first, count):
    return [first] * count


def test_the_texts_that_were_not_used_for_the_longest_time_are_dropped():
    lm, prefixes = Runner(), PrefixCache(3 * BLOCK)
    for first in (1, 2, 3):
        keep(prefixes, lm, text(first, 100))
    assert len(prefixes.open(lm, [*text(1, 40), 9], 300)) == 40
    keep(prefixes, lm, text(4, 100))
    assert [kept_text.tokens[0] for kept_text in prefixes.texts] == [3, 1, 4] and prefixes.tokens == 3 * BLOCK
    keep(prefixes, lm, text(5, 2 * BLOCK))
    assert [kept_text.tokens[0] for kept_text in prefixes.texts] == [4, 5]
    keep(prefixes, lm, text(6, 9 * BLOCK))
    assert [(kept_text.tokens[0], len(kept_text.kv)) for kept_text in prefixes.texts] == [(6, 3 * BLOCK)], (
        "its beginning"
    )
    assert lm.open_ones == 2
    prefixes.clear()
    assert lm.open_ones == 1 and not prefixes.texts


def test_only_computed_tokens_are_kept_and_the_last_token_is_always_computed_anew():
    lm, prefixes = Runner(), PrefixCache(BLOCK)
    kv = Cache(lm, 30)
    prefixes.keep(lm, text(1, 33), kv)
    assert len(prefixes.texts[0].tokens) == 30
    assert len(prefixes.open(lm, text(1, 25), 99)) == 24
    assert len(prefixes.open(lm, text(1, 25), 99, [(text(1, 99), Cache(lm, 10))])) == 24
    assert len(prefixes.open(lm, text(2, 25), 99, [(text(2, 99), Cache(lm, 20))])) == 20


def test_a_copied_prefix_lies_in_cells_without_holes():
    """Those of the copied sequence are scattered by rejected nodes."""
    lm = CausalLM(tiny_model())
    kv, rng = lm.open(), np.random.default_rng(0)
    draft = Draft(forest((chain(4),)), torch.from_numpy(rng.integers(0, VOCABULARY, 4)))
    lm.forward([kv], [[1, 2, 3]], draft)
    other = kv.fork()
    kv.accept([0, 2])
    lm.forward([other], [[4]], Draft(forest((chain(1),)), torch.tensor([5])))
    copied = lm.open_copy(kv, 5, 300)
    assert kv.slots.tolist() != copied.slots.tolist() == [0, 1, 2, 3, 4] and copied.stream != kv.stream


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_proposer_that_reads_every_positions_hidden_states_is_refused_by_name(target):
    part = SimpleNamespace(name="reader", requires=Requires(hidden=(1,)))
    with pytest.raises(ValueError, match="'reader' requires hidden states of every position .*prefix_cache=null"):
        check_prefix_cache(part, target)
    last = Medusa(heads_of(target), parse("0"))
    check_prefix_cache(last, target)
    check_prefix_cache(BestOf.load(target, {"a": last, "b": Ngram(2, 2, 1)}), target)
    both = BestOf.load(target, {"a": last, "b": StateRecorder((1,))})
    assert both.requires.every_position


def test_a_target_that_cannot_copy_is_refused_by_name(target, monkeypatch):
    recurrent_layers = replace(target, lm=CausalLM(recurrent.FAMILIES["lfm2"]()))
    with pytest.raises(ValueError, match="prefix_cache requires copied_prefix .*CausalLM lacks"):
        check_prefix_cache(Null(), recurrent_layers)
    monkeypatch.setattr(type(target.lm.model), "tp_size", 2)  # split over ranks, which copy nothing
    with pytest.raises(ValueError, match="prefix_cache requires copied_prefix .*CausalLM lacks"):
        check_prefix_cache(Null(), target)
