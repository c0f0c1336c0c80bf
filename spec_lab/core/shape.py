"""The shape of a forest: one tree of proposed tokens below each live sequence.

Rows number everything the target computes logits for: rows ``0 .. B-1`` are the roots (the last pending token of each
sequence), rows ``B .. B+M-1`` are the M drafted nodes. A node's parent is a row, so "child of the root" and "child of a
node" are one thing. No nodes: autoregressive decoding. A path: a chain. More roots: a batch. Letters: ``core.draft``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.upload import upload


class Schedule(NamedTuple):
    """Nodes in an order in which a verifier can work on several at once.

    Within a step every parent has at most one node. A step's nodes stand in four parts: nodes that have later siblings
    come before last siblings, and in either part sampled nodes come before points.

    Args:
        nodes: ``[M]``, step by step.
        parents: ``[M]``, the rows of their parents.
        steps: for each step where it starts and where its four parts end: sampled nodes with later siblings, points
            with later siblings, sampled last siblings, points that are last siblings.
        last: ``[E]``, the places in ``nodes`` of all last siblings, of which the first ``sampled`` are sampled nodes.
    """

    nodes: Any
    parents: Any
    steps: list[list[int]]
    last: Any
    sampled: int


class Level(NamedTuple):
    """The nodes of one depth, as a proposer draws them.

    Args:
        parents: ``[n]`` rows above, in ascending order.
        ranks: for each sibling rank its nodes: their rows, and the places of their parents in ``parents``.
    """

    parents: np.ndarray
    ranks: list[tuple[np.ndarray, np.ndarray]]


class Drawing(NamedTuple):
    """The order in which a forest of known shape is drawn: level by level, all children of a row side by side.

    Args:
        rows: ``[E]`` those with children, level by level.
        order: ``[M]`` the place of each node among all that are drawn; each row of a level has room for as many
            children as the one with the most.
        tokens: for each level but the last, where the tokens of those of its nodes that have children stand among its
            own.
        above: likewise the number of each one's parent among the rows with children of the level above.
    """

    rows: np.ndarray
    order: np.ndarray
    tokens: list[np.ndarray]
    above: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class Shape:
    """The shape of a forest, without its tokens. Host arrays; shared between drafts of the same shape.

    What is derived from the parents is computed once, when it is first used. A tree that is grown anew in every step
    has nothing cached, so each property must be fast for a few dozen nodes: a plain loop, or a few array operations.

    Args:
        roots: B, the number of trees.
        parent: ``[M]`` int64, the row of each node's parent. Parents come before their children, siblings stand in the
            order in which they were drawn.

    Attributes:
        depth: ``[R]`` int64, edges between each row and its root; roots have depth 0.
        rank: ``[M]`` int64, each node's place among its siblings, in the order drawn, from 0.
        count: ``[R]`` int64, the number of each row's children.

    Raises:
        ValueError: a parent that is no earlier row.
    """

    roots: int
    parent: np.ndarray  # [M]
    depth: np.ndarray = field(init=False, repr=False)  # [R]
    rank: np.ndarray = field(init=False, repr=False)  # [M]
    count: np.ndarray = field(init=False, repr=False)  # [R]
    _forests: dict[tuple[Shape, ...], Shape] = field(init=False, repr=False, default_factory=dict)
    _kept: dict[bytes, tuple[Shape, np.ndarray]] = field(init=False, repr=False, default_factory=dict)
    _devices: dict[torch.device, DeviceShape] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        wrong = "every node's parent must be an earlier row: a root or a node listed before it"
        if self.parent.ndim != 1:
            raise ValueError(wrong)
        depth, rank, count = [0] * self.roots, [], [0] * self.rows
        for row, parent in enumerate(self.parent.tolist(), start=self.roots):
            if not 0 <= parent < row:
                raise ValueError(wrong)
            depth.append(depth[parent] + 1)
            rank.append(count[parent])
            count[parent] += 1
        for name, values in (("depth", depth), ("rank", rank), ("count", count)):
            object.__setattr__(self, name, np.array(values, dtype=np.int64))

    def grown(self, rows: np.ndarray, counts: np.ndarray) -> Shape:
        """Return the shape with further nodes, which come last.

        So each level of a tree that grows level by level is counted once.

        Args:
            rows: ``[n]`` different rows without children.
            counts: ``[n]`` int64, how many children each gets.
        """
        above, added = rows.repeat(counts), int(counts.sum())
        count = np.concatenate([self.count, np.zeros(added, dtype=np.int64)])
        count[rows] = counts
        shape = object.__new__(Shape)  # its parents are right
        vars(shape).update(
            roots=self.roots,
            parent=np.concatenate([self.parent, above]),
            depth=np.concatenate([self.depth, self.depth[above] + 1]),
            rank=np.concatenate([self.rank, np.arange(added) - (counts.cumsum() - counts).repeat(counts)]),
            count=count,
            root=np.concatenate([self.root, self.root[above]]),
            _forests={},
            _kept={},
            _devices={},
        )
        if self.roots == 1:
            before, rows_before = self.tree_masks[0], self.rows
            mask = np.full((rows_before + added,) * 2, -np.inf, dtype=np.float32)
            mask[:rows_before, :rows_before] = before
            mask[rows_before:, :rows_before] = before[above]
            np.fill_diagonal(mask[rows_before:, rows_before:], 0.0)
            vars(shape)["tree_masks"] = [mask]
        return shape

    @property
    def nodes(self) -> int:
        """M."""
        return len(self.parent)

    @property
    def rows(self) -> int:
        """R = B + M."""
        return self.roots + len(self.parent)

    @cached_property
    def deepest(self) -> int:
        """The largest depth; 0 without nodes."""
        return int(self.depth.max(initial=0))

    @cached_property
    def lineage(self) -> np.ndarray:  # [R, D + 1]
        """``lineage[r, k]``: the row k edges above r, itself at 0; -1 beyond its root."""
        rows, width = self.rows, self.deepest + 1
        above = np.full(rows + 1, -1, dtype=np.int64)  # the last entry, found by -1, stands for no row
        above[self.roots : rows] = self.parent
        table = np.empty((width, rows), dtype=np.int64)
        table[0] = np.arange(rows)
        for k in range(1, width):
            above.take(table[k - 1], out=table[k], mode="wrap")
        return np.ascontiguousarray(table.T)

    @cached_property
    def root(self) -> np.ndarray:  # [R]
        """The root above each row."""
        if self.roots == 1:
            return np.zeros(self.rows, dtype=np.int64)
        return self.lineage[np.arange(self.rows), self.depth]

    @cached_property
    def branches(self) -> bool:
        """Whether some row has more than one child, so that not every tree is a chain."""
        return int(self.count.max(initial=0)) > 1

    @cached_property
    def table(self) -> np.ndarray:  # [R, K]
        """For each row the rows of its children, in the order drawn; -1 fills up."""
        table = np.full((self.rows, int(self.count.max(initial=0))), -1, dtype=np.int64)
        table[self.parent, self.rank] = np.arange(self.roots, self.rows)
        return table

    @cached_property
    def children(self) -> list[np.ndarray]:
        """For each row the rows of its children, in the order drawn."""
        return [rows[:count] for rows, count in zip(self.table, self.count.tolist(), strict=True)]

    @cached_property
    def expanded(self) -> np.ndarray:  # [E]
        """The rows that have children."""
        return np.flatnonzero(self.count)

    @cached_property
    def grid(self) -> np.ndarray:  # [B, L]
        """The rows of each tree, its root first, then its nodes in order; -1 fills up shorter trees."""
        if self.roots == 1:
            return np.arange(self.rows)[None]
        grid = np.full((self.roots, int(self.sizes.max(initial=0))), -1, dtype=np.int64)
        grid[self.root, self.places + 1] = np.arange(self.rows)
        return grid

    @cached_property
    def trees(self) -> list[np.ndarray]:
        """For each root the rows of its tree: the root, then its nodes in order."""
        if self.roots == 1:
            return [self.grid[0]]
        return [rows[:size] for rows, size in zip(self.grid, self.sizes.tolist(), strict=True)]

    @cached_property
    def tree_depths(self) -> list[np.ndarray]:
        """For each root the depths of its tree's rows, in order: 0 of the root itself, then of its nodes."""
        return [self.depth[rows] for rows in self.trees]

    @cached_property
    def places(self) -> np.ndarray:  # [R]
        """Each node's number within its own tree, from 0; roots have -1."""
        if self.roots == 1:
            return np.arange(-1, self.rows - 1)
        order = np.argsort(self.root, kind="stable")
        first = np.cumsum(self.sizes) - self.sizes
        places = np.empty(self.rows, dtype=np.int64)
        places[order] = np.arange(self.rows) - first[self.root[order]] - 1
        return places

    @cached_property
    def ancestors(self) -> np.ndarray:  # [R, R]
        """``ancestors[r, a]``: a lies on the path from r's root to r, both ends included."""
        above = np.zeros((self.rows, self.rows + 1), dtype=bool)
        above[np.arange(self.rows)[:, None], self.lineage] = True  # -1 marks the last column, which is left out
        return np.ascontiguousarray(above[:, :-1])

    @cached_property
    def tree_masks(self) -> list[np.ndarray]:
        """For each root the additive float32 mask ``[n, n]`` of its tree's rows: each attends to the path to it."""
        width = self.grid.shape[1]
        columns = np.append(self.places + 1, width)  # the last column, found by -1, stands for no row and is left out
        mask = np.full((self.rows, width + 1), -np.inf, dtype=np.float32)
        mask[np.arange(self.rows)[:, None], columns[self.lineage]] = 0.0
        return [mask[rows, : len(rows)] for rows in self.trees]

    @cached_property
    def by_rank(self) -> Schedule:
        """All nodes, those of one sibling rank in one step."""
        return self.schedule(self.rank)

    @cached_property
    def by_turn(self) -> Schedule:
        """All nodes, each as early as possible after its parent and its earlier siblings. See ``turn``."""
        return self.schedule(self.turn)

    @cached_property
    def turn(self) -> np.ndarray:  # [M]
        """The step in which each node comes if its parent and its earlier siblings come before it, from 0."""
        after = [0] * self.roots  # each row, the first step in which a child can come
        for parent, rank in zip(self.parent.tolist(), self.rank.tolist(), strict=True):
            after.append(after[parent] + rank + 1)
        return np.array(after[self.roots :], dtype=np.int64) - 1

    def schedule(self, step: np.ndarray, point: np.ndarray | None = None) -> Schedule:
        """The nodes by ``step`` ``[M]``, numbers from 0 without gaps.

        Args:
            point: ``[M]`` bool, which nodes are points; None for none.
        """
        last = self.rank + 1 == self.count[self.parent]
        key = step * 4 + last * 2 if point is None else step * 4 + last * 2 + point
        order = key.argsort(kind="stable")
        ends = [0, *np.bincount(key, minlength=4).cumsum().tolist()]
        ends += ends[-1:] * (-(len(ends) - 1) % 4)
        steps = [ends[start : start + 5] for start in range(0, len(ends) - 1, 4)] if self.nodes else []
        last = np.flatnonzero(last[order])
        if point is not None:
            last = np.concatenate([last[~point[order[last]]], last[point[order[last]]]])
        sampled = len(last) if point is None else len(last) - int(point[order[last]].sum())
        return Schedule(order, self.parent[order], steps, last, sampled)

    @cached_property
    def levels(self) -> list[Level]:
        """The nodes of each depth, from depth 1 on."""
        rows = np.arange(self.roots, self.rows)[np.argsort(self.parent, kind="stable")]
        depths, ranks = self.depth[rows], self.rank[rows - self.roots]
        levels = []
        for depth in range(1, self.deepest + 1):
            here, numbered = rows[depths == depth], ranks[depths == depth]
            parents = np.unique(self.parent[here - self.roots])
            nodes = [here[numbered == rank] for rank in range(int(numbered.max()) + 1)]
            above = [np.searchsorted(parents, self.parent[same_rank - self.roots]) for same_rank in nodes]
            levels.append(Level(parents, list(zip(nodes, above, strict=True))))
        return levels

    @cached_property
    def drawing(self) -> Drawing:
        """How it is drawn where no token is looked at."""
        drawn_at, parent_of = np.zeros(self.rows, dtype=np.int64), np.zeros(self.rows, dtype=np.int64)
        order, tokens, above, first = np.empty(self.nodes, dtype=np.int64), list[np.ndarray](), list[np.ndarray](), 0
        for number, level in enumerate(self.levels):
            if number:
                tokens.append(drawn_at[level.parents])
                above.append(parent_of[level.parents])
            for rank, (nodes, parents) in enumerate(level.ranks):
                drawn_at[nodes], parent_of[nodes] = parents * len(level.ranks) + rank, parents
                order[nodes - self.roots] = first + drawn_at[nodes]
            first += len(level.parents) * len(level.ranks)
        rows = [level.parents for level in self.levels] or [np.empty(0, dtype=np.int64)]
        return Drawing(np.concatenate(rows), order, tokens, above)

    @cached_property
    def tours(self) -> list[list[tuple[int, bool]]]:
        """For each root a walk around its tree, depth first, siblings in the order drawn: all nodes, each as (row,
        False) when it is entered and as (row, True) when it is left, after all below it.
        """
        below: list[list[int]] = [[] for _ in range(self.rows)]
        for row, parent in enumerate(self.parent.tolist(), start=self.roots):
            below[parent].append(row)
        tours = []
        for root in range(self.roots):
            tour: list[tuple[int, bool]] = []
            ahead = [(row, False) for row in reversed(below[root])]
            while ahead:
                row, leaving = ahead.pop()
                tour.append((row, leaving))
                if not leaving:
                    ahead.append((row, True))
                    ahead += [(child, False) for child in reversed(below[row])]
            tours.append(tour)
        return tours

    @cached_property
    def visit(self) -> np.ndarray:  # [R]
        """Each row's place in a visit of its tree from the leaves up, from 0: children before their parent, siblings
        and what is below them in the order drawn.
        """
        visit = np.empty(self.rows, dtype=np.int64)
        visit[: self.roots] = self.sizes - 1
        for tour in self.tours:
            visit[[row for row, leaving in tour if leaving]] = np.arange(len(tour) // 2)
        return visit

    @cached_property
    def sizes(self) -> np.ndarray:  # [B]
        """The number of rows of each tree, its root included."""
        if self.roots == 1:
            return np.array([self.rows])
        return np.bincount(self.root, minlength=self.roots)

    @cached_property
    def largest(self) -> int:
        """The largest of ``sizes``."""
        return int(self.sizes.max(initial=0))

    def path(self, row: int) -> list[int]:
        """Return the rows from the root (left out) down to ``row`` (included); empty for a root."""
        path = []
        while row >= self.roots:
            path.append(row)
            row = int(self.parent[row - self.roots])
        return path[::-1]

    def ranks(self, row: int) -> tuple[int, ...]:
        """Return the path to ``row`` as child ranks, as published tree choices write it."""
        return tuple(int(self.rank[r - self.roots]) for r in self.path(row))

    def keep(self, rows: np.ndarray) -> tuple[Shape, np.ndarray]:
        """Return the shape that is left when unmarked nodes, and all nodes below them, are removed.

        The shape remembers what was kept of it, so that drafts of a static tree share the shapes of what is left.

        Args:
            rows: ``[R]`` bool, the rows to keep. Roots always stay.

        Returns:
            The shape, and the kept nodes' old numbers ``[M']``.
        """
        key = np.asarray(rows[self.roots :], dtype=bool).tobytes()
        if key not in self._kept:
            if len(self._kept) >= MAX_DERIVED:
                self._kept.clear()
            self._kept[key] = self._keep(rows)
        return self._kept[key]

    def _keep(self, rows: np.ndarray) -> tuple[Shape, np.ndarray]:
        marked = np.ones(self.rows + 1, dtype=bool)
        marked[self.roots : -1] = rows[self.roots :]
        marked = marked[self.lineage].all(1)
        new_row = np.cumsum(marked) - 1
        kept = np.flatnonzero(marked[self.roots :])
        shape = Shape(self.roots, new_row[self.parent[kept]])
        if self.roots == 1 and "tree_masks" in vars(self):
            both = np.flatnonzero(marked)
            vars(shape)["tree_masks"] = [self.tree_masks[0][both[:, None], both]]
        return shape, kept

    def on(self, device: torch.device) -> DeviceShape:
        """Return the arrays that verifiers and ``choose`` read, on ``device``: one upload, kept for the next call."""
        if device not in self._devices:
            self._devices[device] = DeviceShape.of(self, device)
        return self._devices[device]


@dataclass(frozen=True, eq=False)
class DeviceShape:
    """The arrays of a ``Shape`` that verifiers and ``choose`` read, under the same names, as int64 tensors."""

    roots: int
    rows: int
    nodes: int
    parent: Tensor  # [M]
    lineage: Tensor  # [R, D + 1]
    depth: Tensor  # [R]
    root: Tensor  # [R]
    rank: Tensor  # [M]
    table: Tensor  # [R, K]
    expanded: Tensor  # [E]
    grid: Tensor  # [B, L]
    visit: Tensor  # [R]
    count: Tensor  # [R]
    by_rank: Schedule
    by_turn: Schedule

    @staticmethod
    def of(shape: Shape, device: torch.device) -> DeviceShape:
        """The same shape on ``device``."""
        names = ("parent", "lineage", "depth", "root", "rank", "table", "expanded", "grid", "visit", "count")
        arrays = [getattr(shape, name) for name in names]
        orders = (shape.by_rank, shape.by_turn)
        arrays += [array for order in orders for array in (order.nodes, order.parents, order.last)]
        every = upload(device, *(np.asarray(array, dtype=np.int64) for array in arrays))
        schedules = [
            Schedule(nodes, parents, order.steps, last, order.sampled)
            for order, nodes, parents, last in zip(orders, every[-6::3], every[-5::3], every[-4::3], strict=True)
        ]
        tensors = dict(zip(names, every, strict=False))
        return DeviceShape(shape.roots, shape.rows, shape.nodes, **tensors, by_rank=schedules[0], by_turn=schedules[1])


def tree(choices: tuple[tuple[int, ...], ...]) -> Shape:
    """Return the one-tree shape whose nodes are given as paths of child ranks.

    Args:
        choices: one path for each node, such as ``((0,), (1,), (0, 0))``: two children of the root, and one child of
            the first (Medusa's format, 2401.10774).

    Returns:
        The shape with nodes in breadth-first order, siblings by rank.

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


def chain(length: int) -> Shape:
    """Return the shape of one path of ``length`` nodes below one root; ``chain(0)`` drafts nothing."""
    return Shape(1, np.arange(length, dtype=np.int64))


def forest(trees: tuple[Shape, ...]) -> Shape:
    """Return several one-tree shapes side by side.

    The first tree remembers the forests it begins, so that static trees share one; they are forgotten with it.

    Args:
        trees: ``[B]`` shapes of one root each.

    Returns:
        The shape of B roots: root b is the root of ``trees[b]``; the nodes follow tree by tree.
    """
    if not trees:
        return Shape(0, np.empty(0, dtype=np.int64))
    if len(trees) == 1:
        return trees[0]
    known, others = trees[0]._forests, trees[1:]
    if others not in known:
        roots, parents, nodes = len(trees), [], 0
        for root, shape in enumerate(trees):
            parents.append(np.where(shape.parent == 0, root, shape.parent - 1 + roots + nodes))
            nodes += shape.nodes
        if len(known) >= MAX_DERIVED:
            known.clear()
        known[others] = Shape(roots, np.concatenate(parents).astype(np.int64))
    return known[others]


MAX_DERIVED = 64
"""Maximum number of forests that a tree remembers, and of shapes of what was kept of it."""
