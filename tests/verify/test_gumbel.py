"""The Gumbel verifier: its twin, the closed form of a match, the output over many noises, a biased control."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spec_lab.core.draft import Draft, empty
from spec_lab.core.randomness import CounterDraws, Key, Purpose
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.tasks.certify.toy_models import code
from spec_lab.verify import Gumbel, Match, Token, Traversal, check_pair, choose, match_probability
from tests.distributions.tabular import World
from tests.verify.test_twins import joint, random_distribution

# Drafts ------------------------------------------------------------------------------------------------------------


def scores(distribution: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """log p + g."""
    with np.errstate(divide="ignore"):
        return np.log(distribution) + noise


@st.composite
def races(draw: st.DrawFn):
    """A random forest whose siblings are the best of a race, with target distributions: ``(draft, p [R, V])`` in
    float64.

    Includes p = q, disjoint supports, zeros, one-hot distributions and illegal nodes (no mass at the parent, dead
    rows).
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    v, roots = draw(st.integers(3, 6)), draw(st.integers(1, 3))
    kinds = st.sampled_from(["generic", "peaked", "zeros", "one-hot"])
    parent, tokens, q, p, noise, q_row = [], [], [], [], [], []

    def add(dead: bool) -> None:
        distribution = random_distribution(rng, v, draw(kinds))
        if draw(st.booleans()):
            distribution = 0.5 * distribution + 0.5 * random_distribution(rng, v, "peaked")
        p.append(np.zeros(v) if dead else distribution)
        q_row.append(-1)

    for _ in range(roots):
        add(False)
    row = 0
    while row < len(p) and len(parent) < 14:
        distribution = (
            p[row] if draw(st.integers(0, 3)) == 0 and p[row].any() else random_distribution(rng, v, draw(kinds))
        )
        width = draw(st.integers(0, 3))
        if draw(st.integers(0, 5)) == 0 and (p[row] == 0).any() and p[row].any():  # disjoint supports
            distribution = np.where(p[row] == 0, 1.0, 0.0) / (p[row] == 0).sum()
        width = min(width, int((distribution > 0).sum()))
        if width:
            q_row[row] = len(q)
            q.append(distribution)
            noise.append(rng.gumbel(size=v))
            for token in np.argsort(-scores(distribution, noise[-1]))[:width]:
                parent.append(row)
                tokens.append(int(token))
                illegal = not p[row].any()
                if draw(st.integers(0, 5)) == 0 and p[row].sum() > p[row][token]:
                    p[row][token], illegal = 0.0, True
                    p[row] /= p[row].sum()
                add(illegal)
        row += 1
    shape = Shape(roots, np.array(parent, dtype=np.int64))
    order = rng.permutation(len(q)) if q else np.zeros(0, dtype=np.int64)  # rows of q stand in no special order
    where = np.append(np.argsort(order), -1)
    distributions, noises = (torch.tensor(np.array(x).reshape(-1, v)[order]) for x in (q, noise))
    draft = Draft(shape, torch.tensor(tokens, dtype=torch.long), "gumbel", distributions, where[q_row], noises)
    return draft, torch.tensor(np.array(p))


def walk(draft: Draft, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The verifier as in the paper, one tree and one row at a time: ``stop [R]``, and ``emit [R, V]`` where paths
    end."""
    shape, tokens = draft.shape, draft.token.tolist()
    stop, emit = np.zeros(shape.rows), np.zeros_like(p)
    for row in range(shape.roots):
        while len(shape.children[row]):
            y = int(np.argmax(scores(p[row], draft.noise[draft.q_row[row]].numpy())))
            below = {tokens[child - shape.roots]: child for child in shape.children[row]}
            if y not in below:
                stop[row], emit[row, y] = 1.0, 1.0
                break
            row = below[y]
        else:
            stop[row], emit[row] = 1.0, p[row]
    return stop, emit


# One step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=200)
@given(case=races())
def test_the_verifier_equals_its_twin(dtype, case):
    draft, p = case
    p = p.to(dtype)
    stop, emit = walk(draft, p.double().numpy())
    verdict = Gumbel()(draft, p)
    assert verdict.given == "noise" and verdict.stop.dtype == np.float64
    assert verdict.stop.tolist() == stop.tolist()
    assert verdict.residual(np.array([0])).dtype == dtype
    np.testing.assert_allclose(joint(draft, verdict), emit / np.maximum(emit.sum(-1, keepdims=True), 1e-9), atol=1e-12)


def test_no_nodes_emits_from_the_target():
    p = torch.softmax(torch.randn(3, 7, dtype=torch.float64), -1)
    bare = Draft(forest((chain(0),) * 3), torch.empty(0, dtype=torch.long), "gumbel", p[:0], np.full(3, -1), p[:0])
    for draft in (bare, empty(3)):
        verdict = Gumbel()(draft, p)
        assert verdict.stop.tolist() == [1.0, 1.0, 1.0]
        assert torch.equal(verdict.residual(np.arange(3)), p)


def test_a_node_whose_children_were_cut_is_a_leaf():
    """The leaf's own race is unused, so the bonus token is a fresh choice."""
    q, noise = torch.full((2, 4), 0.25), torch.tensor([[5.0, 0, 0, 0], [0, 5.0, 0, 0]], dtype=torch.float64)
    draft = Draft(chain(2), torch.tensor([0, 1]), "gumbel", q, np.array([0, 1, -1]), noise)
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 3)
    assert Gumbel()(draft, p).stop.tolist() == [0, 0, 1]
    verdict = Gumbel()(draft.cut([1]), p[:2])
    assert verdict.stop.tolist() == [0, 1]
    assert verdict.residual(np.array([1]))[0].tolist() == p[1].tolist()


def pair(p: list[float], q: list[float], token: int) -> tuple[Draft, torch.Tensor]:
    """One root with one child."""
    noise = torch.zeros(1, len(q), dtype=torch.float64)
    draft = Draft(chain(1), torch.tensor([token]), "gumbel", torch.tensor([q]), np.array([0, -1]), noise)
    return draft, torch.tensor([p, [1 / len(p)] * len(p)])


def test_target_probabilities_without_mass_at_the_root_are_refused():
    draft, p = pair([0.0, 0.0, 0.0], [1.0, 0.0, 0.0], 0)
    verdict = Gumbel()(draft, p)
    assert verdict.stop.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="total mass"):
        choose(verdict, draft.shape, p, CounterDraws(0), [(0, 0, 0)])


def test_gumbel_matching_and_rejection_sampling_refuse_each_other_s_drafts():
    """Shared noise is for accept-iff-equal only; match draws fresh choices and supports these drafts as well."""
    assert Gumbel().name == "gumbel" and Gumbel().lossless
    check_pair("draft_tree", "gumbel", Gumbel())
    check_pair("draft_tree", "gumbel", Match())
    for verifier in (Token(), Traversal()):
        with pytest.raises(ValueError, match=rf"'{verifier.name}' .*'gumbel'"):
            check_pair("draft_tree", "gumbel", verifier)
    for drawn in ("iid", "without_replacement", "deterministic"):
        check_pair("draft_tree", drawn, Match())
        with pytest.raises(ValueError, match=f"'gumbel' .*'{drawn}'"):
            check_pair("draft_tree", drawn, Gumbel())


def test_a_single_precision_distribution_races_in_double():
    """Scores that differ by far less than single precision resolves have one winner."""
    p, order = torch.rand(2, 50).softmax(-1), np.random.default_rng(0).permutation(50)
    noise = -p[:1].double().log() - 1e-10 * torch.from_numpy(order)
    draft = Draft(chain(1), torch.from_numpy(order.argsort()[:1]), "gumbel", p[:1], np.array([0, -1]), noise)
    assert Gumbel()(draft, p).stop.tolist() == [0.0, 1.0]


# The closed form ---------------------------------------------------------------------------------------------------


def double_sum(p: np.ndarray, q: np.ndarray) -> float:
    """The closed form literally."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in both)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    v=st.integers(3, 9),
    kinds=st.tuples(*[st.sampled_from(["generic", "peaked", "zeros", "one-hot"])] * 2),
)
def test_the_closed_form_is_the_double_sum_and_within_its_bounds(seed, v, kinds):
    rng = np.random.default_rng(seed)
    p, q = (np.array([random_distribution(rng, v, kind) for _ in range(4)]) for kind in kinds)
    q[0] = p[0]
    match = match_probability(torch.tensor(p), torch.tensor(q)).numpy()
    np.testing.assert_allclose(match, [double_sum(*rows) for rows in zip(p, q, strict=True)], rtol=0, atol=1e-12)
    tv = 0.5 * np.abs(p - q).sum(-1)
    assert (match >= (1 - tv) / (1 + tv) - 1e-12).all() and (match <= 1 - tv + 1e-12).all()
    assert match[0] == pytest.approx(1.0, abs=1e-12)


# Many noises -------------------------------------------------------------------------------------------------------

MANY = 20_000
DISTRIBUTIONS = {
    "generic": ([0.4, 0.25, 0.15, 0.1, 0.07, 0.03], [0.1, 0.3, 0.05, 0.25, 0.1, 0.2]),
    "zeros": ([0.0, 0.5, 0.3, 0.2, 0.0, 0.0], [0.3, 0.3, 0.0, 0.3, 0.1, 0.0]),
    "peaked": ([0.96, 0.01, 0.01, 0.01, 0.005, 0.005], [0.7, 0.2, 0.025, 0.025, 0.025, 0.025]),
}


def noises(number: int, width: int, seed: int = 0, index: int = -1) -> np.ndarray:
    """Noise of so many requests' rows."""
    return CounterDraws(seed).race(width, [Key(n, 0, 0, Purpose.RACE, index) for n in range(number)])


def agrees(tokens: np.ndarray, distribution: np.ndarray) -> bool:
    """Whether tokens fit the distribution: Pearson's test at 1e-6; none of mass zero."""
    counts = np.bincount(tokens, minlength=len(distribution))
    some = distribution > 0
    return counts[~some].sum() == 0 and stats.chisquare(counts[some], len(tokens) * distribution[some]).pvalue > 1e-6


@cache
def first_tokens(name: str) -> tuple[Draft, np.ndarray, np.ndarray]:
    """Chains of one node below roots of equal distributions: the draft, whether each is accepted, the emitted
    tokens."""
    p, q = (np.array(row) for row in DISTRIBUTIONS[name])
    g = noises(MANY, len(q))
    drafted = scores(q, g).argmax(-1)
    shape = Shape(MANY, np.arange(MANY))
    distributions = torch.from_numpy(q).expand(MANY, -1)
    q_row = np.concatenate([np.arange(MANY), np.full(MANY, -1)])
    draft = Draft(shape, torch.from_numpy(drafted), "gumbel", distributions, q_row, torch.from_numpy(g))
    verdict = Gumbel()(draft, torch.from_numpy(p).expand(2 * MANY, -1))
    accepted = verdict.stop[MANY:] == 1.0
    residual = verdict.residual(np.arange(MANY)).numpy()
    assert ((residual.sum(-1) == 1) == ~accepted).all()
    return draft, accepted, np.where(accepted, drafted, residual.argmax(-1))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_rate_of_matches_is_the_closed_form(name):
    """Within five standard deviations."""
    p, q = (torch.tensor([row]) for row in DISTRIBUTIONS[name])
    chance = float(match_probability(p, q))
    rate = first_tokens(name)[1].mean()
    assert abs(rate - chance) < 5 * (chance * (1 - chance) / MANY) ** 0.5
    assert chance > float((p * q).sum()) + 0.02  # the rate of independent choices


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_drafts_have_the_draft_s_distribution_and_outputs_the_target_s(name):
    p, q = (np.array(row) for row in DISTRIBUTIONS[name])
    draft, _, tokens = first_tokens(name)
    assert agrees(draft.token.numpy(), q) and agrees(tokens, p)
    assert not agrees(tokens, q) and not agrees(draft.token.numpy(), p)


def test_the_best_of_a_race_are_drawn_without_replacement():
    q = np.array(DISTRIBUTIONS["generic"][1])
    best = np.argsort(-scores(q, noises(MANY, len(q), seed=1)), axis=-1)[:, :2]
    pairs = q[:, None] * q / (1 - q[:, None])
    np.fill_diagonal(pairs, 0.0)
    assert agrees(best @ [len(q), 1], pairs.ravel())


def raced_residual(p: np.ndarray, q: np.ndarray, g: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """Token verification (p / q with uniforms) whose residual is the best of a race over ``fresh``."""
    drafted = scores(q, g).argmax(-1)
    uniform = np.random.default_rng(0).random(len(g))
    accept = uniform < (p / np.maximum(q, 1e-300))[drafted]
    return np.where(accept, drafted, scores(np.maximum(p - q, 0.0), fresh).argmax(-1))


@pytest.mark.nightly
def test_a_residual_that_shares_the_draft_s_noise_is_biased():
    """Negative control: why token and traversal refuse these drafts. With fresh noise the same test is exact."""
    p, q = np.array([0.1, 0.6, 0.3]), np.array([0.55, 0.42, 0.03])
    g = noises(MANY, 3)
    right, wrong = raced_residual(p, q, g, noises(MANY, 3, seed=1)), raced_residual(p, q, g, g)
    assert agrees(right, p) and not agrees(wrong, p)
    tv = 0.5 * np.abs(np.bincount(wrong, minlength=3) / MANY - p).sum()
    assert tv > 0.05  # sampling alone: about 0.005


WORLD = World(5, plain=True)
TREE = tree(((0,), (1,), (0, 0), (1, 0)))


def put_out(trees: int, place_of, seed: int) -> np.ndarray:
    """The first three tokens of so many requests, as one number: one step over ``TREE``, then exact target samples.

    ``place_of``: what keys a row's noise, by its place in its tree.
    """
    v = WORLD.v
    (p0, q0), (p1, q1), (p2, _) = (WORLD.probabilities(depth) for depth in range(3))
    g = {index: noises(trees, v, seed, place_of(index)) for index in (-1, 0, 1)}
    first = np.argsort(-scores(q0[0], g[-1]), axis=-1)[:, :2]  # [N, 2]
    second = np.stack([scores(q1[first[:, k]], g[k]).argmax(-1) for k in (0, 1)], 1)
    shape = forest((TREE,) * trees)
    token = torch.from_numpy(np.concatenate([first, second], 1).ravel())
    nodes = trees + 4 * np.arange(trees)[:, None] + np.arange(4)  # rows of each tree's nodes
    q_row = np.full(shape.rows, -1)
    q_row[:trees], q_row[nodes[:, 0]], q_row[nodes[:, 1]] = np.arange(3 * trees).reshape(3, trees)
    q = torch.from_numpy(np.concatenate([np.repeat(q0, trees, 0), q1[first[:, 0]], q1[first[:, 1]]]))
    p = np.empty((shape.rows, v))
    p[:trees], p[nodes[:, :2]], p[nodes[:, 2:]] = p0, p1[first], p2[first * v + second]
    noise = torch.from_numpy(np.concatenate([g[-1], g[0], g[1]]))
    draft, target = Draft(shape, token, "gumbel", q, q_row, noise), torch.from_numpy(p)
    end = choose(Gumbel()(draft, target), shape, target, CounterDraws(seed), [(n, 0, 0) for n in range(trees)])
    rng, codes = np.random.default_rng(seed), []
    for row, last in zip(end.row, end.token, strict=True):
        text = [*(int(token[r - trees]) for r in shape.path(int(row))), int(last)]
        while len(text) < 3:
            text.append(int(rng.choice(v, p=WORLD.p(text))))
        codes.append(code(text, v))
    return np.array(codes)


@pytest.mark.nightly
def test_the_joint_distribution_of_a_step_over_a_tree_is_the_target_s():
    """Each row has noise of its own; a tree whose rows share it is detected."""
    truth = np.ones(1)
    for depth in range(3):
        truth = (truth[:, None] * WORLD.probabilities(depth)[0]).ravel()
    right = [put_out(3000, lambda index: index, seed) for seed in range(4)]
    assert agrees(np.concatenate(right), truth)
    assert not agrees(np.concatenate([put_out(3000, lambda index: 0, seed) for seed in range(2)]), truth)
