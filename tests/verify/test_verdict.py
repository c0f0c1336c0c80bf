"""Sampling a verdict: rows and tokens come with exactly the probabilities that it states."""

from collections import Counter

import numpy as np
import pytest
import torch

from spec_lab.core.draft import ComputedOnly, Draft
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import chain, forest, tree
from spec_lab.verify import (
    Cascade,
    Diversed,
    Gumbel,
    KSeq,
    Lenient,
    Match,
    Misfit,
    Relaxed,
    Synthetic,
    Token,
    Traversal,
    Typical,
    Verdict,
    Verifier,
    check_draft,
    check_pair,
    choose,
    misfit,
)
from tests.distributions.tabular import explore

SHAPE = forest((chain(1), chain(0), tree(((0,), (1,), (0, 0)))))  # trees of 2, 1 and 4 rows
WHO = [(7, 0, 3), (8, 0, 3), (9, 1, 0)]
STOP = np.array([0.3, 1.0, 0.1, 0.7, 0.4, 0.0, 0.5])  # three roots, the chain's node, the tree's three
RESIDUAL = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (SHAPE.rows, 3)).astype(float)) + torch.eye(3)[0]
STATED = Verdict(STOP, lambda rows: RESIDUAL[rows])  # residuals need not sum to 1


def test_rows_and_tokens_come_as_stated_each_in_its_own_tree():
    masses = [Counter() for _ in WHO]
    for mass, (rows, tokens, _) in explore(lambda draws: choose(STATED, SHAPE, RESIDUAL, draws, WHO)):
        for root, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            masses[root][row, token] += mass
    for root, rows in enumerate(SHAPE.trees):
        wanted = {
            (row, x): STOP[row] * float(RESIDUAL[row, x] / RESIDUAL[row].sum())
            for row in rows.tolist()
            for x in range(3)
        }
        assert dict(masses[root]) == pytest.approx({pair: mass for pair, mass in wanted.items() if mass > 0}, abs=1e-12)


def test_a_choice_depends_on_its_own_key_only():
    row, token, _ = choose(STATED, SHAPE, RESIDUAL, CounterDraws(1), WHO)
    other_row, other_token, _ = choose(STATED, SHAPE, RESIDUAL, CounterDraws(1), [(1, 1, 1), (2, 2, 2), WHO[2]])
    assert (other_row[2], other_token[2]) == (row[2], token[2])
    runs = {
        tuple(np.concatenate(choose(STATED, SHAPE, RESIDUAL, CounterDraws(1), [(r, 0, 0)] * 3)[:2]).tolist())
        for r in range(40)
    }
    assert len(runs) > 5


def test_an_empty_residual_falls_back_to_the_target_and_is_reported():
    bare = Verdict(STOP, lambda rows: torch.where(torch.from_numpy(rows == 3)[:, None], 0.0, RESIDUAL[rows]))
    sure = torch.eye(3, dtype=torch.float64)[[2]].expand(SHAPE.rows, 3)
    for _, (rows, tokens, empty) in explore(lambda draws: choose(bare, SHAPE, sure, draws, WHO)):
        assert empty.tolist() == [rows[0] == 3, False, False]
        assert not empty[0] or tokens[0] == 2


def test_expected_accepted_weighs_depths_by_where_the_path_ends():
    np.testing.assert_allclose(STATED.expected_accepted(SHAPE), [0.7, 0.0, 0.4 + 2 * 0.5], rtol=1e-15)


def test_a_draft_that_a_verifier_does_not_support_is_refused_by_name():
    class Narrow(Token):
        accepts = frozenset({"without_replacement", "iid"})

    check_pair("chain", "iid", Narrow())
    check_pair("chain", frozenset({"iid", "without_replacement"}), Narrow())
    for draws in ("deterministic", frozenset({"deterministic", "iid"})):
        with pytest.raises(Misfit, match="'token' .*iid, without_replacement.*'ngram' .*'deterministic'"):
            check_pair("ngram", draws, Narrow())


EVERY = [
    Token(),
    Traversal(),
    Match(),
    Lenient(0.5),
    Typical(),
    Relaxed(),
    KSeq(),
    Gumbel(),
    Cascade(),
    Diversed(0.4),
    Synthetic(),
]


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
def test_mixtures_of_point_and_sampled_siblings_are_for_some_verifiers_only(verifier):
    mixed = frozenset({"deterministic", "without_replacement"})
    shape, q, q_row = tree(((0,), (1,))), torch.full((1, 3), 1 / 3), np.array([0, -1, -1])
    draft = Draft(shape, torch.tensor([0, 1]), np.array([0, 2], dtype=np.int8), q, q_row)
    if verifier.name in ("kseq", "gumbel", "cascade", "diversed"):
        with pytest.raises(Misfit, match=f"'{verifier.name}' .*'union' .*'deterministic', 'without_replacement'"):
            check_pair("union", mixed, verifier)
        with pytest.raises(Misfit, match=f"'{verifier.name}' .*'union' .*'deterministic'"):
            check_draft("union", verifier, draft)
    else:
        check_pair("union", mixed, verifier)
        check_draft("union", verifier, draft)
        assert verifier(draft, q.expand(3, 3)).stop.sum() == pytest.approx(1.0)


def test_a_verifier_that_does_not_declare_mixtures_refuses_them():
    class Plain(Verifier):
        name, accepts, lossless = "plain", frozenset({"iid", "without_replacement", "deterministic"}), True

        def __call__(self, draft, p): ...

    assert misfit("union", frozenset({"deterministic", "iid"}), Plain()) is not None
    assert misfit("union", frozenset({"deterministic"}), Plain()) is None and misfit("chain", "iid", Plain()) is None
    assert "several ways" in str(misfit("union", frozenset({"deterministic", "iid"}), Plain()))


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
def test_computed_only_rows_change_no_verdict(verifier):
    """They are not in the draft's shape: p has no rows of theirs, and no path ends there."""
    way = sorted(verifier.accepts)[0]
    shape = forest((tree(((0,), (1,), (0, 0))), chain(2)))
    expanded, generator = np.unique(shape.parent), torch.Generator().manual_seed(0)
    q = torch.rand(len(expanded), 6, generator=generator).softmax(-1)
    q_row = np.full(shape.rows, -1)
    q_row[expanded] = np.arange(len(expanded))
    noise = torch.rand(len(expanded), 6, generator=generator).double() if way == "gumbel" else None
    sampled = (None, None) if way == "deterministic" else (q, q_row)
    window = ComputedOnly(np.array([0, shape.rows, 3]), torch.tensor([1, 1, 1]))
    token, p = torch.tensor([0, 1, 2, 3, 4]), torch.rand(shape.rows, 6, generator=generator).softmax(-1)
    bare = Draft(shape, token, way, *sampled, noise)
    draft = Draft(shape, token, way, *sampled, noise, computed_only=window)
    assert draft.computed_only_nodes.tolist() == [3, 0] and draft.acceptable_nodes.tolist() == [3, 2]
    assert verifier(draft, p).stop.tolist() == verifier(bare, p).stop.tolist()
    rows = np.arange(shape.rows)
    assert torch.equal(verifier(draft, p).residual(rows), verifier(bare, p).residual(rows))
