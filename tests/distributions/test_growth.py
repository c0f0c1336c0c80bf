"""Trees of sampled nodes grown without knowing their final shape: exact top down and bottom up, not for K-SEQ.

Where to grow next may depend on everything drawn so far, on other branches and on siblings' tokens too, as long as
every drawn node stays and siblings are verified in the order drawn.
"""

from __future__ import annotations

import heapq

import pytest

from spec_lab.verify import KSeq, Match, Token, Traversal
from tests.distributions.tabular import Growing, Outputs, World, explore
from tests.distributions.test_lossless import WORLDS, require_lossless

EXACT = [Token(), Traversal(), Match()]


def token_of(growing: Growing, row: int) -> int:
    return growing.paths[row][-1]


def best_first(growing: Growing, ways=("without_replacement",) * 3, nodes: int = 3) -> None:
    """The slot of largest estimated probability is filled next (DySpec, 2410.11744): a child or a further sibling."""
    slots = [(-1.0, 0)]
    while slots and len(growing.parent) < nodes:
        value, row = heapq.heappop(slots)
        if len(growing.paths[row]) >= 2:
            continue
        left = growing.left[row].copy() if row in growing.left else growing.world.q(growing.paths[row])
        child = growing.sample(row, ways[0])
        if child is None:
            continue
        chance = float(left[token_of(growing, child)] / left.sum())
        heapq.heappush(slots, (value * chance, child))
        if chance < 1:
            heapq.heappush(slots, (value * (1 - chance), row))


def independent_best_first(growing: Growing) -> None:
    """The same with siblings drawn independently."""
    best_first(growing, ("iid",) * 3)


def one_more_after_a_token(growing: Growing, way="without_replacement") -> None:
    """A second sibling only where the first is one of two tokens."""
    first = growing.sample(0, way)
    if token_of(growing, first) in (0, 2):
        growing.sample(0, way)


def deeper_where_unsure(growing: Growing) -> None:
    """A chain that continues only below tokens of small q, and branches below the others."""
    row = growing.sample(0, "without_replacement")
    if growing.world.q(())[token_of(growing, row)] < 0.4:
        growing.sample(row, "iid")
    else:
        growing.sample(0, "without_replacement")


def sibling_after_a_child(growing: Growing) -> None:
    """A second sibling whose existence depends on what was drawn below the first."""
    first = growing.sample(0, "without_replacement")
    below = growing.sample(first, "without_replacement")
    if token_of(growing, below) % 2:
        second = growing.sample(0, "without_replacement")
        if second is not None and token_of(growing, second) < token_of(growing, below):
            growing.sample(second, "iid")
    else:
        growing.sample(first, "without_replacement")


def across_branches(growing: Growing) -> None:
    """Nodes drawn below one sibling depend on those below the other."""
    first, second = growing.sample(0, "without_replacement"), growing.sample(0, "without_replacement")
    below = growing.sample(first, "iid")
    if second is not None and token_of(growing, below) == token_of(growing, second):
        growing.sample(second, "without_replacement")
        growing.sample(second, "without_replacement")


POLICIES = [
    best_first, independent_best_first, one_more_after_a_token, deeper_where_unsure, sibling_after_a_child,
    across_branches,
]  # fmt: skip


@pytest.mark.parametrize("grow", POLICIES, ids=lambda grow: grow.__name__)
@pytest.mark.parametrize("world", WORLDS[:4], ids=lambda w: f"world{w.seed}")
@pytest.mark.parametrize("verifier", EXACT, ids=lambda v: v.name)
@pytest.mark.each_value
def test_growth_that_depends_on_drawn_tokens_keeps_the_distribution(verifier, world, grow):
    require_lossless(Outputs.of_grown(world, verifier, grow))


def test_best_first_trees_have_different_shapes():
    """The tests above depend on it."""
    shapes = set()
    for _, draft in explore(lambda draws: grown(World(6, support=4, plain=True), draws)):
        shapes.add(tuple(draft.shape.parent.tolist()))
    assert {(0, 0, 0), (0, 0, 1), (0, 1, 0)} & shapes and len(shapes) >= 3


def grown(world, draws):
    growing = Growing(world, draws)
    best_first(growing)
    return growing.draft()


def test_k_seq_is_not_exact_where_the_number_of_siblings_follows_a_token():
    world = World(6, support=4, plain=True)
    wrong = Outputs.of_grown(world, KSeq(), lambda growing: one_more_after_a_token(growing, "iid"))
    assert wrong.tv() > 1e-3 and wrong.first_failure() is not None
    for verifier in EXACT:
        require_lossless(Outputs.of_grown(world, verifier, lambda growing: one_more_after_a_token(growing, "iid")))


def test_k_seq_is_exact_where_that_number_is_fixed():
    def two(growing: Growing) -> None:
        growing.sample(0, "iid")
        growing.sample(0, "iid")

    require_lossless(Outputs.of_grown(World(6, support=4, plain=True), KSeq(), two))


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda v: v.name)
def test_a_node_dropped_for_its_value_is_detected(verifier):
    """Negative control: growth may depend on drawn tokens, dropping nodes may not."""

    def choosy(growing: Growing) -> None:
        row = growing.sample(0, "iid")
        if token_of(growing, row) == 0:
            growing.parent.pop()
            growing.codes.pop()
            growing.paths.pop()

    assert Outputs.of_grown(World(6, support=4, plain=True), verifier, choosy).tv() > 1e-2
