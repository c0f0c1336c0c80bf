"""Sampling a verdict: rows and tokens come with exactly the probabilities that it states."""

from collections import Counter

import numpy as np
import pytest
import torch

from spec_lab.core.draft import chain, forest, tree
from spec_lab.core.randomness import CounterDraws
from spec_lab.verify import Token, Verdict, check_pair, choose
from tests.laws.tabular import explore

SHAPE = forest((chain(1), chain(0), tree(((0,), (1,), (0, 0)))))  # trees of 2, 1 and 4 rows
WHO = [(7, 0, 3), (8, 0, 3), (9, 1, 0)]
STOP = np.array([0.3, 1.0, 0.1, 0.7, 0.4, 0.0, 0.5])  # three heads, the chain's node, the tree's three
LAW = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (SHAPE.rows, 3)).astype(float)) + torch.eye(3)[0]
STATED = Verdict(STOP, lambda rows: LAW[rows])  # laws need not sum to 1


def test_rows_and_tokens_come_as_stated_each_in_its_own_tree():
    found = [Counter() for _ in WHO]
    for mass, (rows, tokens, _) in explore(lambda draws: choose(STATED, SHAPE, LAW, draws, WHO)):
        for head, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            found[head][row, token] += mass
    for head, rows in enumerate(SHAPE.trees):
        wanted = {(row, x): STOP[row] * float(LAW[row, x] / LAW[row].sum()) for row in rows.tolist() for x in range(3)}
        assert dict(found[head]) == pytest.approx({pair: mass for pair, mass in wanted.items() if mass > 0}, abs=1e-12)


def test_what_is_chosen_depends_on_who_asks_and_on_nobody_else():
    row, token, _ = choose(STATED, SHAPE, LAW, CounterDraws(1), WHO)
    other_row, other_token, _ = choose(STATED, SHAPE, LAW, CounterDraws(1), [(1, 1, 1), (2, 2, 2), WHO[2]])
    assert (other_row[2], other_token[2]) == (row[2], token[2])
    runs = {
        tuple(np.concatenate(choose(STATED, SHAPE, LAW, CounterDraws(1), [(r, 0, 0)] * 3)[:2]).tolist())
        for r in range(40)
    }
    assert len(runs) > 5


def test_where_rounding_left_nothing_the_target_answers_and_the_choice_says_so():
    bare = Verdict(STOP, lambda rows: torch.where(torch.from_numpy(rows == 3)[:, None], 0.0, LAW[rows]))
    sure = torch.eye(3, dtype=torch.float64)[[2]].expand(SHAPE.rows, 3)
    for _, (rows, tokens, empty) in explore(lambda draws: choose(bare, SHAPE, sure, draws, WHO)):
        assert empty.tolist() == [rows[0] == 3, False, False]
        assert not empty[0] or tokens[0] == 2


def test_expected_accepted_weighs_depths_by_where_the_path_ends():
    np.testing.assert_allclose(STATED.expected_accepted(SHAPE), [0.7, 0.0, 0.4 + 2 * 0.5], rtol=1e-15)


def test_a_draft_that_a_verifier_cannot_judge_is_refused_by_name():
    class Narrow(Token):
        accepts = frozenset({"without", "iid"})

    check_pair("chain", "iid", Narrow())
    with pytest.raises(ValueError, match="'token' supports drafts drawn iid, without; proposer 'ngram' draws 'point'"):
        check_pair("ngram", "point", Narrow())
