"""Bounds of whole draft trees against a linear programme over all drafts, and the verifiers they bound."""

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import tree
from spec_lab.propose.trees import parse
from spec_lab.replay.optimum import by_rank, levels, modelled, summed
from spec_lab.verify import KSeq, Match, Token, Traversal
from spec_lab.verify.transport import transport_bound
from tests.distributions.tabular import Outputs, World, every_draft, side_by_side, target_of
from tests.oracles.tree_transport import most_accepted

SMALL = ["1x1", "1x1x1", "2", "2x1", "1x2", "0 1 0.0", "0 1 2 0.0 0.1 1.0"]
WAYS = ["iid", "without_replacement"]


def bound(world, draft, probability):
    """The bound of the mean accepted length over all drafts."""
    optimum = levels(draft, target(world, draft))
    return float(summed(probability @ optimum.at_least))


def target(world, draft):
    return target_of(world, (), draft)


@pytest.mark.each_value
@pytest.mark.parametrize("drawn", WAYS)
@pytest.mark.parametrize("shape", SMALL)
def test_no_lossless_verifier_accepts_more(shape, drawn):
    """At least the linear programme's optimum; equal to it for chains, also if they branch at their end."""
    for seed in range(3):
        world = World(seed, v=3 if len(shape) > 8 else 4, support=3, plain=seed == 0)
        draft, probability = every_draft(world, tree(parse(shape)), drawn)
        optimum, most = most_accepted(draft, probability, world.p), bound(world, draft, probability)
        assert most >= optimum - 1e-9
        if shape in ("1x1", "1x1x1", "2", "1x2"):
            assert most == pytest.approx(optimum, abs=1e-9)
        for verifier in (Token(), Traversal(), Match(), *[KSeq()] * (drawn == "iid")):
            assert Outputs.of_drafts(world, verifier, draft, probability).accepted <= optimum + 1e-9


@pytest.mark.each_value
@pytest.mark.parametrize("drawn", WAYS)
@pytest.mark.parametrize("shape", ["2x1", "0 1 0.0"])
def test_the_bound_is_close(shape, drawn):
    """Within 4 % of the optimum over random pairs, also where only some places of a level have children."""
    totals = np.zeros(2)
    for seed in range(100, 104):
        world = World(seed, v=4, support=4, plain=True)
        draft, probability = every_draft(world, tree(parse(shape)), drawn)
        totals += most_accepted(draft, probability, world.p), bound(world, draft, probability)
    assert totals[0] < totals[1] < 1.04 * totals[0]


@pytest.mark.parametrize("shape", ["1x1", "1x1x1"])
def test_block_verification_is_the_optimum_of_chains_and_exceeds_optimal_nodes(shape):
    """Token verification is optimal at each node of a chain; verifiers of whole paths accept more."""
    for seed in range(4):
        world = World(seed, plain=True)
        draft, probability = every_draft(world, tree(parse(shape)), "iid")
        block, token = (
            Outputs.of_drafts(world, verifier, draft, probability).accepted for verifier in (Traversal(), Token())
        )
        assert block == pytest.approx(bound(world, draft, probability), abs=1e-12)
        assert token < block - 1e-6


def test_one_child_has_one_minus_tv():
    rng = np.random.default_rng(0)
    p, q = (torch.from_numpy(rng.dirichlet(np.ones(9), 5)) for _ in range(2))
    for drawn in WAYS:
        assert transport_bound(p, q, 1, drawn) == pytest.approx(1 - 0.5 * (p - q).abs().sum(1).numpy(), abs=1e-14)


def test_points_accept_their_texts_probability():
    """Match and token attain it; a text that is drafted twice counts once."""
    for seed in range(4):
        world = World(seed)
        draft, probability = every_draft(world, tree(parse("2x2x1")), "deterministic")
        most = bound(world, draft, probability)
        assert most == pytest.approx(most_accepted(draft, probability, world.p), abs=1e-9)
        for verifier in (Match(), Token(), Traversal()):
            assert Outputs.of_drafts(world, verifier, draft, probability).accepted == pytest.approx(most, abs=1e-12)
    world = World(0, plain=True)
    shape = tree(((0,), (1,), (0, 0), (1, 0)))
    twice = Draft(shape, torch.tensor([2, 2, 1, 1]))
    assert bound(world, twice, np.ones(1)) == pytest.approx(world.p(())[2] * (1 + world.p((2,))[1]))


@pytest.mark.each_value
@pytest.mark.parametrize("drawn", WAYS)
@pytest.mark.parametrize("shape", ["2x1", "3", "1x1x1"])
def test_lumped_tokens_leave_a_bound(drawn, shape):
    """Tokens that no one drafted, summed to one column, raise the bound if anything."""
    for seed in range(2):
        world = World(seed, v=5, support=5, plain=True)
        draft, probability = every_draft(world, tree(parse(shape)), drawn)
        p = target(world, draft)
        for number in range(0, len(probability), max(1, len(probability) // 20)):
            single, rows = _tree(draft, number)
            whole, lumped = levels(single, p[rows]), levels(*_lumped(single, p[rows], world.v), lumps=1)
            assert (lumped.at_least >= whole.at_least - 1e-12).all()


def _tree(draft, number):
    """One tree of a forest, and its rows."""
    keep = draft.shape.root == number
    rows = np.flatnonzero(keep)
    numbers = np.cumsum(keep) - 1
    parent = numbers[draft.shape.parent[rows[1:] - draft.shape.roots]]
    shape = type(draft.shape)(1, parent)
    return Draft(shape, draft.token[rows[1:] - draft.shape.roots], draft.drawn, draft.q, draft.q_row[rows]), rows


def _lumped(draft, p, v):
    """The same tree with the tokens that no row has drafted summed to one column."""
    used = np.unique(draft.token.numpy())
    others = np.setdiff1d(np.arange(v), used)
    order = torch.from_numpy(used)

    def less(x):
        return torch.cat([x[:, order], x[:, torch.from_numpy(others)].sum(1, keepdim=True)], 1)

    token = torch.from_numpy(np.searchsorted(used, draft.token.numpy()))
    return Draft(draft.shape, token, draft.drawn, less(draft.q), draft.q_row), less(p)


def test_acceptance_by_rank_sums_to_the_optimum_of_all_children():
    world = World(1, v=5, support=5, plain=True)
    draft, _ = every_draft(world, tree(parse("2x1")), "iid")
    p = target(world, draft)
    shares = by_rank(draft, p, levels(draft, p).weight, 4)
    assert shares.shape == (2, 4) and (shares >= 0).all()
    first, q = torch.from_numpy(world.p(()))[None], torch.from_numpy(world.q(()))[None]
    assert shares[0].sum() == pytest.approx(transport_bound(first, q, 4, "iid")[0])
    value = modelled(draft.shape, shares)
    assert value == pytest.approx(shares[0, 0] + shares[0, 1] + shares[0, :2].sum() * shares[1, 0])


def test_trees_of_a_forest_do_not_mix():
    world = World(3, plain=True)
    drafts = [every_draft(world, tree(parse(text)), "iid")[0] for text in ("1x1", "2x1")]
    singles = [_tree(draft, 5)[0] for draft in drafts]
    together = side_by_side(singles)
    at_least = levels(together, target(world, together)).at_least
    alone = [levels(single, target(world, single)).at_least[0] for single in singles]
    assert at_least == pytest.approx(np.array(alone), abs=1e-14)
