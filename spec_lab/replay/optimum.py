"""How many drafted tokens any lossless verifier can accept of random draft trees, from p and q at the trees' rows.

A verifier of one step is a joint distribution of the draft X and the accepted path. Let a(s) = P(the accepted path
passes the text s). The verifier is lossless if and only if a(sx) <= a(s) p(x|s) for every text s and token x: what is
missing is emitted after s, from the residual. And it accepts drafted tokens only: with n children drawn below s, of a
set G of tokens it accepts no more than is drafted, sum over x in G of a(sx) <= P(s in X and a child of s in G). So with
pi(s) the expected number of nodes of text s, w(s) = a(s) / pi(s) and H the complement of G,

    sum over x of a(sx) <= pi(s) min over H of [w(s) p(H|s) + 1 - P(all n children lie in H)]                      (1)
    a(sx) <= min(a(s) p(x|s), pi(sx))                                                                              (2)

At the root w = 1, and (1) is the optimal transport of one node (``verify.transport``). Below, (2) bounds w along the
path, and as every drafted row is seen with the probability of its text, the sum of the minima of (1) over the rows of
depth d of a recorded tree has an expectation that bounds P(at least d + 1 tokens are accepted). Every level is at most
the one above.

It is the optimum, and not only a bound, for chains, where (1) and (2) are what block verification attains (2403.10444),
and for trees of one level, where optimal transport attains (1) (2310.15141, 2410.18234). For other trees the optimum is
that of a linear programme over all drafts, with which ``tests/replay/test_optimum`` compares. Of deterministic tokens
a(s) <= p(s), which ``match`` and ``token`` attain.

Verification of each node by itself, from the top, is bounded by the product of the nodes' optima. That is no bound of
verifiers that look at whole paths: block verification accepts more than ``token``, whose nodes are optimal on chains.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.shape import Shape
from spec_lab.verify.transport import inside, transport_bound

MAX_RANKS = {"iid": 16, "without_replacement": 6}
"""Children of a row whose acceptance by rank is computed, by the way of drawing."""


class LevelBounds(NamedTuple):
    """Bounds of each depth of the trees of a forest.

    Args:
        at_least: ``[B, D]`` whose expectation over drafts bounds P(at least d + 1 tokens are accepted), d from 0. A
            bound of the mean accepted length is the sum of the least means so far (``summed``).
        weight: ``[R]`` a bound of P(the row is accepted, given that it is drafted); of deterministic tokens, of
            P(accepted).
    """

    at_least: np.ndarray
    weight: np.ndarray


def summed(means: np.ndarray) -> np.ndarray:  # [..., D] -> [...]
    """Return the bound of the mean accepted length from the means of ``LevelBounds.at_least``."""
    return np.asarray(np.minimum.accumulate(np.minimum(means, 1.0), axis=-1).sum(-1))


def way_of(draft: Draft) -> Drawn:
    """Return how the draft's nodes were drawn; "deterministic" of a draft without nodes.

    Raises:
        ValueError: deterministic and sampled nodes, for which no bound is known here.
    """
    if not draft.shape.nodes:
        return "deterministic"
    if len(draft.ways) > 1:
        raise ValueError(f"no bound is known for trees drawn {' and '.join(sorted(draft.ways))}")
    (way,) = draft.ways
    return way


def levels(draft: Draft, p: Tensor, lumps: int = 0) -> LevelBounds:
    """Return the bounds of each tree and depth.

    Args:
        draft: trees of static shapes, or chains that end by what is known before the next token is drawn; or
            deterministic ones.
        p: ``[R, V]`` float64.
        lumps: last columns that stand for several tokens each. The bounds stay bounds.

    Raises:
        ValueError: deterministic and sampled nodes in one draft.
    """
    way, shape = way_of(draft), draft.shape
    if way == "deterministic":
        return _of_deterministic(shape, draft.token.numpy(), p.numpy())
    assert draft.q is not None and draft.q_row is not None
    way = "iid" if way == "iid" else "without_replacement"  # a race draws without replacement
    depth, count = shape.depth, shape.count
    bounds, weight = np.zeros((shape.roots, shape.deepest)), np.zeros(shape.rows)
    weight[: shape.roots] = 1.0
    sizes = _per_level(shape, np.ones(shape.rows, dtype=bool))
    expanded = _per_level(shape, count > 0)
    token = np.concatenate([np.zeros(shape.roots, dtype=np.int64), draft.token.numpy()])
    visits = _Visits(shape, _exhausted(draft, way))
    for level in range(shape.deepest):
        rows = np.flatnonzero((depth == level) & (count > 0))
        tree = shape.root[rows]
        p_rows, q_rows = p[rows], draft.q[draft.q_row[rows]].double()
        counts = sorted(set(count[rows].tolist()))
        masses = inside(p_rows, q_rows, counts, cast(Drawn, way))
        assert masses is not None
        count_index = np.searchsorted(counts, count[rows])
        drafts = np.stack([masses.drafts[k] for k in counts])  # [K, n, S]
        if way == "iid":  # all nodes of a level have the same distribution, so that their numbers of children mix
            mix = np.zeros((len(counts), shape.roots))
            np.add.at(mix, (count_index, tree), 1.0)
            chosen = np.einsum("kn,kns->ns", (mix / np.maximum(mix.sum(0), 1.0))[:, tree], drafts)
        else:  # the set may follow from the text alone: it is that of the most children
            widest = np.zeros(shape.roots, dtype=np.int64)
            np.maximum.at(widest, tree, count_index)
            chosen = drafts[widest[tree], np.arange(len(rows))]
        target = masses.target
        costs = np.multiply(target, weight[rows, None], where=target > 0, out=np.zeros_like(target))
        best = (costs - chosen).argmin(1)[:, None]
        drafted = chosen if way == "iid" else drafts[count_index, np.arange(len(rows))]
        value = np.take_along_axis(costs - drafted, best, 1)[:, 0]
        np.add.at(bounds[:, level], tree, np.where(masses.support > 0, np.minimum(1.0 + value, 1.0), 0.0))

        nodes = np.flatnonzero(depth == level + 1)
        above, tree = shape.parent[nodes - shape.roots], shape.root[nodes]
        p_token = p.numpy()[above, token[nodes]] / np.maximum(p.numpy()[above].sum(1), 1e-300)
        q_above = draft.q[draft.q_row[above]].double().numpy()
        q_above = q_above / np.maximum(q_above.sum(1, keepdims=True), 1e-300)
        if way == "iid":  # weight * expanded is a(s) / q(s), and sizes bounds it
            ratio = p_token / np.maximum(q_above[np.arange(len(nodes)), token[nodes]], 1e-300)
            total = weight[above] * expanded[tree, level] * ratio
            total = np.minimum(total, sizes[tree, level + 1])
            weight[nodes] = total / np.maximum(expanded[tree, level + 1], 1)
            continue
        drawn_at = _drawn_at(q_above, token[nodes], lumps)
        weight[nodes] = visits.below(nodes, p_token, *drawn_at)
    return LevelBounds(bounds, weight)


def _of_deterministic(shape: Shape, token: np.ndarray, p: np.ndarray) -> LevelBounds:
    """P of the distinct texts of each depth: no verifier accepts more of a given tree."""
    bounds, weight = np.zeros((shape.roots, shape.deepest)), np.ones(shape.rows)
    text = np.arange(shape.rows)  # the first row that has the same text
    for level in range(1, shape.deepest + 1):
        rows = np.flatnonzero(shape.depth == level)
        above, tokens = shape.parent[rows - shape.roots], token[rows - shape.roots]
        _, first, same = np.unique(np.stack([text[above], tokens]), axis=1, return_index=True, return_inverse=True)
        text[rows] = rows[first][same.ravel()]
        weight[rows] = weight[above] * p[above, tokens]
        distinct = rows[first]
        np.add.at(bounds[:, level - 1], shape.root[distinct], weight[distinct])
    return LevelBounds(bounds, weight)


def _per_level(shape: Shape, marked: np.ndarray) -> np.ndarray:  # [B, D + 1]
    """The number of marked rows of each tree and depth."""
    counts = np.zeros((shape.roots, shape.deepest + 1))
    np.add.at(counts, (shape.root[marked], shape.depth[marked]), 1.0)
    return counts


def _exhausted(draft: Draft, way: str) -> np.ndarray:  # [B] bool
    """Trees in which q's support may have been exhausted, so that planned nodes are missing."""
    shape, exhausted = draft.shape, np.zeros(draft.shape.roots, dtype=bool)
    assert draft.q is not None and draft.q_row is not None
    if way != "iid":
        support = (draft.q[draft.q_row[shape.expanded]] > 0).sum(1).numpy()
        exhausted[shape.root[shape.expanded[support <= shape.count[shape.expanded]]]] = True
    return exhausted


RANKS = 3
"""Ranks at which the probability of a draw without replacement is bounded from below; 0 from there on."""


def _drawn_at(q: np.ndarray, token: np.ndarray, lumps: int) -> tuple[np.ndarray, np.ndarray]:  # [n, RANKS] each
    """P(the token is drawn as the first, second, .. without replacement): a lower and an upper bound.

    Exact for the first two where no column stands for several tokens.
    """
    chance = q[np.arange(len(q)), token]
    others = q.copy()
    others[np.arange(len(q)), token] = 0.0
    total = others.sum(1, keepdims=True) + chance[:, None]
    left = np.maximum(total - others, chance[:, None])  # what a first token leaves; at least the token's own
    upper = chance * np.divide(others, left, out=np.zeros_like(others), where=left > 0).sum(1)
    if lumps:
        left[:, -lumps:] = 1.0  # several tokens, of which only one is drawn first
    lower = chance * np.divide(others, left, out=np.zeros_like(others), where=left > 0).sum(1)
    not_yet = np.maximum(1.0 - chance - upper, 0.0)  # it is drawn later; then with at least its own probability
    ahead = np.maximum(1.0 - chance - lower, 0.0)
    return np.stack([chance, lower, not_yet * chance], 1), np.stack([chance, np.minimum(upper, 1.0), ahead], 1)


class _Visits:
    """How often trees drawn without replacement have a node of a given text, from the nodes planned for a tree.

    A text of depth d is that of each planned node of depth d with some probability: the product over its tokens of P(it
    is the draw of that rank). For every row these are followed down its tree, as bounds, with a bound of a(s).

    Args:
        exhausted: ``[B]`` trees that lack planned nodes. They have no upper bound.
    """

    def __init__(self, shape: Shape, exhausted: np.ndarray) -> None:
        self.shape, self.exhausted = shape, exhausted
        self.slot = np.zeros(shape.rows, dtype=np.int64)
        self.tables: list[np.ndarray] = []  # of each depth, the rows of each tree [B, nodes]; -1 fills up
        for level in range(shape.deepest + 1):
            rows = np.flatnonzero(shape.depth == level)
            order = rows[np.argsort(shape.root[rows], kind="stable")]
            counts = np.bincount(shape.root[order], minlength=shape.roots)
            column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
            self.slot[order] = column
            table = np.full((shape.roots, int(counts.max(initial=0))), -1, dtype=np.int64)
            table[shape.root[order], column] = order
            self.tables.append(table)
        self.lower = self.upper = np.ones((shape.roots, 1))  # [rows of a depth, nodes]
        self.bound = np.ones(shape.roots)  # of a(s)
        self.number = np.arange(shape.roots)  # [R'] of each row, its row in these

    def below(self, nodes: np.ndarray, p: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:  # [n]
        """Go down to the nodes of the next depth; return their weights.

        Args:
            nodes: rows ``[n]``, all of one depth.
            p: ``[n]`` of their tokens.
            lower, upper: ``[n, RANKS]`` of ``_drawn_at``.
        """
        shape = self.shape
        above, tree = shape.parent[nodes - shape.roots], shape.root[nodes]
        candidates = self.tables[int(shape.depth[nodes[0]])][tree]  # [n, nodes]
        there = candidates >= 0
        safe = np.where(there, candidates, shape.roots)
        rank = shape.rank[safe - shape.roots]
        parent = self.slot[shape.parent[safe - shape.roots]]
        known = there & (rank < RANKS)
        number = self.number[above]
        at = np.minimum(rank, RANKS - 1)
        low = np.take_along_axis(self.lower[number], parent, 1) * np.take_along_axis(lower, at, 1)
        high = np.take_along_axis(self.upper[number], parent, 1) * np.where(
            rank < RANKS, np.take_along_axis(upper, at, 1), upper[:, -1:]
        )
        self.lower, self.upper = np.where(known, low, 0.0), np.where(there, high, 0.0)
        expanded = there & (shape.count[safe] > 0)
        bound = self.bound[number] * p
        self.bound = np.where(self.exhausted[tree], bound, np.minimum(bound, self.upper.sum(1)))
        self.number = np.zeros(shape.rows, dtype=np.int64)
        self.number[nodes] = np.arange(len(nodes))
        seen = (self.lower * expanded).sum(1)
        weight = np.full(len(nodes), np.inf)
        np.divide(self.bound, seen, out=weight, where=seen > 0)
        weight[self.bound == 0] = 0.0
        whole = ~self.exhausted[tree] & (there == expanded).all(1)
        return np.where(whole, np.minimum(weight, 1.0), weight)


# Trees ---------------------------------------------------------------------------------------------------------------


def by_rank(draft: Draft, p: Tensor, weight: np.ndarray, ranks: int) -> np.ndarray:  # [D, K]
    """Return the optimal acceptance of each further child by the depth of its parent, averaged over rows.

    Sampled: the optimum of k children less that of k - 1, which children not drafted have as well. Deterministic ones:
    p of the drafted children; rows that have no such child are left out.

    Args:
        draft: the drafts.
        p: ``[R, V]`` float64.
        weight: ``[R]`` of the rows, from ``levels``.
        ranks: children wanted; fewer are computed of sampled ones (``MAX_RANKS``), and of deterministic ones those that
            were drafted.
    """
    way, shape = way_of(draft), draft.shape
    limit = MAX_RANKS["iid" if way == "iid" else "without_replacement"]
    wide = int(shape.count.max(initial=0)) if way == "deterministic" else min(ranks, limit)
    accuracy = np.zeros((shape.deepest, wide))
    for level in range(shape.deepest):
        rows = np.flatnonzero((shape.depth == level) & (shape.count > 0))
        row_weight = np.minimum(weight[rows], 1.0)
        if way == "deterministic":
            below = shape.table[rows][:, :wide]
            chance = np.where(below >= 0, p.numpy()[rows[:, None], draft.token.numpy()[below - shape.roots]], 0.0)
            total = (row_weight[:, None] * (below >= 0)).sum(0)
            accuracy[level] = np.divide(row_weight @ chance, total, out=np.zeros(wide), where=total > 0)
            continue
        assert draft.q is not None and draft.q_row is not None
        q = draft.q[draft.q_row[rows]].double()
        drawn: Drawn = "iid" if way == "iid" else "without_replacement"
        bounds = [transport_bound(p[rows], q, count, drawn) for count in range(wide + 1)]
        if row_weight.sum() > 0:
            accuracy[level] = np.diff(np.array(bounds) @ row_weight / row_weight.sum())
    return accuracy.clip(0.0, 1.0)


def modelled(shape: Shape, accuracy: np.ndarray) -> np.ndarray:  # [B]
    """Return the expected accepted tokens of each tree if acceptance depends on depth and rank alone (2402.12374)."""
    value = np.zeros(shape.rows)
    value[: shape.roots] = 1.0
    for level in range(shape.deepest):
        rows = np.flatnonzero(shape.depth == level + 1)
        nodes = rows - shape.roots
        rank = shape.rank[nodes]
        known = rank < accuracy.shape[1]
        value[rows[known]] = value[shape.parent[nodes[known]]] * accuracy[level, rank[known]]
    return np.bincount(shape.root[shape.roots :], value[shape.roots :], minlength=shape.roots)
