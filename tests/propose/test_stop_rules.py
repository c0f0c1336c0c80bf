"""Rules that stop drafts: their formulas, and where drafts end under them."""

import math

import numpy as np
import pytest
import torch

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import forest, tree
from spec_lab.propose.best_first import BestFirst, Budget
from spec_lab.propose.expansion import RowLogits
from spec_lab.propose.stop_rules import AdaEdl, Confidence, Gain, Stop, Svip, entropy
from spec_lab.propose.trees import parse
from tests.propose.lab import bare_batch
from tests.propose.test_grower import Table, V, grown

RULES = {"confidence": Confidence(), "adaedl": AdaEdl(), "svip": Svip(), "gain": Gain()}
THRESHOLDS = [
    ("confidence", 0.35), ("confidence", 0.6), ("adaedl", 0.45), ("adaedl", 0.6),
    ("svip", 0.2), ("svip", 0.4), ("gain", 0.1), ("gain", 0.4),
]  # fmt: skip
TREE = tree(tuple(parse("0 1 0.0 0.1 1.0 0.0.0 0.0.1 0.0.0.0")))


def stops_at(rule, probs, path, threshold):
    """The formulas of the papers, with Python's numbers."""
    h = -sum(p * math.log(p) for p in probs if p > 0)
    return {
        Confidence: max(probs) < threshold,
        AdaEdl: 1 - math.sqrt(0.2 * h) < threshold,
        Svip: math.sqrt(0.15 * h) > threshold,
        Gain: path * max(probs) < threshold,
    }[type(rule)]


def test_entropy_is_in_nats_and_certain_rows_have_none():
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(entropy(probs), torch.tensor([0.0, math.log(2)], dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES)
def test_rules_follow_their_papers(rule):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(200, V, generator=generator, dtype=torch.float64) ** 4
    probs /= probs.sum(-1, keepdim=True)
    path, threshold = torch.rand(2, 200, generator=generator, dtype=torch.float64)
    stops = RULES[rule](probs, path, threshold).tolist()
    rows = zip(probs.tolist(), path.tolist(), threshold.tolist(), strict=True)
    assert stops == [stops_at(RULES[rule], *row) for row in rows]
    assert len(set(stops)) == 2


def check_ends(rule, threshold, draft, above, logits, may_grow):
    """Every row has children unless the rule stops there or, for a rule that stops after a node, above it."""
    probs = logits.softmax(-1)
    path = np.ones(draft.shape.rows)
    stopped = np.zeros(draft.shape.rows, dtype=bool)
    ended = 0
    for row in range(draft.shape.rows):
        if row >= draft.shape.roots:
            parent = draft.shape.parent[row - draft.shape.roots]
            path[row] = path[parent] * float(probs[above[parent], draft.token[row - draft.shape.roots]])
        stopped[row] = stops_at(rule, probs[above[row]].tolist(), path[row], threshold)
        if rule.before:
            expected = not stopped[row]
        else:
            expected = row < draft.shape.roots or not stopped[draft.shape.parent[row - draft.shape.roots]]
        if may_grow(row):
            assert bool(len(draft.shape.children[row])) == expected
            ended += not expected
    return ended


@pytest.mark.each_value
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("rule", "threshold"), THRESHOLDS)
def test_static_trees_end_where_the_rule_stops(rule, threshold, on_host):
    rule, shape, ended = RULES[rule], forest((TREE, TREE)), 0
    for seed in range(12):
        stop = Stop(rule, np.full(2, threshold))
        draft, _, _ = grown(shape, "deterministic", seed, 0.0, False, stop, on_host)
        whole, _, _ = grown(shape, "deterministic", seed, 0.0, False, None, on_host)
        # rows of the smaller draft within the whole one, by their paths of child ranks
        above = [0, 1]
        for node in range(draft.shape.nodes):
            parent = draft.shape.parent[node]
            rank = draft.shape.children[parent].tolist().index(node + 2)
            above.append(int(whole.shape.children[above[parent]][rank]))
        logits = Table(shape.rows, seed, 0.0).logits
        assert draft.token.tolist() == [int(whole.token[row - 2]) for row in above[2:]]
        ended += check_ends(rule, threshold, draft, above, logits, lambda row, a=above: len(shape.children[a[row]]))
    assert ended


@pytest.mark.parametrize("drawn", ["deterministic", "iid", "without_replacement"])
@pytest.mark.parametrize(("rule", "threshold"), THRESHOLDS)
def test_best_first_trees_end_where_the_rule_stops(rule, threshold, drawn):
    """With room for every node, all paths reach the depth or end at the rule."""
    rule, depth = RULES[rule], 3
    for seed in range(8):
        logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (400, V)))
        stop = Stop(rule, np.array([threshold]))
        batch = bare_batch([(0, 0, 0)], V, CounterDraws(seed))
        best = BestFirst(Budget(200, 2, depth, 4), drawn, batch, [depth], [Sampling(1.0)], stop)
        draft = best.grow(
            RowLogits(logits[:1]), lambda shape, rows, token, x=logits: RowLogits(x[torch.from_numpy(rows)])
        )
        depths = draft.shape.depth
        check_ends(rule, threshold, draft, list(range(draft.shape.rows)), logits, lambda row, d=depths: d[row] < depth)


def test_each_sequence_has_its_own_threshold():
    shape = forest((TREE, TREE))
    stop = Stop(Confidence(), np.array([0.0, 1.1]))
    draft, _, _ = grown(shape, "deterministic", 0, 0.0, False, stop, True)
    assert draft.shape.sizes.tolist() == [TREE.rows, 3]
