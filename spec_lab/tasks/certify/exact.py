"""Enumeration: every draft, every acceptance and every emitted token of the code under test, in float64.

Nothing is sampled here. The random choices of a request all go through ``Draws``; ``enumeration.Scripts`` visits every
outcome of every choice and multiplies the probabilities. Two kinds of instances are enumerated:

- A *step* (``Instance.tokens`` is 0): the drafts are enumerated. Each goes through the real forward of the target and
  the real verifier, whose ``stop`` and ``residual`` give the distribution of the step's output without sampling.
- A *loop*: drafts, verdicts and emitted tokens are enumerated through the whole decode loop until all tokens are
  emitted, so that state and random keys carried from step to step count as well. The reference is ``ground_truth``.

An instance is exact (``Finding.wrong`` is None) if all of these hold, with EXACT = 1e-12:

- for a step, |A(s a) - (A(s) - D(s)) p(a | s)| <= EXACT for every text s and token a (see ``outputs``); for a loop,
  |P(output) - P_autoregressive(output)| <= EXACT for every output and every beginning of one;
- |sum of P(output) - 1| <= EXACT;
- TV = sum |P(output) - P_autoregressive(output)| / 2 <= EXACT;
- |E accepted tokens - E expected by the verdicts| <= 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import Draws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import step
from spec_lab.decode.study import Capture, choose_nothing, commit_nothing
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import Choices, depth_of, parse, widths
from spec_lab.runners.runner import DraftRunner
from spec_lab.tasks.certify.enumeration import side_by_side
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import PLAIN, Instance
from spec_lab.tasks.certify.outputs import (
    EXACT,
    Distribution,
    Output,
    StepOutputs,
    WrongText,
    first_difference,
    total_variation,
)
from spec_lab.tasks.certify.toy_models import code, table_models, warped
from spec_lab.verify import Verifier, check_draft

MAX_DECODINGS = 60_000
"""Largest number of outcomes of one instance that is enumerated."""

WIDE = 256
"""Most outcomes that are decoded as one batch."""

MIN_TOKENS, MAX_TOKENS = 3, 6
"""Smallest and largest number of tokens that a toy's tables cover; drafts go no deeper."""


@dataclass(frozen=True)
class Finding:
    """The result of one instance.

    Args:
        tv: total variation between the output's distribution and the target's.
        mass: total probability.
        failure: the first text with a wrong probability, in words; None where there is none.
        accepted: mean number of accepted tokens.
        expected: the same as the verdicts expect it.
        outcomes: number of outcomes enumerated.
        drafted: number of nodes drafted in all of them.
        own_target_tv: total variation from the distribution against which a lossy verifier declares that it is exact
            (``aim``); None where it declares none, or where that distribution depends on more than the text.
        after: of a step, the text after which the output is wrong; None where none is.
    """

    instance: str
    tv: float
    mass: float
    failure: str | None
    accepted: float
    expected: float
    outcomes: int
    drafted: int = 0
    own_target_tv: float | None = None
    after: WrongText | None = None

    @property
    def wrong(self) -> str | None:
        """Description of what is not exact; None where everything is. The module states the tolerances."""
        if self.failure is not None:
            return self.failure
        if not abs(self.mass - 1) <= EXACT:
            return f"the probabilities of the outputs sum to {self.mass:.12g}"
        if not self.tv <= EXACT:
            return f"the distribution of the outputs has a total variation of {self.tv:.2g} from the target's"
        if not abs(self.accepted - self.expected) <= 1e-9:
            return f"{self.accepted:.9g} tokens are accepted on average, the verdicts expected {self.expected:.9g}"
        return None


class ToyParts(NamedTuple):
    """A proposer on a toy target.

    Args:
        target: computes p from a table.
        p: the probabilities after every text, as ``sampling`` warps them.
    """

    target: Target
    proposer: Proposer
    p: list[np.ndarray]

    @property
    def wide(self) -> int:
        """Outcomes that are decoded as one batch: one where requests share a store, through which each would change
        the drafts of the others.
        """
        return 1 if self.proposer.shared_store else WIDE

    def forget(self) -> None:
        """Empty the store that requests share, before an outcome is replayed."""
        if self.proposer.shared_store:
            with attributed("proposer", self.proposer):
                self.proposer.forget()


def reference(drawn: Drawn, target: Target, draft: DraftRunner, tree: Choices) -> DraftModel:
    """Return a draft model's proposer on a toy target that draws siblings as asked."""
    return DraftModel(draft, target.context, TreePlan(tree, drawn))


def toy_parts(
    instance: Instance, proposer: Proposer | Drawn, sampling: Sampling = PLAIN, dtype: torch.dtype = torch.float64
) -> ToyParts:
    """Return the instance's parts: with the proposer's toy version, which is the proposer itself where it has none; for
    a way of drawing with the reference. A tree that cannot be drafted for the sampling is replaced by a chain: at
    temperature 0 sampled siblings have no other tokens to draw.
    """
    tree = parse(instance.tree)
    longest = max(min(instance.tokens + depth_of(tree), MAX_TOKENS), len(instance.start) + MIN_TOKENS)
    target, draft = table_models(instance.toy, longest, dtype=dtype)
    together = instance.requests > 1
    toy = _toy(proposer, target, draft, tree, together)
    try:
        toy.check_sampling(sampling)
    except ValueError:
        toy = _toy(proposer, target, draft, widths([1] * depth_of(tree)), together)
    return ToyParts(target, toy, warped(instance.toy, longest, sampling))


def _toy(proposer: Proposer | Drawn, target: Target, draft: DraftRunner, tree: Choices, together: bool) -> Proposer:
    """Return a proposer that drafts ``tree`` for a toy target."""
    if isinstance(proposer, str):
        return reference(proposer, target, draft, tree)
    with attributed("proposer", proposer):
        return (proposer.toy_of_batch if together else proposer.toy)(target, draft, tree)


@torch.inference_mode()
def examine(
    instance: Instance,
    proposer: Proposer | Drawn,
    verifier: Verifier,
    sampling: Sampling = PLAIN,
    max_decodings: int = MAX_DECODINGS,
) -> Finding:
    """Enumerate an instance of one request with a proposer, or with the reference that draws as asked.

    Raises:
        Reused: a random key was used for two choices.
        Continuous: the proposer draws Gumbel noise, which cannot be enumerated.
        TooMany: more than ``max_decodings`` outcomes.
        ValueError: a draft that cannot have been drawn from the q that it states.
    """
    if not instance.tokens:
        return _step(instance, toy_parts(instance, proposer, sampling), verifier, sampling, max_decodings)
    counts = Counts()
    outputs = decoded(instance, proposer, verifier, sampling, max_decodings, counts)
    expected = truth(instance, sampling)
    tv, failure = total_variation(outputs, expected), first_difference(outputs, expected)
    return Finding(instance.name, tv, sum(outputs.values()), failure, **vars(counts))


# One step ------------------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """One verified tree: where the path can end and what is emitted there.

    Args:
        depth: ``[n]`` of each row; number: ``[n]`` of its text.
        ends: ``[n, V]`` the probability of ending at a row and emitting a token.
        expected: expected number of accepted tokens.
        own_target: ``[n, V]`` the distribution against which a lossy verifier is exact.
    """

    depth: np.ndarray
    number: np.ndarray
    ends: np.ndarray
    expected: float
    own_target: np.ndarray | None

    def add_to(self, outputs: StepOutputs, probability: float) -> None:
        """Add its outputs to those of other drafts."""
        for row, (depth, number) in enumerate(zip(self.depth.tolist(), self.number.tolist(), strict=True)):
            outputs.exactly[depth + 1].reshape(-1, outputs.v)[number] += probability * self.ends[row]


def _step(instance: Instance, parts: ToyParts, verifier: Verifier, sampling: Sampling, max_decodings: int) -> Finding:
    v, start = instance.toy.v, len(instance.start)
    p = [after[code(instance.start, v) * v**k :][: v**k] for k, after in enumerate(parts.p[start:])]
    outputs = StepOutputs(v, len(p))
    own_targets: dict[tuple[int, int], np.ndarray] | None = {}
    accepted = expected = 0.0
    outcomes = drafted = 0

    def play(draws: Draws, count: int) -> list[Tree]:
        parts.forget()
        return verified(instance, parts, verifier, sampling, draws, count)

    for probability, tree in side_by_side(play, parts.wide, max_decodings):
        outcomes, drafted = outcomes + 1, drafted + len(tree.depth) - 1
        tree.add_to(outputs, probability)
        for row, (depth, number) in enumerate(zip(tree.depth.tolist(), tree.number.tolist(), strict=True)):
            if own_targets is not None and tree.own_target is not None:
                other = own_targets.setdefault((depth, number), tree.own_target[row])
                if np.abs(other - tree.own_target[row]).max() > EXACT:
                    own_targets = None  # the text is a leaf in one draft and a parent in another: not one distribution
        accepted += probability * float(tree.ends.sum(-1) @ tree.depth)
        expected += probability * tree.expected
    own_target_tv = None
    if own_targets:
        targets = [after.copy() for after in p]
        for (depth, number), there in own_targets.items():
            if depth < len(targets):
                targets[depth][number] = there
        own_target_tv = outputs.tv(targets)
    after = outputs.first_wrong(p)
    failure = None if after is None else after.words
    return Finding(
        instance.name, outputs.tv(p), outputs.mass, failure, accepted, expected, outcomes, drafted, own_target_tv, after
    )


def verified(
    instance: Instance, parts: ToyParts, verifier: Verifier, sampling: Sampling, draws: Draws, count: int
) -> list[Tree]:
    """Draft and verify ``count`` copies of the step, as one forest through the real target and verifier."""
    target, proposer, capture = parts.target, parts.proposer, Capture()
    pair = Arm(target, proposer, verifier, draws)
    requests = [instance.request(number, sampling) for number in range(count)]
    lives = [
        SequenceState(request, target.lm.open(), list(request.tokens), state=proposer.init(request))
        for request in requests
    ]
    captured = replace(pair, verifier=capture, choose=choose_nothing, commit=commit_nothing)
    try:
        step([], captured, [(live, len(live.tokens) - 1) for live in lives])
        info = step(lives, captured)
        if info.errors:
            raise ValueError(f"a toy draft broke: {next(iter(info.errors.values()))}")
        assert capture.draft is not None and capture.p is not None
        check_draft(proposer.name, verifier, capture.draft)
        return _trees(capture.draft, capture.p, verifier, instance.toy.v)
    finally:
        for live in lives:
            proposer.close(live.state)
            live.kv.close()


def _trees(draft: Draft, p: torch.Tensor, verifier: Verifier, v: int) -> list[Tree]:
    shape, token = draft.shape, draft.token.tolist()
    with attributed("verifier", verifier):
        verdict = verifier(draft, p)
        residual = verdict.residual(np.arange(shape.rows)).double().numpy()
        aim = verifier.aim(draft, p)
        aimed = None if aim is None else aim.double().numpy()
    total = residual.sum(-1, keepdims=True)
    ends = verdict.stop[:, None] * np.divide(residual, total, out=np.zeros_like(residual), where=total > 0)
    expected = verdict.expected_accepted(shape)
    number = np.zeros(shape.rows, dtype=np.int64)
    for node, parent in enumerate(shape.parent.tolist()):
        number[shape.roots + node] = number[parent] * v + token[node]
    return [
        Tree(shape.depth[rows], number[rows], ends[rows], float(expected[root]), None if aimed is None else aimed[rows])
        for root, rows in enumerate(shape.trees)
    ]


# The decode loop -----------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Counts of ``decoded``: means of accepted tokens that were not forced, as found and as the verdicts expect them;
    outcomes; drafted nodes.
    """

    accepted: float = 0.0
    expected: float = 0.0
    outcomes: int = 0
    drafted: int = 0


@torch.inference_mode()
def decoded(
    instance: Instance,
    proposer: Proposer | Drawn,
    verifier: Verifier,
    sampling: Sampling = PLAIN,
    max_decodings: int = MAX_DECODINGS,
    counts: Counts | None = None,
) -> Distribution:
    """Return the distribution of the outputs of the decode loop, every choice enumerated. Raises what ``examine`` does.

    Up to ``WIDE`` copies of the request are decoded as one batch, each with choices of its own. Where requests share a
    store, one is decoded at a time, with an empty store.
    """
    parts = toy_parts(instance, proposer, sampling)
    counts, distribution = counts or Counts(), Distribution()

    def play(draws: Draws, count: int) -> list[tuple[Output, float, float]]:
        parts.forget()
        requests = [instance.request(number, sampling) for number in range(count)]
        group = fixed_group(Arm(parts.target, parts.proposer, verifier, draws, instance.applied), requests)
        accepted, expected = np.zeros(count), np.zeros(count)
        for info in group:
            counts.drafted += info.draft.shape.nodes
            for tree, (live, got) in enumerate(zip(info.sequences, info.committed, strict=True)):
                accepted[live.request.id] += len(got.path) - got.count(accepted=True, forced=True)
                expected[live.request.id] += info.expected[tree]
        outputs: list[Output] = [()] * count
        for sequence in sorted(group.sequences, key=lambda live: live.lineage):
            outputs[sequence.request.id] += ((tuple(sequence.emitted), str(sequence.finish)),)
        return list(zip(outputs, accepted.tolist(), expected.tolist(), strict=True))

    for probability, (output, accepted, expected) in side_by_side(play, parts.wide, max_decodings):
        counts.outcomes += 1
        counts.accepted += probability * accepted
        counts.expected += probability * expected
        distribution[output] = distribution.get(output, 0.0) + probability
    return distribution
