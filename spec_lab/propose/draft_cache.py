"""The cells a draft model holds for one sequence, and how they are found again whatever became of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spec_lab.core.draft import Shape
from spec_lab.engine.batch import SequenceState
from spec_lab.engine.kv_cache import Cells, Path


@dataclass(frozen=True, eq=False)
class Held:
    """The computed nodes of one drafted tree.

    Args:
        shape: the forest they belong to, and which tree of it is theirs.
        token: ``[M]`` the forest's tokens.
        slots: ``[R]`` the cell of each computed node, -1 elsewhere.
    """

    shape: Shape
    tree: int
    token: np.ndarray  # [M]
    slots: np.ndarray  # [R]

    @property
    def rows(self) -> np.ndarray:
        """The computed nodes, parents first."""
        rows = self.shape.trees[self.tree]
        return rows[self.slots[rows] >= 0]

    def find(self, wanted: list[int]) -> list[int]:
        """The longest path of computed nodes from the head down whose tokens begin ``wanted``.

        All of them are searched: siblings drawn iid may repeat a token with different nodes below.
        """
        heads, parent, depth = self.shape.roots, self.shape.parent, self.shape.depth
        matched, deepest = {self.tree}, self.tree
        for row in self.rows.tolist():
            level = int(depth[row])
            if parent[row - heads] in matched and level <= len(wanted) and self.token[row - heads] == wanted[level - 1]:
                matched.add(row)
                if level > depth[deepest]:
                    deepest = row
        return self.shape.path(deepest)


@dataclass(eq=False)
class Trail:
    """A draft model's cells for one sequence: a path, and below its end the nodes drafted last.

    Cells know their tokens, so each round starts from the longest prefix of the sequence found among all of them.
    Nothing is assumed about what happened in between; a rewind, a fork or a forced ending only makes it shorter.
    """

    owner: SequenceState
    cells: Cells
    path: Path
    tokens: list[int] = field(default_factory=list)  # what the path's cells hold
    held: Held | None = None

    def follow(self) -> list[int]:
        """Keep the cells of the longest common prefix, give up the others; returns the tokens not yet computed.

        At least one is left, since the law after the last token is what drafting begins with.
        """
        tokens = self.owner.tokens
        end = len(self.tokens)
        if end < len(tokens) and tokens[:end] == self.tokens:
            if self.held is not None:
                found = self.held.find(tokens[end:-1])
                self.cells.keep(self.path, self.held.slots[found])
                self.held.slots[found] = -1
            self._drop()
        else:
            self._drop()
            common = 0
            for mine, theirs in zip(self.tokens, tokens[:-1], strict=False):
                if mine != theirs:
                    break
                common += 1
            self.cells.backtrack(self.path, common)
        pending = tokens[len(self.path) :]
        self.tokens = list(tokens)
        return pending

    def fork(self, owner: SequenceState) -> Trail:
        """A trail for a fork of the owner, which shares the path's cells."""
        return Trail(owner, self.cells, self.cells.fork(self.path), list(self.tokens))

    def close(self) -> None:
        """Give everything back."""
        if self.path.open:
            self._drop()
            self.cells.close(self.path)

    def _drop(self) -> None:
        """Give up the held nodes' cells."""
        if self.held is not None:
            self.cells.drop(self.path, self.held.slots[self.held.rows])
            self.held = None
