"""The output of draft and verifier has exactly the target's distribution, by enumeration."""

import numpy as np
import pytest

from spec_lab.core.randomness import Key, Purpose
from spec_lab.core.shape import chain, tree
from spec_lab.tasks.certify.enumeration import Reused, Script, explore
from spec_lab.tasks.certify.exact import examine
from spec_lab.tasks.certify.instances import TOYS, Instance
from spec_lab.verify import Match, Token, Traversal
from tests.distributions.tabular import Outputs, World, every_draft, propose

EXACT = 1e-12
WORLDS = [World(toy.seed, toy.v, plain=toy.plain) for toy in TOYS]
TREES = {
    "[1]": chain(1),
    "[1,1]": chain(2),
    "[1,1,1]": chain(3),
    "[2]": tree(((0,), (1,))),
    "[3]": tree(((0,), (1,), (2,))),
    "[1,2]": tree(((0,), (0, 0), (0, 1))),
    "[2,1]": tree(((0,), (1,), (0, 0), (1, 0))),
    "[2,2]": tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))),
    "[3,1]": tree(((0,), (1,), (2,), (0, 0), (1, 0), (2, 0))),
    "ragged": tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))),
}
LARGEST = ("[2,2]", "[3,1]", "ragged")
VERIFIERS = pytest.mark.parametrize("verifier", [Token(), Traversal(), Match()], ids=lambda v: v.name)
DRAWN = pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])


def require_lossless(outputs: Outputs) -> None:
    assert outputs.first_failure(EXACT) is None
    assert outputs.mass == pytest.approx(1.0, abs=EXACT)
    for length in range(1, len(outputs.exactly)):
        assert outputs.tv(length) < EXACT
    assert outputs.expected == pytest.approx(outputs.accepted, abs=EXACT)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(
            name,
            world,
            id=f"{name}-world{world.seed}",
            # The largest trees take longer than all others together: two toy models in the short run.
            marks=[pytest.mark.nightly] if name in LARGEST and world.seed not in (1, 4) else [],
        )
        for name in TREES
        for world in WORLDS
    ],
)
@DRAWN
@VERIFIERS
def test_one_step_is_lossless(world, name, drawn, verifier):
    require_lossless(Outputs.of_forest(world, verifier, TREES[name], drawn))


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["[2]", "[1,1]", "[3]", "[2,1]"])
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
@VERIFIERS
def test_one_step_with_wide_distributions_is_lossless(name, drawn, verifier):
    """V = 5 and no zeros anywhere."""
    require_lossless(Outputs.of_forest(World(5, v=5, support=5, plain=True), verifier, TREES[name], drawn))


@pytest.mark.each_value
@pytest.mark.parametrize("world", [World(8), World(12, v=5, support=2)], ids=["world8", "world12"])
@pytest.mark.parametrize("name", ["[1,1]", "[3]", "[2,1]", "[2,2]"])
@DRAWN
@VERIFIERS
def test_the_real_proposer_and_target_accept_what_their_twins_do(world, name, drawn, verifier):
    """``certify`` drafts with the draft model's proposer on a model that is a table; the twin is plain Python."""
    twin = Outputs.of_forest(world, verifier, TREES[name], drawn)
    real = examine(Instance(world, name.strip("[]").replace(",", "x")), drawn, verifier)
    assert real.wrong is None
    assert real.accepted == pytest.approx(twin.accepted, abs=1e-12)
    assert real.outcomes == len(every_draft(world, TREES[name], drawn)[1])


def test_worlds_hold_every_kind_of_context():
    p, q = (np.concatenate(rows) for rows in zip(*(World(1).probabilities(k) for k in range(4)), strict=True))
    assert (p == q).all(1).any() and ((p * q).sum(1) == 0).any()
    assert (p.max(1) == 1).any() and (q.max(1) == 1).any() and ((p == 0) & (q > 0)).any()


def test_an_exhausted_distribution_draws_no_more_siblings():
    """Without replacement, a distribution over two tokens yields two of three siblings, a one-hot one yields one."""
    world = World(2, support=2, plain=True)
    draft, probability = every_draft(world, TREES["[3]"], "without_replacement")
    assert probability.sum() == pytest.approx(1)
    assert np.bincount(draft.shape.parent).tolist() == [2] * draft.shape.roots
    greedy = World(2, support=1, plain=True)
    for verifier in (Token(), Traversal(), Match()):
        require_lossless(Outputs.of_forest(world, verifier, TREES["[3]"], "without_replacement"))
        require_lossless(Outputs.of_forest(greedy, verifier, TREES["[2,2]"], "without_replacement"))
    alone, _ = every_draft(greedy, TREES["[2,2]"], "without_replacement")
    assert alone.shape.depth.tolist() == [0, 1, 2]
    twice, _ = every_draft(greedy, TREES["[2]"], "iid")
    assert twice.token[0] == twice.token[1]


def test_a_key_used_twice_is_detected():
    script, key = Script(), Key(0, 0, 0, Purpose.STOP)
    script.choose(np.ones(2), key)
    with pytest.raises(Reused, match="two choices"):
        script.choose(np.ones(2), key)


def test_enumeration_visits_every_draft_once():
    world, key = World(8, plain=True), Key(0, 0, 0, Purpose.DRAFT)
    seen = [
        (tuple(draft.token.tolist()), probability)
        for probability, draft in explore(
            lambda draws: propose(world, (), TREES["[2]"], "without_replacement", draws, key)
        )
    ]
    q = world.q(())
    assert len({tokens for tokens, _ in seen}) == len(seen) == 6
    for (first, second), probability in seen:
        assert probability == pytest.approx(q[first] * q[second] / (1 - q[first]))
