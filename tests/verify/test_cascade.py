"""Speculative cascades are exact for their own distribution pi, and lossy for the target's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape, chain, tree
from spec_lab.verify import Cascade, Token
from tests.distributions import twin_zoo
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_lossless import TREES, WORLDS, require_lossless
from tests.verify.test_twins import drafts

CASCADES = [Cascade(0.4, "chow"), Cascade(0.1, "diff"), Cascade(0.3, "opt")]
EACH = pytest.mark.parametrize("verifier", CASCADES, ids=lambda v: v.rule)
DRAWN = pytest.mark.parametrize("drawn", ["iid", "without_replacement"])


def aimed_at(world: World, verifier: Cascade, depth: int) -> list[np.ndarray]:
    """The expected distribution after every text, by length: pi at expanded nodes of a tree, p at its leaves."""
    every = [list(zip(*world.probabilities(length), strict=True)) for length in range(depth)]
    pi = [np.array([twin_zoo.pi(p, q, verifier.alpha, verifier.rule) for p, q in pairs]) for pairs in every]
    return [*pi, world.probabilities(depth)[0]]


@pytest.mark.each_value
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"world{w.seed}")
@pytest.mark.parametrize("name", ["[1]", "[1,1]", "[1,1,1]", "[2]", "[2,2]"])
@DRAWN
@EACH
def test_cascade_is_exact_against_its_own_target_distribution(verifier, drawn, name, world):
    shape: Shape = TREES[name]
    outputs = Outputs.of_forest(world, verifier, shape, drawn)
    outputs.distributions = aimed_at(world, verifier, int(shape.depth.max()))
    require_lossless(outputs)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["[1]", "[1,1]", "[2,2]"])
@DRAWN
@EACH
def test_cascade_is_lossy_against_the_target_and_accepts_more(verifier, drawn, name):
    world = World(27, plain=True)
    outputs = Outputs.of_forest(world, verifier, TREES[name], drawn)
    assert outputs.tv() > 0.01 and outputs.first_failure() is not None
    assert outputs.accepted > Outputs.of_forest(world, Token(), TREES[name], drawn).accepted + 0.01


P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.4, 0.2, 0.4])  # TV(p, q) = 0.2


@pytest.mark.parametrize(
    ("rule", "alpha", "defers"),
    [
        ("chow", 0.5, True),  # max q = 0.4 < 0.5
        ("chow", 0.6, False),  # not below 0.4
        ("chow", 0.7, False),
        ("diff", 0.05, True),  # 0.4 < 0.5 - 0.05
        ("diff", 0.1, False),  # just reached
        ("diff", 0.15, False),
        ("opt", 0.15, True),  # 0.4 < 0.5 - 0.15 * 0.2
        ("opt", 0.6, False),
        ("opt", 0.45, True),  # cheaper than diff: 0.4 < 0.5 - 0.09
    ],
)
def test_each_rule_defers_as_in_the_table(rule, alpha, defers):
    draft = Draft(chain(1), torch.tensor([0]), "iid", torch.tensor(Q[None]), np.array([0, -1]))
    aim = Cascade(alpha, rule).aim(draft, torch.tensor(np.array([P, P])))
    assert aim.tolist() == [(P if defers else Q).tolist(), P.tolist()]  # a leaf has no q


@EACH
@settings(max_examples=150)
@given(case=drafts(("iid", "without_replacement")))
def test_the_distribution_of_cascade_is_the_paper_s(verifier, case):
    draft, p = case
    aim = verifier.aim(draft, p).numpy()
    np.testing.assert_allclose(aim, twin_zoo.aim(draft, p.numpy(), verifier.alpha, verifier.rule), rtol=0, atol=1e-15)
    np.testing.assert_allclose(aim.sum(-1), p.sum(-1).numpy(), rtol=0, atol=1e-12)
    assert (aim[p.numpy() == 0] == 0).all(), "a token that the target forbids"


def test_a_draft_that_never_defers_is_fully_accepted():
    """Also in single precision, where distributions sum to slightly more than 1."""
    q = torch.softmax(torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)), -1) * (1 + 1e-6)
    p = torch.softmax(torch.randn(7, 5000, generator=torch.Generator().manual_seed(1)), -1)
    shape, q_row = TREES["[2,2]"], np.array([0, 1, 2, -1, -1, -1, -1])
    token = torch.multinomial(q[q_row[shape.parent]], 1, generator=torch.Generator().manual_seed(2))[:, 0]
    draft = Draft(shape, token, "iid", q, q_row)
    assert Cascade(1.0, "chow")(draft, p).expected_accepted(shape).tolist() == [2.0]
    unused = next(x for x in range(5000) if x not in token and q[2, x] > 1e-4)
    p[2, unused] = 0.0  # a constraint at one row costs nothing at the others
    assert Cascade(1.0, "chow")(draft, p).expected_accepted(shape).tolist() == [2.0]


def test_a_constraint_masks_the_draft_distribution_too():
    """Token 0 is illegal: its node's row is dead. Without deferral pi is q over the legal tokens."""
    p = torch.tensor([[0.0, 0.7, 0.3], [0.0, 0.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    verifier = Cascade(1.0, "chow")
    draft = Draft(tree(((0,), (1,))), torch.tensor([0, 1]), "iid", q, np.array([0, -1, -1]))
    assert verifier.aim(draft, p).tolist() == [pytest.approx([0.0, 0.4, 0.6]), [0.0] * 3, p[2].tolist()]
    assert verifier(draft, p).stop[1] == 0


def test_the_target_probabilities_are_not_changed():
    p = torch.tensor(np.array([P, P]))
    draft = Draft(chain(1), torch.tensor([0]), "iid", torch.tensor(Q[None]), np.array([0, -1]))
    Cascade(1.0, "chow")(draft, p)
    assert p.tolist() == [P.tolist(), P.tolist()]
