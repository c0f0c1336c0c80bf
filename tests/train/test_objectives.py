"""Losses: their values by hand, their gradients by finite differences, and that chunks do not change them."""

import logging
import math
from typing import get_args

import pytest
import torch
from torch.autograd import gradcheck

from spec_lab.drafters.eagle.train import Eagle3Recipe
from spec_lab.train import pieces
from spec_lab.train.objectives import (
    ChainLoss,
    Chains,
    Truth,
    chain_loss,
    compare,
    compare_states,
    expected_length,
    mean_losses,
    row_loss,
)

FLOAT = torch.float64
P, Q = torch.tensor([[0.5, 0.3, 0.2]], dtype=FLOAT), torch.tensor([[0.25, 0.25, 0.5]], dtype=FLOAT)
ALPHA = 0.25 + 0.25 + 0.2
KL = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
ENTROPY = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2))
LAMBDA = math.exp(-3 * ALPHA)
BY_HAND = {
    "kl": KL + ENTROPY,
    "reverse_kl": 0.25 * math.log(0.5) + 0.25 * math.log(0.25 / 0.3) + 0.5 * math.log(2.5),
    "tv": 1 - ALPHA,
    "nla": -math.log(ALPHA),
    "hybrid_lk": LAMBDA * KL + (1 - LAMBDA) * (1 - ALPHA),
    "ce": -math.log(0.5),
    "tau": 1 - ALPHA,
}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def truth_of(logits, token=None, ids=None):
    return Truth.of(logits, lambda hidden: hidden, torch.zeros(len(logits)).long() if token is None else token, ids)


@pytest.mark.parametrize("kind", get_args(ChainLoss))
def test_values_by_hand(kind):
    assert float(row_loss(kind, Q.log(), P, torch.tensor([2]))) == pytest.approx(BY_HAND[kind], abs=1e-12)


@pytest.mark.parametrize("kind", sorted({*get_args(ChainLoss)} - {"hybrid_lk"}))
def test_gradients_by_finite_differences(kind):
    truth = truth_of(random(5, 4, seed=1), torch.tensor([0, 1, 2, 3, 0]))
    logits = random(5, 4, seed=2).requires_grad_()
    assert gradcheck(lambda x: compare(x, truth, kind).loss, (logits,))


def test_the_gradient_of_hybrid_lk_has_a_constant_mixture():
    truth, x = truth_of(random(1, 4, seed=1)), random(1, 4, seed=2)

    def gradient(kind):
        logits = x.clone().requires_grad_()
        return torch.autograd.grad(compare(logits, truth, kind).loss.sum(), logits)[0]

    share = (-3 * compare(x, truth).alpha).exp()
    torch.testing.assert_close(gradient("hybrid_lk"), share * gradient("kl") + (1 - share) * gradient("tv"))


@pytest.mark.parametrize("kind", get_args(ChainLoss))
def test_losses_are_least_where_the_draft_is_the_target(kind):
    logits = random(40, 11, seed=5)
    truth = truth_of(logits)
    same, other = (compare(logits + noise, truth, kind).measured() for noise in (0, random(40, 11, seed=6)))
    assert float(same.accepted) == pytest.approx(1) and same.agreed == 1 and other.accepted < 0.9
    if kind == "ce":  # least where q is certain of the texts' tokens
        return
    assert float(same.loss) < float(other.loss)
    if kind in ("tv", "tau", "nla", "hybrid_lk"):
        assert float(same.loss) == pytest.approx(0, abs=1e-6)


def test_rows_whose_best_token_is_not_drafted_count_as_rejections_but_have_no_loss():
    logits, ids = torch.zeros(2, 11), torch.tensor([0, 2, 3, 5, 7, 8, 10])
    logits[0, 1] = logits[1, 2] = 9.0  # token 1 is not in the draft vocabulary, token 2 is
    truth = truth_of(logits, torch.tensor([2, 1]), ids)
    assert truth.best.tolist() == [-1, 1] and truth.token.tolist() == [1, -1]
    drafted = torch.zeros(2, 7).index_fill(1, torch.tensor([1]), 9.0)
    both, alone = compare(drafted, truth).measured(), compare(drafted[1:], truth[1:]).measured()
    assert float(both.loss) == pytest.approx(float(alone.loss))
    assert both.agreed == 0.5 and both.accepted < 0.51 < alone.accepted
    text = compare(drafted, truth, "ce")
    assert text.learned.tolist() == [True, False] and float(text.loss[1]) == float(text.true[1]) == 0


def test_the_draft_vocabulary_may_have_any_order():
    logits, ids = random(6, 5, seed=3), torch.tensor([4, 0, 3])
    truth = truth_of(logits, torch.tensor([4, 0, 3, 1, 2, 4]), ids)
    torch.testing.assert_close(truth.p, logits.softmax(-1)[:, ids])
    assert truth.token.tolist() == [0, 1, 2, -1, -1, 0]
    places = {4: 0, 0: 1, 3: 2}
    assert truth.best.tolist() == [places.get(int(best), -1) for best in logits.argmax(-1)]


CHAINS = Chains(
    loss=torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 0.0]], dtype=FLOAT),
    alpha=torch.tensor([[0.5, 0.4, 0.2], [0.8, 0.5, 0.0]], dtype=FLOAT),
    true=torch.tensor([[0.2, 0.6, 0.0], [1.0, 0.4, 0.0]], dtype=FLOAT),
    learned=torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
    present=torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
)
"""The second chain has two positions."""


def test_weights_of_chains_by_hand():
    assert float(chain_loss(CHAINS, "kl", "decay", [1.0, 0.5, 0.25])) == pytest.approx(2 + 0.5 * 3.5 + 0.25 * 4)
    first, second = (0.6, 0.6 * 0.8, 0.6 * 0.8 * 0.5), (1.0, 0.7)  # P_k
    expected = (1 * sum(first) + 3 * sum(second)) / 2 + (2 * sum(first[1:]) + 5 * second[1]) / 2 + 4 * first[2]
    assert float(chain_loss(CHAINS, "kl", "dpace", [1.0, 0.5, 0.25])) == pytest.approx(expected)
    tau = (0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.2 + 0.8 + 0.8 * 0.5) / 2
    assert float(chain_loss(CHAINS, "tau", "decay", [1.0] * 3)) == pytest.approx(-tau)


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_gradients_of_chains_by_finite_differences(weights):
    def total(loss, alpha, kind):
        return chain_loss(CHAINS._replace(loss=loss, alpha=alpha), kind, weights, [1.0, 0.5, 0.25])

    given = [tensor.clone().requires_grad_() for tensor in (CHAINS.loss, CHAINS.alpha)]
    assert gradcheck(lambda loss, alpha: total(loss, alpha, "kl") + total(loss, alpha, "tau"), given)


@pytest.mark.parametrize("chunk", [1, 9, 1000])
def test_chunks_of_rows_change_nothing(chunk, monkeypatch):
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    states, weight = random(7, 3, seed=1).requires_grad_(), random(3, 4, seed=2).requires_grad_()
    truth, rows = truth_of(random(9, 4, seed=3)), torch.tensor([8, 0, 3, 3, 1, 2, 5])
    ours = compare_states(states, lambda x: x @ weight, truth, rows, "nla")
    plain = compare(states @ weight, truth[rows], "nla")
    for name, value in plain._asdict().items():
        torch.testing.assert_close(getattr(ours, name), value)
    for computed in zip(*(torch.autograd.grad(r.loss.sum(), (states, weight)) for r in (ours, plain)), strict=True):
        torch.testing.assert_close(*computed)


@pytest.mark.parametrize("kind", ["kl", "ce", "nla"])
@pytest.mark.parametrize("chunk", [1, 9, 1000])
def test_losses_whose_gradients_are_computed_with_them_are_the_plain_ones(chunk, kind, monkeypatch):
    """Two positions of a chain, with logits of their own and shared weights; the upstream gradient is 3."""
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    states = [random(rows, 3, seed=rows).requires_grad_() for rows in (5, 7)]
    weight, bias, other = (random(*shape, seed=2).requires_grad_() for shape in ((3, 4), (4,), (2,)))
    heads = [lambda x: x @ weight + bias, lambda x: (2 * x) @ weight]
    truth = truth_of(random(9, 4, seed=3), torch.tensor([0, 1, 2, 3, -1, 1, 2, 3, 0]))
    rows = [torch.tensor([8, 0, 4, 3, 1]), torch.tensor([8, 0, 3, 3, 1, 2, 5])]
    loss, compared = mean_losses(states, heads, [weight, bias, other], truth, rows, [1.0, 0.5], kind)
    plain = [compare(head(x), truth[of], kind) for head, x, of in zip(heads, states, rows, strict=True)]
    expected = plain[0].measured().loss + 0.5 * plain[1].measured().loss
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(compared, plain, strict=True):
        torch.testing.assert_close([*ours], [value.detach() for value in theirs])
    leaves = [*states, weight, bias]
    both = [torch.autograd.grad(3 * total, leaves) for total in (loss, expected)]
    torch.testing.assert_close(*both)


def test_the_loss_whose_name_has_changed_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        Eagle3Recipe(loss="nla")
        assert not caplog.records
        Eagle3Recipe(loss="tv")
    assert "task.recipe.loss=tv is 1 - alpha" in caplog.text and "task.recipe.loss=nla" in caplog.text


def test_the_expected_length_is_the_sum_of_products():
    assert expected_length([0.5, 0.4, 0.25]) == pytest.approx(0.5 + 0.2 + 0.05)
    assert expected_length([]) == 0
