"""Enumerated instances: toy models, draft trees, lengths and constraints, small enough to visit every outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from spec_lab.constrain import AppliedConstraint, Constraint
from spec_lab.constrain.applied import Placement
from spec_lab.constrain.banned import Banned
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.control import Branch, ControllerConstraint, Event
from spec_lab.constrain.engines.grammar import regex
from spec_lab.constrain.min_new_tokens import MinNewTokens
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.propose.trees import parse, width_of
from spec_lab.tasks.certify.toy_models import PROMPT, RandomToy

PLAIN = Sampling(1.0)
"""Temperature 1 and nothing else."""


@dataclass(frozen=True)
class Instance:
    """One toy request.

    Args:
        toy: the probabilities of target and draft model.
        tree: as ``trees.parse`` reads it; proposers without a tree ignore it.
        tokens: 0 for a single step; otherwise the decode loop runs until so many tokens are emitted.
        stop: tokens that end the text.
        start: tokens after the prompt at which the step begins.
        applied: a constraint on the toy's tokens, for a loop; None for none.
        requests: copies that are decoded together as one batch, whose joint distribution is examined (``together``).
    """

    toy: RandomToy
    tree: str
    tokens: int = 0
    stop: frozenset[int] = frozenset()
    start: tuple[int, ...] = ()
    applied: AppliedConstraint | None = None
    requests: int = 1

    @property
    def chain(self) -> bool:
        """Whether the tree is a chain."""
        return width_of(parse(self.tree)) == 1

    @property
    def name(self) -> str:
        """The instance in words."""
        kind = "plain" if self.toy.plain else "mixed"
        what = f"{self.tokens} tokens" if self.tokens else "one step"
        stop = f", stop {sorted(self.stop)}" if self.stop else ""
        under = ""
        if self.applied is not None:
            under = f", {self.applied.constraint.name} on {self.applied.placement}"
            under += ", global" if self.applied.is_global else ""
        together = f", {self.requests} requests" if self.requests > 1 else ""
        return f"V={self.toy.v} {kind} toy model {self.toy.seed}, tree {self.tree}, {what}{stop}{under}{together}"

    def request(self, number: int, sampling: Sampling) -> Request:
        """Return the instance as a request."""
        return Request(number, f"toy {number}", PROMPT + self.start, sampling, max(self.tokens, 1), self.stop)


TREES = ("1", "1x1", "1x1x1", "2", "3", "1x2", "2x1", "2x2", "3x1", "0 1 0.0 0.1 1.0 0.0.0 0.1.0")
TOYS = (
    RandomToy(1),
    RandomToy(6),
    RandomToy(12, v=5),
    RandomToy(4, plain=True),
    RandomToy(2),  # the first p and q are disjoint: nothing is accepted
    RandomToy(14),  # the first p and q are equal: the first token is always accepted
)
FEW = RandomToy(8, support=2)
STEPS = tuple(Instance(toy, tree) for toy in TOYS for tree in TREES)
"""Single steps."""

LOOPS = (
    Instance(FEW, "1", 3),
    Instance(FEW, "1x1", 3),
    Instance(FEW, "2", 3),
    Instance(FEW, "2x1", 2),
    Instance(FEW, "1x1", 3, frozenset({1})),
    Instance(RandomToy(9, v=5, support=2), "1x1", 3, frozenset({0, 3})),
)
"""The decode loop without a constraint."""

QUICK = (*(Instance(TOYS[0], tree) for tree in ("1x1", "2", "2x1", "1x1x1")), *LOOPS[:2])
"""Instances that every run enumerates of its own pair, in a fraction of a second."""

PAIRED = RandomToy(5, support=2, plain=True)
TOGETHER = (
    Instance(PAIRED, "1x1", requests=2),
    Instance(RandomToy(7, support=2, plain=True), "1x1", requests=2),
    Instance(PAIRED, "2x1", requests=2),
    Instance(FEW, "1", 2, requests=2),
)
"""Two requests in one batch, for proposers and policies that share something between requests."""

PIECES = (b"a", b"b", b"ab", b"c", b"")
"""The tokens of constrained toys as text; the last one ends it."""

END = frozenset({4})
CONSTRAINED = RandomToy(8, v=5, support=2)
CONDITIONED = RandomToy(3, v=5, support=2, plain=True)
"""No text is impossible, so that some output is valid."""


def constrained() -> tuple[Instance, ...]:
    """Return loops under every kind of constraint: a grammar in every placement, a fork with backtracking, banned
    phrases with a minimum length.
    """
    vocabulary = Vocabulary.plain(PIECES, 4)
    grammar = regex(vocabulary, "(ab|c)(a|b|c)*b|a[bc]")
    every = [
        AppliedConstraint(grammar, placement, fast_forward=placement == "both") for placement in get_args(Placement)
    ]
    forking = ControllerConstraint(lambda _: Forking(), vocabulary.size, "a controller that forks")
    every.append(AppliedConstraint(forking))
    every.append(AppliedConstraint(Combined([Banned(("bb", "ca"), PIECES), MinNewTokens(2, vocabulary.size)])))
    trees = ("1x1", "2x1", "1x1", "1x1", "1", "1x1")
    return tuple(
        Instance(CONSTRAINED, tree, 2, END, applied=applied) for tree, applied in zip(trees, every, strict=True)
    )


def conditioned() -> tuple[Instance, ...]:
    """Return loops whose outputs have the target's distribution given that a grammar allows them: chains and a tree,
    masks on the target alone and on both.
    """
    grammar = regex(Vocabulary.plain(PIECES, 4), "(ab|c)(a|b|c)*b|a[bc]")
    target, both = (
        AppliedConstraint(grammar, side, fast_forward=side == "both", distribution="global")
        for side in ("target", "both")
    )
    every = (("1x1", 3, target), ("2", 3, target), ("2x1", 3, both), ("1x1", 4, both))
    return tuple(Instance(CONDITIONED, tree, tokens, END, applied=applied) for tree, tokens, applied in every)


def under(applied: AppliedConstraint | None, toy_constraint: Constraint | None = None) -> tuple[Instance, ...]:
    """Return loops under a run's own constraint in every placement that it can have; none where it has no toy version
    (``Constraint.toy``), and none is given.
    """
    constraint = toy_constraint
    if constraint is None and applied is not None:
        constraint = applied.constraint.toy(Vocabulary.plain(PIECES, 4))
    if applied is None or constraint is None:
        return ()
    places = [
        placement for placement in get_args(Placement) if placement in ("target", "both") or not constraint.has_actions
    ]
    every = [AppliedConstraint(constraint, side, fast_forward=side == "both") for side in places]
    toy = CONSTRAINED
    if applied.is_global:
        every, toy = [replace(applied, distribution="global") for applied in every if applied.on_target], CONDITIONED
    return tuple(
        Instance(toy, tree, tokens, END, applied=applied)
        for tree, tokens in (("2x1", 2), ("1x1", 3))
        for applied in every
    )


def every_instance() -> tuple[Instance, ...]:
    """Return all instances, those under a run's own constraint apart."""
    return STEPS + LOOPS + constrained() + conditioned()


@dataclass
class Forking:
    """A controller that forks the sequence after the first token; the fork replaces that token."""

    steps: int = 0

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        self.steps += 1
        if self.steps == 2:
            return [Branch(allow={0, 1, 2}), Branch(backtrack=1, ff=((3, 0),))]
        return [Branch()]

    def fork(self) -> Forking:
        """See ``Controller``."""
        return Forking(self.steps)
