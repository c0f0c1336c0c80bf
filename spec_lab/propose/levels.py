"""Which rows of a static tree are expanded next: level by level, or forced tokens first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_lab.core.draft import Drawn
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import chain, forest
from spec_lab.core.upload import upload
from spec_lab.decode.sequence import Batch
from spec_lab.propose.expansion import Computed, Expand, RowLogits
from spec_lab.propose.grower import Children, Grower
from spec_lab.propose.stop_rules import Stop


class LevelByLevel(Grower):
    """A forest of known shape that is drafted level by level, one packed forward of the drafter each.

    Nodes that are left out are cut at the end.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grows = self.live.copy()  # where something is drafted below
        self.level = -1
        self.below: list[tuple[np.ndarray, np.ndarray]] = []  # by rank: nodes below the chosen rows, places of those

    def choose(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the rows of the next level below which something is drafted."""
        self.level += 1
        if self.level == len(self.shape.levels):
            return np.empty(0, dtype=np.int64), None
        level = self.shape.levels[self.level]
        live, self.below = self.grows[level.parents], level.ranks
        rows = level.parents[live]
        allowed = self.allowed(rows)
        if allowed is not None and self.level:  # roots are computed whatever is drafted
            some = allowed.any(-1)
            live[live], rows, allowed = some, rows[some], allowed[some]
        if len(rows) < len(live):
            places = live.cumsum() - 1  # of each of the level's parents among ``rows``
            self.below = [(nodes[live[above]], places[above[live[above]]]) for nodes, above in level.ranks]
        return rows, allowed

    def siblings(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the planned nodes below ``rows``; places in the whole tree key their draws."""
        return [(above, self.shape.places[nodes]) for nodes, above in self.below]

    def add(self, rows: np.ndarray, children: Children) -> None:
        """Note which nodes were drawn."""
        for rank, (nodes, above) in enumerate(self.below):
            if children.counts is not None:
                drawn = children.counts[above] > rank
                nodes, above = nodes[drawn], above[drawn]
            self.live[nodes] = True
            self.token[nodes - self.shape.roots] = children.token[above, rank]
            self.grows[nodes] = True if children.stopped is None else ~children.stopped[above]
            if children.probability is None:
                continue
            if self.path is not None:
                self.path[nodes] = self.path[rows[above]] * children.probability[above, rank]
            if self.greedy_q is not None:
                self.greedy_q[nodes - self.shape.roots] = children.probability[above, rank]


RUN = 24
"""Most forced tokens of one chain."""


class ForcedChains(Grower):
    """One chain below each root: tokens drawn from the drafter's masked q, and after each the forced ones.

    A forced token follows with certainty, so its q is one-hot. The drafter computes it together with the drawn token
    before it, when it computes q for the next free one; so ``depths`` counts drawn tokens only.

    Args:
        drawn: "iid", "without_replacement" or "deterministic".
        batch: the sequences, with draft masks.
        depths: ``[B]`` most tokens drawn.
        max_nodes: ``[B]`` of each tree.
        samplings: ``[B]`` how the drafter samples.
        stop: where nothing more is drawn; None: nowhere.
    """

    def __init__(
        self,
        drawn: Drawn,
        batch: Batch,
        depths: Sequence[int],
        max_nodes: Sequence[int],
        samplings: Sequence[Sampling],
        stop: Stop | None = None,
    ) -> None:
        lengths = [min(depth + RUN, nodes) if depth else 0 for depth, nodes in zip(depths, max_nodes, strict=True)]
        super().__init__(drawn, batch, forest(tuple(map(chain, lengths))), samplings, stop)
        self.length, self.left = np.array(lengths), np.array(depths)  # [B]; tokens to be drawn
        self.first = self.shape.roots + self.length.cumsum() - self.length  # [B] of each tree, its first node
        self.end = np.arange(self.shape.roots)  # [B] of each tree, its last row
        self.size = np.zeros_like(self.length)  # [B] nodes so far, of which so many are
        self.computed = np.zeros_like(self.length)
        self.growing = np.flatnonzero(self.left)  # the trees in which one more token is drawn
        self.after = np.ones((self.shape.roots, batch.target.vocabulary), dtype=bool)  # what may follow the last rows
        self._ask(self.growing)

    def choose(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the last row of each chain that is not complete."""
        return self.end[self.growing], self.after[self.growing]

    def siblings(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return one child of each; its place in its chain keys its draw."""
        return [(np.arange(len(rows)), self.size[self.growing])]

    def compute(self, rows: np.ndarray, expand: Expand) -> Computed:
        """Compute all new nodes of the chains that end with ``rows``."""
        new = self.size[self.growing] - self.computed[self.growing]
        self.computed[self.growing] += new
        fresh = [np.arange(row - count, row) + 1 for row, count in zip(rows.tolist(), new.tolist(), strict=True)]
        nodes = np.concatenate(fresh)
        logits = expand(self.shape, nodes, self.token[nodes - self.shape.roots]).logits
        return RowLogits.of(logits[upload(logits.device, new.cumsum() - 1)[0]])

    def add(self, rows: np.ndarray, children: Children) -> None:
        """Append what was drawn, and the forced tokens after it."""
        drawn = np.ones(len(rows), dtype=bool) if children.counts is None else children.counts > 0
        trees = self.growing[drawn]
        probability = 1.0 if children.probability is None else children.probability[drawn, 0]
        self._append(trees, children.token[drawn, 0], probability)
        self.left[trees] -= 1
        if children.stopped is not None:
            self.left[self.growing[children.stopped]] = 0
        forced = trees
        while len(forced := forced[self.size[forced] < self.length[forced]]):
            self._ask(forced)
            forced = forced[self.after[forced].sum(-1) == 1]
            allowed = self.after[forced]
            if not self.greedy:
                self.q_row[self.end[forced]] = sum(map(len, self.q)) + np.arange(len(forced))
                self.q.append(upload(self.q[0].device, allowed)[0].to(self.q[0].dtype))
            self._append(forced, allowed.argmax(-1))
        grows = (self.left > 0) & (self.size < self.length) & self.after.any(-1)
        self.growing = trees[grows[trees]]

    def _ask(self, trees: np.ndarray) -> None:
        """Note what is allowed after the last rows of ``trees``."""
        if (allowed := self.allowed(self.end[trees])) is not None:
            self.after[trees] = allowed

    def _append(self, trees: np.ndarray, token: np.ndarray, probability: np.ndarray | float = 1.0) -> None:
        """Append one token to each of ``trees``."""
        above, self.end[trees] = self.end[trees], self.first[trees] + self.size[trees]
        rows = self.end[trees]
        self.size[trees] += 1
        self.live[rows] = True
        self.token[rows - self.shape.roots] = token
        if self.path is not None:
            self.path[rows] = self.path[above] * probability
        if self.greedy_q is not None:
            self.greedy_q[rows - self.shape.roots] = probability
