"""Verifiers tested on tables: every draft of a tree in one forest, nothing sampled.

The drafting here is a twin of the draft model's, token by token in plain Python. ``spec_lab.tasks.certify`` enumerates
the real one; its output distributions and its enumerating draws are used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from spec_lab.core.draft import WAYS, Draft, Drawn
from spec_lab.core.randomness import Draws, Key, Purpose
from spec_lab.core.shape import Shape
from spec_lab.tasks.certify import outputs
from spec_lab.tasks.certify.enumeration import explore
from spec_lab.tasks.certify.toy_models import RandomToy, code
from spec_lab.verify import Verdict

Verify = Callable[[Draft, torch.Tensor], Verdict]
"""A verifier, or a broken one."""


class World(RandomToy):
    """A toy world with the distributions after single texts."""

    def p(self, context: Sequence[int]) -> np.ndarray:
        """The target distribution after ``context``."""
        return self.probabilities(len(context))[0][code(context, self.v)]

    def q(self, context: Sequence[int]) -> np.ndarray:
        """The draft distribution after ``context``."""
        return self.probabilities(len(context))[1][code(context, self.v)]


# Drafting


def propose(world: World, context: tuple[int, ...], tree: Shape, drawn: Drawn, draws: Draws, who: Key) -> Draft:
    """Draft a tree below ``context``, node by node. A node that cannot be drawn is left out with its descendants.

    Point siblings are the likeliest tokens; without replacement, q's support can be exhausted.
    """
    paths: list[tuple[int, ...]] = [()]  # of each row that was drawn
    row = {0: 0}  # of each node of the whole tree
    parent, q, q_row = [], [], [-1]
    left: dict[int, np.ndarray] = {}
    for number, above in enumerate(tree.parent.tolist(), start=1):
        if above not in row:
            continue
        if above not in left:
            row_of_q = world.q(context + paths[row[above]])
            left[above] = (
                np.argsort(-row_of_q, kind="stable").astype(float) if drawn == "deterministic" else row_of_q.copy()
            )
            q_row[row[above]] = len(q)
            q.append(row_of_q)
        rank = int(tree.rank[number - 1])
        if drawn == "deterministic":
            if rank >= world.v:
                continue
            token = int(left[above][rank])
        else:
            if not left[above].any():
                continue
            key = who._replace(purpose=Purpose.DRAFT, index=number)
            token = int(draws.pick(torch.from_numpy(left[above][None]), [key])[0])
            if drawn == "without_replacement":
                left[above][token] = 0.0
        row[number] = len(paths)
        parent.append(row[above])
        paths.append((*paths[row[above]], token))
        q_row.append(-1)
    shape = Shape(1, np.array(parent, dtype=np.int64))
    token = torch.tensor([path[-1] for path in paths[1:]], dtype=torch.long)
    if drawn == "deterministic":
        return Draft(shape, token)
    return Draft(shape, token, drawn, torch.from_numpy(np.array(q).reshape(-1, world.v)), np.array(q_row))


class Growing:
    """A draft of one tree below the empty text that is grown node by node.

    Args:
        world: q of every text.
        draws: draws the sampled nodes.
    """

    def __init__(self, world: World, draws: Draws) -> None:
        self.world, self.draws = world, draws
        self.paths: list[tuple[int, ...]] = [()]  # of each row
        self.parent: list[int] = []
        self.codes: list[int] = []
        self.q: dict[int, np.ndarray] = {}
        self.left: dict[int, np.ndarray] = {}

    def point(self, above: int, token: int) -> int:
        """Add a point; returns its row."""
        return self._add(above, token, "deterministic")

    def sample(self, above: int, way: Drawn, off: Sequence[int] = ()) -> int | None:
        """Draw a child ``iid`` or ``without_replacement``; returns its row, None where nothing is left to draw.
        ``off``: tokens that q leaves out, given with the first child that is drawn there.
        """
        if above not in self.q:
            q = self.world.q(self.paths[above]).copy()
            q[list(off)] = 0.0
            if not q.any():
                return None
            self.q[above], self.left[above] = q / q.sum(), q / q.sum()
        weights = self.q[above] if way == "iid" else self.left[above]
        if not weights.any():
            return None
        key = Key(0, 0, 0, Purpose.DRAFT, len(self.parent))
        token = int(self.draws.pick(torch.from_numpy(weights[None]), [key])[0])
        if way == "without_replacement":
            self.left[above][token] = 0.0
        return self._add(above, token, way)

    def _add(self, above: int, token: int, way: Drawn) -> int:
        self.parent.append(above)
        self.codes.append(WAYS.index(way))
        self.paths.append((*self.paths[above], token))
        return len(self.paths) - 1

    def draft(self) -> Draft:
        """The grown draft."""
        q_row = np.full(len(self.paths), -1)
        q_row[list(self.q)] = np.arange(len(self.q))
        return Draft(
            Shape(1, np.array(self.parent, dtype=np.int64)),
            torch.tensor([path[-1] for path in self.paths[1:]], dtype=torch.long),
            np.array(self.codes, dtype=np.int8),
            torch.from_numpy(np.array(list(self.q.values())).reshape(-1, self.world.v)),
            q_row,
        )


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to each row."""
    paths: list[tuple[int, ...]] = [()] * draft.shape.roots
    for above, token in zip(draft.shape.parent.tolist(), draft.token.tolist(), strict=True):
        paths.append((*paths[above], token))
    return paths


def target_of(world: World, context: tuple[int, ...], draft: Draft) -> torch.Tensor:
    """p at every row of a draft below ``context``, ``[R, V]``."""
    return torch.from_numpy(np.array([world.p(context + path) for path in paths_of(draft)]))


# Output distributions


class Outputs(outputs.StepOutputs):
    """The output distribution of one step, to compare with the world's own."""

    def __init__(self, world: World, longest: int) -> None:
        super().__init__(world.v, longest)
        self.distributions = [world.probabilities(k)[0] for k in range(longest)]
        self.accepted = self.expected = 0.0

    @classmethod
    def of_forest(cls, world: World, verify: Verify, tree: Shape, drawn: Drawn) -> Outputs:
        """Return the outputs of one step: all possible drafts in one forest, verified at once."""
        return cls.of_drafts(world, verify, *every_draft(world, tree, drawn))

    @classmethod
    def of_grown(cls, world: World, verify: Verify, grow: Callable[[Growing], None]) -> Outputs:
        """Return the outputs of one step whose draft is grown by ``grow``."""

        def play(draws: Draws) -> Draft:
            growing = Growing(world, draws)
            grow(growing)
            return growing.draft()

        cases = list(explore(play))
        drafts, probability = [draft for _, draft in cases], np.array([mass for mass, _ in cases])
        return cls.of_drafts(world, verify, side_by_side(drafts), probability)

    @classmethod
    def of_drafts(cls, world: World, verify: Verify, draft: Draft, probability: np.ndarray) -> Outputs:
        """Return the outputs of one step that drafts one of the trees in ``draft``, with probabilities ``[B]``."""
        shape, v = draft.shape, world.v
        number = np.zeros(shape.rows, dtype=np.int64)
        p = np.empty((shape.rows, v))
        for depth in range(int(shape.depth.max()) + 1):
            rows = np.flatnonzero(shape.depth == depth)
            if depth > 0:
                nodes = rows - shape.roots
                number[rows] = number[shape.parent[nodes]] * v + draft.token.numpy()[nodes]
            p[rows] = world.probabilities(depth)[0][number[rows]]
        verdict = verify(draft, torch.from_numpy(p))
        residual = verdict.residual(np.arange(shape.rows)).numpy()
        mass = residual.sum(-1)
        assert (mass[verdict.stop > 1e-14] > 0).all(), "a path can end where nothing can be emitted"
        emitted = (probability[shape.root] * verdict.stop / np.where(mass > 0, mass, 1.0))[:, None] * residual
        instance = cls(world, int(shape.depth.max()) + 1)
        for depth in range(int(shape.depth.max()) + 1):
            rows = np.flatnonzero(shape.depth == depth)
            np.add.at(instance.exactly[depth + 1].reshape(-1, v), number[rows], emitted[rows])
        instance.accepted = float((emitted.sum(-1) * shape.depth).sum())
        instance.expected = float(probability @ verdict.expected_accepted(shape))
        return instance

    def tv(self, length: int | None = None) -> float:
        """Distance to the target distribution of ``length`` tokens; shorter outputs are continued by exact target
        samples."""
        return super().tv(self.distributions, length)

    def first_failure(self, tolerance: float = outputs.EXACT) -> str | None:
        """The first difference from the target distribution, in words."""
        return super().first_failure(self.distributions, tolerance)


@lru_cache(maxsize=64)
def every_draft(world: World, tree: Shape, drawn: Drawn) -> tuple[Draft, np.ndarray]:
    """All drafts of a tree below the empty context as one forest, and the probability of each."""
    first = Key(0, 0, 0, Purpose.DRAFT)
    cases = list(explore(lambda draws: propose(world, (), tree, drawn, draws, first)))
    return side_by_side([draft for _, draft in cases]), np.array([probability for probability, _ in cases])


def side_by_side(drafts: Sequence[Draft]) -> Draft:
    """Several one-tree drafts as one forest."""
    roots = len(drafts)
    parent, q_row = [], [np.full(roots, -1)]
    nodes = offset = 0
    for root, draft in enumerate(drafts):
        above = draft.shape.parent
        parent.append(np.where(above == 0, root, above - 1 + roots + nodes))
        if draft.q is not None:
            mine = np.where(draft.q_row >= 0, draft.q_row + offset, -1)
            q_row[0][root] = mine[0]
            q_row.append(mine[1:])
            offset += len(draft.q)
        nodes += draft.shape.nodes
    shape = Shape(roots, np.concatenate(parent).astype(np.int64))
    token = torch.cat([draft.token for draft in drafts])
    if drafts[0].q is None:
        return Draft(shape, token)
    drawn = drafts[0].drawn
    if not isinstance(drawn, str):
        drawn = np.concatenate([draft.codes for draft in drafts])
    return Draft(shape, token, drawn, torch.cat([draft.q for draft in drafts]), np.concatenate(q_row))
