"""The sequence ids of draft trees in llama.cpp, and the KV cache of one sequence.

llama.cpp marks each cell of its KV cache with the ids of the sequences that it belongs to, and a token attends to the
cells of its own id up to its own position. So a draft tree is a set of paths, one id for each leaf: a node carries the
ids of all leaves below it, and pending tokens those of all leaves. The first path, which follows first children, has
the sequence's own id, so a chain requires no other. Ids of other leaves have the sequence's past in common with it;
copying and removing ids only edits the cells' marks. A batch and its trees have at most 256 ids together: batch 8
leaves 32 leaves for each tree.

In models with sliding windows llama.cpp uses a cell again that one id alone has and that no later token of this id
attends to (even with ``swa_full``), so that a rewind would miss it. There every sequence has a second id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from spec_lab.core.shape import Shape

if TYPE_CHECKING:
    from spec_lab.runners.llama_cpp import LlamaCpp


@dataclass(eq=False)
class Paths:
    """The paths from the root of a tree to its leaves. Nodes are numbered within the tree.

    Args:
        paths: the nodes of each; the first one follows first children.
        path_of: of each node a path that it lies on, and its depth.
        fixed: whether several steps share them, so that ``add`` must not be called.
    """

    paths: list[list[int]] = field(default_factory=lambda: [[]])
    path_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    fixed: bool = False

    def add(self, nodes: Iterable[tuple[int, int]]) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
        """Append nodes, given with their parents (-1 for the root), parents first.

        Returns:
            For each new node the paths that it lies on, and for each new path one that has the same nodes at first,
            and how many of these were there before.
        """
        new: dict[int, list[int]] = {}
        begun = []
        for node, parent in nodes:
            number, depth = self.path_of[parent] if parent >= 0 else (0, 0)
            if len(self.paths[number]) == depth:
                self.paths[number].append(node)
            else:
                above = self.paths[number][:depth]
                begun.append((len(self.paths), number, sum(earlier not in new for earlier in above)))
                number = len(self.paths)
                self.paths.append([*above, node])
                for earlier in above:
                    if earlier in new:
                        new[earlier].append(number)
            self.path_of[node] = number, depth + 1
            new[node] = [number]
        return list(new.values()), begun

    def copy(self) -> Paths:
        """Return an independent copy."""
        return Paths([list(path) for path in self.paths], dict(self.path_of))


@dataclass(frozen=True, eq=False)
class ForestIds:
    """The ids of the rows of a forest, before it is known which ids its sequences have.

    Args:
        trees: the paths of each tree.
        widths: how many ids each tree has.
        counts: ``[R]`` how many ids each row has.
        paths: ``[sum of counts]`` their places among the ids of all trees, tree by tree.
        nodes: of each tree the places of its nodes among all nodes.
    """

    trees: list[Paths]
    widths: list[int]
    counts: np.ndarray
    paths: np.ndarray
    nodes: list[np.ndarray]

    @staticmethod
    def of(shape: Shape, min_ids: int = 1) -> ForestIds:
        """The ids of a shape, at least ``min_ids`` for each tree."""
        trees, widths, first = [], [], 0
        ids_of: list[list[int]] = [[] for _ in range(shape.rows)]
        nodes = [rows[1:] - shape.roots for rows in shape.trees]
        in_tree = shape.places.tolist()
        for root, tree_nodes in enumerate(nodes):
            paths = Paths()
            parents = shape.parent[tree_nodes].tolist()
            rows, _ = paths.add((number, in_tree[parent]) for number, parent in enumerate(parents))
            for node, numbers in zip(tree_nodes.tolist(), rows, strict=True):
                ids_of[shape.roots + node] = [first + number for number in numbers]
            paths.fixed = True
            trees.append(paths)
            widths.append(max(min_ids, len(paths.paths)))
            ids_of[root] = list(range(first, first + widths[-1]))
            first += widths[-1]
        flat = [number for numbers in ids_of for number in numbers]
        counts = np.array([len(ids) for ids in ids_of], dtype=np.int32)
        return ForestIds(trees, widths, counts, np.array(flat, dtype=np.int64), nodes)

    @cached_property
    def starts(self) -> np.ndarray:  # [R]
        """Where the ids of each row begin in an int32 array of the ids of ``paths``, in bytes."""
        return 4 * (np.cumsum(self.counts) - self.counts)


class LlamaSequence:
    """The KV cache of one sequence: its own id, and further ids for the leaves of its draft trees.

    A further id stays when its leaf is gone, and has a prefix of the sequence, so that the next tree only has to share
    what was added. A ``runner.KVSequence``.

    Args:
        ids: its own id, and further ones.
        reserve: about how many tokens it will have.

    Attributes:
        kept: of a copy that the runner may give up (``Runner.open_copy``): when it was made or last copied, as a
            number that grows; 0 of other sequences.
        prefix: the kept copy whose cells its first positions share, and how many these are; None without one.
    """

    def __init__(self, runner: LlamaCpp, ids: list[int], reserve: int) -> None:
        self.runner, self.ids, self.reserve = runner, ids, reserve
        self.kept = 0
        self.prefix: tuple[LlamaSequence, int] | None = None
        self.shared = [0] * len(ids)  # of each further id the positions that it has in common with the sequence
        self.held: Paths | None = None
        self.length = 0

    def __len__(self) -> int:
        return self.length

    @property
    def open(self) -> bool:
        """Whether it has not been closed."""
        return bool(self.ids)

    @property
    def cells(self) -> int:
        """Cells that it uses at most, beside those of a kept copy that it shares."""
        shared = self.prefix[1] if self.prefix is not None and self.prefix[0].open else 0
        return self.length - shared + (0 if self.held is None else len(self.held.path_of))

    def accept(self, nodes: Sequence[int] | np.ndarray = ()) -> None:
        """Append the tokens of held ``nodes``, a path from the root down, and forget all others.

        Raises:
            ValueError: the nodes are no such path.
        """
        held, self.held = self.held, None
        if held is None:
            return
        accepted = np.asarray(nodes).tolist() if len(nodes) else []
        context, end, depth = self.runner.context, self.length, len(accepted)
        common = [_common(path, accepted) for path in held.paths]
        if depth not in common:
            raise ValueError(f"nodes {accepted} are no path of the held tree from its root down")
        if len(held.paths[0]) > common[0]:
            context.remove(self.ids[0], end + common[0])
        if common[0] < depth:
            context.share(self.ids[common.index(depth)], self.ids[0], end + common[0], end + depth)
        for path in range(1, len(held.paths)):
            if len(held.paths[path]) > common[path]:
                context.remove(self.ids[path], end + common[path])
            self.shared[path] = end + common[path]
        self.length += depth

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on, and held nodes.

        Raises:
            ValueError: it is longer than the sequence.
        """
        self.accept()
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot shorten a sequence of {self.length} tokens to {length}")
        if length < self.length:
            self.runner.context.remove(self.ids[0], length)
        for path, shared in enumerate(self.shared[1:], start=1):
            if shared > length:
                self.runner.context.remove(self.ids[path], length)
                self.shared[path] = length
        if self.prefix is not None:
            self.prefix = self.prefix[0], min(self.prefix[1], length)
        self.length = length

    def fork(self) -> LlamaSequence:
        """A second sequence with the same past, whose cells it shares."""
        return self.runner.open_copy(self, self.length, self.reserve)

    def close(self) -> None:
        """Free everything. Harmless when repeated."""
        self.held, self.length, self.prefix = None, 0, None
        self.release(0)

    def release(self, keep: int) -> None:
        """Give back all ids but the first ``keep``."""
        for number in self.ids[keep:]:
            self.runner.context.remove(number, 0)
            self.runner.context.release_id(number)
        del self.ids[keep:], self.shared[keep:]
        if not keep:
            self.runner.sequences.discard(self)

    def attach(self, count: int) -> None:
        """Share the sequence's past with its first ``count`` ids, of which it has as many."""
        first_id = self.ids[0]
        for path in range(1, count):
            self.runner.context.share(first_id, self.ids[path], self.shared[path], self.length)
            self.shared[path] = self.length

    def append(self, count: int, paths: int) -> None:
        """Take note of ``count`` computed tokens that carry the first ``paths`` ids."""
        self.length += count
        for path in range(1, paths):
            self.shared[path] = self.length


def _common(path: list[int], accepted: list[int]) -> int:
    """How many of the first nodes two paths have in common."""
    length = 0
    for mine, theirs in zip(path, accepted, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
