"""The transport bound against linear programmes, all subsets, and the verifiers it bounds."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from spec_lab.core.shape import tree
from spec_lab.verify import Match, Token, Traversal
from spec_lab.verify.transport import all_inside, spechub_acceptance, transport_bound
from tests.distributions.tabular import Outputs, World

WAYS = ["iid", "without_replacement"]
KINDS = ["generic", "peaked", "zeros", "equal", "disjoint", "one-hot p", "one-hot q", "both one-hot"]


def pair(rng: np.random.Generator, v: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Distributions p and q ``[V]`` of a kind."""
    p, q = (rng.dirichlet(np.full(v, 0.2 if kind == "peaked" else 1.0)) + 1e-12 for _ in range(2))
    if kind == "zeros":
        p[rng.permutation(v)[: rng.integers(0, v)]] = 0.0
        q[rng.permutation(v)[: rng.integers(0, v)]] = 0.0
    if kind == "equal":
        p = q
    if kind == "disjoint":
        cut = rng.integers(1, v)
        p[:cut], q[cut:] = 0.0, 0.0
    if kind in ("one-hot p", "both one-hot"):
        p = np.eye(v)[rng.integers(v)]
    if kind in ("one-hot q", "both one-hot"):
        q = np.eye(v)[rng.integers(v)]
    return p / p.sum(), q / q.sum()


def bound(p: np.ndarray, q: np.ndarray, count: int, drawn: str) -> float:
    return float(transport_bound(torch.from_numpy(p)[None], torch.from_numpy(q)[None], count, drawn)[0])


def drafts(q: np.ndarray, count: int, drawn: str) -> dict[tuple[int, ...], float]:
    """The probability of each ordered draft, by sums over remaining tokens rather than 1 minus removed mass."""
    support = np.flatnonzero(q).tolist()
    if drawn == "iid":
        return {d: float(np.prod(q[list(d)])) for d in itertools.product(support, repeat=count)}
    masses = {}
    for d in itertools.permutations(support, min(count, len(support))):
        probability = 1.0
        for position, token in enumerate(d):
            probability *= q[token] / q[[i for i in support if i not in d[:position]]].sum()
        masses[d] = float(probability)
    return masses


def programme(p: np.ndarray, q: np.ndarray, count: int, drawn: str) -> float:
    """Max P(token in draft), as ``of_drafts``."""
    return of_drafts(p, drafts(q, count, drawn))


def of_drafts(p: np.ndarray, drafted: dict[tuple[int, ...], float]) -> float:
    """Max P(token in draft) over joint distributions of the draft (as a set) and the token with the right marginals."""
    sets: dict[frozenset[int], float] = {}
    for draft, probability in drafted.items():
        sets[frozenset(draft)] = sets.get(frozenset(draft), 0.0) + probability
    v, m = len(p), len(sets)
    gain = -np.array([[float(y in s) for y in range(v)] for s in sets])
    marginals = np.concatenate([np.kron(np.eye(m), np.ones(v)), np.kron(np.ones(m), np.eye(v))])
    wanted = np.concatenate([list(sets.values()), p])
    # the last equation follows from the others, but for rounding
    solved = linprog(gain.ravel(), A_eq=marginals[:-1], b_eq=wanted[:-1], method="highs-ds")
    assert solved.status == 0, solved.message
    return -float(solved.fun)


def over_all_sets(p: np.ndarray, q: np.ndarray, count: int, drawn: str) -> float:
    """1 - max over all sets H of P(all drafts in H) - p(H)."""
    drafted = drafts(q, count, drawn)
    sets = [set(h) for n in range(len(p) + 1) for h in itertools.combinations(range(len(p)), n)]
    return 1 - max(sum(w for d, w in drafted.items() if h.issuperset(d)) - p[list(h)].sum() for h in sets)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("drawn", WAYS)
def test_is_the_optimum_of_the_linear_programme(drawn, count, kind):
    rng = np.random.default_rng([count, KINDS.index(kind)])
    for v in (3, 4, 5):
        for _ in range(2):
            p, q = pair(rng, v, kind)
            assert bound(p, q, count, drawn) == pytest.approx(programme(p, q, count, drawn), abs=1e-8)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("drawn", WAYS)
def test_a_prefix_of_tokens_sorted_by_p_over_q_is_the_best_set(drawn, count, kind):
    rng = np.random.default_rng([7, count, KINDS.index(kind)])
    for _ in range(10):
        p, q = pair(rng, 5, kind)
        assert bound(p, q, count, drawn) == pytest.approx(over_all_sets(p, q, count, drawn), abs=1e-12)


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from([*WAYS, "gumbel"]), st.integers(2, 12))
def test_one_sibling_reaches_one_minus_tv_and_more_siblings_more(seed, kind, drawn, v):
    p, q = pair(np.random.default_rng(seed), v, kind)
    bounds = [bound(p, q, count, drawn) for count in range(7)]
    assert bounds[0] == 0.0
    assert bounds[1] == pytest.approx(1 - 0.5 * np.abs(p - q).sum(), abs=1e-12)
    assert (np.diff(bounds) >= -1e-12).all()
    assert min(bounds) >= 0 and max(bounds) <= 1  # also where sums round
    assert bounds[-1] <= p[q > 0].sum() + 1e-12  # tokens that are never drafted are never accepted
    if drawn != "iid" and (q > 0).sum() <= 6:
        assert bounds[6] == pytest.approx(p[q > 0].sum(), abs=1e-12)  # all of the support is drafted


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.integers(1, 4))
def test_siblings_without_replacement_can_do_more_than_iid_ones(seed, kind, count):
    """A verifier can make iid siblings of distinct ones by repeating some, at the right odds."""
    p, q = pair(np.random.default_rng(seed), 6, kind)
    assert bound(p, q, count, "without_replacement") >= bound(p, q, count, "iid") - 1e-12


@pytest.mark.each_value
@pytest.mark.parametrize("spread", [0, 2, 40, 80])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_draws_without_replacement_against_fractions(count, spread):
    """Exact rational sums over all ordered draws. Spread 40: q(0) = 1 - 1e-17; the small rest decides the next draw."""
    rng = np.random.default_rng([count, spread])
    for _ in range(3):
        q = np.exp(-rng.uniform(0, 1, 6) * spread)
        if spread == 40:
            q[0], q[1:] = 1.0, q[1:] * 1e-17
        q = (q / q.sum())[rng.permutation(6)]
        exact = [float(fraction_inside(q, range(j + 1), count)) for j in range(6)]
        assert all_inside(q[None], count)[0] == pytest.approx(exact, abs=1e-13)


def fraction_inside(q: np.ndarray, inside: range, count: int) -> Fraction:
    masses = [Fraction(float(mass)) for mass in q]
    total = Fraction(0)
    for draft in itertools.permutations(inside, count):
        probability, left = Fraction(1), sum(masses)
        for token in draft:
            probability *= masses[token] / left
            left -= masses[token]
        total += probability
    return total


@pytest.mark.parametrize(("count", "error"), [(3, 1e-12), (5, 1e-12), (8, 1e-12), (12, 1e-12), (40, 1e-6)])
def test_uniform_distributions_have_a_closed_form(count, error):
    """All draws of V equal tokens lie among the first j with probability C(j, n) / C(V, n)."""
    v = 1000
    inside = all_inside(np.full((1, v), 1 / v), count)[0]
    j = np.arange(1, v + 1)[:, None]
    exact = np.prod(np.maximum(j - np.arange(count), 0) / (v - np.arange(count)), -1)
    assert inside == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("drawn", WAYS)
def test_a_draft_that_cannot_be_drawn_again(drawn):
    """One-hot q and n = 2: without replacement there is no second sibling; almost one-hot there is."""
    p, q = np.array([0.1, 0.6, 0.3]), np.array([1.0, 0.0, 0.0])
    assert bound(p, q, 2, drawn) == pytest.approx(0.1, abs=1e-15)
    q = np.array([1.0, 2e-30, 1e-30])
    # without: the second is token 1 or 2 at odds 2 : 1, which is p's; the first of the three is always there
    assert bound(p, q, 2, drawn) == pytest.approx(1.0 if drawn == "without_replacement" else 0.1, abs=1e-12)
    q = np.array([1.0, 5e-324, 0.0])  # practically no mass
    assert bound(p, q, 2, drawn) == pytest.approx(0.1, abs=1e-15)


@pytest.mark.parametrize("rare", [1e-10, 1e-100, 1e-289])
def test_rare_tokens_are_drafted_all_the_same(rare):
    """Three of four tokens without replacement: the likely one and any two of the others, equally often."""
    assert bound(np.full(4, 0.25), np.array([1.0, rare, rare, rare]), 3, "without_replacement") == pytest.approx(
        1.0, abs=1e-9
    )
    assert bound(np.eye(4)[1], np.array([1.0, rare, rare, rare]), 3, "without_replacement") == pytest.approx(
        2 / 3, abs=1e-9
    )


@pytest.mark.each_value
@pytest.mark.parametrize("drawn", WAYS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rows_are_independent(drawn, count):
    """Supports of all sizes, dead rows and rows without a draft, float32: row by row or at once."""
    rng = np.random.default_rng(3)
    pairs = [pair(rng, 6, kind) for kind in KINDS for _ in range(60)]
    p, q = (torch.from_numpy(np.array(side)).float() for side in zip(*pairs, strict=True))
    p[5], q[9] = 0.0, 0.0
    together = transport_bound(p, q, count, drawn)
    assert together.dtype == np.float64 and together.shape == (len(pairs),)
    assert together[5] == together[9] == 0.0
    alone = np.concatenate([transport_bound(p[i : i + 1], q[i : i + 1], count, drawn) for i in range(len(pairs))])
    assert together == pytest.approx(alone, abs=1e-13)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "world", [World(seed) for seed in range(30, 38)] + [World(38, plain=True)], ids=lambda w: w.seed
)
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("drawn", WAYS)
def test_no_verifier_exceeds_it(drawn, width, world):
    most = bound(world.p(()), world.q(()), width, drawn)
    shape = tree(tuple((rank,) for rank in range(width)))
    for verifier in (Token(), Traversal(), Match()):
        accepted = Outputs.of_forest(world, verifier, shape, drawn).accepted
        assert accepted <= most + 1e-12
        if width == 1 and not isinstance(verifier, Match):
            assert accepted == pytest.approx(most, abs=1e-12)


@pytest.mark.parametrize("drawn", WAYS)
def test_recursive_rejection_is_below_the_optimum(drawn):
    """The bound is not vacuous: over random pairs two siblings come within 10 % of it, and do not reach it."""
    toys = [World(seed, v=5, support=5, plain=True) for seed in range(40, 60)]
    most = sum(bound(toy.p(()), toy.q(()), 2, drawn) for toy in toys)
    accepted = sum(Outputs.of_forest(toy, Token(), tree(((0,), (1,))), drawn).accepted for toy in toys)
    assert 0.9 * most < accepted < 0.999 * most


@pytest.mark.parametrize("kind", KINDS)
def test_spechub_accepts_what_the_linear_programme_accepts_of_its_pairs(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for v in (2, 4, 5):
        p, q = pair(rng, v, kind)
        hub, pairs = int(q.argmax()), {}
        for token in set(range(v)) - {hub} if q[hub] < 1 else ():
            pairs[token, hub], pairs[hub, token] = q[token], q[hub] * q[token] / (1 - q[hub])
        (accepted,) = spechub_acceptance(torch.from_numpy(p)[None], torch.from_numpy(q)[None])
        assert accepted == pytest.approx(of_drafts(p, pairs) if pairs else p[hub], abs=1e-8)


def test_spechub_of_a_draft_that_is_certain_or_of_lumps():
    p = torch.tensor([[0.3, 0.5, 0.2], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.3, 0.1, 0.6]])
    accepted = spechub_acceptance(p, q, lumps=1)
    assert accepted == pytest.approx([0.5, 0.0, (min(0.3, 1 / 7) + 0.5) + 0.2], abs=1e-6), "the hub is no lump"
