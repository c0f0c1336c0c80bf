"""The exact layer: every draft, every acceptance and every emitted token of the real code, enumerated in float64.

A *step* drafts with the real proposer on a toy target, runs the real target path over the forest and asks the real
verifier for its law: the law of the step's output follows without sampling. A *loop* enumerates the whole decode loop
until a number of tokens is out, every choice through ``Draws``: state and noise carried from step to step count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import Draws
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import SequenceState
from spec_lab.engine.step import Parts, step
from spec_lab.engine.study import Capture, choose_nothing, commit_nothing
from spec_lab.models.target import Target
from spec_lab.propose import Proposer, branches, draws_of
from spec_lab.propose.draft_model import DraftModel
from spec_lab.propose.trees import Choices, depth_of, parse, width_of
from spec_lab.tasks.certify.enumerate import side_by_side
from spec_lab.tasks.certify.outputs import EXACT, Outputs, autoregressive
from spec_lab.tasks.certify.table import table_models
from spec_lab.tasks.certify.worlds import PROMPT, Random, code, warped
from spec_lab.verify import Verifier, check_draft, check_pair

MOST = 60_000
"""Outcomes of one instance that are enumerated at most."""

PLAIN = Sampling(1.0)

LEAST, MOST_TOKENS = 3, 6
"""Tokens that a toy's tables reach at least, and at most: drafts go no deeper."""


@dataclass(frozen=True)
class Instance:
    """What is enumerated.

    Args:
        world: the toy laws.
        tree: as ``trees.parse`` reads it; proposers that draft no tree ignore it.
        tokens: 0 for one step; otherwise the loop runs until so many tokens are out.
        stop: tokens that end the text.
        start: tokens after the prompt when the step begins.
        binding: a constraint on the toy's tokens, for a loop (``constrained``); None for none.
    """

    world: Random
    tree: str
    tokens: int = 0
    stop: frozenset[int] = frozenset()
    start: tuple[int, ...] = ()
    binding: AppliedConstraint | None = None

    @property
    def chain(self) -> bool:
        """Whether the tree is a chain."""
        return width_of(parse(self.tree)) == 1

    @property
    def name(self) -> str:
        """In words."""
        kind = "plain" if self.world.plain else "mixed"
        what = f"{self.tokens} tokens" if self.tokens else "one step"
        ends = f", stop {sorted(self.stop)}" if self.stop else ""
        bound = "" if self.binding is None else f", {self.binding.constraint.name} on {self.binding.placement}"
        return f"V={self.world.v} {kind} world {self.world.seed}, tree {self.tree}, {what}{ends}{bound}"


@dataclass(frozen=True)
class Finding:
    """What one instance showed.

    Args:
        instance: which.
        tv: total variation between the output's law and the target's.
        mass: total probability.
        failure: the first text after which the law is another one, in words; None where it is the target's.
        accepted: tokens accepted on average.
        expected: as the verdicts expected it.
        outcomes: enumerated.
        drafted: nodes drafted in all of them.
        aimed: total variation from the law a lossy verifier says that it is exact against; None where it names none, or
            where its law depends on more than the text.
    """

    instance: str
    tv: float
    mass: float
    failure: str | None
    accepted: float
    expected: float
    outcomes: int
    drafted: int = 0
    aimed: float | None = None

    @property
    def wrong(self) -> str | None:
        """What is not exact, in words; None where the output's law is the target's and acceptance what was expected."""
        if self.failure is not None:
            return self.failure
        if not abs(self.mass - 1) <= EXACT:
            return f"the output's law has a total mass of {self.mass:.12g}"
        if not self.tv <= EXACT:
            return f"the output's law is {self.tv:.2g} from the target's"
        if not abs(self.accepted - self.expected) <= 1e-9:
            return f"{self.accepted:.9g} tokens are accepted on average, the verdicts expected {self.expected:.9g}"
        return None


TREES = ("1", "1x1", "1x1x1", "2", "3", "1x2", "2x1", "2x2", "3x1", "0 1 0.0 0.1 1.0 0.0.0 0.1.0")
WORLDS = (
    Random(1),
    Random(6),
    Random(12, v=5),
    Random(4, plain=True),
    Random(2),  # the first p and q are disjoint: nothing is accepted
    Random(14),  # the first p and q are equal: the first token always is
)
FEW = Random(8, support=2)
STEPS = tuple(Instance(world, tree) for world in WORLDS for tree in TREES)
LOOPS = (
    Instance(FEW, "1", 3),
    Instance(FEW, "1x1", 3),
    Instance(FEW, "2", 3),
    Instance(FEW, "2x1", 2),
    Instance(FEW, "1x1", 3, frozenset({1})),
    Instance(Random(9, v=5, support=2), "1x1", 3, frozenset({0, 3})),
)


class Toy(NamedTuple):
    """A proposer on a toy target.

    Args:
        target: over the table of p.
        proposer: drafts for it.
        laws: p after every text, warped as requests sample.
    """

    target: Target
    proposer: Proposer
    laws: list[np.ndarray]


def reference(drawn: Drawn, target: Target, draft: CausalLM, tree: Choices) -> DraftModel:
    """A draft model's proposer on a toy target that draws as asked."""
    return DraftModel(draft, target.context, tree, drawn)


def toy(
    instance: Instance, proposer: Proposer | Drawn, sampling: Sampling = PLAIN, dtype: torch.dtype = torch.float64
) -> Toy:
    """The instance's parts: the proposer's own ``toy`` where it offers one, else the proposer as it is; for a way of
    drawing the reference.
    """
    tree = parse(instance.tree)
    longest = max(min(instance.tokens + depth_of(tree), MOST_TOKENS), len(instance.start) + LEAST)
    target, draft = table_models(instance.world, longest, dtype=dtype)
    if isinstance(proposer, str):
        drafting: Proposer = reference(proposer, target, draft, tree)
    else:
        with attributed("proposer", proposer):
            drafting = getattr(proposer, "toy", lambda *_: proposer)(target, draft, tree)
    return Toy(target, drafting, warped(instance.world, longest, sampling))


@torch.inference_mode()
def examine(
    instance: Instance,
    proposer: Proposer | Drawn,
    verifier: Verifier,
    sampling: Sampling = PLAIN,
    most: int = MOST,
) -> Finding:
    """Enumerate an instance with a proposer, or with the reference that draws as asked.

    Raises:
        Reused: a choice reused another's noise.
        Continuous: the proposer races.
        TooMany: more than ``most`` outcomes.
        ValueError: a draft that its own laws cannot have given.
    """
    parts = toy(instance, proposer, sampling)
    return (_loop if instance.tokens else _step)(instance, parts, verifier, sampling, most)


def request_of(number: int, instance: Instance, sampling: Sampling) -> Request:
    """The instance as a request."""
    text = PROMPT + instance.start
    return Request(number, f"toy {number}", text, sampling, max(instance.tokens, 1), instance.stop)


class _Tree(NamedTuple):
    """One drafted tree judged: where the path can end and what is emitted there.

    Args:
        depth: ``[n]`` of each row; number: ``[n]`` of its text.
        ends: ``[n, V]`` the probability of ending at a row and emitting a token.
        expected: accepted tokens.
        aim: ``[n, V]`` the law a lossy verifier is exact against.
    """

    depth: np.ndarray
    number: np.ndarray
    ends: np.ndarray
    expected: float
    aim: np.ndarray | None


def _step(instance: Instance, parts: Toy, verifier: Verifier, sampling: Sampling, most: int) -> Finding:
    v, start = instance.world.v, len(instance.start)
    laws = [after[code(instance.start, v) * v**k :][: v**k] for k, after in enumerate(parts.laws[start:])]
    outputs = Outputs(v, len(laws))
    aims: dict[tuple[int, int], np.ndarray] | None = {} if hasattr(verifier, "aim") else None
    accepted = expected = 0.0
    outcomes = drafted = 0

    def play(draws: Draws, count: int) -> list[_Tree]:
        return _judged(instance, parts, verifier, sampling, draws, count)

    for probability, tree in side_by_side(play, most=most):
        outcomes, drafted = outcomes + 1, drafted + len(tree.depth) - 1
        for row, (depth, number) in enumerate(zip(tree.depth.tolist(), tree.number.tolist(), strict=True)):
            outputs.exactly[depth + 1].reshape(-1, v)[number] += probability * tree.ends[row]
            if aims is not None and tree.aim is not None:
                other = aims.setdefault((depth, number), tree.aim[row])
                if np.abs(other - tree.aim[row]).max() > EXACT:
                    aims = None  # one text is a leaf here, a parent there: the aim is no law of texts
        accepted += probability * float(tree.ends.sum(-1) @ tree.depth)
        expected += probability * tree.expected
    aimed = None
    if aims is not None:
        wanted = [after.copy() for after in laws]
        for (depth, number), law_there in aims.items():
            if depth < len(wanted):
                wanted[depth][number] = law_there
        aimed = outputs.tv(wanted)
    failure = outputs.first_failure(laws)
    return Finding(instance.name, outputs.tv(laws), outputs.mass, failure, accepted, expected, outcomes, drafted, aimed)


def _judged(
    instance: Instance, parts: Toy, verifier: Verifier, sampling: Sampling, draws: Draws, count: int
) -> list[_Tree]:
    """``count`` drafts of one step, as one forest through the real target and verifier."""
    target, proposer, capture = parts.target, parts.proposer, Capture()
    check_pair(proposer.name, draws_of(proposer), verifier, branches(proposer))
    requests = [request_of(number, instance, sampling) for number in range(count)]
    lives = [SequenceState(one, target.lm.open(), list(one.tokens), state=proposer.init(one)) for one in requests]
    own = Parts(target, proposer, capture, draws, None, choose_nothing, commit_nothing)
    try:
        step([], own, [(live, len(live.tokens) - 1) for live in lives])
        info = step(lives, own)
        if info.errors:
            raise ValueError(f"a toy draft broke: {next(iter(info.errors.values()))}")
        assert capture.draft is not None and capture.p is not None
        check_draft(proposer.name, verifier, capture.draft)
        return _trees(capture.draft, capture.p, verifier, instance.world.v)
    finally:
        for live in lives:
            proposer.close(live.state)
            live.kv.close()


def _trees(draft: Draft, p: torch.Tensor, verifier: Verifier, v: int) -> list[_Tree]:
    shape, token = draft.shape, draft.token.tolist()
    with attributed("verifier", verifier):
        verdict = verifier(draft, p)
        residual = verdict.residual(np.arange(shape.rows)).double().numpy()
    total = residual.sum(-1, keepdims=True)
    ends = verdict.stop[:, None] * np.divide(residual, total, out=np.zeros_like(residual), where=total > 0)
    expected = verdict.expected_accepted(shape)
    aim = verifier.aim(draft, p).double().numpy() if hasattr(verifier, "aim") else None
    number = np.zeros(shape.rows, dtype=np.int64)
    for node, above in enumerate(shape.parent.tolist()):
        number[shape.roots + node] = number[above] * v + token[node]
    return [
        _Tree(shape.depth[rows], number[rows], ends[rows], float(expected[head]), None if aim is None else aim[rows])
        for head, rows in enumerate(shape.trees)
    ]


def _loop(instance: Instance, parts: Toy, verifier: Verifier, sampling: Sampling, most: int) -> Finding:
    v = instance.world.v
    outputs, truth = Outputs(v, instance.tokens), autoregressive(parts.laws, instance.tokens, v, instance.stop)
    accepted = expected = 0.0
    outcomes = drafted = 0

    def play(draws: Draws, count: int) -> list[tuple[list[int], float, float]]:
        nonlocal drafted
        requests = [request_of(number, instance, sampling) for number in range(count)]
        group = fixed_group(parts.target, parts.proposer, verifier, requests, draws)
        took, hoped = np.zeros(count), np.zeros(count)
        for done in group:
            drafted += done.draft.shape.nodes
            for tree, (live, got) in enumerate(zip(done.sequences, done.committed, strict=True)):
                took[live.request.id] += len(got.path)
                hoped[live.request.id] += done.expected[tree]
        return [(s.emitted, took[s.request.id], hoped[s.request.id]) for s in group.sequences]

    for probability, (text, took, hoped) in side_by_side(play, most=most):
        outcomes += 1
        outputs.exactly[len(text)][code(text, v)] += probability
        accepted += probability * took
        expected += probability * hoped
    failure = outputs.first_difference(truth)
    tv = outputs.distance(truth)
    return Finding(instance.name, tv, outputs.mass, failure, accepted, expected, outcomes, drafted)
