"""Point and sampled siblings under one parent, in any drawing order: the output has the target's distribution."""

from __future__ import annotations

import numpy as np
import pytest

from spec_lab.core.draft import DETERMINISTIC, Draft
from spec_lab.verify import Lenient, Match, Token, Traversal, Verdict
from spec_lab.verify.rejection import Rejection, recursive_rejection
from tests.distributions.mutants import edited
from tests.distributions.tabular import Growing, Outputs, World
from tests.distributions.test_lossless import WORLDS, require_lossless

EXACT = [Token(), Traversal(), Match(), Lenient(1.0)]


def guesses(growing: Growing, row: int, count: int) -> list[int]:
    """Tokens determined by the text above ``row``, as an n-gram's: likely and unlikely ones."""
    path = growing.paths[row]
    first = (sum(path) + len(path)) % growing.world.v
    return [(first + 2 * n + n // 2) % growing.world.v for n in range(count)]


def points_first(growing: Growing) -> None:
    """Points, then x ~ q, which may repeat one of them."""
    for token in guesses(growing, 0, 2):
        growing.point(0, token)
    growing.sample(0, "iid")


def points_excluded(growing: Growing) -> None:
    """Points, then x and y ~ q without them."""
    tokens = guesses(growing, 0, 1)
    for token in tokens:
        growing.point(0, token)
    growing.sample(0, "without_replacement", off=tokens)
    growing.sample(0, "without_replacement", off=tokens)


def sample_first(growing: Growing) -> None:
    """x ~ q, then points; one that equals x stays."""
    growing.sample(0, "iid")
    for token in guesses(growing, 0, 3):
        growing.point(0, token)


def sample_first_dropping_equals(growing: Growing) -> None:
    """x ~ q, then points; one that equals x is dropped."""
    row = growing.sample(0, "iid")
    for token in guesses(growing, 0, 3):
        if token != growing.paths[row][-1]:
            growing.point(0, token)


def alternating(growing: Growing) -> None:
    """Point, x, point, y without replacement, z ~ q."""
    first, second = guesses(growing, 0, 2)
    growing.point(0, first)
    growing.sample(0, "without_replacement")
    growing.point(0, second)
    growing.sample(0, "without_replacement")
    growing.sample(0, "iid")


def union(growing: Growing) -> None:
    """A chain of points (an n-gram's) and a sampled chain under one root."""
    (token,) = guesses(growing, 0, 1)
    row = growing.point(0, token)
    growing.point(row, guesses(growing, row, 1)[0])
    row = growing.sample(0, "iid", off=[token])
    if row is not None:
        growing.sample(row, "iid")


def below_each_other(growing: Growing) -> None:
    """Points below sampled nodes, sampled nodes below points, and both side by side."""
    top = growing.sample(0, "without_replacement")
    for token in guesses(growing, top, 2):
        growing.point(top, token)
    growing.sample(top, "iid")
    point = growing.point(0, guesses(growing, 0, 1)[0])
    growing.sample(point, "iid")
    growing.sample(0, "without_replacement")


MIXTURES = [
    points_first, points_excluded, sample_first, sample_first_dropping_equals, alternating, union, below_each_other,
]  # fmt: skip
MIXED = pytest.mark.parametrize("grow", MIXTURES, ids=lambda grow: grow.__name__)


@MIXED
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"world{w.seed}")
@pytest.mark.parametrize("verifier", EXACT, ids=lambda v: v.name)
@pytest.mark.each_value
def test_mixed_siblings_keep_the_target_s_distribution(verifier, world, grow):
    require_lossless(Outputs.of_grown(world, verifier, grow))


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda v: v.name)
def test_points_left_out_of_q_are_accepted_more_often(verifier):
    toys = [World(seed, v=5, support=5, plain=True) for seed in range(20)]

    def one(growing: Growing, off: bool) -> None:
        tokens = guesses(growing, 0, 2)
        for token in tokens:
            growing.point(0, token)
        growing.sample(0, "iid", off=tokens if off else ())

    with_points, without = (
        np.mean([Outputs.of_grown(toy, verifier, lambda g, off=off: one(g, off)).accepted for toy in toys])
        for off in (False, True)
    )
    assert without > with_points + 0.02


# Broken rules


class PointsKept(Rejection):
    """Rejected points keep their mass."""

    _excess_ = edited(Rejection._excess_, "if row in self._deterministic:", "if False:")


class PointsAsSampled(Rejection):
    """A point is verified with the q of its parent, as if it had been drawn."""

    accept = edited(Rejection.accept, "if self._code[node] == DETERMINISTIC:", "if False:")


class LaterPointsToo(Rejection):
    """Points count as rejected before their turn."""

    def __init__(self, draft, p):
        super().__init__(draft, p)
        for node in np.flatnonzero(draft.codes == DETERMINISTIC):
            self._deterministic.setdefault(self.parent[node], []).append(int(draft.token[node]))


def broken(rejection: type[Rejection]) -> dict[str, object]:
    """Token and traversal that reject siblings through ``rejection``."""
    top_down = edited(recursive_rejection, "Rejection(draft, p)", "Broken(draft, p)", Broken=rejection)
    bottom_up = edited(Traversal, "Rejection(draft, p)", "Broken(draft, p)", Broken=rejection)
    return {"token": lambda draft, p: Verdict(*top_down(draft, p)), "traversal": bottom_up()}


@pytest.mark.parametrize("rejection", [PointsKept, PointsAsSampled, LaterPointsToo], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", ["token", "traversal"])
def test_a_broken_rule_for_points_is_killed(rejection, name):
    verifier, world = broken(rejection)[name], World(6, support=4, plain=True)
    assert max(Outputs.of_grown(world, verifier, grow).tv() for grow in (alternating, sample_first)) > 1e-2


@pytest.mark.parametrize("name", ["token", "traversal"])
def test_the_unbroken_rule_survives_the_same_edits(name):
    world = World(6, support=4, plain=True)
    assert Outputs.of_grown(world, broken(Rejection)[name], alternating).tv() < 1e-12


def test_a_wrong_order_of_siblings_is_killed():
    """Points come first in the draft though x was drawn first: where a point equal to x was dropped, q is another
    one."""

    def reordered(growing: Growing) -> None:
        sample_first_dropping_equals(growing)
        order = [*range(1, len(growing.parent)), 0]
        growing.codes = [growing.codes[n] for n in order]
        growing.paths = [(), *(growing.paths[n + 1] for n in order)]

    world = World(6, support=4, plain=True)
    assert Outputs.of_grown(world, Token(), sample_first_dropping_equals).tv() < 1e-12
    assert Outputs.of_grown(world, Token(), reordered).tv() > 1e-2


def test_a_draft_with_inconsistent_ways_of_drawing_is_refused():
    growing = Growing(World(6), None)
    growing.point(0, 1)
    draft = growing.draft()
    assert draft.ways == {"deterministic"}
    with pytest.raises(ValueError, match="row of q"):
        Draft(draft.shape, draft.token, np.array([1], dtype=np.int8), draft.q, draft.q_row)
    with pytest.raises(ValueError, match="q and q_row"):
        Draft(draft.shape, draft.token, np.array([1], dtype=np.int8))
    with pytest.raises(ValueError, match="2 .*1 nodes"):
        Draft(draft.shape, draft.token, np.zeros(2, dtype=np.int8))
