"""Subtrees of recorded trees: which nodes a shape or limits keep.

A subtree is closed under parents and earlier siblings, so that its nodes were drawn, and are verified, as if no other
had been drafted. What is kept follows from depth, sibling rank and number alone, never from a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spec_lab.core.options import brief
from spec_lab.core.shape import Shape
from spec_lab.propose.trees import Choices, depth_of, parse, write
from spec_lab.replay.recorded_trees import NeedsModel, RecordedTrees

UNLIMITED = 2**31
"""A limit that limits nothing."""


@dataclass(frozen=True)
class Subtree:
    """Which nodes of a recorded tree stay.

    Args:
        choices: a static tree, as paths of child ranks; None for limits only.
        depth: most levels.
        children: most children of a row, the first drawn.
        nodes: most nodes of a tree, the first in the draft's order.
    """

    choices: Choices | None = None
    depth: int = UNLIMITED
    children: int = UNLIMITED
    nodes: int = UNLIMITED

    @staticmethod
    def parse(text: str) -> Subtree:
        """Read a shape: "all", limits ("depth=3,children=2,nodes=8"), or a tree as ``proposer.tree`` has it (3x2x1).

        Raises:
            ValueError: none of these.
        """
        if text == "all":
            return Subtree()
        if "=" not in text:
            return Subtree(parse(text))
        limits: dict[str, Any] = {}
        for limit in text.split(","):
            name, _, value = limit.strip().partition("=")
            if name not in ("depth", "children", "nodes") or not value.isdecimal():
                raise ValueError(
                    f"a shape is 'all', limits such as depth=3,children=2,nodes=8, or a tree such as 3x2x1 (got "
                    f"{brief(text)})"
                )
            limits[name] = int(value)
        return Subtree(**limits)

    def __str__(self) -> str:
        limits = [f"{name}={value}" for name, value in self.limits.items() if value != UNLIMITED]
        tree = [] if self.choices is None else [short(self.choices)]
        return ",".join([*tree, *limits]) or "all"

    @property
    def limits(self) -> Mapping[str, int]:
        """The limits by name."""
        return {"depth": self.depth, "children": self.children, "nodes": self.nodes}

    @cached_property
    def trie(self) -> np.ndarray:  # [S, K]
        """For each state, the root's or a node's, the state of its child of each rank; -1 for none."""
        assert self.choices is not None
        number = {(): 0} | {path: state for state, path in enumerate(self.choices, start=1)}
        width = max((path[-1] + 1 for path in self.choices), default=1)
        table = np.full((len(number), width), -1, dtype=np.int64)
        for path in self.choices:
            table[number[path[:-1]], path[-1]] = number[path]
        return table

    def keeps(self, shape: Shape) -> np.ndarray:  # [M] bool
        """Return which nodes of a forest stay.

        Raises:
            NeedsModel: no recorded tree has a node that the static tree has.
        """
        depth, parent = shape.depth[shape.roots :], shape.parent
        keep = (depth <= self.depth) & (shape.rank < self.children) & (shape.places[shape.roots :] < self.nodes)
        if self.choices is not None:
            table, state = self.trie, np.full(shape.rows, -1, dtype=np.int64)
            state[: shape.roots] = 0
            for level in range(1, min(shape.deepest, depth_of(self.choices)) + 1):
                nodes = np.flatnonzero(depth == level)
                above, rank = state[parent[nodes]], shape.rank[nodes]
                known = (above >= 0) & (rank < table.shape[1])
                state[shape.roots + nodes[known]] = table[above[known], rank[known]]
            missing = np.setdiff1d(np.arange(len(table)), state)
            if len(missing):
                path = self.choices[int(missing[0]) - 1]
                raise NeedsModel(f"no recorded tree has the node {'.'.join(map(str, path))} of the tree {self}")
            keep &= state[shape.roots :] >= 0
        if keep.all():
            return keep
        marked = np.append(np.ones(shape.roots, dtype=bool), keep)
        closed = np.append(marked, True)[shape.lineage].all(1)
        return closed[shape.roots :]


def check_not_cut(trees: RecordedTrees, subtree: Subtree) -> None:
    """Refuse a named tree where a policy drafted less of it: the named tree is drafted whole in every step.

    Args:
        trees: the recorded trees; those after the prefill are checked.
        subtree: limits without a tree keep what the policy decided, and are not refused.

    Raises:
        NeedsModel: a recorded tree lacks nodes of the named one.
    """
    if subtree.choices is None or not trees.policy:
        return
    shape, root = trees.shape, trees.shape.root[trees.shape.roots :]
    limited = [path for path in subtree.choices if len(path) <= subtree.depth and max(path) < subtree.children]
    kept = np.bincount(root[subtree.keeps(shape)], minlength=shape.roots)[trees.decode]
    if cut := int((kept < min(len(limited), subtree.nodes)).sum()):
        raise NeedsModel(
            f"policy {brief(trees.policy)} drafted less than the tree {subtree} in {cut} of {len(kept)} steps; record "
            "without a policy, or name limits such as depth=2, which keep what it decided"
        )


def short(choices: Choices) -> str:
    """Return a static tree as widths where it has one for each level, else as paths."""
    counts = []
    for level in range(1, depth_of(choices) + 1):
        counts.append(max(path[-1] + 1 for path in choices if len(path) == level))
    wide = "x".join(map(str, counts))
    return wide if parse(wide) == choices else write(choices)
