"""Lossless verifiers beside their papers' algorithms: chains, arg maxes, rounding; random forests for all verifiers."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spec_lab.core.draft import DETERMINISTIC, WAYS, Draft
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.verify import Match, Token, Traversal, arrays, choose, greedy_path, parallel, rejection
from tests.distributions import twin
from tests.distributions.tabular import explore

PAIRS = [(Token(), twin.token), (Traversal(), twin.traversal), (Match(), twin.match)]
BY_NAME = pytest.mark.parametrize(("verifier", "direct"), PAIRS, ids=[verifier.name for verifier, _ in PAIRS])


def random_distribution(rng: np.random.Generator, v: int, kind: str) -> np.ndarray:
    """A distribution ``[V]``: generic, peaked, with zeros, or one-hot."""
    distribution = rng.dirichlet(np.full(v, 0.1 if kind == "peaked" else 1.0)) + 1e-12
    if kind == "zeros":
        distribution[rng.permutation(v)[: rng.integers(1, v - 1)]] = 0.0
    if kind == "one-hot":
        distribution = np.eye(v)[rng.integers(v)]
    return distribution / distribution.sum()


@st.composite
def drafts(
    draw: st.DrawFn,
    drawn: tuple[str, ...] = ("iid", "without_replacement", "deterministic", "mixed"),
    chains: bool = False,
):
    """A random forest, drawn as declared, with target probabilities: ``(draft, p [R, V])`` in float64.

    Includes p = q, disjoint supports, zeros, one-hot distributions, illegal nodes (no mass at the parent, dead rows)
    and, drawn iid or point, siblings that repeat a token. ``mixed``: each node is drawn in a way of its own.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    how = draw(st.sampled_from(drawn))
    v = draw(st.integers(3, 6))
    roots = 1 if chains else draw(st.integers(1, 3))
    kinds = st.sampled_from(["generic", "peaked", "zeros", "one-hot"])
    parent, tokens, ways, q, p = [], [], [], [], []
    siblings: dict[int, list[int]] = {}

    def add() -> None:
        q.append(random_distribution(rng, v, draw(kinds)))
        relation = draw(st.sampled_from(["free", "free", "free", "equal", "disjoint"]))
        distribution = q[-1].copy() if relation == "equal" else random_distribution(rng, v, draw(kinds))
        if relation == "disjoint" and (q[-1] == 0).any():
            distribution = np.where(q[-1] == 0, distribution + 1e-3, 0.0)
            distribution /= distribution.sum()
        p.append(distribution)

    for _ in range(roots):
        add()
    for number in range(draw(st.integers(0, 12))):
        above = number if chains else draw(st.integers(0, roots + len(parent) - 1))
        distribution = q[above].copy()
        way = draw(st.sampled_from(["deterministic", "iid", "without_replacement"])) if how == "mixed" else how
        if way == "without_replacement":
            distribution[siblings.get(above, [])] = 0.0
        if way == "deterministic":
            distribution[:] = 1.0
        if distribution.sum() == 0:
            if chains:
                break
            continue
        token = int(rng.choice(v, p=distribution / distribution.sum()))
        if way == "without_replacement":
            siblings.setdefault(above, []).append(token)
        ways.append(WAYS.index(way))
        parent.append(above)
        tokens.append(token)
        add()
        if draw(st.integers(0, 5)) == 0 and p[above].sum() > p[above][token]:  # an illegal node; its row is dead
            p[above][token], p[-1] = 0.0, np.zeros(v)
            p[above] /= p[above].sum()
    shape = Shape(roots, np.array(parent, dtype=np.int64))
    token = torch.tensor(tokens, dtype=torch.long)
    p = torch.tensor(np.array(p))
    if how == "deterministic":
        return Draft(shape, token), p
    codes = np.array(ways, dtype=np.int8)
    expanded = np.unique(shape.parent[codes != DETERMINISTIC] if draw(st.booleans()) else shape.parent)
    rng.shuffle(expanded)
    q_row = np.full(shape.rows, -1)
    q_row[expanded] = np.arange(len(expanded))
    rows = torch.tensor(np.array(q)[expanded].reshape(-1, v))
    return Draft(shape, token, codes if how == "mixed" else how, rows, q_row), p


def alone(draft: Draft, rows: np.ndarray) -> Draft:
    """The tree of ``rows``, its root first, as a draft of its own."""
    new = np.full(draft.shape.rows, -1)
    new[rows] = np.arange(len(rows))
    nodes = rows[1:] - draft.shape.roots
    drawn = draft.drawn if isinstance(draft.drawn, str) else draft.drawn[nodes]
    q_row = None if draft.q_row is None else draft.q_row[rows]
    return Draft(Shape(1, new[draft.shape.parent[nodes]]), draft.token[nodes], drawn, draft.q, q_row)


def joint(draft: Draft, verdict) -> np.ndarray:
    """``[R, V]``: the probability of ending at a row and emitting a token there."""
    residual = verdict.residual(np.arange(draft.shape.rows)).double().numpy()
    mass = residual.sum(-1, keepdims=True)
    return verdict.stop[:, None] * np.divide(residual, mass, out=np.zeros_like(residual), where=mass > 0)


@pytest.mark.nightly
@settings(max_examples=150)
@given(case=drafts(("iid", "without_replacement"), chains=True))
def test_chains_verified_together_equal_the_paper_s_algorithm(case):
    draft, p = case
    stop, emit = twin.token(draft, p.numpy())
    with patch.object(rejection, "MANY", 0):
        verdict = Token()(draft, p)
        np.testing.assert_allclose(verdict.stop, stop, rtol=0, atol=1e-12)
        np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lenience", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_many_chains_are_verified_as_one_at_a_time(lenience, dtype, monkeypatch):
    rng = np.random.default_rng(7)
    shape = forest(tuple(chain(length) for length in (3, 0, 5) * 12))
    assert shape.nodes >= rejection.MANY
    p, q = (torch.from_numpy(rng.dirichlet(np.ones(8), shape.rows)).to(dtype) for _ in range(2))
    tokens = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    draft = Draft(shape, tokens[torch.from_numpy(shape.parent)], "iid", q, np.arange(shape.rows))
    together = rejection.recursive_rejection(draft, p, lenience)
    monkeypatch.setattr(rejection, "MANY", shape.nodes + 1)
    one_by_one = rejection.recursive_rejection(draft, p, lenience)
    np.testing.assert_allclose(together[0], one_by_one[0], rtol=1e-12)
    rows = np.flatnonzero(one_by_one[0])
    assert len(rows) > shape.roots
    torch.testing.assert_close(together[1](rows), one_by_one[1](rows), rtol=0, atol=0)


@settings(max_examples=150)
@given(case=drafts(("iid", "without_replacement"), chains=True))
def test_traversal_of_a_chain_is_block_verification(case):
    draft, p = case
    stop, emit = twin.block(draft, p.numpy())
    verdict = Traversal()(draft, p)
    np.testing.assert_allclose(verdict.stop, stop, rtol=0, atol=1e-12)
    np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, rtol=0, atol=1e-12)


@settings(max_examples=100)
@given(case=drafts(("deterministic",)))
def test_point_drafts_have_one_distribution_under_all_three_algorithms(case):
    draft, p = case
    results = [direct(draft, p.numpy()) for _, direct in PAIRS]
    for stop, emit in results[1:]:
        np.testing.assert_allclose(stop, results[0][0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(stop[:, None] * emit, results[0][0][:, None] * results[0][1], rtol=0, atol=1e-12)


@BY_NAME
@settings(max_examples=150)
@given(case=drafts())
def test_every_possible_end_of_a_path_has_a_residual(verifier, direct, case):
    """Where no residual is left rounding may leave a positive stop; it is negligible."""
    draft, p = case
    verdict = verifier(draft, p)
    nothing = (direct(draft, p.numpy())[1].sum(-1) == 0) & (p.sum(-1).numpy() > 0)
    assert verdict.stop[nothing].sum() < 1e-14
    ends = np.flatnonzero(verdict.stop > 1e-14)
    assert (verdict.residual(ends).sum(-1) > 0).all()


@BY_NAME
@pytest.mark.parametrize("drawn", ["without_replacement", "deterministic"])
def test_a_stop_left_by_rounding_emits_from_the_target(verifier, direct, drawn):
    """In float32 these numbers add up to less than 1: all that p allows is drafted, and still the root may stop."""
    p = torch.tensor([0.7, 0.2, 0.1]).expand(4, 3)
    q = (None, None) if drawn == "deterministic" else (p[:1], np.array([0, -1, -1, -1]))
    draft = Draft(tree(((0,), (1,), (2,))), torch.tensor([0, 1, 2]), drawn, *q)
    verdict = verifier(draft, p)
    assert verdict.stop[0] < 1e-6
    choices = [choice for _, choice in explore(lambda draws: choose(verdict, draft.shape, p, draws, [(0, 0, 0)]))]
    ends = [(int(token), bool(empty)) for (row,), (token,), (empty,) in choices if row == 0]
    assert sorted(ends) in ([], [(0, True), (1, True), (2, True)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("verifier", "direct"), PAIRS[:2], ids=["token", "traversal"])
@settings(max_examples=50)
@given(case=drafts(("iid", "without_replacement", "mixed")))
def test_wide_vocabularies_are_summed_in_parts_with_the_same_result_on_a_device(verifier, direct, case):
    draft, p = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "on_host", lambda x: False)
        whole = verifier(draft, p).stop
        patch.setattr(parallel, "CHUNK", 1)  # one row at a time
        np.testing.assert_allclose(verifier(draft, p).stop, whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_nothing_is_summed_over_the_vocabulary_that_no_path_can_reach(verifier, drawn, monkeypatch):
    """A draft that is the target: the first path is accepted, whatever else was drafted."""
    shape, q = tree(((0,), (1,), (0, 0), (0, 1), (1, 0))), torch.full((3, 4), 0.25)
    draft = Draft(shape, torch.tensor([0, 1, 2, 3, 0]), drawn, q, np.array([0, 1, 2, -1, -1, -1]))
    monkeypatch.setattr(rejection, "excess_", lambda *arguments: pytest.fail("a sum over the vocabulary"))
    monkeypatch.setattr(Tensor, "sum", lambda *arguments: pytest.fail("a sum over the vocabulary"))
    assert verifier(draft, torch.full((6, 4), 0.25)).stop.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("verifier", [Match(), Token(), Traversal()], ids=lambda verifier: verifier.name)
@settings(max_examples=200)
@given(case=drafts(drawn=("deterministic",)), seed=st.integers(0, 2**32))
def test_a_verifier_that_follows_the_arg_max_ends_at_the_greedy_path(verifier, case, seed):
    """Its verdict for one-hot p is the oracle; siblings may hold the same token."""
    draft, p = case
    rng, shape = np.random.default_rng(seed), draft.shape
    best = rng.integers(p.shape[1], size=shape.rows)
    for node, parent in enumerate(shape.parent.tolist()):
        if rng.random() < 0.7:  # long paths are rare otherwise
            best[parent] = int(draft.token[node])
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(best), p.shape[1]).double()
    assert verifier.follows_argmax
    verdict, ends = verifier(draft, one_hot), greedy_path(shape, draft.token.numpy(), best)
    assert np.flatnonzero(verdict.stop).tolist() == sorted(ends.tolist())
    assert verdict.residual(ends).argmax(-1).tolist() == best[ends].tolist()
    assert verdict.expected_accepted(shape).tolist() == shape.depth[ends].tolist()
    assert shape.root[ends].tolist() == list(range(shape.roots))


@BY_NAME
def test_temperature_zero_is_one_hot(verifier, direct):
    """The path follows the arg max exactly, and a stop where the arg max was drafted has probability 0, not almost."""
    shape = tree(((0,), (1,), (0, 0), (1, 0), (1, 1)))
    draft = Draft(shape, torch.tensor([3, 5, 1, 2, 6]))
    p = torch.nn.functional.one_hot(torch.tensor([5, 0, 6, 0, 0, 4]), 8).float()
    verdict = verifier(draft, p)
    assert verdict.stop.tolist() == [0, 0, 0, 0, 0, 1]
    assert verdict.residual(np.array([5]))[0].tolist() == p[5].tolist()


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=["token", "traversal"])
def test_a_peaked_draft_without_replacement_keeps_its_second_sibling(verifier):
    """q = 1 in float32 on its first token still has a second sibling, drawn from the rest."""
    q = torch.tensor([[1.0, 3e-10, 1e-10, 0.0]])
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).expand(3, 4)
    draft = Draft(tree(((0,), (1,))), torch.tensor([0, 1]), "without_replacement", q, np.array([0, -1, -1]))
    stop, emit = twin.token(draft, p.double().numpy())
    verdict = verifier(draft, p)
    np.testing.assert_allclose(verdict.stop, stop, atol=1e-6)
    np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, atol=1e-6)


@pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=["token", "traversal"])
@pytest.mark.parametrize(
    ("tokens", "drawn", "says"),
    [
        ([0, 2], "iid", "node 1 "),
        ([2, 0], "without_replacement", "node 0 "),
        ([0, 0], "without_replacement", "repeat"),
    ],
)
def test_a_token_that_was_not_drawn_as_stated_is_refused(verifier, tokens, drawn, says):
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    draft = Draft(tree(((0,), (1,))), torch.tensor(tokens), drawn, q, np.array([0, -1, -1]))
    with pytest.raises(ValueError, match=says):
        verifier(draft, torch.full((3, 4), 0.25))


@BY_NAME
def test_every_verifier_is_lossless_and_supports_every_draft(verifier, direct):
    assert verifier.name == type(verifier).__name__.lower()
    assert verifier.lossless and verifier.accepts - {"gumbel"} == {"iid", "without_replacement", "deterministic"}
