"""Broken verifiers, as found in public code: the enumeration must see each. The distances are what it sees."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab.draft import Draft
from spec_lab.verify import Token, Traversal, Verdict
from tests.laws import twin
from tests.laws.tabular import Loop, Outputs, World
from tests.laws.test_lossless import TREES

WORLD = World(11, plain=True)


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


def bonus_one_early(draft, p):
    """A leaf emits from its parent's law."""
    verdict, shape = Token()(draft, p), draft.shape
    leaf = np.bincount(shape.parent, minlength=shape.rows) == 0

    def residual(rows):
        return torch.where(torch.from_numpy(leaf[rows])[:, None], p[shape.parent[rows - shape.heads]], given(rows))

    given = verdict.residual
    return Verdict(verdict.stop, residual)


def bonus_from_q(draft, p):
    """A leaf emits from the draft's law at its parent."""
    verdict, shape = Token()(draft, p), draft.shape
    leaf = np.bincount(shape.parent, minlength=shape.rows) == 0

    def residual(rows):
        q = draft.q[draft.q_row[shape.parent[rows - shape.heads]]]
        return torch.where(torch.from_numpy(leaf[rows])[:, None], q, verdict.residual(rows))

    return Verdict(verdict.stop, residual)


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


MUTANTS = [
    # name, judge, tree, drawn, total variation seen
    ("residual = p", residual_is_p, "[1]", "iid", 0.12),
    ("residual = |p - q|", residual_is_absolute, "[1]", "iid", 0.42),
    ("residual = p minus the rejected token", residual_without_the_rejected, "[1]", "iid", 0.11),
    ("bonus one position early", bonus_one_early, "[1,1]", "iid", 0.088),
    ("bonus from q", bonus_from_q, "[1,1]", "iid", 0.076),
    ("lenience 0.99", judged(twin.token, lenience=0.99), "[1]", "iid", 0.0014),
    ("lenience 0.99", judged(twin.token, lenience=0.99), "[2,1]", "without", 0.0026),
    ("drawn without, judged iid", swapped(Token()), "[2]", "without", 0.081),
    ("drawn without, judged iid", swapped(Traversal()), "[2,1]", "without", 0.081),
    ("drawn iid, judged without", judged(swapped(twin.token)), "[2]", "iid", 0.042),
    ("siblings re-ranked by q", reranked("q"), "[3]", "iid", 0.19),
    ("siblings re-ranked by p", reranked("p"), "[3]", "without", 0.78),
    ("traversal a <- S", judged(twin.traversal, forget=True), "[1,1]", "iid", 0.02),
    ("traversal a <- S", judged(twin.traversal, forget=True), "[2,2]", "without", 0.021),
    ("block: early break", early_break, "[1,1]", "iid", 0.023),
]


@pytest.mark.parametrize(("name", "judge", "shape", "drawn", "tv"), MUTANTS, ids=[f"{m[0]} {m[2]}" for m in MUTANTS])
def test_killed(name, judge, shape, drawn, tv):
    outputs = Outputs.of_forest(WORLD, judge, TREES[shape], drawn)
    assert outputs.mass == pytest.approx(1, abs=1e-12)
    assert outputs.tv() == pytest.approx(tv, rel=0.05)
    assert outputs.first_failure() is not None


def test_forgetting_a_is_invisible_at_depth_one():
    """Why depth 2 is enumerated at all."""
    for drawn in ("iid", "without"):
        assert Outputs.of_forest(WORLD, judged(twin.traversal, forget=True), TREES["[3]"], drawn).tv() < 1e-12


@pytest.mark.parametrize("law", [twin.token, twin.traversal, twin.match])
def test_unbroken_twins_live(law):
    for drawn in ("iid", "without", "point"):
        assert Outputs.of_forest(WORLD, judged(law), TREES["[2,1]"], drawn).tv() < 1e-12


def test_noise_reused_across_steps_is_seen_by_the_joint_law_only():
    """A draw number that stands still hands two steps the same uniforms."""

    class Stuck:
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

    class Reusing(Loop):
        def run(self, draws, steps):
            return super().run(Stuck(draws), steps)

    outputs = Outputs.of_loop(Reusing(World(11, support=2, plain=True), Token(), TREES["[1]"], "iid"), 2)
    assert outputs.tv(1) < 1e-12
    assert outputs.tv() > 0.1
