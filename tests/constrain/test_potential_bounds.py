"""Learned bounds of the potential, against every text; outputs sampled with them, by enumeration of the decode loop."""

from itertools import product

import numpy as np
import pytest

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.potential_bounds import ExpectedFutures, LearnedConstraint
from spec_lab.constrain.protocol import ConstraintError, unpack
from spec_lab.core.request import Request
from spec_lab.tasks.certify.exact import decoded
from spec_lab.tasks.certify.instances import Instance
from spec_lab.tasks.certify.toy_models import RandomToy, code
from spec_lab.verify import Match, Token, Traversal
from tests.constrain.test_potential import Cliffs, words
from tests.constrain.toys import Table, distance
from tests.decode.test_global_constraint import branching, by_enumeration

TOY = RandomToy(5, support=2, plain=True)
STOP, LENGTH = 3, 3
CLIFF = words((0, 1, 3), (0, 2, 0), (1, 3), (1, 0, 2), (2,))
"""Token 2 leads to a dead end, and so do tokens 0, 2."""


def p_after(text):
    return TOY.probabilities(len(text))[0][code(text, TOY.v)]


def p_of(text):
    return float(np.prod([p_after(text[:number])[token] for number, token in enumerate(text)]))


def potential(allowed, text) -> float:
    """The probability that a text is completed to a valid output."""
    mass = 0.0
    for count in range(1, LENGTH - len(text) + 1):
        for more in product(range(4), repeat=count):
            whole = (*text, *more)
            steps = [(whole[:n], whole[n]) for n in range(len(text), len(whole))]
            if more[-1] == STOP and STOP not in more[:-1] and all(token in allowed(before) for before, token in steps):
                mass += float(np.prod([p_after(before)[token] for before, token in steps]))
    return mass


def texts_under(allowed) -> list[tuple[int, ...]]:
    """Every text without its end that is allowed token by token, in a random order in which beginnings come first."""
    texts = [
        text
        for count in range(LENGTH)
        for text in product(range(3), repeat=count)
        if all(text[n] in allowed(text[:n]) for n in range(count))
    ]
    order = np.random.default_rng(0).random(len(texts)).tolist()
    return sorted(texts, key=lambda text: max(order[texts.index(text[:end])] for end in range(len(text) + 1)))


def learn(futures: ExpectedFutures, allowed, text, followed) -> None:
    """Score a text, or add the tokens that followed it since."""
    tokens = np.array(allowed(text), dtype=np.int64)
    may = tokens[futures.may_follow(text, tokens)].tolist()
    rest = sum(p_after(text)[token] for token in may if token not in followed)
    futures.learn(text, rest, {token: p_after(text)[token] for token in followed})


def learned(allowed, count: int | None) -> ExpectedFutures:
    """The bounds after so many texts, of which each stores the tokens that followed it; None for all texts."""
    futures = ExpectedFutures(frozenset({STOP}), LENGTH)
    for text in texts_under(allowed)[:count]:
        if text:
            learn(futures, allowed, text[:-1], [*futures.known[text[:-1]].p, text[-1]])
        learn(futures, allowed, text, [])
    return futures


@pytest.mark.parametrize("allowed", [branching, CLIFF], ids=["branching", "dead ends"])
def test_bounds_are_upper_bounds_and_only_fall(allowed):
    futures, before, falls = ExpectedFutures(frozenset({STOP}), LENGTH), {}, 0
    texts, z = texts_under(allowed), potential(allowed, ())
    assert futures.upper == 1 and futures.lower == 0 and 0 < z < 1
    for text in texts:
        tokens = np.array(allowed(text), dtype=np.int64)
        learn(futures, allowed, text, tokens.tolist())
        futures.learn(text, 9.0, dict.fromkeys(tokens.tolist(), 0.0))  # known already: nothing changes
        if STOP in tokens:
            futures.add((*text, STOP), p_of((*text, STOP)))
        now = {known: scored.total for known, scored in futures.known.items()}
        for known, bound in now.items():
            assert bound >= potential(allowed, known) - 1e-15
            assert bound <= before.get(known, 1.0) + 1e-15
        falls += now[()] < before.get((), 1.0)
        assert futures.lower - 1e-15 <= z <= futures.upper + 1e-15
        before = now
    assert falls >= 3
    for known, bound in before.items():
        assert bound == pytest.approx(potential(allowed, known), abs=1e-15)
    assert futures.lower == pytest.approx(z, abs=1e-15) and futures.upper == pytest.approx(z, abs=1e-15)


def sampled(allowed, count, sampler, tree="1x1", drawn="iid", verifier=None, constraint=None):
    """The distribution of the loop's outputs after so many texts were learned, and H of the empty text."""
    futures = learned(allowed, count)
    applied = AppliedConstraint(LearnedConstraint(constraint or Table(allowed), futures, sampler))
    instance = Instance(TOY, tree, LENGTH, frozenset({STOP}), applied=applied)
    return decoded(instance, drawn, verifier or Token()), futures.upper


@pytest.mark.each_value
@pytest.mark.parametrize("count", [0, 1, 3, None])
@pytest.mark.parametrize(
    ("tree", "drawn", "verifier"),
    [("1x1", "iid", Traversal()), ("2", "without_replacement", Token()), ("2", "deterministic", Match())],
    ids=["chain", "without_replacement", "deterministic"],
)
def test_accepted_outputs_have_the_conditional_distribution(count, tree, drawn, verifier):
    """Whatever was learned, a valid output has the probability p(x) / H(root)."""
    sampled_p, upper = sampled(branching, count, "rejection", tree, drawn, verifier)
    wanted, z = by_enumeration(TOY, branching, STOP, LENGTH), potential(branching, ())
    assert sum(sampled_p.values()) == pytest.approx(1)
    for output, given_valid in wanted.items():
        assert sampled_p[output] == pytest.approx(given_valid * z / upper, abs=1e-13)
    rejected = {output: p for output, p in sampled_p.items() if output not in wanted}
    assert sum(rejected.values()) == pytest.approx(1 - z / upper, abs=1e-12)
    if count is None:
        assert not rejected
    if count == 0:
        assert {finish for ((_, finish),) in rejected} == {"constraint", "length", "stop"}


@pytest.mark.parametrize("at", ["mask", "advance"])
def test_outputs_that_reach_a_dead_end_are_rejected(at):
    for count in (0, 2, None):
        sampled_p, upper = sampled(CLIFF, count, "rejection", constraint=Cliffs(CLIFF, at=at))
        for output, given_valid in by_enumeration(TOY, CLIFF, STOP, LENGTH).items():
            assert sampled_p[output] == pytest.approx(given_valid * potential(CLIFF, ()) / upper, abs=1e-13)


@pytest.mark.nightly
def test_expected_futures_begin_masked_and_end_with_the_conditional_distribution():
    instance = Instance(TOY, "1x1", LENGTH, frozenset({STOP}), applied=AppliedConstraint(Table(branching)))
    masked, wanted = decoded(instance, "iid", Token()), by_enumeration(TOY, branching, STOP, LENGTH)
    away = [distance(sampled(branching, count, "expected_futures")[0], wanted) for count in (0, 3, None)]
    assert distance(sampled(branching, 0, "expected_futures")[0], masked) < 1e-12
    assert away[0] > 0.1 and away[0] > away[1] > away[2] and away[2] < 1e-12


@pytest.mark.nightly
def test_every_output_follows_the_constraint_with_expected_futures():
    for count in (0, 3):
        for ((text, _),) in sampled(branching, count, "expected_futures")[0]:
            assert all(token in branching(text[:number]) for number, token in enumerate(text))


def test_a_state_that_was_not_scored():
    request, futures = Request(0, "one", (0,)), learned(branching, 1)
    every, masked = (
        LearnedConstraint(Table(branching), futures, sampler).start(request)
        for sampler in ("rejection", "expected_futures")
    )
    for state in (every, masked):
        assert np.flatnonzero(unpack(state.mask(), 4)).tolist() == [1, 2] and state.action() is None
        state.advance(1)
    assert every.mask() is None and every.potential() is None
    assert np.flatnonzero(unpack(masked.mask(), 4)).tolist() == [0, 1, 2]
    fork = every.fork()
    every.advance(3)  # not allowed after token 1
    assert every.action() == () and fork.action() is None
    masked.own = None
    with pytest.raises(ConstraintError, match="a token was drawn that its constraint does not allow"):
        masked.mask()
