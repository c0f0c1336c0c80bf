"""Typical and relaxed acceptance: accepted tokens, the chosen path, and the distance from the target."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import chain, forest, tree
from spec_lab.verify import Match, Relaxed, Typical
from spec_lab.verify.longest_path import ends
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_closed_forms import Constant
from tests.distributions.test_lossless import TREES

BOTH = pytest.mark.parametrize("verifier", [Typical(0.3, 0.9), Relaxed(2, 0.5)], ids=lambda v: v.name)
SHAPE = tree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 1, 0)))


# Which path


@pytest.mark.parametrize(
    ("passes", "end"),
    [
        ([], ()),  # none: the root
        ([(0,), (2,)], (0,)),  # ties go to the first
        ([(0,), (1,), (1, 1)], (1, 1)),  # the deepest
        ([(0,), (0, 0), (1,), (1, 0), (1, 1), (1, 1, 0)], (1, 1, 0)),
        ([(1,), (1, 0), (1, 1), (1, 0, 0), (1, 1, 0)], (1, 0, 0)),
        ([(0,), (1, 0), (1, 0, 0)], (0,)),  # nothing below a rejected token counts
    ],
)
def test_the_longest_path_from_the_root_is_accepted_and_of_equals_the_first(passes, end):
    marks = np.array([SHAPE.ranks(row) in passes for row in range(1, SHAPE.rows)])
    (row,) = ends(SHAPE, marks)
    assert SHAPE.ranks(int(row)) == end


def test_each_tree_has_a_path_of_its_own():
    shape = forest((chain(0), SHAPE, chain(2)))
    marks = np.zeros(shape.nodes, dtype=bool)
    marks[[1, 5, 8]] = True  # (1,) and (1, 1) of the second tree, the first node of the third
    assert [shape.ranks(int(row)) for row in ends(shape, marks)] == [(), (1, 1), (0,)]


# Which tokens

P = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
ENTROPY = -sum(mass * np.log(mass) for mass in (0.5, 0.3, 0.15, 0.05))


def accepted(verifier, p=P) -> list[int]:
    """The tokens that are accepted as the only draft."""
    tokens = range(len(p))
    drafts = Draft(forest((chain(1),) * len(tokens)), torch.tensor(list(tokens)))
    stop = verifier(drafts, p.expand(2 * len(tokens), -1)).stop
    assert stop.tolist() == [*(1 - stop[len(tokens) :]), *stop[len(tokens) :]]
    return np.flatnonzero(stop[len(tokens) :]).tolist()


@pytest.mark.parametrize(
    ("epsilon", "delta", "tokens"),
    [
        (0.4, 1.0, [0]),  # exp(-H) = 0.319 is the bound: 0.3 fails
        (0.2, 1.0, [0, 1]),  # epsilon is
        (0.15, 1.0, [0, 1]),  # it must be exceeded
        (0.14, 1.0, [0, 1, 2]),
        (1.0, 0.5, [0, 1]),  # 0.5 exp(-H) = 0.16
        (1.0, 0.4, [0, 1, 2]),
        (0.0, 1.0, [0, 1, 2, 3]),  # never a token without mass
        (1.0, 0.0, [0, 1, 2, 3]),
    ],
)
def test_typical_compares_with_epsilon_or_with_the_entropy_s_bound(epsilon, delta, tokens):
    assert accepted(Typical(epsilon, delta)) == tokens
    bound = min(epsilon, delta * np.exp(-ENTROPY))
    assert tokens == [x for x in range(5) if P[x] > bound]


@pytest.mark.parametrize(
    ("top", "delta", "tokens"),
    [
        (1, 1.0, [0]),
        (2, 1.0, [0, 1]),
        (3, 0.2, [0, 1]),  # 0.5 - 0.2 is reached
        (3, 0.19, [0]),
        (3, 0.36, [0, 1, 2]),
        (9, 1.0, [0, 1, 2, 3]),  # never a token without mass; more than there are is all
    ],
)
def test_relaxed_accepts_the_likeliest_within_delta(top, delta, tokens):
    assert accepted(Relaxed(top, delta), P + torch.tensor([0, 1e-12, 0, 0, 0])) == tokens


def test_relaxed_counts_equals_of_the_last_among_the_likeliest():
    assert accepted(Relaxed(2, 1.0), torch.tensor([0.2, 0.4, 0.2, 0.2])) == [0, 1, 2, 3]


# Distance from the target


class Three(Constant):
    pair = (np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.25, 0.5]))


@pytest.mark.parametrize("verifier", [Typical(0.25, 0.9), Relaxed(2, 0.25)], ids=lambda v: v.name)
def test_the_distance_to_the_target_in_a_small_case(verifier):
    """Tokens 0 and 1 are accepted: half of the drafts; the rest are emitted from p: (1/2, 2/5, 1/10)."""
    outputs = Outputs.of_forest(Three(0, v=3), verifier, chain(1), "iid")
    first = outputs.exactly[1] + outputs.exactly[2].reshape(3, 3).sum(1)
    assert first == pytest.approx([0.5, 0.4, 0.1], abs=1e-15)
    assert outputs.tv(1) == pytest.approx(0.1, abs=1e-15)
    assert outputs.accepted == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize("name", ["[1]", "[1,1]", "[2]", "[2,2]", "ragged"])
@pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])
@BOTH
@pytest.mark.each_value
def test_they_are_lossy(verifier, name, drawn):
    outputs = Outputs.of_forest(World(27, plain=True), verifier, TREES[name], drawn)
    assert outputs.tv() > 0.05 and outputs.first_failure() is not None
    assert outputs.mass == pytest.approx(1, abs=1e-12)
    assert outputs.expected == pytest.approx(outputs.accepted, abs=1e-12)


@BOTH
def test_at_temperature_zero_they_are_greedy_verification(verifier):
    """Drafted arg maxes are accepted, and nothing else."""
    random = np.random.default_rng(0)
    for _ in range(30):
        draft = Draft(SHAPE, torch.from_numpy((random.integers(0, 3, SHAPE.rows)[SHAPE.parent] + SHAPE.rank) % 3))
        p = torch.nn.functional.one_hot(torch.from_numpy(random.integers(0, 3, SHAPE.rows)), 3).float()
        greedy = Match()(draft, p)
        assert verifier(draft, p).expected_accepted(SHAPE) == greedy.expected_accepted(SHAPE)


@BOTH
def test_the_token_after_the_path_comes_from_the_target(verifier):
    p = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    verdict = verifier(Draft(chain(1), torch.tensor([0])), p)
    assert verdict.stop.tolist() == [0.0, 1.0]
    assert torch.equal(verdict.residual(np.array([1, 0])), p[[1, 0]])


@BOTH
def test_the_noise_of_a_race_does_not_matter(verifier):
    """They read tokens and p only."""
    q, q_row = torch.full((1, 3), 1 / 3), np.array([0, -1])
    p = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    raced = Draft(chain(1), torch.tensor([0]), "gumbel", q, q_row, torch.zeros(1, 3, dtype=torch.float64))
    assert (verifier(raced, p).stop == verifier(Draft(chain(1), torch.tensor([0])), p).stop).all()
