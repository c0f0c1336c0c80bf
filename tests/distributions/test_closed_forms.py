"""Enumerated acceptance equals the papers' formulas."""

import itertools

import numpy as np
import pytest

from spec_lab.core.shape import chain, tree
from spec_lab.verify import Match, Token, Traversal
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_lossless import TREES

WORLDS = [World(seed) for seed in range(20, 26)] + [World(seed, plain=True) for seed in (26, 27)]
EVERY_WORLD = pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"world{w.seed}")


class Constant(World):
    """Distributions that ignore the context."""

    pair = (np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3]))

    def probabilities(self, length):
        return tuple(np.tile(row, (self.v**length, 1)) for row in self.pair)


def accepted(world, verifier, shape, drawn="iid") -> float:
    return Outputs.of_forest(world, verifier, shape, drawn).accepted


def paths(world, length):
    """Every path of a chain with its p(x), q(x) by position."""
    for x in itertools.product(range(world.v), repeat=length):
        yield [world.p(x[:i])[x[i]] for i in range(length)], [world.q(x[:i])[x[i]] for i in range(length)]


@pytest.mark.each_value
@EVERY_WORLD
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_expected_acceptance_of_a_chain_has_a_closed_form(world, length):
    """Accepted tokens of a chain of ``length``: the sum over depths of P(path to that depth is accepted)."""
    token = block = match = 0.0
    for n in range(1, length + 1):
        for p, q in paths(world, n):
            token += np.prod(np.minimum(p, q))  # 2211.17192: q(x) min(1, p(x) / q(x)) per position
            match += np.prod(np.multiply(p, q))
            weight = 1.0
            for p_i, q_i in zip(p, q, strict=True):
                weight = min(1.0, weight * p_i / q_i) if q_i > 0 else 0.0
            block += np.prod(q) * weight  # 2403.10444: P(at least n accepted | x^n) = p_n(x^n)
    assert accepted(world, Token(), chain(length)) == pytest.approx(token, abs=1e-12)
    assert accepted(world, Traversal(), chain(length)) == pytest.approx(block, abs=1e-12)
    assert accepted(world, Match(), chain(length)) == pytest.approx(match, abs=1e-12)


@EVERY_WORLD
def test_one_token_is_accepted_with_one_minus_tv(world):
    p, q = world.p(()), world.q(())
    for verifier in (Token(), Traversal()):
        assert accepted(world, verifier, chain(1)) == pytest.approx(1 - 0.5 * np.abs(p - q).sum(), abs=1e-12)


def test_expected_tokens_of_a_constant_acceptance():
    """E[tokens] = (1 - a^(g+1)) / (1 - a)."""
    world = Constant(0, v=2)
    a = 1 - 0.5 * np.abs(world.p(()) - world.q(())).sum()
    for gamma in range(1, 6):
        tokens = 1 + accepted(world, Token(), chain(gamma))
        assert tokens == pytest.approx((1 - a ** (gamma + 1)) / (1 - a), abs=1e-12)


def test_the_example_of_the_block_verification_paper():
    """2403.10444, section 3: 10/9 accepted tokens token by token, 11/9 as a block."""
    world = Constant(0, v=2)
    assert accepted(world, Token(), chain(2)) == pytest.approx(10 / 9, abs=1e-12)
    assert accepted(world, Traversal(), chain(2)) == pytest.approx(11 / 9, abs=1e-12)


@EVERY_WORLD
@pytest.mark.parametrize("width", [1, 2, 3])
def test_siblings_never_beat_optimal_transport(world, width):
    """iid siblings: accepted <= 1 - max over sets H of q(H)^n - p(H); one sibling reaches it."""
    p, q = world.p(()), world.q(())
    sets = [list(h) for n in range(world.v + 1) for h in itertools.combinations(range(world.v), n)]
    bound = 1 - max(q[h].sum() ** width - p[h].sum() for h in sets)
    shape = tree(tuple((rank,) for rank in range(width)))
    for verifier in (Token(), Traversal(), Match()):
        assert accepted(world, verifier, shape) <= bound + 1e-12
    if width == 1:
        assert accepted(world, Token(), shape) == pytest.approx(bound, abs=1e-12)


@EVERY_WORLD
@pytest.mark.parametrize("length", [1, 2, 3])
def test_on_chains_traversal_accepts_at_least_what_token_does(world, length):
    """A theorem (2403.10444), on average over drafts; on a single draft it may accept less."""
    assert accepted(world, Traversal(), chain(length)) >= accepted(world, Token(), chain(length)) - 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name == "ragged" else [])
        for name, shape in TREES.items()
        if shape.rank.any()
    ],
)
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_on_trees_traversal_accepts_more_over_all_worlds(name, drawn):
    gains = [
        accepted(world, Traversal(), TREES[name], drawn) - accepted(world, Token(), TREES[name], drawn)
        for world in WORLDS
    ]
    assert sum(gains) > 1e-3 if TREES[name].depth.max() > 1 else max(map(abs, gains)) < 1e-12


def test_on_a_tree_token_can_accept_more():
    """There is no such theorem on trees: a world in which top-down accepts slightly more; both are exact."""
    world = World(119, v=5)
    traversal, token = (
        accepted(world, verifier, TREES["[1,2]"], "without_replacement") for verifier in (Traversal(), Token())
    )
    assert token - traversal == pytest.approx(3.799e-5, rel=1e-3)


@pytest.mark.parametrize("name", TREES)
def test_point_drafts_are_accepted_alike(name):
    world = World(28)
    numbers = [accepted(world, verifier, TREES[name], "deterministic") for verifier in (Token(), Traversal(), Match())]
    assert numbers == pytest.approx([numbers[0]] * 3, abs=1e-14)


class Same(World):
    """The draft is the target."""

    def probabilities(self, length):
        p, _ = super().probabilities(length)
        return p, p


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda v: v.name)
def test_a_chain_drawn_from_the_target_itself_is_fully_accepted(verifier, drawn):
    for length in (1, 2, 3):
        assert accepted(Same(3), verifier, chain(length), drawn) == pytest.approx(length, abs=1e-12)
