"""Broken verifiers and proposers, as found in public code: the enumeration must see each, and says where."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab.draft import Draft
from spec_lab.law import Purpose
from spec_lab.verify import Token, Traversal, Verdict
from tests.laws import twin
from tests.laws.tabular import Outputs, World, paths_of
from tests.laws.test_lossless import TREES, WORLDS

WORLD = World(11, plain=True)


class TopTwo(World):
    """Draws from the two likeliest tokens of the draft's softmax."""

    def laws(self, length):
        p, q = super().laws(length)
        q = np.where(q >= np.sort(q)[:, -2:-1], q, 0.0)
        return p, q / q.sum(-1, keepdims=True)


def judged(law, **broken):
    """A twin as a verifier."""

    def judge(draft: Draft, p: torch.Tensor) -> Verdict:
        stop, emit = law(draft, p.numpy(), **broken)
        return Verdict(stop, lambda rows: torch.from_numpy(emit[rows]))

    return judge


def residual_is_p(draft, p):
    return Verdict(Token()(draft, p).stop, lambda rows: p[rows])


def residual_is_absolute(draft, p):
    verdict = Token()(draft, p)
    inner = draft.q_row >= 0
    law = p.clone()
    law[inner] = (p[inner] - draft.q[draft.q_row[inner]]).abs()
    return Verdict(verdict.stop, lambda rows: law[rows])


def residual_without_the_rejected(draft, p):
    law = p.clone()
    law[draft.shape.parent, draft.token] = 0.0
    return Verdict(Token()(draft, p).stop, lambda rows: law[rows])


def bonus_from(law):
    """A leaf emits from another law, ``law(draft, p, rows)``."""

    def judge(draft: Draft, p: torch.Tensor) -> Verdict:
        verdict, shape = Token()(draft, p), draft.shape
        leaf = np.bincount(shape.parent, minlength=shape.rows) == 0

        def residual(rows):
            parent = shape.parent[rows - shape.heads]
            return torch.where(torch.from_numpy(leaf[rows])[:, None], law(draft, p, parent), verdict.residual(rows))

        return Verdict(verdict.stop, residual)

    return judge


def residual_of_token(draft, p):
    """Traversal (on a chain block verification) whose residual forgets the path's weight: (P - q)+, not (a P - q)+."""
    return Verdict(Traversal()(draft, p).stop, Token()(draft, p).residual)


def previous_q(judge):
    """Each position is judged with the q of the one before it; the first with its own."""

    def judged_late(draft: Draft, p: torch.Tensor) -> Verdict:
        shape, q_row = draft.shape, draft.q_row.copy()
        inner = np.flatnonzero((shape.depth > 0) & (q_row >= 0))
        q_row[inner] = draft.q_row[shape.parent[inner - shape.heads]]
        return judge(replace(draft, q_row=q_row), p)

    return judged_late


def other_temperature(draft, p):
    """Judged with q at temperature 1/2."""
    q = draft.q.square()
    return Token()(replace(draft, q=q / q.sum(-1, keepdim=True)), p)


def dropped(draft, p):
    """A drafted token that q thinks unlikely is dropped, and the head emits a "bonus" from p. Chains of one."""
    verdict, heads = Token()(draft, p), draft.shape.heads
    unlikely = (draft.q[np.arange(heads), draft.token] < 0.3).numpy()
    kept = np.where(unlikely, 0.0, verdict.stop[heads:])
    stop = np.concatenate([np.where(unlikely, 1.0, verdict.stop[:heads]), kept])
    alone = torch.from_numpy(np.append(unlikely, unlikely))[:, None]
    return Verdict(stop, lambda rows: torch.where(alone[rows], p[rows], verdict.residual(rows)))


def swapped(verifier):
    other = {"iid": "without", "without": "iid"}
    return lambda draft, p: verifier(replace(draft, drawn=other[draft.drawn]), p)


def reranked(key):
    """The children of each head sorted by p or q before they are verified. Trees of depth 1."""

    def judge(draft: Draft, p: torch.Tensor) -> Verdict:
        parent = torch.from_numpy(draft.shape.parent)
        law = p if key == "p" else draft.q[torch.from_numpy(draft.q_row[: draft.shape.heads])]
        order = sorted(range(len(parent)), key=lambda c: (int(parent[c]), -float(law[parent[c], draft.token[c]])))
        token = draft.token.clone()
        slots = sorted(range(len(parent)), key=lambda c: int(parent[c]))
        token[slots] = draft.token[order]
        p = p.clone()
        p[draft.shape.heads :][slots] = p[draft.shape.heads :][order]
        verdict = Token()(replace(draft, token=token), p)
        # back to the rows that hold the tokens now verified
        new = np.arange(draft.shape.rows)
        new[draft.shape.heads + np.array(order)] = draft.shape.heads + np.array(slots)
        return Verdict(verdict.stop[new], lambda rows: verdict.residual(new[rows]))

    return judge


def early_break(draft, p):
    """Block verification that stops at the first eta above h. Chains."""
    verdict, shape = Traversal()(draft, p), draft.shape
    rows = np.stack(shape.trees)  # [B, gamma + 1]
    tail = verdict.stop[rows][:, ::-1].cumsum(-1)[:, ::-1]  # not stopped below
    before = np.concatenate([tail[:, 1:], np.zeros((len(rows), 1))], -1)
    h = np.divide(verdict.stop[rows], 1 - before, out=np.ones_like(tail), where=before < 1)
    stop = np.empty(shape.rows)
    going = np.cumprod(np.concatenate([np.ones((len(rows), 1)), h[:, 1:]], -1), -1)
    stop[rows] = going * np.concatenate([1 - h[:, 1:], np.ones((len(rows), 1))], -1)
    return Verdict(stop, verdict.residual)


FORGET, STAY = (lambda a, s: s), (lambda a, s: a)  # what becomes of a node's weight, in place of S / (S + 1 - a)

MUTANTS = [
    # name, judge, tree, drawn, total variation seen, tokens of the shortest output whose law is off
    ("residual = p", residual_is_p, "[1]", "iid", 0.12, 1),
    ("residual = |p - q|", residual_is_absolute, "[1]", "iid", 0.42, 1),
    ("residual = p minus the rejected token", residual_without_the_rejected, "[1]", "iid", 0.11, 1),
    ("bonus one position early", bonus_from(lambda draft, p, rows: p[rows]), "[1,1]", "iid", 0.088, 3),
    ("bonus from q", bonus_from(lambda draft, p, rows: draft.q[draft.q_row[rows]]), "[1,1]", "iid", 0.076, 3),
    ("lenience 0.99", judged(twin.token, lenience=0.99), "[1]", "iid", 0.0014, 1),
    ("lenience 0.99", judged(twin.token, lenience=0.99), "[2,1]", "without", 0.0026, 1),
    # which, as rejected siblings have no mass left, is also: q not renormalised after an earlier sibling
    ("drawn without, judged iid", swapped(Token()), "[2]", "without", 0.081, 1),
    ("drawn without, judged iid", swapped(Traversal()), "[2,1]", "without", 0.081, 1),
    ("drawn iid, judged without", judged(swapped(twin.token)), "[2]", "iid", 0.042, 1),
    ("siblings re-ranked by q", reranked("q"), "[3]", "iid", 0.19, 1),
    ("siblings re-ranked by p", reranked("p"), "[3]", "without", 0.78, 1),
    ("sampled token dropped for its value", dropped, "[1]", "iid", 0.1, 1),
    ("q from the previous position", previous_q(judged(twin.token)), "[1,1]", "iid", 0.0115, 2),
    ("q from the previous position", previous_q(judged(twin.traversal)), "[2,1]", "without", 0.19, 1),
    ("q at another temperature", other_temperature, "[1]", "iid", 0.074, 1),
    ("traversal a <- S", judged(twin.traversal, weight=FORGET), "[1,1]", "iid", 0.02, 1),
    ("traversal a <- S", judged(twin.traversal, weight=FORGET), "[2,2]", "without", 0.021, 1),
    ("block: h = p_i (a stays)", judged(twin.traversal, weight=STAY), "[1,1]", "iid", 0.022, 1),
    ("block: h = p_i (a stays)", judged(twin.traversal, weight=STAY), "[2,2]", "without", 0.069, 1),
    ("block: residual not scaled", residual_of_token, "[1,1]", "iid", 0.0015, 2),
    ("block: residual not scaled", residual_of_token, "[2,1]", "without", 0.0036, 2),
    ("block: early break", early_break, "[1,1]", "iid", 0.023, 1),
]
EVERY_MUTANT = pytest.mark.parametrize(
    ("name", "judge", "shape", "drawn", "tv", "tokens"), MUTANTS, ids=[f"{m[0]} {m[2]}" for m in MUTANTS]
)


@EVERY_MUTANT
def test_killed(name, judge, shape, drawn, tv, tokens):
    outputs = Outputs.of_forest(WORLD, judge, TREES[shape], drawn)
    assert outputs.mass == pytest.approx(1, abs=1e-12)
    assert outputs.tv() == pytest.approx(tv, rel=0.05)
    assert outputs.first_failure() is not None
    assert next(n for n in range(1, 9) if outputs.tv(n) > 1e-12) == tokens


@EVERY_MUTANT
def test_would_fail_the_exact_tests(name, judge, shape, drawn, tv, tokens):
    """At least two worlds of ``test_lossless`` see it; one whose first p and q are disjoint can see next to nothing."""

    def fails(world):
        try:
            return Outputs.of_forest(world, judge, TREES[shape], drawn).first_failure() is not None
        except AssertionError as error:
            return "nothing can be emitted" in str(error)

    assert sum(map(fails, WORLDS)) >= 2


@pytest.mark.parametrize(
    ("world", "shape", "drawn", "tv"),
    [
        (WORLD, "[1,1]", "point", 0.136),
        (WORLD, "[2]", "point", 0.23),
        (TopTwo(WORLD.seed, plain=True), "[1,1]", "iid", 0.119),
    ],
    ids=["greedy chain", "top-k siblings", "top-k sampling"],
)
def test_a_softmax_stated_for_a_truncated_draft_is_seen(world, shape, drawn, tv):
    """Declared iid from the whole softmax. Stated as drawn, the same drafts are lossless."""

    def declared_iid(draft: Draft, p: torch.Tensor) -> Verdict:
        expanded, paths = np.unique(draft.shape.parent), paths_of(draft)
        q_row = np.full(draft.shape.rows, -1)
        q_row[expanded] = np.arange(len(expanded))
        q = torch.from_numpy(np.array([WORLD.q(paths[row]) for row in expanded]))
        return Token()(Draft(draft.shape, draft.token, "iid", q, q_row), p)

    assert Outputs.of_forest(world, Token(), TREES[shape], drawn).tv() < 1e-12
    assert Outputs.of_forest(world, declared_iid, TREES[shape], drawn).tv() == pytest.approx(tv, rel=0.05)


@pytest.mark.parametrize("weight", [FORGET, STAY], ids=["a <- S", "a stays"])
@pytest.mark.parametrize("drawn", ["iid", "without"])
def test_a_wrong_weight_is_invisible_at_depth_one(weight, drawn):
    """Why depth 2 is enumerated at all."""
    assert Outputs.of_forest(WORLD, judged(twin.traversal, weight=weight), TREES["[3]"], drawn).tv() < 1e-12


@pytest.mark.parametrize("law", [twin.token, twin.traversal, twin.match])
def test_unbroken_twins_live(law):
    for drawn in ("iid", "without", "point"):
        assert Outputs.of_forest(WORLD, judged(law), TREES["[2,1]"], drawn).tv() < 1e-12


# Noise: draws that hand out a uniform twice


class Stuck:
    """A draw number that stands still: two steps get the same uniforms."""

    def __init__(self, draws):
        self.draws, self.memory = draws, {}

    def pick(self, weights, keys):
        (key,) = keys
        key = key._replace(round=0)
        if key not in self.memory:
            self.memory[key] = self.draws.pick(weights, [key])
        (index,) = self.memory[key]
        row = np.asarray(weights)[0]
        return np.array([index if row[index] > 0 else int(row.argmax())])


class Shared:
    """The uniform that drew the draft's token is used again for ``purpose``. Chains of one.

    Knowing the token leaves the uniform an interval: each later choice weighs what it has in common with that.
    """

    def __init__(self, draws, purpose):
        self.draws, self.purpose = draws, purpose

    def pick(self, weights, keys):
        row = np.asarray(weights, dtype=np.float64)[0]
        ends = np.cumsum(row / row.sum())
        starts = ends - row / row.sum()
        if keys[0].purpose == self.purpose:
            low, high = self.interval
            row = np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0.0)
        (index,) = self.draws.pick(row[None], keys)
        if keys[0].purpose == Purpose.DRAFT:
            self.interval = starts[index], ends[index]
        return np.array([index])


def outputs_under(noise, steps):
    """The law of chains of one, decoded with ``noise(draws)`` in place of draws."""

    class Noisy(Loop):
        def run(self, draws, steps):
            return super().run(noise(draws), steps)

    return Outputs.of_loop(Noisy(World(11, support=2, plain=True), Token(), TREES["[1]"], "iid"), steps)


def test_noise_reused_across_steps_is_seen_by_the_joint_law_only():
    outputs = outputs_under(Stuck, 2)
    assert outputs.tv(1) < 1e-12
    assert outputs.tv() > 0.1


@pytest.mark.parametrize(
    ("purpose", "tv"), [(Purpose.STOP, 0.053), (Purpose.EMIT, 0.077)], ids=["acceptance", "residual"]
)
def test_noise_shared_with_the_draft_is_seen(purpose, tv):
    outputs = outputs_under(lambda draws: Shared(draws, purpose), 1)
    assert outputs.tv() == pytest.approx(tv, rel=0.05)
