"""K-SEQ is lossless with the least possible rho; its acceptance is the paper's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.core.draft import Draft
from spec_lab.core.shape import forest, tree
from spec_lab.verify import KSeq, Token, Verdict, arrays
from spec_lab.verify.kseq import min_rho
from tests.distributions import twin_zoo
from tests.distributions.tabular import Outputs, Verify, World
from tests.distributions.test_closed_forms import WORLDS as MORE_WORLDS
from tests.distributions.test_lossless import TREES, WORLDS, require_lossless
from tests.distributions.twin_zoo import beta, bisected, one_of
from tests.verify.test_twins import drafts, joint, random_distribution

KINDS = ["generic", "peaked", "zeros", "one-hot"]


def siblings(p: np.ndarray, q: np.ndarray, k: int, dtype=torch.float64) -> tuple[Draft, torch.Tensor]:
    """One root with k children that hold q's likeliest token, all rows with distribution p."""
    token = torch.full((k,), int(q.argmax()))
    draft = Draft(tree(tuple((rank,) for rank in range(k))), token, "iid", torch.tensor(q[None], dtype=dtype), FIRST[k])
    return draft, torch.tensor(np.tile(p, (k + 1, 1)), dtype=dtype)


FIRST = {k: np.array([0] + [-1] * k) for k in range(1, 40)}


def rho_of(p: np.ndarray, q: np.ndarray, k: int) -> float:
    return float(min_rho(*siblings(p, q, k))[0])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    v = draw(st.integers(3, 8))
    return random_distribution(rng, v, draw(st.sampled_from(KINDS))), random_distribution(
        rng, v, draw(st.sampled_from(KINDS))
    )


@pytest.mark.each_value
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"world{w.seed}")
@pytest.mark.parametrize("name", TREES)
def test_one_step_is_lossless(world, name):
    require_lossless(Outputs.of_forest(world, KSeq(), TREES[name], "iid"))


def test_on_a_device_rho_is_that_of_the_cpu_to_rounding(monkeypatch):
    cases = []
    for seed, k in itertools.product(range(20), (2, 3, 5, 12)):
        rng = np.random.default_rng(seed)
        cases.append(siblings(random_distribution(rng, 9, "generic"), random_distribution(rng, 9, "peaked"), k))
    for k in (3, 5, 6, 7):  # q is above p wherever it is positive: the first root is the last
        cases.append(siblings(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.6, 0.0, 0.0]), k))
    expected = [float(min_rho(*case)[0]) for case in cases]
    assert expected[-4] == pytest.approx((1 - 0.7) / (1 - 0.7 ** (1 / 3)), rel=1e-15)
    monkeypatch.setattr(arrays, "on_host", lambda x: False)
    rhos = [min_rho(*case)[0] for case in cases]
    assert all(isinstance(rho, torch.Tensor) and rho.dtype == torch.float64 for rho in rhos)
    np.testing.assert_allclose([float(rho) for rho in rhos], expected, rtol=1e-14, atol=0)


def with_rho_times(factor: float) -> Verify:
    """The twin with another rho: a control of the enumeration."""

    def verify(draft: Draft, p: torch.Tensor) -> Verdict:
        stop, emit = twin_zoo.kseq(draft, p.numpy(), lambda *case: factor * bisected(*case))
        return Verdict(stop, lambda rows: torch.from_numpy(emit[rows]))

    return verify


def test_a_larger_rho_is_lossless_but_accepts_less_and_a_smaller_is_lossy():
    world = World(4, plain=True)
    small, large = (Outputs.of_forest(world, with_rho_times(factor), TREES["[2]"], "iid") for factor in (0.9, 1.1))
    assert large.first_failure(1e-12) is None and small.tv() > 1e-3
    assert large.accepted < Outputs.of_forest(world, KSeq(), TREES["[2]"], "iid").accepted - 1e-3


@pytest.mark.nightly
@settings(max_examples=300)
@given(pair=pairs(), k=st.integers(2, 12))
def test_rho_is_safe_and_the_least_that_is(pair, k):
    p, q = pair
    rho = rho_of(p, q, k)
    assert 1 <= rho <= k
    assert one_of(k, beta(rho, p, q)) <= rho * (1 + 1e-13)
    assert rho == pytest.approx(bisected(p, q, k), abs=1e-6)  # a double root near p = q has half the digits
    if rho > 1 + 1e-3:
        less = rho - 1e-4
        assert one_of(k, beta(less, p, q)) > less


@pytest.mark.nightly
@settings(max_examples=150)
@given(case=drafts(("iid",)))
def test_with_the_same_rho_the_distribution_is_the_paper_s_to_rounding(case):
    draft, p = case
    rho = iter(min_rho(draft, p)[[row for root in range(draft.shape.roots) for row in top_down(draft, root)]])
    stop, emit = twin_zoo.kseq(draft, p.numpy(), lambda *_: next(rho))
    verdict = KSeq()(draft, p)
    np.testing.assert_allclose(verdict.stop, stop, rtol=0, atol=1e-12)
    np.testing.assert_allclose(joint(draft, verdict), stop[:, None] * emit, rtol=0, atol=1e-12)


def top_down(draft: Draft, row: int) -> list[int]:
    """Rows with children, in the order in which the twin asks for their rho."""
    children = draft.shape.children[row]
    return [row, *(r for child in children for r in top_down(draft, child))] if len(children) else []


@settings(max_examples=100)
@given(case=drafts(("iid",), chains=True))
def test_on_chains_k_seq_equals_token(case):
    draft, p = case
    assert (min_rho(draft, p) == [1.0] * draft.shape.nodes + [0.0]).all()
    mine, other = KSeq()(draft, p), Token()(draft, p)
    np.testing.assert_allclose(mine.stop, other.stop, rtol=0, atol=1e-15)
    np.testing.assert_allclose(joint(draft, mine), joint(draft, other), rtol=0, atol=1e-15)


def test_rows_may_have_different_numbers_of_children():
    """Each has the rho of its own number; a row without children has none."""
    shape = tree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)))
    p, q = World(4, plain=True).p(()), World(4, plain=True).q(())
    token = torch.full((6,), int(q.argmax()))
    draft = Draft(shape, token, "iid", torch.tensor(np.tile(q, (3, 1))), np.array([0, 1, 2, -1, -1, -1, -1]))
    rho = min_rho(draft, torch.tensor(np.tile(p, (7, 1))))
    assert rho == pytest.approx([bisected(p, q, 3), 1.0, bisected(p, q, 2), 0, 0, 0, 0], abs=1e-9)
    assert len({round(r, 3) for r in rho}) == 4


@pytest.mark.parametrize("k", [2, 3, 30])
def test_rho_has_its_closed_form_at_the_edges(k):
    ends, uniform = np.eye(3), np.full(3, 1 / 3)
    assert rho_of(uniform, uniform, k) == 1.0  # p = q: one draft is enough
    assert rho_of(ends[0], ends[1], k) == k  # nothing can be accepted
    assert rho_of(np.zeros(3), uniform, k) == k  # a dead row
    assert rho_of(ends[0], ends[0], k) == 1.0
    # one-hot p: beta = min(q, 1 / rho) at its token, and 1 - (1 - q)^k of all drafts hold it
    assert rho_of(ends[0], uniform, k) == pytest.approx((1 - (2 / 3) ** k) * 3, abs=1e-12)
    if k == 2:  # one-hot q: beta = 1 / (3 rho), and 2 - beta = rho
        assert rho_of(uniform, ends[0], k) == pytest.approx(1 + (2 / 3) ** 0.5, abs=1e-12)


@pytest.mark.parametrize("world", MORE_WORLDS, ids=lambda w: f"world{w.seed}")
@pytest.mark.parametrize("k", [1, 2, 3])
def test_siblings_are_accepted_with_the_paper_s_probability(world, k):
    """On one level 1 - (1 - beta)^k, which is at least 1 - 1/e of what optimal transport accepts, and at most that."""
    p, q = world.p(()), world.q(())
    accepted = Outputs.of_forest(world, KSeq(), tree(tuple((rank,) for rank in range(k))), "iid").accepted
    assert accepted == pytest.approx(1 - (1 - beta(bisected(p, q, k), p, q)) ** k, abs=1e-12)
    sets = [list(h) for n in range(world.v + 1) for h in itertools.combinations(range(world.v), n)]
    bound = 1 - max(q[h].sum() ** k - p[h].sum() for h in sets)
    assert (1 - 1 / np.e) * bound - 1e-12 <= accepted <= bound + 1e-12


@pytest.mark.parametrize("k", [2, 3])
def test_on_one_level_k_seq_accepts_at_least_what_token_does(k):
    """An observation, not a theorem; over random toy models, in some of them strictly."""
    shape = tree(tuple((rank,) for rank in range(k)))
    gains = [
        Outputs.of_forest(world, KSeq(), shape, "iid").accepted
        - Outputs.of_forest(world, Token(), shape, "iid").accepted
        for world in MORE_WORLDS
    ]
    assert min(gains) > -1e-12 and max(gains) > 0.01


def wide(noise: float) -> tuple[Draft, torch.Tensor]:
    """Trees [2,2] over 5000 tokens in single precision; the more noise, the less q is like p."""
    random = torch.Generator().manual_seed(0)
    shape = forest((TREES["[2,2]"],) * 3)
    rows = np.unique(shape.parent)
    logits = 3 * torch.randn(shape.rows, 5000, generator=random)
    q = torch.softmax(logits[rows] + noise * torch.randn(len(rows), 5000, generator=random), -1)
    q_row = np.full(shape.rows, -1)
    q_row[rows] = np.arange(len(rows))
    token = torch.multinomial(q[q_row[shape.parent]], 1, generator=random)[:, 0]
    return Draft(shape, token, "iid", q, q_row), torch.softmax(logits, -1)


def test_in_single_precision_the_target_s_own_drafts_are_fully_accepted():
    """Its distributions do not sum to exactly 1; that must not cost acceptance."""
    draft, p = wide(0.0)
    assert KSeq()(draft, p).expected_accepted(draft.shape).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0, 5.0])
def test_in_single_precision_rho_is_safe_to_its_last_digits(noise):
    draft, p = wide(noise)
    rho = min_rho(draft, p)
    for row in np.unique(draft.shape.parent):
        pair = p[row].double().numpy(), draft.q[draft.q_row[row]].double().numpy()
        pair = pair[0] / pair[0].sum(), pair[1] / pair[1].sum()
        assert one_of(2, beta(rho[row], *pair)) <= rho[row] * (1 + 1e-6)
        assert rho[row] == pytest.approx(bisected(*pair, 2), abs=1e-3)


def test_rejected_drafts_emit_from_the_residual():
    """k = 2, p = (0, 1), q = (3/4, 1/4): rho = 1.75, token 1 is always accepted, token 0 never; then 1 is emitted."""
    draft, p = siblings(np.array([0.0, 1.0]), np.array([0.75, 0.25]), 2)
    verdict = KSeq()(draft, p)
    assert min_rho(draft, p)[0] == pytest.approx(1.75, abs=1e-12)
    assert verdict.stop.tolist() == [1.0, 0.0, 0.0]
    assert verdict.residual(np.array([0])).tolist() == [[0.0, pytest.approx(0.5625)]]
