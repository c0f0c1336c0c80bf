"""A cascade of drafts: its chain is the draft model's own, whatever the inner proposer drafts."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.proposer import Requires
from spec_lab.drafters import cascade as module
from spec_lab.drafters.cascade import DraftCascade
from spec_lab.models.target import Target
from spec_lab.propose.best_of import BestOf
from spec_lab.propose.jacobi import Jacobi
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.pld_plus import PldPlus
from spec_lab.propose.recycling import Recycling
from spec_lab.propose.suffix import Suffix
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.enumeration import Watched
from spec_lab.tasks.certify.instances import QUICK
from spec_lab.tasks.certify.toy_models import RandomToy, table_models
from spec_lab.verify import Lenient, Token, Traversal
from tests.propose import lab
from tests.propose.lab import (
    COLD,
    PROMPTS,
    WARM,
    batch_of,
    decode,
    draft_model,
    emitted,
    expanded,
    fork_of,
    plain_greedy,
    plain_probabilities,
    requests,
    steps_after_texts,
)
from tests.tiny import CONTEXT, tiny_model

MODEL = tiny_model(seed=1, num_hidden_layers=1)
INNER = {
    "n-gram": lambda: Ngram(3, 3, 1),
    "n-gram tree": lambda: NgramTree(5, 3, 3, 1),
    "chain": lambda: draft_model("1x1x1", seed=2),
    "tree": lambda: draft_model("2x2", "without_replacement", 1.0, seed=2),
    "the draft model itself": lambda: draft_model("1x1x1x1"),
    "recycling": lambda: Recycling(61, parse("2x1")),
    "PLD+": lambda: PldPlus(3, -1),
    "Jacobi": lambda: Jacobi(3),
    "suffix": lambda: Suffix.load(None, nodes=5, children=3),
    "best of two": lambda: BestOf.load(None, {"a": Ngram(3, 3, 1), "b": draft_model("1x1", seed=2)}),
    "cascade": lambda: cascade(Ngram(2, 2, 1), model=tiny_model(seed=2, num_hidden_layers=1)),
}


def cascade(inner, model=MODEL, **options):
    return lab.cascade(inner, CausalLM(model), **options)


def cells_are_free(proposer):
    return not proposer.arm.target.lm.cells.references.any()


# What is drafted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("drawn", ["iid", "deterministic"])
@pytest.mark.each_value
def test_greedy_chains_are_the_draft_model_s_whatever_drafts_for_it(target, truth, name, drawn):
    cascaded = cascade(INNER[name](), drawn=drawn)
    group, steps = decode(target, cascaded, requests())
    reference, others = decode(target, draft_model("1x1x1", drawn), requests())
    assert emitted(group) == emitted(reference) == truth
    assert [info.draft.token.tolist() for info in steps] == [info.draft.token.tolist() for info in others]
    assert all((info.draft.q is None) == (drawn == "deterministic") for info in steps)
    assert cells_are_free(cascaded)


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("sampling", [WARM, Sampling(0.8, top_k=5, repetition_penalty=1.3)], ids=["warm", "penalised"])
@pytest.mark.each_value
def test_the_stated_distributions_are_the_draft_model_s(target, name, sampling):
    cascaded = cascade(INNER[name]())
    compared = 0
    for info, before in steps_after_texts(target, cascaded, requests(sampling, new=10)):
        assert info.draft.shape.depth[info.draft.shape.roots - 1 :].max() == 3
        for row, _, text, (token,) in expanded(info.draft, before):
            q = info.draft.q[info.draft.q_row[row]]
            torch.testing.assert_close(q, plain_probabilities(MODEL, text, sampling), rtol=0, atol=1e-9)
            assert q[token] > 0
            compared += 1
    assert compared > 20 and cells_are_free(cascaded)


def test_a_temperature_of_its_own_and_requests_that_sample_differently_share_a_batch(target):
    mixed = [
        replace(request, sampling=sampling)
        for request, sampling in zip(requests(new=8), [COLD, WARM, Sampling(0.5)], strict=True)
    ]
    for temperature in (None, 2.0):
        for info, before in steps_after_texts(target, cascade(Ngram(3, 2, 1), temperature=temperature), mixed):
            for row, sequence, text, _ in expanded(info.draft, before):
                of = next(seq for seq in info.sequences if seq.tokens[: len(sequence.tokens)] == sequence.tokens)
                sampling = of.request.sampling if temperature is None else Sampling(temperature)
                expected = plain_probabilities(MODEL, text, sampling)
                torch.testing.assert_close(info.draft.q[info.draft.q_row[row]], expected, rtol=0, atol=1e-9)


def test_a_draft_model_that_is_guessed_right_is_called_less_often_than_it_drafts_tokens(target, truth):
    cascaded = cascade(draft_model("1x1x1x1", lm=CausalLM(MODEL)), depth=4)
    group, steps = decode(target, cascaded, requests())
    chains = cascade(Ngram(1, 1, 1, "first"), depth=4)
    _, others = decode(target, chains, requests())
    assert cascaded.arm.target.lm.forwards <= len(steps) < chains.arm.target.lm.forwards
    assert emitted(group) == truth and len(steps) == len(others)


def test_calls_and_copies_of_inner_steps_are_counted_as_the_proposer_s(target):
    _, steps = decode(target, cascade(draft_model("1x1", seed=2)), requests())
    for info in steps:
        took = info.seconds()
        assert 0 < took["propose_forward"] < took["propose"] and info.copies_before >= 2
        assert sum(name == "target_forward" for name, _, _ in info.spans) == 1


def test_chains_end_with_the_context_of_the_target_and_of_the_draft_model(target):
    cascaded = cascade(Ngram(3, 2, 1), depth=4, context=len(PROMPTS[0]) + 6)
    _, steps = decode(target, cascaded, requests(new=12, prompts=PROMPTS[:1]))
    lengths = [(info.context[0], info.draft.shape.nodes) for info in steps]
    assert all(nodes == min(4, max(0, len(PROMPTS[0]) + 6 - length)) for length, nodes in lengths)
    assert lengths[-1][1] == 0
    short = replace(target, context=len(PROMPTS[0]) + 3)
    _, (first, *_) = decode(short, cascade(Ngram(3, 2, 1), depth=8), requests(new=12, prompts=PROMPTS[:1]))
    assert first.draft.shape.nodes == 3


# The life cycle ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_after_growth_rewinds_and_forks_chains_are_those_of_the_text(data):
    cascaded = cascade(INNER[data.draw(st.sampled_from(["n-gram", "chain", "recycling", "best of two"]))]())
    batch = batch_of(cascaded.arm.target, requests(prompts=PROMPTS[:2]), cascaded)
    live = list(batch.sequences)
    for step in range(data.draw(st.integers(1, 4))):
        draft = cascaded.propose(replace(batch, sequences=live))
        chains = draft.token.view(len(live), 3).tolist()
        assert chains == [plain_greedy(MODEL, sequence.tokens, 3) for sequence in live]
        for sequence, chain in zip(list(live), chains, strict=True):
            kept = data.draw(st.integers(0, 3))
            sequence.tokens += [*chain[:kept], data.draw(st.integers(0, 9))]
            sequence.step = step + 1
            if data.draw(st.booleans()):
                removed = data.draw(st.integers(0, min(3, len(sequence.emitted))))
                del sequence.tokens[len(sequence.tokens) - removed :]
                cascaded.rewind(sequence.state, len(sequence.tokens) - 1)
            if len(live) < 4 and data.draw(st.booleans()):
                live.append(
                    fork_of(sequence, cascaded, [*sequence.tokens, data.draw(st.integers(0, 9))], number=len(live))
                )
    for sequence in live:
        cascaded.close(sequence.state)
        sequence.kv.close()
    assert cells_are_free(cascaded)


@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["cold", "warm"])
def test_preempted_requests_and_requests_alone_get_the_same_tokens(target, sampling):
    def run(wanted, limits):
        cascaded = cascade(Ngram(3, 2, 1))
        engine = Engine(Arm(target, cascaded, Token(), Watched(CounterDraws(0))), limits=limits)
        for request in wanted:
            engine.add(request)
        list(engine)
        assert cells_are_free(cascaded)
        return {sequence.request.id: sequence.emitted for sequence in engine.sequences}

    together = run(requests(sampling), Limits())
    alone = {number: tokens for request in requests(sampling) for number, tokens in run([request], Limits()).items()}
    assert together == alone
    wanted = requests(sampling)
    most = max(len(request.tokens) + request.max_new_tokens for request in wanted) + 8
    asked = cascade(Ngram(3, 2, 1))
    engine = Engine(
        Arm(target, asked, Token(), CounterDraws(0)), limits=Limits(max_kv_tokens=most, max_prefill_tokens=4)
    )
    for request in wanted:
        engine.add(request)
    list(engine)
    assert {sequence.request.id: sequence.emitted for sequence in engine.sequences} == together and cells_are_free(
        asked
    )


def test_no_random_choice_shares_its_key_with_another(target):
    group = Engine(Arm(target, cascade(draft_model("1x1", seed=2)), Token(), Watched(CounterDraws(0))))
    for request in requests(WARM):
        group.add(request)
    assert list(group)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["cold", "warm"])
def test_broken_logits_of_the_draft_model_end_their_own_request_only(target, truth, bad, sampling):
    model = tiny_model(seed=1, num_hidden_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = bad
    cascaded = cascade(Ngram(3, 2, 1), model=model)
    group, _ = decode(target, cascaded, requests(sampling, new=4, prompts=(PROMPTS[0], (60, 1), PROMPTS[2])))
    assert [sequence.finish for sequence in group.sequences] == ["length", "nan", "length"]
    assert "the draft's logits are NaN or infinite" in group.errors[group.sequences[1]]
    if sampling is COLD:
        assert emitted(group)[::2] == [truth[0][:4], truth[2][:4]]
    assert cells_are_free(cascaded)


# Exactness -----------------------------------------------------------------------------------------------------------

TARGET, DRAFT = table_models(RandomToy(4, plain=True), 3)
CHAINS = [instance for instance in QUICK if instance.chain and not instance.tokens]


def toy(inner, kind=DraftCascade, **options):
    model = Target(DRAFT, None, "draft", TARGET.context, "", 0.0)
    return kind(Arm(model, inner, Token(), CounterDraws(0)), 2, **options)


@dataclass(eq=False)
class EndsWithItsStep(DraftCascade):
    """A chain that ends where the first inner step does."""

    def _decode(self, batch, ends, rows):
        first = {text: len(text.tokens) + 1 for text in ends}
        within = module.WithinChain
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "WithinChain", lambda inner, _: within(inner, ends))
            return super()._decode(batch, first, rows)


@dataclass(eq=False)
class KeepsWhatWasGuessed(EndsWithItsStep):
    """A chain of the inner drafts that were accepted: whether a sampled token stays depends on the token."""

    def _decode(self, batch, ends, rows):
        q, broken = super()._decode(batch, ends, rows)
        for text in ends:
            del text.tokens[-1]
        return {text: [part[:-1] for part in parts] for text, parts in q.items()}, broken


@pytest.mark.each_value
@pytest.mark.parametrize("inner", [Ngram(3, 3, 1), draft_model("1x1", lm=DRAFT)], ids=["n-gram", "chain"])
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
def test_a_chain_that_ends_with_an_inner_step_would_be_exact(inner, verifier):
    shorter = toy(inner, EndsWithItsStep)
    shorter.arm = replace(shorter.arm, verifier=verifier)
    ends, full = (prove(proposer, Token(), CHAINS) for proposer in (shorter, toy(inner)))
    assert ends.worst.tv < 1e-12 and ends.failure is None and ends.missing == ()
    assert [finding.accepted for finding in ends.findings] != [finding.accepted for finding in full.findings]


def test_a_chain_of_guessed_tokens_alone_is_found_not_to_be_exact():
    wrong = prove(toy(draft_model("1x1", lm=DRAFT), KeepsWhatWasGuessed), Token(), CHAINS)
    assert wrong.worst.tv > 0.01 and wrong.failure is not None


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
def test_drafts_of_a_lossy_inner_verification_are_found_not_to_be_exact(verifier):
    lossy = toy(draft_model("1x1", lm=DRAFT))
    lossy.arm = replace(lossy.arm, verifier=Lenient(0.5))
    assert prove(lossy, verifier, QUICK[:1]).worst.tv > 0.001


def test_the_same_tokens_are_accepted_whoever_drafts_for_the_draft_model():
    plain = draft_model("1x1", lm=DRAFT, context=TARGET.context)
    means = [[finding.accepted for finding in prove(made, Token(), CHAINS).findings]
             for made in (plain, toy(Ngram(3, 3, 1)), toy(Jacobi(2)), toy(draft_model("1x1", lm=DRAFT)))]  # fmt: skip
    np.testing.assert_allclose(means, [means[0]] * 4, rtol=0, atol=1e-12)


# What is refused -----------------------------------------------------------------------------------------------------


@dataclass
class Curious(Ngram):
    """Requires a hidden state that a draft model of one layer does not have."""

    name: str = "curious"
    requires: Requires = Requires((2,))


def load(target, inner, verifier=None, **options):
    return DraftCascade.load(target, "draft", lambda draft: inner, verifier or Token(), **options)


@pytest.fixture
def loaded(monkeypatch):
    """The tiny draft model in place of a checkpoint."""
    from spec_lab.drafters.draft_model.loading import Loaded

    made = Loaded(partial(CausalLM, MODEL), None, 61, frozenset({7}), CONTEXT, "abc")
    monkeypatch.setattr(module, "load_draft", lambda target, path, revision: made)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (Ngram(3, 2, 1), {"verifier": Lenient(0.8)}, "verifier: the verifier 'lenient' is lossy"),
        (draft_model("1x1", "gumbel"), {}, "inner, whose target is the draft model draft: .*draws 'gumbel'"),
        (Curious(3, 2, 1), {}, "inner, .*: proposer 'curious' requires hidden state 2 of the target"),
    ],
)
def test_wrong_options_are_named(target, loaded, inner, options, message):
    with pytest.raises(ValueError, match=message):
        load(target, inner, **options)


def test_an_inner_tree_that_needs_a_temperature_is_refused_for_chains_of_points(target, loaded):
    chains = load(target, draft_model("2x1", "without_replacement"), drawn="deterministic")
    with pytest.raises(ValueError, match="inner, which drafts for the draft model: at temperature 0"):
        chains.check_sampling(WARM)
    load(target, draft_model("2x1", "without_replacement"), temperature=1.0).check_sampling(COLD)
