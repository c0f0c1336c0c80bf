"""Best-first growth of draft trees: each draft forward expands the unexpanded nodes of highest path probability.

Source: OPT-Tree (2406.17276) and DySpec (2410.11744) grow by the product of draft probabilities along the path. Here
``width`` nodes are expanded at a time; ``width`` = 1 is strict best-first growth. With ``rerank`` trees grow as in
EAGLE-2 (2406.16858, section 4): each forward expands the ``width`` best nodes of the newest level, and the best of all
nodes are kept at the end.

Which node is expanded next may depend on everything drawn so far, because every drawn node stays in the tree and
siblings are verified in drawing order. Token and traversal verification are therefore exact for sampled nodes too.
Leaving out drawn nodes by their tokens is exact for likeliest tokens ("point") only, so ``rerank`` requires these.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, Shape
from spec_lab.core.probabilities import Sampling, finite_, likeliest, logits_to_probs, probs_dtype
from spec_lab.core.randomness import Draws, Key, Purpose
from spec_lab.core.readback import Readback
from spec_lab.decode.rows import tokens_before, tokens_of
from spec_lab.decode.sequence import DraftMasks
from spec_lab.propose.expansion import Expand
from spec_lab.propose.growth import Stop
from spec_lab.propose.siblings import BROKEN, allow_, exists, sample_siblings


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


@dataclass
class BestFirst:
    """A forest of draft trees that grow best first.

    Args:
        budget: the limits of each tree.
        drawn: how siblings are drawn: "iid", "without" replacement or "point" (the top-k tokens).
        draws: samples the children.
        keys: ``[B]`` (request, branch, step) of each tree.
        samplings: ``[B]`` sampling parameters of the draft.
        depths: ``[B]`` maximum depth of each tree; the budget's applies as well. 0: nothing is drafted.
        texts: ``[B]`` tokens of each sequence; required by repetition penalties.
        masks: token masks of a constraint; None for none. Children are drawn from the masked draft distribution, and
            nodes below which no token is allowed are not expanded.
        read: reads what was drawn, once for each draft forward.
        stop: where nothing more is drafted; None: nowhere. Its paths have the probabilities with which nodes are drawn.
        lenient: see ``TreePlan.draft``.
        broken: trees whose draft logits held no distribution, with the reason.
    """

    budget: Budget
    drawn: Drawn
    draws: Draws
    keys: Sequence[tuple[int, int, int]]
    samplings: Sequence[Sampling]
    depths: Sequence[int]
    texts: Sequence[Sequence[int]] = ()
    masks: DraftMasks | None = None
    read: Readback = field(default_factory=Readback)
    stop: Stop | None = None
    lenient: bool = False
    broken: dict[int, str] = field(default_factory=dict)
    parent: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    _score: list[float] = field(default_factory=list)  # of each row: log-probability of its path
    _tree: list[int] = field(default_factory=list)  # of each row
    kept: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of the draft, when it is complete
    _depth: list[int] = field(default_factory=list)
    _place: list[int] = field(default_factory=list)  # of each row: its number in its own tree, 0 for the root
    _nodes: list[int] = field(default_factory=list)  # of each tree
    _q: list[Tensor] = field(default_factory=list)
    _q_row: dict[int, int] = field(default_factory=dict)
    _allowed: dict[int, np.ndarray] = field(default_factory=dict)  # [V] bool, of rows about to be expanded

    def grow(self, roots: Tensor, expand: Expand) -> Draft:
        """Draw the whole forest.

        Args:
            roots: ``[A, V]`` draft logits at the roots of the A trees with a depth above 0, in order.
            expand: computes further rows.
        """
        count = len(self.keys)
        self._score, self._tree, self._depth = [0.0] * count, list(range(count)), [0] * count
        self._place, self._nodes = [0] * count, [0] * count
        frontier: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # heaps of (-score, row)
        chosen, logits, shape = [tree for tree, depth in enumerate(self.depths) if depth], roots, self._shape()
        for root in chosen:
            self._may_expand(shape, root)
        while chosen:
            for row in self._draw(chosen, logits):
                heapq.heappush(frontier[self._tree[row]], (-self._score[row], row))
            chosen, shape = [], self._shape()
            for tree, heap in enumerate(frontier):
                left = self.budget.drawn - self._nodes[tree]
                count = min(self.budget.width, left // self.budget.children)
                while heap and count:
                    _, row = heapq.heappop(heap)
                    shallow = self._depth[row] < min(self.depths[tree], self.budget.depth)
                    if shallow and self._may_expand(shape, row):
                        chosen.append(row)
                        count -= 1
                if self.budget.rerank:
                    heap.clear()  # only the newest level is expanded
            chosen.sort(key=lambda row: (self._tree[row], row))
            if chosen:
                logits = expand(shape, np.array(chosen), np.array(self.token)).logits
        return self._draft(logits)

    def _may_expand(self, shape: Shape, row: int) -> bool:
        """Return whether the constraint allows any token below a row, and keep the row's mask."""
        if self.masks is None:
            return True
        allowed = self._allowed[row] = self.masks(shape, np.array([row]), np.array(self.token, dtype=np.int64))[0]
        return bool(allowed.any())

    def _shape(self) -> Shape:
        return Shape(len(self.keys), np.array(self.parent, dtype=np.int64))

    def _draw(self, rows: Sequence[int], logits: Tensor) -> list[int]:
        """Draw the children of ``rows`` ``[n]`` from draft logits ``[n, V]``; return the children's rows."""
        samplings = [self.samplings[self._tree[row]] for row in rows]
        own, ask = logits.to(probs_dtype(logits.dtype), copy=True), {}
        if (without := finite_(own)) is not None:
            ask["without"] = without
        if self.masks is not None:
            ask["possible"] = allow_(own, np.stack([self._allowed.pop(row) for row in rows]))
        if self.stop is not None:
            paths = np.exp([self._score[row] for row in rows])
            ask["stopped"] = self.stop(own.softmax(-1), np.array([self._tree[row] for row in rows]), paths)
        if self.drawn == "point":  # path probabilities are those at temperature 1, whatever the request's temperature
            samplings = [sampling.untruncated for sampling in samplings]
        texts = tokens_of(self.texts, samplings, own.shape[-1], own.device)
        seen = tokens_before(texts, self._shape(), np.array(self.token, dtype=np.int64), np.array(rows))
        q = logits_to_probs(own, samplings, seen, scratch=own)
        if self.drawn == "point":
            token = likeliest(q, self.budget.children)
        else:
            ask["support"] = support = (q > 0).sum(-1)
            token = self._sample(rows, q, support)
        ask["token"], ask["mass"] = token, q.gather(-1, token)
        host = dict(zip(ask, self.read(*ask.values()), strict=True))
        if "without" in host:
            self.broken |= {self._tree[rows[place]]: BROKEN for place in np.flatnonzero(host["without"]).tolist()}
        if self.drawn == "point":  # the largest first, so that those without mass are the last
            count = (host["mass"] > 0).sum(-1)
        else:
            count = sum(exists(host["support"], rank, self.drawn) for rank in range(self.budget.children))
        if "possible" in host:
            count = np.where(host["possible"], count, 0)
        if self.lenient and "without" in host:
            count = np.where(host["without"], 0, count)
        before = self.stop is not None and self.stop.rule.before
        if before:
            count = np.where(host["stopped"], 0, count)
        first, grows = sum(map(len, self._q)), list[int]()
        if self.drawn != "point":
            self._q.append(q)
        with np.errstate(divide="ignore"):
            gains = np.log(host["mass"], dtype=np.float64)
        for place, (row, children) in enumerate(zip(rows, count.tolist(), strict=True)):
            if not children:
                continue
            self._q_row[row] = first + place
            if self.stop is None or before or not host["stopped"][place]:
                grows += range(len(self._tree), len(self._tree) + children)
            self.parent += [row] * children
            self.token += host["token"][place, :children].tolist()
            self._score += (self._score[row] + gains[place, :children]).tolist()
            tree = self._tree[row]
            self._tree += [tree] * children
            self._depth += [self._depth[row] + 1] * children
            self._place += range(self._nodes[tree] + 1, self._nodes[tree] + 1 + children)
            self._nodes[tree] += children
        return grows

    def _sample(self, rows: Sequence[int], q: Tensor, support: Tensor) -> Tensor:  # [n, children]
        """Sample the children of each row, keyed by the row's place in its own tree and the child's rank."""
        k, places = self.budget.children, np.arange(len(rows))
        owners = [(self.keys[self._tree[row]], self._place[row] * k) for row in rows]
        ranks = [(places, [Key(*key, Purpose.DRAFT, own + rank) for key, own in owners]) for rank in range(k)]
        return torch.stack(sample_siblings(self.draws, self.drawn, q, support, ranks), -1)

    def _draft(self, like: Tensor) -> Draft:
        shape, self.kept = self._shape(), np.array(self.token, dtype=np.int64)
        if self.budget.rerank:
            shape, kept = shape.keep(self._best())
            self.kept = self.kept[kept]
        token = torch.from_numpy(self.kept).to(like.device)
        if self.drawn == "point":
            return Draft(shape, token, broken=self.broken)
        q_row = np.full(shape.rows, -1, dtype=np.int64)
        for row, place in self._q_row.items():
            q_row[row] = place
        nothing = torch.empty(0, like.shape[-1], device=like.device)
        return Draft(shape, token, self.drawn, torch.cat(self._q) if self._q else nothing, q_row, broken=self.broken)

    def _best(self) -> np.ndarray:  # [R] bool
        """Mark the ``nodes`` best rows of each tree.

        A node's score is at most its parent's and its earlier siblings', and ties go to what was drawn first, so the
        marked rows are trees.
        """
        best = np.zeros(len(self._score), dtype=bool)
        first = len(self.keys)
        order = sorted(range(first, len(self._score)), key=lambda row: (-self._score[row], row))
        left = [self.budget.nodes] * first
        for row in order:
            tree = self._tree[row]
            best[row] = left[tree] > 0
            left[tree] -= 1
        return best
