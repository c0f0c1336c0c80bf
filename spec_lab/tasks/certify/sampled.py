"""Statistical tests: the decode loop in float32 with sampled choices, tested against distributions that are known.

``joint`` samples whole texts of a toy, whose exact distribution is a table, for Pearson's chi-square test of their
histogram. ``scores`` decodes with real models, whose texts are too many to count, and tests martingales: given
everything decided before a token was drawn, the token must follow its distribution. ``significance`` states the
formulas of p-values and of the smallest bias that each test detects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.protocol import TokenWeights, full_mask, unpack
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.history import TextHistories
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import CounterDraws, Draws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.global_constraint import conditioned
from spec_lab.decode.rows import condition_
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import StepInfo
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.propose.trees import Choices, parse, write
from spec_lab.tasks.certify.enumeration import Watched
from spec_lab.tasks.certify.exact import Counts, toy_parts
from spec_lab.tasks.certify.instances import PLAIN, Instance
from spec_lab.tasks.certify.outputs import text_probabilities
from spec_lab.tasks.certify.significance import Score
from spec_lab.tasks.certify.toy_models import PROMPT, RandomToy, code
from spec_lab.verify import Verifier

JOINT = Instance(RandomToy(11, support=4, plain=True), "2x1", tokens=4)
"""The toy whose texts of four tokens are sampled: 4 ** 4 = 256 texts, all possible."""

WIDE = 256
"""Texts decoded in one batch."""


@runtime_checkable
class HasTree(Protocol):
    """A proposer with a static draft tree."""

    @property
    def tree(self) -> Choices:
        """The nodes of the tree, each as the ranks of the children on its path from the root."""
        ...


def joint(
    proposer: Proposer | Drawn,
    verifier: Verifier,
    samples: int,
    seed: int,
    sampling: Sampling = PLAIN,
    instance: Instance = JOINT,
    tick: Callable[[int], object] = lambda _: None,
    watched: bool = True,
    counts: Counts | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample texts of a toy with the decode loop in float32, and compute their exact distribution.

    A proposer with a static tree drafts that tree, without the nodes deeper than the texts or of a rank of V or more.
    For a verifier that is ``chains_only`` a chain is drafted.

    Args:
        proposer: a proposer, or a way of drawing for the reference.
        samples: number of texts.
        instance: the toy and the number of tokens.
        tick: called with the number of texts added.
        watched: whether a random key that is used for two choices is an error.

    Returns:
        ``[samples]`` int64, each text's number; ``[V ** tokens]`` the probability of each text.

    Raises:
        Reused: a random key was used for two choices, which would share their noise.
    """
    if verifier.chains_only:
        instance = replace(instance, tree="1x1")
    tree: Choices = proposer.tree if isinstance(proposer, HasTree) else ()
    fitting = [path for path in tree if len(path) <= instance.tokens and max(path) < instance.toy.v]
    if fitting:
        instance = replace(instance, tree=write(parse(fitting)))
    parts = toy_parts(instance, proposer, sampling, torch.float32)
    draws: Draws = CounterDraws(seed)
    v, texts = instance.toy.v, np.empty(samples, dtype=np.int64)
    for start in range(0, samples, WIDE):
        numbers = range(start, min(start + WIDE, samples))
        requests = [Request(number, f"toy {number}", PROMPT, sampling, instance.tokens) for number in numbers]
        group = fixed_group(Arm(parts.target, parts.proposer, verifier, Watched(draws) if watched else draws), requests)
        for info in group:
            if counts is not None:
                counts.drafted += info.draft.shape.nodes
        for live in group.sequences:
            texts[live.request.id] = code(live.emitted, v)
        tick(len(numbers))
    return texts, text_probabilities(parts.p, instance.tokens)


# Real models -------------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """Values fixed before a step's first token was drawn: its position in the output, and q there or the drafted
    tokens.
    """

    position: int
    q: Tensor | None  # [V]
    drafted: list[int]

    def function(self, p: Tensor) -> Tensor:  # [V] -> [V]
        """Return f: sign(q - p), or 1 for the drafted tokens and 0 for others."""
        if self.q is not None:
            return torch.sign(self.q.to(p) - p)
        return torch.zeros_like(p).index_fill_(0, torch.tensor(self.drafted), 1.0)


def scores(
    target: Target,
    proposer: Proposer,
    verifier: Verifier,
    requests: Sequence[Request],
    seed: int,
    batch_size: int = 16,
    tick: Callable[[int], object] = lambda _: None,
    applied: AppliedConstraint | None = None,
    counts: Counts | None = None,
) -> dict[str, Score]:
    """Decode requests and test their tokens against the probabilities p of one plain forward over each finished text,
    without KV cache.

    Three martingales, each a sum of f(x) - E f(x) over tokens x (see ``Score``):

    - *towards the draft*: the first token of each step, f = sign(q - p) at the root; for deterministic drafts, f = 1 if
      the token is among those drafted there, else 0. Given the past, a step's first token follows p whatever the
      verifier does. Later tokens of a step are left out, as where the step ends depends on them.
    - *mode*: every token, f = 1 if it has the largest p, else 0.
    - *draft*: every sampled draft token, f = 1 if it has the largest probability of the q that the draft states for it,
      given its earlier siblings, else 0. It finds a draft that was not drawn from the q that it states.

    Args:
        target: decodes, best in float32 or float64: p is computed in two ways that must agree.
        requests: decoded in groups of ``batch_size``.
        tick: called with the number of tokens added.
        applied: the constraint, which must have no actions: with them, single tokens do not follow p.

    Raises:
        ValueError: a request broke; names it.
    """
    towards, mode, drafted = Score(1.0 if proposer.drawn == "deterministic" else 2.0), Score(1.0), Score(1.0)
    for start in range(0, len(requests), batch_size):
        some = requests[start : start + batch_size]
        group = fixed_group(Arm(target, proposer, verifier, CounterDraws(seed), applied), some)
        known: dict[SequenceState, list[_Known]] = {}
        for info in group:
            for live, fixed in _fixed(info):
                known.setdefault(live, []).append(fixed)
            _score_draft(drafted, info.draft)
            if counts is not None:
                counts.drafted += info.draft.shape.nodes
        if group.errors:
            raise ValueError(next(iter(group.errors.values())))
        for live in group.sequences:
            p = _plain_probabilities(target, live, applied)
            _add(mode, p, likeliest(p), live.emitted)
            if live in known:
                there = p[[parent.position for parent in known[live]]]
                f = torch.stack([parent.function(row) for parent, row in zip(known[live], there, strict=True)])
                _add(towards, there, f, [live.emitted[parent.position] for parent in known[live]])
            tick(len(live.emitted))
    scores = {"towards the draft": towards, "mode": mode, "draft": drafted}
    return {name: score for name, score in scores.items() if score.tokens}


def _fixed(info: StepInfo) -> list[tuple[SequenceState, _Known]]:
    """Return, for each tree with children of the root, q at the root or the drafted tokens."""
    draft, shape, parents = info.draft, info.draft.shape, []
    for root, live in enumerate(info.sequences):
        children = shape.children[root] - shape.roots
        if len(children):
            q = None if draft.q is None or draft.q_row is None else draft.q[int(draft.q_row[root])].cpu()
            position = info.context[root] - len(live.request.tokens)
            parents.append((live, _Known(position, q, [] if q is not None else draft.token[children].tolist())))
    return parents


def likeliest(p: Tensor) -> Tensor:  # [n, V] -> [n, V]
    """Return 1 for the token with the largest probability of each row, 0 for others."""
    return torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).double()


def _plain_probabilities(target: Target, live: SequenceState, applied: AppliedConstraint | None) -> Tensor:
    """Return p for each emitted token, by one forward over the whole text, ``[n, V]`` float64."""
    first = len(live.request.tokens)
    logits = target.plain_logits(live.tokens[:-1], first)
    texts, sampling = [live.tokens[: first + row] for row in range(len(logits))], [live.request.sampling]
    histories = TextHistories.of(texts, [first] * len(texts), sampling, logits.shape[-1], logits.device)
    mask: Tensor | None = None
    potential: list[TokenWeights | None] = []
    if applied is not None and applied.on_target:
        state, each = conditioned(applied, target)[0].constraint.start(live.request), []
        for token in live.emitted:
            bits = state.mask()
            each.append(full_mask(logits.shape[-1]) if bits is None else bits)
            potential.append(state.potential())
            if token not in live.request.stop:
                state.advance(token)
        mask = torch.from_numpy(unpack(np.array(each), logits.shape[-1])).to(logits.device)
    allowed = None if any(weights is not None for weights in potential) else mask
    p = logits_to_probs(logits, sampling, None if histories is None else histories.here(), allowed)
    condition_(p, potential)
    return p.double().cpu()


def _add(score: Score, p: Tensor, f: Tensor, tokens: Sequence[int]) -> None:
    """Add f(x) for tokens ``[n]`` with probabilities p and functions f, both ``[n, V]``."""
    p = p / p.sum(-1, keepdim=True)  # in float32 the sum is off by rounding, always in one direction
    mean = (p * f).sum(-1)
    variance = (p * (f - mean[:, None]) ** 2).sum(-1)
    score.add(f[range(len(tokens)), list(tokens)].numpy(), mean.numpy(), variance.numpy())


def _score_draft(score: Score, draft: Draft) -> None:
    """Add whether each sampled draft token has the largest q given its earlier siblings; nothing for other drafts."""
    if draft.q is None or draft.q_row is None or not draft.shape.nodes or "deterministic" in draft.ways:
        return
    shape, token = draft.shape, draft.token.cpu()
    q = draft.q[torch.from_numpy(draft.q_row[shape.parent]).to(draft.q.device)].double().cpu()
    if draft.ways != {"iid"}:
        for children in shape.children:
            for rank, child in enumerate(children - shape.roots):
                q[child, token[torch.from_numpy(children[:rank] - shape.roots)]] = 0.0
        q /= q.sum(-1, keepdim=True)
    _add(score, q, likeliest(q), token.tolist())
