"""FLy against its definition: every outcome of the native tests of a chain, and what the rule makes of it."""

from itertools import product

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import chain, forest, tree
from spec_lab.verify import FLy, Token
from spec_lab.verify.verdict import Misfit, check_draft
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_lossless import TREES
from tests.verify.test_device import on_device

V, LENGTHS = 4, (4, 1, 0, 2)


def a_draft(drawn, seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    shape = forest(tuple(chain(length) for length in lengths))
    p = (2 * torch.randn(shape.rows, V, dtype=torch.float64, generator=generator)).softmax(-1)
    q = torch.randn(shape.nodes, V, dtype=torch.float64, generator=generator).softmax(-1)
    token = torch.randint(V, (shape.nodes,), generator=generator)
    if drawn == "deterministic":
        return Draft(shape, token), p
    q_row = np.full(shape.rows, -1)
    q_row[shape.parent] = np.arange(shape.nodes)
    return Draft(shape, token, drawn, q, q_row), p


def by_definition(draft, p, rule):
    """Where the paths end: over all outcomes of the tests, each with its probability."""
    stop, shape = np.zeros(draft.shape.rows), draft.shape
    for rows in shape.trees:
        count = len(rows) - 1
        window = max(1, min(rule.window, count - 1))
        nodes = [int(row) - shape.roots for row in rows[1:]]
        p_rows = [p[int(shape.parent[node])] for node in nodes]
        tokens = [int(draft.token[node]) for node in nodes]
        accept = [float(row[token]) for row, token in zip(p_rows, tokens, strict=True)]
        if draft.q is not None:
            q_rows = [draft.q[int(draft.q_row[shape.parent[node]])] for node in nodes]
            accept = [min(1.0, a / float(q[t])) for a, q, t in zip(accept, q_rows, tokens, strict=True)]
        unsure = [
            sum(-x * np.log(x) for x in sorted(row.tolist())[-3:] if x > 0) >= rule.threshold and float(row[token]) > 0
            for row, token in zip(p_rows, tokens, strict=True)
        ]
        for passed in product([True, False], repeat=count):
            end = 0
            while end < count:
                after = passed[end + 1 : end + 1 + window]
                if not passed[end] and not (unsure[end] and len(after) == window and all(after)):
                    break
                end += 1
            stop[rows[end]] += np.prod([a if ok else 1 - a for a, ok in zip(accept, passed, strict=True)])
    return stop


@pytest.mark.parametrize("drawn", ["iid", "deterministic"])
@pytest.mark.parametrize("rule", [FLy(1, 0.2), FLy(2, 0.9), FLy(6, 0.3)], ids=repr)
def test_paths_end_where_the_definition_says(rule, drawn):
    for seed in range(4):
        draft, p = a_draft(drawn, seed)
        p[1] = torch.eye(V, dtype=torch.float64)[0]
        verdict = rule(draft, p)
        np.testing.assert_allclose(verdict.stop, by_definition(draft, p, rule), atol=1e-14)
        rows = np.arange(draft.shape.rows)
        assert torch.equal(verdict.residual(rows), Token()(draft, p).residual(rows))
        on_device(rule, draft, p, rows)


def test_it_is_lossy_by_an_exact_distance_and_accepts_more():
    """Only a rejection with a whole window after it is forgiven: never on a chain of one."""
    world = World(11, plain=True)
    runs = {name: Outputs.of_forest(world, FLy(1, 0.3), TREES[name], "iid") for name in ("[1]", "[1,1]", "[1,1,1]")}
    token = Outputs.of_forest(world, Token(), TREES["[1,1,1]"], "iid")
    assert runs["[1]"].tv() < 1e-12 < 0.01 < runs["[1,1]"].tv()
    assert runs["[1,1,1]"].accepted > token.accepted + 0.01
    assert Outputs.of_forest(world, FLy(1, 5.0), TREES["[1,1,1]"], "iid").tv() < 1e-12
    assert not FLy().lossless


def test_trees_are_refused():
    draft = Draft(tree(((0,), (1,))), torch.tensor([0, 1]))
    with pytest.raises(Misfit, match="verifies chains only"):
        check_draft("ngram_tree", FLy(), draft)
