"""A draft is a forest: one tree of proposed tokens below each live sequence.

Rows number everything the target gives logits for: rows ``0 .. B-1`` are the roots (the last pending token of each
sequence), rows ``B .. B+M-1`` are the M drafted nodes. A node's parent is a row, so "child of the root" and "child of a
node" are one thing. No nodes: autoregressive decoding. A path: a chain. More roots: a batch.

Letters used in shapes everywhere: B roots (live sequences), M nodes, R = B + M rows, V vocabulary, E expanded parents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Drawn = Literal["iid", "without", "point", "gumbel"]
"""How siblings were drawn: independently; without replacement; deterministically (top-k, n-gram); or as the best of a
race, whose noise the verifier shares (``Draft.noise``)."""


@dataclass(frozen=True, eq=False)
class Shape:
    """The shape of a forest, without its tokens. Host arrays; shared between drafts of the same shape.

    Args:
        roots: B, the number of trees.
        parent: ``[M]`` int64, the row of each node's parent. Parents come before their children, siblings stand in the
            order in which they were drawn.
    """

    roots: int
    parent: np.ndarray  # [M]

    def __post_init__(self) -> None:
        own = np.arange(self.roots, self.rows)
        if self.parent.ndim != 1 or (self.parent < 0).any() or (self.parent >= own).any():
            raise ValueError("every node's parent must be an earlier row: a root or a node listed before it")

    @property
    def nodes(self) -> int:
        """M."""
        return len(self.parent)

    @property
    def rows(self) -> int:
        """R = B + M."""
        return self.roots + len(self.parent)

    @cached_property
    def branches(self) -> bool:
        """Whether some row has more than one child, so that not every tree is a chain."""
        return len(np.unique(self.parent)) < self.nodes

    @cached_property
    def depth(self) -> np.ndarray:  # [R]
        """Edges between each row and its root; roots have depth 0."""
        depth = np.zeros(self.rows, dtype=np.int64)
        for row, parent in enumerate(self.parent, start=self.roots):
            depth[row] = depth[parent] + 1
        return depth

    @cached_property
    def root(self) -> np.ndarray:  # [R]
        """The root above each row."""
        root = np.arange(self.rows)
        for row, parent in enumerate(self.parent, start=self.roots):
            root[row] = root[parent]
        return root

    @cached_property
    def rank(self) -> np.ndarray:  # [M]
        """Each node's place among its siblings, in the order drawn, from 0."""
        seen = np.zeros(self.rows, dtype=np.int64)
        rank = np.zeros(self.nodes, dtype=np.int64)
        for node, parent in enumerate(self.parent):
            rank[node] = seen[parent]
            seen[parent] += 1
        return rank

    @cached_property
    def children(self) -> list[np.ndarray]:
        """For each row the rows of its children, in the order drawn."""
        lists: list[list[int]] = [[] for _ in range(self.rows)]
        for row, parent in enumerate(self.parent, start=self.roots):
            lists[parent].append(row)
        return [np.array(rows, dtype=np.int64) for rows in lists]

    @cached_property
    def trees(self) -> list[np.ndarray]:
        """For each root the rows of its tree: the root, then its nodes in order."""
        if self.roots == 1:
            return [np.arange(self.rows)]
        return [np.flatnonzero(self.root == root) for root in range(self.roots)]

    @cached_property
    def tree_depths(self) -> list[np.ndarray]:
        """For each root the depths of its tree's rows, in order: 0 of the root itself, then of its nodes."""
        return [self.depth[rows] for rows in self.trees]

    @cached_property
    def grid(self) -> np.ndarray:  # [B, L]
        """The rows of each tree as in ``trees``, side by side; -1 fills up shorter trees."""
        grid = np.full((self.roots, max(map(len, self.trees), default=0)), -1, dtype=np.int64)
        for root, rows in enumerate(self.trees):
            grid[root, : len(rows)] = rows
        return grid

    @cached_property
    def places(self) -> np.ndarray:  # [R]
        """Each node's number within its own tree, from 0; roots have -1."""
        places = np.empty(self.rows, dtype=np.int64)
        for rows in self.trees:
            places[rows] = np.arange(-1, len(rows) - 1)
        return places

    @cached_property
    def ancestors(self) -> np.ndarray:  # [R, R]
        """``ancestors[r, a]``: a lies on the path from r's root to r, both ends included."""
        above = np.eye(self.rows, dtype=bool)
        for row, parent in enumerate(self.parent, start=self.roots):
            above[row] |= above[parent]
        return above

    def path(self, row: int) -> list[int]:
        """The rows from the root (left out) down to ``row`` (included); empty for a root."""
        path = []
        while row >= self.roots:
            path.append(row)
            row = int(self.parent[row - self.roots])
        return path[::-1]

    def ranks(self, row: int) -> tuple[int, ...]:
        """The path to ``row`` written as child ranks, as published tree choices write it."""
        return tuple(int(self.rank[r - self.roots]) for r in self.path(row))

    def keep(self, rows: np.ndarray) -> tuple[Shape, np.ndarray]:
        """The shape left when only the nodes marked in ``rows`` ``[R]`` and having all ancestors marked stay.

        Returns the shape and the kept nodes' old numbers ``[M']``. Heads always stay.
        """
        marked = rows.copy()
        marked[: self.roots] = True
        for row, parent in enumerate(self.parent, start=self.roots):
            marked[row] &= marked[parent]
        new_row = np.cumsum(marked) - 1
        kept = np.flatnonzero(marked[self.roots :])
        return Shape(self.roots, new_row[self.parent[kept]]), kept


@lru_cache(maxsize=256)
def tree(choices: tuple[tuple[int, ...], ...]) -> Shape:
    """The one-tree shape whose nodes are given as paths of child ranks, e.g. ``((0,), (1,), (0, 0))``.

    Nodes are ordered breadth first, siblings by rank.

    Raises:
        ValueError: a node whose parent or earlier sibling is missing, an empty or a repeated path.
    """
    paths = sorted(set(choices), key=lambda path: (len(path), path))
    if len(paths) != len(choices) or not all(paths):
        raise ValueError("tree choices must be distinct and not empty")
    row = {(): 0} | {path: number for number, path in enumerate(paths, start=1)}
    for path in paths:
        if path[:-1] not in row:
            raise ValueError(f"tree choice {list(path)} has no parent {list(path[:-1])}")
        if path[-1] < 0 or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in row):
            raise ValueError(f"tree choice {list(path)} has no earlier sibling of rank {path[-1] - 1}")
    return Shape(1, np.array([row[path[:-1]] for path in paths], dtype=np.int64))


@lru_cache(maxsize=256)
def chain(length: int) -> Shape:
    """One path of ``length`` nodes below one root; ``chain(0)`` drafts nothing."""
    return Shape(1, np.arange(length, dtype=np.int64))


@lru_cache(maxsize=256)
def forest(trees: tuple[Shape, ...]) -> Shape:
    """Several one-tree shapes side by side: root b is the root of ``trees[b]``, nodes tree by tree."""
    if not trees:
        return Shape(0, np.empty(0, dtype=np.int64))
    if len(trees) == 1:
        return trees[0]
    roots, parents, nodes = len(trees), [], 0
    for root, one in enumerate(trees):
        parents.append(np.where(one.parent == 0, root, one.parent - 1 + roots + nodes))
        nodes += one.nodes
    return Shape(roots, np.concatenate(parents).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Draft:
    """A forest with its tokens, and the laws they were drawn from.

    Args:
        shape: the forest.
        token: ``[M]`` int64, on the target's device.
        drawn: how siblings were drawn. ``point`` needs no ``q``.
        q: ``[E, V]`` float, the law at each expanded parent *before* anything was drawn there; rows sum to 1.
        q_row: ``[R]`` int64, which row of ``q`` belongs to each row of the forest; -1 where nothing was drawn.
        noise: ``[E, V]`` float64, only of a draft drawn ``gumbel``: standard Gumbel noise g of each expanded parent,
            whose children are the arg max of log q + g, then the second best, and so on.
        broken: trees that could not be drafted, because the draft's logits are NaN or infinite, each with the reason:
            their sequences end.
    """

    shape: Shape
    token: Tensor  # [M]
    drawn: Drawn = "point"
    q: Tensor | None = None  # [E, V]
    q_row: np.ndarray | None = None  # [R]
    noise: Tensor | None = None  # [E, V]
    broken: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.token) != self.shape.nodes:
            raise ValueError(f"{len(self.token)} tokens for {self.shape.nodes} nodes")
        if (self.drawn == "point") != (self.q is None) or (self.q is None) != (self.q_row is None):
            raise ValueError("a draft drawn 'point' carries neither q nor q_row, any other both")
        if (self.drawn == "gumbel") != (self.noise is not None):
            raise ValueError("a draft drawn 'gumbel' carries the noise of its race, no other does")

    def cut(self, depth: Sequence[int]) -> Draft:
        """The draft without nodes deeper than ``depth[b]`` in tree b. Lossless: it looks at no token."""
        shape = self.shape
        if not shape.nodes:
            return self
        allowed = shape.depth <= np.asarray(depth)[shape.root]
        if allowed.all():
            return self
        return self.keep(allowed)[0]

    def keep(self, rows: np.ndarray) -> tuple[Draft, np.ndarray]:
        """The draft of the nodes marked in ``rows`` ``[R]`` whose ancestors all are, and the old rows ``[R']``.

        Lossless only where the marks follow from the path above each node and its law, never from what was drawn there.
        """
        shape = self.shape
        smaller, kept = shape.keep(rows)
        both = np.concatenate([np.arange(shape.roots), shape.roots + kept])
        q_row = None if self.q_row is None else self.q_row[both]
        token = self.token[torch.from_numpy(kept)]
        return Draft(smaller, token, self.drawn, self.q, q_row, self.noise, self.broken), both


@lru_cache(maxsize=256)
def empty(roots: int, device: torch.device | str = "cpu") -> Draft:
    """The draft of the null proposer: roots and no nodes."""
    return Draft(forest((chain(0),) * roots), torch.empty(0, dtype=torch.long, device=device))
