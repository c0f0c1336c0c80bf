"""Best-first growth of draft trees: each draft forward expands the unexpanded nodes of highest path probability.

Source: OPT-Tree (2406.17276) and DySpec (2410.11744) grow by the product of draft probabilities along the path. Here
``width`` nodes are expanded at a time; ``width`` = 1 is strict best-first growth. With ``rerank`` trees grow as in
EAGLE-2 (2406.16858, section 4): each forward expands the ``width`` best nodes of the newest level, and the best of all
nodes are kept at the end. Nodes below which none would be kept are not expanded: a node's score is at most its
parent's, so the draft is the same with fewer forwards.

Which node is expanded next may depend on everything drawn so far, because every drawn node stays in the tree and
siblings are verified in drawing order. Token and traversal verification are therefore exact for sampled nodes too.
Leaving out drawn nodes by their tokens is exact for likeliest tokens ("deterministic") only: ``rerank`` requires these.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import Shape
from spec_lab.decode.sequence import Batch
from spec_lab.propose.expansion import Computed
from spec_lab.propose.grower import Children, Grower
from spec_lab.propose.stop_rules import Stop


@dataclass(frozen=True)
class Budget:
    """The limits of each tree.

    Args:
        nodes: maximum number of nodes below the root; with ``rerank`` as many are kept of all that are drawn.
        children: number of children drawn below each expanded node; without ``rerank`` at most ``nodes``.
        depth: maximum depth.
        width: number of nodes that one draft forward expands.
        rerank: whether to expand level by level and to keep the best nodes of all at the end, as EAGLE-2 does.
    """

    nodes: int
    children: int = 2
    depth: int = 8
    width: int = 4
    rerank: bool = False

    @property
    def drawn(self) -> int:
        """The maximum number of nodes that are drawn."""
        if not self.rerank:
            return self.nodes
        per_level = [min(self.width, self.children**level) * self.children for level in range(self.depth)]
        return sum(per_level)


@lru_cache(maxsize=64)
def _bare(roots: int) -> Shape:
    """The shape of so many roots without nodes, with which every draft begins."""
    return Shape(roots, np.empty(0, dtype=np.int64))


class BestFirst(Grower):
    """A forest of draft trees that grow best first. Its ``shape`` holds all that is drawn so far.

    Children are drawn from the masked draft distribution, and nodes below which no token is allowed are not expanded.

    Args:
        budget: the limits of each tree.
        drawn: how siblings are drawn: "iid", "without_replacement" or "deterministic" (the top-k tokens).
        batch: the sequences.
        depths: ``[B]`` maximum depth of each tree; the budget's applies as well. 0: nothing is drafted.
        samplings: ``[B]`` sampling parameters of the draft.
        stop: where nothing more is drafted; None: nowhere. Its paths have the probabilities with which nodes are drawn.
        lenient: see ``TreePlan.draft``.
    """

    scored = True  # "deterministic" by the probabilities at temperature 1, whatever the request's temperature

    def __init__(
        self,
        budget: Budget,
        drawn: Drawn,
        batch: Batch,
        depths: Sequence[int],
        samplings: Sequence[Sampling],
        stop: Stop | None = None,
        lenient: bool = False,
    ) -> None:
        super().__init__(drawn, batch, _bare(len(depths)), samplings, stop, lenient)
        self.budget, self.depths = budget, np.minimum(depths, budget.depth)
        self.score = np.zeros(len(depths))  # of each row: log-probability of its path
        self.frontier: list[list[tuple[float, int]]] | None = None  # of each tree, a heap of (-score, row)

    def choose(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the best rows of each tree's frontier below which anything is allowed."""
        if self.frontier is None:
            self.frontier, rows = [[] for _ in self.depths], np.flatnonzero(self.depths)
            return rows, self.allowed(rows)
        chosen = list[tuple[int, int, np.ndarray | None]]()
        for tree, (heap, size) in enumerate(zip(self.frontier, self.shape.sizes.tolist(), strict=True)):
            count = min(self.budget.width, (self.budget.drawn - size + 1) // self.budget.children)
            highest = -self._least(tree, size) if self.budget.rerank and heap else math.inf
            while heap and count and heap[0][0] <= highest:
                _, row = heapq.heappop(heap)
                allowed = None if self.batch.draft_masks is None else self.allowed(np.array([row]))
                if allowed is None or allowed.any():
                    chosen.append((tree, row, allowed))
                    count -= 1
            if self.budget.rerank:
                heap.clear()  # only the newest level is expanded
        chosen.sort(key=lambda choice: choice[:2])
        masks = [allowed for *_, allowed in chosen if allowed is not None]
        return np.array([row for _, row, _ in chosen], dtype=np.int64), np.concatenate(masks) if masks else None

    def _least(self, tree: int, size: int) -> float:
        """The lowest score of a node below which one might be kept: fewer than ``nodes`` - 1 nodes are better.

        Args:
            tree: number of the tree.
            size: its rows.
        """
        above = self.budget.nodes - 1  # so many better nodes leave room for the node itself alone
        if size - 1 < above or not above:
            return -math.inf if above else math.inf
        score = self.score if self.shape.roots == 1 else self.score[self.shape.root == tree]
        return float(np.partition(score[1:], size - 1 - above)[size - 1 - above])

    def siblings(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the children of each row, keyed by the row's place in its own tree and the child's rank."""
        if self.greedy:  # only how many there are is of interest
            return [(rows, rows)] * self.budget.children
        places, numbers = np.arange(len(rows)), (self.shape.places[rows] + 1) * self.budget.children
        return [(places, numbers + rank) for rank in range(self.budget.children)]

    def paths(self, rows: np.ndarray) -> np.ndarray | None:
        """See ``Grower``."""
        return np.exp(self.score[rows])

    def add(self, rows: np.ndarray, children: Children) -> None:
        """Append what was drawn; it joins the frontier unless drafting stops above it."""
        assert children.probability is not None and self.frontier is not None
        token, probability, counts = children.token, children.probability, children.counts
        if counts is None:
            counts = np.full(len(rows), self.budget.children, dtype=np.int64)
        else:
            exists = np.arange(self.budget.children) < counts[:, None]
            token, probability = token[exists], probability[exists]
        with np.errstate(divide="ignore"):
            gains = np.log(probability.ravel(), dtype=np.float64)
        first, score = self.shape.rows, self.score[rows].repeat(counts) + gains
        self.shape = self.shape.grown(rows, counts)
        self.token = np.concatenate([self.token, token.ravel()])
        if self.greedy_q is not None:
            self.greedy_q = np.concatenate([self.greedy_q, probability.ravel()])
        self.score = np.concatenate([self.score, score])
        if not self.greedy:
            self.q_row = np.concatenate([self.q_row, np.full(len(score), -1)])
        tree = self.shape.root[first:]
        grows = self.shape.depth[first:] < self.depths[tree]
        if children.stopped is not None:
            grows &= ~children.stopped.repeat(counts)
        trees, costs = tree.tolist(), (-score).tolist()
        for number in grows.nonzero()[0].tolist():
            self.frontier[trees[number]].append((costs[number], first + number))
        for heap in self.frontier:
            heapq.heapify(heap)

    def draft(self, roots: Computed) -> Draft:
        """See ``Grower``; reranked, the best nodes of each tree.

        A node's score is at most its parent's and its earlier siblings', and ties go to what was drawn first, so the
        best rows are trees.
        """
        self.live = np.ones(self.shape.rows, dtype=bool)
        if self.budget.rerank:
            shape, sizes = self.shape, self.shape.sizes - 1
            root = shape.root[shape.roots :]
            order = np.lexsort((-self.score[shape.roots :], root))  # nodes by tree, the best first
            rank = np.arange(shape.nodes) - (sizes.cumsum() - sizes)[root[order]]
            self.live[shape.roots + order] = rank < self.budget.nodes
        return super().draft(roots)
