"""Best-first growth of draft trees: each draft forward expands the unexpanded nodes of highest path probability.

Source: OPT-Tree (2406.17276) and DySpec (2410.11744) grow by the product of draft probabilities along the path. Here
``width`` nodes are expanded at a time; ``width`` = 1 is strict best-first growth. With ``rerank`` trees grow as in
EAGLE-2 (2406.16858, section 4): each forward expands the ``width`` best nodes of the newest level, and the best of all
nodes are kept at the end.

Which node is expanded next may depend on everything drawn so far, because every drawn node stays in the tree and
siblings are verified in drawing order. Token and traversal verification are therefore exact for sampled nodes too.
Leaving out drawn nodes by their tokens is exact for likeliest tokens ("deterministic") only: ``rerank`` requires these.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import Shape
from spec_lab.decode.sequence import Batch
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
        super().__init__(drawn, batch, Shape(len(depths), np.empty(0, dtype=np.int64)), samplings, stop, lenient)
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
            while heap and count:
                _, row = heapq.heappop(heap)
                allowed = self.allowed(np.array([row]))
                if allowed is None or allowed.any():
                    chosen.append((tree, row, allowed))
                    count -= 1
            if self.budget.rerank:
                heap.clear()  # only the newest level is expanded
        chosen.sort(key=lambda choice: choice[:2])
        masks = [allowed for *_, allowed in chosen if allowed is not None]
        return np.array([row for _, row, _ in chosen], dtype=np.int64), np.concatenate(masks) if masks else None

    def siblings(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the children of each row, keyed by the row's place in its own tree and the child's rank."""
        places, numbers = np.arange(len(rows)), (self.shape.places[rows] + 1) * self.budget.children
        return [(places, numbers + rank) for rank in range(self.budget.children)]

    def paths(self, rows: np.ndarray) -> np.ndarray | None:
        """See ``Grower``."""
        return np.exp(self.score[rows])

    def add(self, rows: np.ndarray, children: Children) -> None:
        """Append what was drawn; it joins the frontier unless drafting stops above it."""
        assert children.probability is not None and self.frontier is not None
        count = self.budget.children if children.counts is None else children.counts[:, None]
        exists = np.broadcast_to(np.arange(self.budget.children) < count, children.token.shape)
        parent_of = exists.nonzero()[0]  # of the parent of each child
        with np.errstate(divide="ignore"):
            gains = np.log(children.probability, dtype=np.float64)[exists]
        first, above = self.shape.rows, rows[parent_of]
        self.shape = Shape(self.shape.roots, np.append(self.shape.parent, above))
        self.token = np.append(self.token, children.token[exists])
        if self.greedy_q is not None:
            self.greedy_q = np.append(self.greedy_q, children.probability[exists])
        self.score = np.append(self.score, self.score[above] + gains)
        self.q_row = np.append(self.q_row, np.full(len(above), -1))
        self.live = np.append(self.live, np.ones(len(above), dtype=bool))
        grows = self.shape.depth[first:] < self.depths[self.shape.root[first:]]
        if children.stopped is not None:
            grows &= ~children.stopped[parent_of]
        for row in (first + grows.nonzero()[0]).tolist():
            heapq.heappush(self.frontier[self.shape.root[row]], (-self.score[row], row))

    def draft(self, like: Tensor) -> Draft:
        """See ``Grower``; reranked, the best nodes of each tree.

        A node's score is at most its parent's and its earlier siblings', and ties go to what was drawn first, so the
        best rows are trees.
        """
        if self.budget.rerank:
            shape, sizes = self.shape, self.shape.sizes - 1
            root = shape.root[shape.roots :]
            order = np.lexsort((-self.score[shape.roots :], root))  # nodes by tree, the best first
            rank = np.arange(shape.nodes) - (sizes.cumsum() - sizes)[root[order]]
            self.live[shape.roots + order] = rank < self.budget.nodes
        return super().draft(like)
