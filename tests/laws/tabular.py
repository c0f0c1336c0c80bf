"""Exact laws of speculative decoding on tables: every choice is enumerated, nothing is sampled.

A context is its tokens read as digits in base V, with its length: the laws of all contexts of one length are one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar

import numpy as np
import torch

from spec_lab.draft import Draft, Drawn, Shape
from spec_lab.law import Draws, Key, Purpose
from spec_lab.verify import Verdict, choose

Judge = Callable[[Draft, torch.Tensor], Verdict]
"""A verifier, or a broken one."""

T = TypeVar("T")

# Models


@dataclass(frozen=True)
class World:
    """A target and a draft over V tokens whose laws depend on the whole context.

    Contexts are of all kinds: generic laws, p = q, disjoint supports, one-hot p, one-hot q, zeros in either. q has at
    most ``support`` tokens and p one more, which bounds what there is to enumerate.
    """

    seed: int
    v: int = 4
    support: int = 3
    plain: bool = False  # generic laws only; p is nowhere zero

    @cache  # noqa: B019
    def laws(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """p and q of every context of ``length`` tokens, each ``[V ** length, V]``."""
        rng = np.random.default_rng([self.seed, length])
        pairs = [self._pair(rng) for _ in range(self.v**length)]
        return np.array([p for p, _ in pairs]), np.array([q for _, q in pairs])

    def _law(self, rng: np.random.Generator, support: np.ndarray) -> np.ndarray:
        law = np.zeros(self.v)
        law[support] = rng.dirichlet(np.ones(len(support)))
        return law

    def _pair(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        order = rng.permutation(self.v)
        few, more = order[: self.support], order[: self.support + 1]
        if self.plain:
            return self._law(rng, order), self._law(rng, few)
        kind = rng.choice(
            ["generic", "zeros", "equal", "disjoint", "one-hot p", "one-hot q"], p=[0.5, 0.2] + [0.075] * 4
        )
        if kind == "disjoint":
            return self._law(rng, order[:2]), self._law(rng, order[2 : 2 + self.support])
        q = self._law(rng, few[:1] if kind == "one-hot q" else few)
        if kind == "equal":
            return q.copy(), q
        if kind == "one-hot p":
            return self._law(rng, few[-1:]), q
        return self._law(rng, rng.permutation(self.v)[: self.support] if kind == "zeros" else more), q

    def p(self, context: Sequence[int]) -> np.ndarray:
        """The target's law after ``context``."""
        return self.laws(len(context))[0][self.code(context)]

    def q(self, context: Sequence[int]) -> np.ndarray:
        """The draft's law after ``context``."""
        return self.laws(len(context))[1][self.code(context)]

    def code(self, context: Sequence[int]) -> int:
        """The context's number among those of its length."""
        code = 0
        for token in context:
            code = code * self.v + token
        return code


# Enumeration


class Script:
    """``Draws`` that follow a recorded prefix of choices, then take the first possible index each time."""

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self.prefix, self.probability = prefix, 1.0
        self.chosen: list[int] = []
        self.options: list[list[int]] = []
        self.keys: set[Key] = set()

    def pick(self, weights: torch.Tensor | np.ndarray, keys: Sequence[Key]) -> np.ndarray:
        """See ``Draws.pick``. A key that was used before would reuse its noise: refused."""
        picked = []
        for row, key in zip(np.asarray(weights, dtype=np.float64), keys, strict=True):
            assert key not in self.keys, f"{key} names two choices"
            self.keys.add(key)
            options = np.flatnonzero(row > 0).tolist()
            number = len(self.chosen)
            index = self.prefix[number] if number < len(self.prefix) else options[0]
            self.probability *= float(row[index] / row.sum())
            self.chosen.append(index)
            self.options.append(options)
            picked.append(index)
        return np.array(picked, dtype=np.int64)


def explore(run: Callable[[Draws], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of ``run`` with its probability."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        script = Script(waiting.pop())
        outcome = run(script)
        yield script.probability, outcome
        for number in range(len(script.prefix), len(script.chosen)):
            before = tuple(script.chosen[:number])
            waiting += [(*before, other) for other in script.options[number][1:]]


# Drafting


def propose(world: World, context: tuple[int, ...], tree: Shape, drawn: Drawn, draws: Draws, who: Key) -> Draft:
    """Draft a tree below ``context``, node by node. A node that cannot be drawn is left out, with all below it.

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
            law = world.q(context + paths[row[above]])
            left[above] = np.argsort(-law, kind="stable").astype(float) if drawn == "point" else law.copy()
            q_row[row[above]] = len(q)
            q.append(law)
        rank = int(tree.rank[number - 1])
        if drawn == "point":
            if rank >= world.v:
                continue
            token = int(left[above][rank])
        else:
            if not left[above].any():
                continue
            token = int(draws.pick(left[above][None], [who._replace(purpose=Purpose.DRAFT, index=number)])[0])
            if drawn == "without":
                left[above][token] = 0.0
        row[number] = len(paths)
        parent.append(row[above])
        paths.append((*paths[row[above]], token))
        q_row.append(-1)
    shape = Shape(1, np.array(parent, dtype=np.int64))
    token = torch.tensor([path[-1] for path in paths[1:]], dtype=torch.long)
    if drawn == "point":
        return Draft(shape, token)
    return Draft(shape, token, drawn, torch.from_numpy(np.array(q).reshape(-1, world.v)), np.array(q_row))


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the head down to each row."""
    paths: list[tuple[int, ...]] = [()] * draft.shape.heads
    for above, token in zip(draft.shape.parent.tolist(), draft.token.tolist(), strict=True):
        paths.append((*paths[above], token))
    return paths


def target_of(world: World, context: tuple[int, ...], draft: Draft) -> torch.Tensor:
    """p at every row of a draft below ``context``, ``[R, V]``."""
    return torch.from_numpy(np.array([world.p(context + path) for path in paths_of(draft)]))


# The decode loop


class Loop:
    """Draft, verify, choose, commit on a list of tokens. Laws of a draft seen before are remembered."""

    def __init__(self, world: World, judge: Judge, tree: Shape, drawn: Drawn) -> None:
        self.world, self.judge, self.tree, self.drawn = world, judge, tree, drawn
        self._verdicts: dict[tuple, tuple[Verdict, list]] = {}

    def run(self, draws: Draws, steps: int) -> tuple[tuple[int, ...], int, float]:
        """``steps`` steps from the empty context: tokens, tokens accepted, and the sum of their expectations."""
        tokens: tuple[int, ...] = ()
        accepted, expected = 0, 0.0
        for number in range(steps):
            draft = propose(self.world, tokens, self.tree, self.drawn, draws, Key(0, 0, number, Purpose.DRAFT))
            verdict, paths = self._verdict(tokens, draft)
            expected += float(verdict.expected_accepted(draft.shape)[0])
            p = target_of(self.world, tokens, draft)
            (row,), (token,), _ = choose(verdict, draft.shape, p, draws, [(0, 0, number)])
            accepted += len(paths[row])
            tokens += (*paths[row], int(token))
        return tokens, accepted, expected

    def _verdict(self, context: tuple[int, ...], draft: Draft) -> tuple[Verdict, list[tuple[int, ...]]]:
        key = (context, tuple(draft.shape.parent.tolist()), tuple(draft.token.tolist()))
        if key not in self._verdicts:
            verdict = self.judge(draft, target_of(self.world, context, draft))
            residual = verdict.residual(np.arange(draft.shape.rows))
            self._verdicts[key] = Verdict(verdict.stop, lambda rows: residual[rows]), paths_of(draft)
        return self._verdicts[key]


# Laws of outputs


class Outputs:
    """The law of what is put out: for each length the probability of being exactly each sequence, ``[V ** length]``."""

    def __init__(self, world: World, longest: int) -> None:
        self.world = world
        self.exactly = [np.zeros(world.v**length) for length in range(longest + 1)]
        self.accepted = self.expected = 0.0

    @classmethod
    def of_loop(cls, loop: Loop, steps: int) -> Outputs:
        """Of ``steps`` joint steps, every choice enumerated."""
        outputs = cls(loop.world, steps * (int(loop.tree.depth.max()) + 1))
        for probability, (tokens, accepted, expected) in explore(lambda draws: loop.run(draws, steps)):
            outputs.exactly[len(tokens)][loop.world.code(tokens)] += probability
            outputs.accepted += probability * accepted
            outputs.expected += probability * expected
        return outputs

    @classmethod
    def of_forest(cls, world: World, judge: Judge, tree: Shape, drawn: Drawn) -> Outputs:
        """Of one step: all possible drafts stand side by side in one forest, judged at once."""
        draft, probability = every_draft(world, tree, drawn)
        shape, v = draft.shape, world.v
        code = np.zeros(shape.rows, dtype=np.int64)
        p = np.empty((shape.rows, v))
        for depth in range(int(shape.depth.max()) + 1):
            rows = np.flatnonzero(shape.depth == depth)
            if depth > 0:
                nodes = rows - shape.heads
                code[rows] = code[shape.parent[nodes]] * v + draft.token.numpy()[nodes]
            p[rows] = world.laws(depth)[0][code[rows]]
        verdict = judge(draft, torch.from_numpy(p))
        residual = verdict.residual(np.arange(shape.rows)).numpy()
        mass = residual.sum(-1)
        assert (mass[verdict.stop > 1e-14] > 0).all(), "a path can end where nothing can be emitted"
        law = (probability[shape.root] * verdict.stop / np.where(mass > 0, mass, 1.0))[:, None] * residual
        outputs = cls(world, int(shape.depth.max()) + 1)
        for depth in range(int(shape.depth.max()) + 1):
            rows = np.flatnonzero(shape.depth == depth)
            np.add.at(outputs.exactly[depth + 1].reshape(-1, v), code[rows], law[rows])
        outputs.accepted = float((law.sum(-1) * shape.depth).sum())
        outputs.expected = float(probability @ verdict.expected_accepted(shape))
        return outputs

    @property
    def mass(self) -> float:
        """Total probability."""
        return float(sum(part.sum() for part in self.exactly))

    def tv(self, length: int | None = None) -> float:
        """Distance to the target's law of ``length`` tokens; shorter outputs go on with exact target samples."""
        length = len(self.exactly) - 1 if length is None else length
        v = self.world.v
        extended, truth = self.exactly[0], np.ones(1)
        for k in range(length):
            p = self.world.laws(k)[0]
            extended = (extended[:, None] * p).ravel() + self.exactly[k + 1]
            truth = (truth[:, None] * p).ravel()
        for k in range(length + 1, len(self.exactly)):  # longer outputs are cut
            extended = extended + self.exactly[k].reshape(v**length, -1).sum(-1)
        return 0.5 * float(np.abs(extended - truth).sum())

    def first_failure(self, tolerance: float = 1e-12) -> str | None:
        """The shortest prefix s with A_sa != (A_s - D_s) p(a | s) for some a; None when the output is lossless.

        A_s: the output begins with s. D_s: it is exactly s.
        """
        v = self.world.v
        begins = [part.copy() for part in self.exactly]
        for k in range(len(begins) - 1, 0, -1):
            begins[k - 1] += begins[k].reshape(-1, v).sum(-1)
        for k in range(len(begins) - 1):
            wanted = (begins[k] - self.exactly[k])[:, None] * self.world.laws(k)[0]
            error = np.abs(begins[k + 1].reshape(-1, v) - wanted)
            if error.max() > tolerance:
                s, a = np.unravel_index(int(error.argmax()), error.shape)
                prefix = tuple(int(s) // v**i % v for i in reversed(range(k)))
                return f"after {prefix} token {a} is off by {error.max():.2e}"
        return None


@lru_cache(maxsize=64)
def every_draft(world: World, tree: Shape, drawn: Drawn) -> tuple[Draft, np.ndarray]:
    """All drafts of a tree below the empty context as one forest, and the probability of each."""
    first = Key(0, 0, 0, Purpose.DRAFT)
    cases = list(explore(lambda draws: propose(world, (), tree, drawn, draws, first)))
    return side_by_side([draft for _, draft in cases]), np.array([probability for probability, _ in cases])


def side_by_side(drafts: Sequence[Draft]) -> Draft:
    """Several one-tree drafts as one forest."""
    heads = len(drafts)
    parent, q_row = [], [np.full(heads, -1)]
    nodes = laws = 0
    for head, draft in enumerate(drafts):
        above = draft.shape.parent
        parent.append(np.where(above == 0, head, above - 1 + heads + nodes))
        if draft.q is not None:
            mine = np.where(draft.q_row >= 0, draft.q_row + laws, -1)
            q_row[0][head] = mine[0]
            q_row.append(mine[1:])
            laws += len(draft.q)
        nodes += draft.shape.nodes
    shape = Shape(heads, np.concatenate(parent).astype(np.int64))
    token = torch.cat([draft.token for draft in drafts])
    if drafts[0].q is None:
        return Draft(shape, token)
    return Draft(shape, token, drafts[0].drawn, torch.cat([draft.q for draft in drafts]), np.concatenate(q_row))
