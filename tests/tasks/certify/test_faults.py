"""Proposers and verifiers that raise, or that use random numbers of their own: the message names part and place."""

import re
from random import Random

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.randomness import Key, Purpose
from spec_lab.core.shape import chain, forest
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.enumeration import Script, Unrepeatable, side_by_side
from spec_lab.tasks.certify.instances import LOOPS, QUICK
from spec_lab.verify import Token, Verdict
from tests.tasks.certify.parts import Uniform, Verifies


class Fails(Uniform):
    """Breaks at its third draft."""

    drafts = 0

    def toy(self, target, draft, tree):
        return self

    def propose(self, batch):
        self.drafts += 1
        if self.drafts == 3:
            raise IndexError("token 7 of 4")
        return super().propose(batch)


class Unkeyed(Uniform):
    """Drafts with a random generator of its own."""

    name, drawn = "unkeyed", "deterministic"

    def __init__(self):
        self.random = Random(0)

    def propose(self, batch):
        tokens = [self.random.randrange(batch.target.vocabulary) for _ in batch.sequences]
        return Draft(forest((chain(1),) * len(tokens)), torch.tensor(tokens))


class Crowd(Uniform):
    """Draws token 0 more often, the more sequences are in the batch, and says so."""

    name = "crowd"

    def stated(self, count, v):
        q, q_row = super().stated(count, v)
        q[:, 0] *= count
        return q / q.sum(-1, keepdim=True), q_row

    def propose(self, batch):
        count, v = len(batch.sequences), batch.target.vocabulary
        q, q_row = self.stated(count, v)
        token = batch.draws.pick(q, [Key(*live.key, self.purpose) for live in batch.sequences])
        return Draft(forest((chain(1),) * count), token, self.drawn, q, q_row)


class Remembers(Uniform):
    """Drafts the token with which any request ended last, from a store that it declares."""

    name, drawn, shared_store = "remembers", "deterministic", "the last token of all requests"
    last = None

    def propose(self, batch):
        chains = [chain(0 if self.last is None else 1)] * len(batch.sequences)
        return Draft(forest(tuple(chains)), torch.full((sum(shape.nodes for shape in chains),), self.last or 0))

    def observe(self, observed):
        self.last = observed[-1].tokens[-1]

    def forget(self):
        self.last = None


class Moody(Verifies):
    """Accepts with a random generator of its own."""

    name = "moody"

    def __init__(self):
        self.random = Random(0)

    def __call__(self, draft, p):
        verdict = super().__call__(draft, p)
        stop = verdict.stop.copy()
        if draft.shape.nodes and self.random.random() < 0.5:
            stop = (np.arange(draft.shape.rows) < draft.shape.roots).astype(float)
        return Verdict(stop, verdict.residual)


def test_a_proposer_that_raises_is_named_with_file_line_and_instance():
    with pytest.raises(ValueError) as error:
        prove(Fails(), Token(), QUICK)
    message = str(error.value)
    assert message.startswith(f"proposer 'uniform' raised IndexError: token 7 of 4 ({__file__}:")
    assert "in propose)" in message and "verifier" not in message and "one step" in message


@pytest.mark.parametrize("proposer", [None, 3, Draft(forest((chain(0),) * 2), torch.empty(0, dtype=torch.long))])
def test_a_draft_that_does_not_fit_the_batch_is_refused_and_names_the_proposer(proposer):
    class Odd(Uniform):
        def toy(self, target, draft, tree):
            return self

        def propose(self, batch):
            return proposer

    with pytest.raises(ValueError, match="'uniform' raised (TypeError: propose|ValueErr)"):
        prove(Odd(), Token(), QUICK)


@pytest.mark.parametrize(
    ("proposer", "verifier", "whose"),
    [(Unkeyed(), Token(), "proposer 'unkeyed' drafts"), ("iid", Moody(), "verifier 'moody' verifies")],
    ids=["proposer", "verifier"],
)
def test_random_numbers_of_its_own_are_detected_and_the_rule_is_named(proposer, verifier, whose):
    with pytest.raises(ValueError) as error:
        prove(proposer, verifier, LOOPS[:2])
    message = str(error.value)
    assert message.startswith(f"{whose} differently when the same text is replayed (")
    assert "batch.draws" in message and "stores" in message and "IndexError" not in message


def test_drafts_that_depend_on_the_batch_are_told_by_weights_and_batch_sizes_and_three_causes_are_named():
    with pytest.raises(ValueError, match="proposer 'crowd' drafts differently") as error:
        prove(Crowd(), Token(), LOOPS[:2])
    message = str(error.value)
    assert "their weights differ by up to 0." in message and "of index 0: 0.25, then 0." in message
    assert re.search(r"batches of 1 and of [2-9]\d* requests", message) and "It declares no shared_store." in message
    assert all(f"({number})" in message for number in (1, 2, 3))


def test_a_declared_store_is_emptied_before_each_outcome():
    proof = prove(Remembers(), Token(), LOOPS[:2])
    assert proof.failure is None and not proof.missing and any(finding.drafted for finding in proof.findings)


def test_a_declared_store_that_is_not_emptied_is_named(monkeypatch):
    monkeypatch.setattr(Remembers, "forget", Uniform.forget)
    with pytest.raises(ValueError, match=r"Its shared_store \('the last token of all requests'\) is emptied by forget"):
        prove(Remembers(), Token(), LOOPS[:2])


def test_a_choice_that_a_replay_does_not_repeat_is_an_error():
    plays = []

    def play(draws, count):
        plays.append(count)
        weights = torch.tensor([[0.5, 0.5]] if len(plays) == 1 else [[0.2, 0.3, 0.5]] * count)
        return draws.pick(weights, [Key(n, 0, 0, Purpose.EMIT) for n in range(count)]).tolist()

    with pytest.raises(Unrepeatable, match="choice 0 was EMIT among .0, 1., and is EMIT"):
        list(side_by_side(play))


def test_a_choice_that_a_replay_does_not_reach_is_an_error():
    plays = []

    def play(draws, count):
        plays.append(count)
        weights = torch.tensor([[0.5, 0.5] if len(plays) == 1 else [1.0, 0.0]] * count)
        return draws.pick(weights, [Key(n, 0, 0, Purpose.EMIT) for n in range(count)]).tolist()

    with pytest.raises(Unrepeatable, match="1 choices were made, but only 0"):
        list(side_by_side(play))


def test_other_requests_may_pad_and_round_the_weights():
    key = Key(3, 0, 0, Purpose.STOP)
    first = Script()
    assert first.choose(np.array([0.5, 0.5]), key) == 0
    again = Script((1,), first.choices)
    assert again.choose(np.array([0.5 + 1e-7, 0.5 - 1e-7, 0.0]), key._replace(request=5)) == 1
    with pytest.raises(Unrepeatable):
        Script((1,), first.choices).choose(np.array([0.6, 0.4]), key)
