"""Broken verifiers, proposers, draws and loops, as found in public code, each with the check that must kill it.

They are small patches of the real code or wrappers around it, and go through ``certify`` as a correct pair does.
``python -m tests.distributions.mutants > experiments/exactness/mutants.csv`` writes their table.
"""

from __future__ import annotations

import csv
import inspect
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from textwrap import dedent
from typing import Any, Literal, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import spec_lab.decode.commit
import spec_lab.propose.grower
from experiments.exactness.rules import HSD
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.probabilities import logits_to_probs
from spec_lab.core.randomness import Draws, Key, Purpose
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation, Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.propose import Proposer
from spec_lab.tasks.certify import exact
from spec_lab.tasks.certify.certificate import Control, prove
from spec_lab.tasks.certify.exact import reference
from spec_lab.tasks.certify.instances import LOOPS, PLAIN, Instance
from spec_lab.tasks.certify.outputs import EXACT
from spec_lab.tasks.certify.sampled import JOINT, joint
from spec_lab.tasks.certify.significance import chi_square
from spec_lab.tasks.certify.toy_models import PROMPT, RandomToy, code, logits
from spec_lab.verify import Lenient, Token, Traversal, Verdict, Verifier
from spec_lab.verify.rejection import Rejection, recursive_rejection
from spec_lab.verify.siblings import EVERY_DRAW, excess_
from tests.distributions import twin
from tests.distributions.tabular import Verify, paths_of

# Patches


def edited(what: Any, old: str, new: str, **others: Any) -> Any:
    """A function or class with one piece of its source replaced, and ``others`` in place of its module's names."""
    source = inspect.getsource(what)
    assert source.count(old) == 1, f"{what.__qualname__} no longer holds: {old}"
    space = vars(sys.modules[what.__module__]) | others
    exec(dedent(source.replace(old, new)), space)
    return space[what.__name__]


@dataclass(frozen=True)
class Broken(Verifier):
    """A wrong verifier of one step that claims to be lossless."""

    verify: Verify
    name = "broken"
    accepts = EVERY_DRAW
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        return self.verify(draft, p)


@dataclass(frozen=True)
class Around(Proposer):
    """The reference proposer, whose draft is changed.

    Args:
        change: maps a batch and the reference's ``propose`` to a draft.
        drawn: as stated; ``really``: as drawn.
    """

    change: Callable[[Batch, Callable[[Batch], Draft]], Draft]
    drawn: Drawn = "iid"
    really: Drawn = "iid"
    inner: Any = None
    name = "broken"

    def toy(self, target: Any, draft: Any, tree: Any) -> Proposer:
        return replace(self, inner=reference(self.really, target, draft, tree))

    @property
    def nodes(self) -> int:
        return self.inner.nodes if self.inner else 1

    def propose(self, batch: Batch) -> Draft:
        return self.change(batch, self.inner.propose)

    @property
    def requires(self) -> Requires:
        return self.inner.requires if self.inner else Requires()

    def init(self, request: Request) -> Any:
        return self.inner.init(request)

    def observe(self, observed: Sequence[Observation]) -> None:
        self.inner.observe(observed)

    def fork(self, state: Any) -> Any:
        return self.inner.fork(state)

    def rewind(self, state: Any, length: int) -> None:
        self.inner.rewind(state, length)

    def close(self, state: Any) -> None:
        self.inner.close(state)


class Inverse:
    """Inverse transform sampling, as ``CounterDraws``, of which every outcome can be enumerated.

    What is known of a key's uniform is an interval; a later choice of the same key weighs what it has in common with
    that. As long as no key is used twice, these are the draws within.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws, self.known, self.asked = draws, {}, 0

    def pick(self, weights: Tensor, keys: list[Key]) -> Tensor:
        rows = weights.double().numpy()
        rows = rows / rows.sum(-1, keepdims=True)
        ends = rows.cumsum(-1)
        chosen = []
        for key, start, end in zip(keys, ends - rows, ends, strict=True):
            low, high = self.known.get(key, (0.0, 1.0))
            common = np.minimum(end, high) - np.maximum(start, low)
            common[common < 1e-15] = 0.0  # rounding
            self.asked += 1
            index = int(self.draws.pick(torch.from_numpy(common[None]), [key._replace(step=self.asked)])[0])
            self.known[key] = max(low, start[index]), min(high, end[index])
            chosen.append(index)
        return torch.tensor(chosen)


@contextmanager
def inverse() -> Iterator[None]:
    """Inverse transform sampling in the exact layer: a key used twice is no error but the same uniform, as when
    sampling."""
    right = exact.side_by_side
    with mock.patch.object(
        exact, "side_by_side", lambda play, *more: right(lambda draws, count: play(Inverse(draws), count), *more)
    ):
        yield


# Residuals and bonuses


class Absolute(Rejection):
    _excess_ = edited(
        Rejection._excess_, "excess_(x,", "absolute_(x,", absolute_=edited(excess_, ".relu_()", ".abs_()")
    )


RESIDUAL_IS_ABSOLUTE = edited(
    Token,
    "recursive_rejection(draft, p)",
    "edited(draft, p)",
    edited=edited(recursive_rejection, "Rejection(draft, p)", "Absolute(draft, p)", Absolute=Absolute),
)()


def residual_without_the_rejected(draft: Draft, p: Tensor) -> Verdict:
    emit = p.clone()
    emit[draft.shape.parent, draft.token] = 0.0
    return Verdict(Token()(draft, p).stop, lambda rows: emit[rows])


def bonus_from(source: Callable[[Draft, Tensor, np.ndarray], Tensor]) -> Verify:
    """A leaf emits from ``source(draft, p, its parents)``."""

    def verify(draft: Draft, p: Tensor) -> Verdict:
        verdict, shape = Token()(draft, p), draft.shape
        leaf = np.bincount(shape.parent, minlength=shape.rows) == 0

        def residual(rows: np.ndarray) -> Tensor:
            parent = shape.parent[rows - shape.roots]
            return torch.where(torch.from_numpy(leaf[rows])[:, None], source(draft, p, parent), verdict.residual(rows))

        return Verdict(verdict.stop, residual)

    return verify


def unscaled(draft: Draft, p: Tensor) -> Verdict:
    rejection = Rejection(draft, p)
    for node in range(draft.shape.nodes):
        rejection.reject(node, 1.0)
    return Verdict(Traversal()(draft, p).stop, rejection.residual)


# What a draft declares


def previous_q(verifier: Verifier) -> Verify:
    """Each position is verified with the q of the previous one; the first with its own."""

    def verify(draft: Draft, p: Tensor) -> Verdict:
        shape, q_row = draft.shape, draft.q_row.copy()
        inner = np.flatnonzero((shape.depth > 0) & (q_row >= 0))
        q_row[inner] = draft.q_row[shape.parent[inner - shape.roots]]
        return verifier(replace(draft, q_row=q_row), p)

    return verify


def other_temperature(draft: Draft, p: Tensor) -> Verdict:
    q = draft.q.square()
    return Token()(replace(draft, q=q / q.sum(-1, keepdim=True)), p)


def swapped(verifier: Verify) -> Verify:
    other: dict[Drawn, Drawn] = {"iid": "without_replacement", "without_replacement": "iid"}
    return lambda draft, p: verifier(replace(draft, drawn=other[draft.drawn]), p)


def twin_token(draft: Draft, p: Tensor) -> Verdict:
    stop, emit = twin.token(draft, p.numpy())
    return Verdict(stop, lambda rows: torch.from_numpy(emit[rows]))


def reranked(key: Literal["p", "q"]) -> Verify:
    """The children of each root sorted by p or q before they are verified. Trees of depth 1."""

    def verify(draft: Draft, p: Tensor) -> Verdict:
        parent = torch.from_numpy(draft.shape.parent)
        source = p if key == "p" else draft.q[torch.from_numpy(draft.q_row[: draft.shape.roots])]
        order = sorted(range(len(parent)), key=lambda c: (int(parent[c]), -float(source[parent[c], draft.token[c]])))
        token = draft.token.clone()
        slots = sorted(range(len(parent)), key=lambda c: int(parent[c]))
        token[slots] = draft.token[order]
        p = p.clone()
        p[draft.shape.roots :][slots] = p[draft.shape.roots :][order]
        verdict = Token()(replace(draft, token=token), p)
        # back to the rows that hold the tokens now verified
        new = np.arange(draft.shape.rows)
        new[draft.shape.roots + np.array(order)] = draft.shape.roots + np.array(slots)
        return Verdict(verdict.stop[new], lambda rows: verdict.residual(new[rows]))

    return verify


@dataclass(frozen=True)
class Likeliest:
    """Draws from the k likeliest tokens only."""

    draws: Draws
    k: int

    def pick(self, weights: Tensor, keys: list[Key]) -> Tensor:
        least = weights.topk(self.k, -1).values[:, -1:]
        return self.draws.pick(torch.where(weights >= least, weights, 0.0), keys)


def truncated(k: int, really: Drawn = "iid") -> Around:
    """Drafts the k likeliest tokens and states the whole softmax, iid."""
    return Around(
        lambda batch, propose: replace(propose(replace(batch, draws=Likeliest(batch.draws, k))), drawn="iid"),
        really=really,
    )


# Dropping what was drawn


def pruned(draft: Draft, rows: np.ndarray) -> Draft:
    """The draft's nodes that are marked in ``rows`` ``[R]``, below marked ones."""
    shape, kept = draft.shape.keep(rows)
    q_row = np.concatenate([draft.q_row[: shape.roots], draft.q_row[shape.roots :][kept]])
    return replace(draft, shape=shape, token=draft.token[torch.from_numpy(kept)], q_row=q_row)


def choosy(batch: Batch, propose: Callable[[Batch], Draft]) -> Draft:
    draft = propose(batch)
    return pruned(draft, np.append(np.ones(draft.shape.roots, dtype=bool), draft.token.numpy() != 0))


def dropped(draft: Draft, p: Tensor) -> Verdict:
    """A token with small q is dropped, and the root emits a "bonus" from p. Chains of one."""
    verdict, roots = Token()(draft, p), draft.shape.roots
    unlikely = (draft.q[np.arange(roots), draft.token] < 0.3).numpy()
    kept = np.where(unlikely, 0.0, verdict.stop[roots:])
    stop = np.concatenate([np.where(unlikely, 1.0, verdict.stop[:roots]), kept])
    alone = torch.from_numpy(np.append(unlikely, unlikely))[:, None]
    return Verdict(stop, lambda rows: torch.where(alone[rows], p[rows], verdict.residual(rows)))


# A grammar


class Grammar(RandomToy):
    """No token follows itself: p is the masked distribution. The draft has no grammar."""

    def probabilities(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        p, q = super().probabilities(length)
        last = np.arange(len(p)) % self.v if length else np.array(PROMPT[-1:])
        legal = torch.from_numpy(last[:, None] != np.arange(self.v))
        return logits_to_probs(torch.from_numpy(logits(p)), [PLAIN], mask=legal).numpy(), q

    def unmasked(self, text: tuple[int, ...]) -> np.ndarray:
        """p ``[V]`` before the mask."""
        return super().probabilities(len(text))[0][code(text, self.v)]


def trimmed(batch: Batch, propose: Callable[[Batch], Draft]) -> Draft:
    """Drafts only what is legal, by dropping what is not: the node above then emits its bonus."""
    draft = propose(batch)
    last = np.concatenate([[sequence.tokens[-1] for sequence in batch.sequences], draft.token.numpy()])
    legal = last[draft.shape.parent] != draft.token.numpy()
    return pruned(draft, np.append(np.ones(draft.shape.roots, dtype=bool), legal))


@dataclass(frozen=True)
class MaskedResidual(Broken):
    """Accepts by p before the mask; the emitted token is masked."""

    verify: Verify = Token()
    world: Grammar = Grammar(11, plain=True)

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        verdict = self.verify(
            draft, torch.from_numpy(np.array([self.world.unmasked(path) for path in paths_of(draft)]))
        )
        return Verdict(verdict.stop, lambda rows: verdict.residual(rows) * (p[rows] > 0))


# Block verification and traversal

WEIGHT = "kept / max(kept + rest, TINY) if rest > 0.0 else 1.0"
WEIGHT_IS_S = edited(Traversal, WEIGHT, "1.0 if above < shape.roots else kept")()
WEIGHT_STAYS = edited(Traversal, WEIGHT, "a[above]")()


def early_break(draft: Draft, p: Tensor) -> Verdict:
    """Accept up to the first i with eta_i > h_i, not to the last with eta_i <= h_i. Chains."""
    verdict, shape = Traversal()(draft, p), draft.shape
    rows = np.stack(shape.trees)  # [B, gamma + 1]
    tail = verdict.stop[rows][:, ::-1].cumsum(-1)[:, ::-1]  # not stopped below
    before = np.concatenate([tail[:, 1:], np.zeros((len(rows), 1))], -1)
    h = np.divide(verdict.stop[rows], 1 - before, out=np.ones_like(tail), where=before < 1)
    stop = np.empty(shape.rows)
    going = np.cumprod(np.concatenate([np.ones((len(rows), 1)), h[:, 1:]], -1), -1)
    stop[rows] = going * np.concatenate([1 - h[:, 1:], np.ones((len(rows), 1))], -1)
    return Verdict(stop, verdict.residual)


# The loop


def shared(purpose: Purpose) -> AbstractContextManager[Any]:
    """A draft's tokens are drawn by the uniforms of another purpose."""

    class Confused:
        DRAFT = purpose

    return mock.patch.object(spec_lab.propose.grower, "Purpose", Confused)


def same_step() -> AbstractContextManager[Any]:
    """A step number that does not advance: each step gets the uniforms of the first."""
    return mock.patch.object(SequenceState, "key", property(lambda s: (s.request.id, s.branch, 0)))


def late_stop(first: int) -> AbstractContextManager[Any]:
    """Stop tokens are searched in ``emitted[first:]``, and nothing is cut after them."""
    right = spec_lab.decode.commit._commit

    def late(sequence: Any, *rest: Any) -> Any:
        asked, before = sequence.request, len(sequence.tokens)
        sequence.request = replace(asked, stop=frozenset())
        done = right(sequence, *rest)
        sequence.request = asked
        if asked.stop.intersection(sequence.tokens[before:][first:]):
            sequence.finish = "stop"
        return done

    return mock.patch.object(spec_lab.decode.commit, "_commit", late)


# The table

Layer = Literal["step", "loop", "seam", "samples"]
"""Killer of a mutant: the enumerated distribution of one step; the enumerated loop; a key that is used twice; or a
chi-square test of texts that the loop sampled."""

TEXTS, ALPHA = 3000, 1e-6
"""Texts sampled, and the p-value that kills."""


class Case(NamedTuple):
    """Where a mutant shows.

    Args:
        drawn: the original's way of drawing.
        tv: the total variation it costs; 1 for a key used twice, which is refused; of samples not stated.
    """

    instance: Instance
    drawn: Drawn
    tv: float


@dataclass(frozen=True, eq=False)
class Mutant:
    """A broken variant, and its original, which passes the same check.

    Args:
        name: as the notes on verification list it.
        how: what is broken.
        layer: what kills it.
        cases: each of them must kill it.
        verifier: the broken verifier; None for the original.
        original: verifier.
        proposer: the broken proposer; None for the reference, drawing as in the case.
        patch: of code that is no argument.
    """

    name: str
    how: str
    layer: Layer
    cases: tuple[Case, ...]
    verifier: Verifier | None = None
    original: Verifier = Token()
    proposer: Around | None = None
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


PINNED = RandomToy(11, plain=True)
WIDE = RandomToy(6, support=4, plain=True)  # no zeros: every token has mass under q
MASKED = Grammar(11, plain=True)
NOISY = Instance(RandomToy(3, plain=True), "1", 3)


def one_step(tree: str, drawn: Drawn, tv: float, world: RandomToy = PINNED) -> Case:
    return Case(Instance(world, tree), drawn, tv)


MUTANTS = [
    Mutant("residual = p", "token emits from p after a rejection", "step", (one_step("1", "iid", 0.12),), Control()),
    Mutant(
        "residual = |p-q|", "token: abs in place of the positive part", "step", (one_step("1", "iid", 0.42),),
        RESIDUAL_IS_ABSOLUTE,
    ),
    Mutant(
        "residual = p minus the rejected token", "token emits from p without the children", "step",
        (one_step("1", "iid", 0.11),), Broken(residual_without_the_rejected),
    ),
    Mutant(
        "q from the previous position", "token reads the q of the row above", "step",
        (one_step("1x1", "iid", 0.142, WIDE),), Broken(previous_q(Token())),
    ),
    Mutant(
        "q from the previous position", "traversal reads the q of the row above", "step",
        (one_step("2x1", "without_replacement", 0.36, WIDE),), Broken(previous_q(Traversal())), Traversal(),
    ),
    Mutant(
        "bonus from one position early, or from q", "a leaf emits from p of its parent", "step",
        (one_step("1x1", "iid", 0.088),), Broken(bonus_from(lambda draft, p, rows: p[rows])),
    ),
    Mutant(
        "bonus from one position early, or from q", "a leaf emits from q of its parent", "step",
        (one_step("1x1", "iid", 0.076),), Broken(bonus_from(lambda draft, p, rows: draft.q[draft.q_row[rows]])),
    ),
    Mutant(
        "block early break", "accepts up to the first test that fails", "step", (one_step("1x1", "iid", 0.023),),
        Broken(early_break), Traversal(),
    ),
    Mutant(
        "block unscaled residual", "(p - q)+ in place of (a p - q)+", "step",
        (one_step("1x1", "iid", 0.0015), one_step("2x1", "without_replacement", 0.0036)), Broken(unscaled), Traversal(),
    ),
    Mutant(
        "block h_i = p_i", "a node's weight stays when it loses a child", "step",
        (one_step("1x1", "iid", 0.022), one_step("2x2", "without_replacement", 0.069)), WEIGHT_STAYS, Traversal(),
    ),
    # which, as rejected siblings have no mass left, is also: q not renormalised after an earlier sibling
    Mutant(
        "with/without replacement swapped", "token verifies as iid what was drawn without", "step",
        (one_step("2", "without_replacement", 0.081), one_step("2", "without_replacement", 0.0566, WIDE)),
        Broken(swapped(Token())),
    ),
    Mutant(
        "with/without replacement swapped", "traversal verifies as iid what was drawn without", "step",
        (one_step("2x1", "without_replacement", 0.081), one_step("2x1", "without_replacement", 0.0566, WIDE)),
        Broken(swapped(Traversal())), Traversal(),
    ),
    Mutant(
        "with/without replacement swapped", "token's twin verifies as without what was drawn iid", "step",
        (one_step("2", "iid", 0.042), one_step("2", "iid", 0.0798, WIDE)), Broken(swapped(twin_token)),
        Broken(twin_token),
    ),
    Mutant(
        "siblings re-ranked", "sorted by q before they are verified", "step", (one_step("3", "iid", 0.19),),
        Broken(reranked("q")),
    ),
    Mutant(
        "siblings re-ranked", "sorted by p before they are verified", "step",
        (one_step("3", "without_replacement", 0.78),), Broken(reranked("p")),
    ),
    Mutant(
        "top-k draft verified with softmax q", "drawn from the two likeliest", "step", (one_step("1x1", "iid", 0.119),),
        proposer=truncated(2),
    ),
    Mutant(
        "top-k draft verified with softmax q", "a greedy chain", "step", (one_step("1x1", "iid", 0.136),),
        proposer=truncated(1),
    ),
    Mutant(
        "top-k draft verified with softmax q", "siblings are the likeliest tokens", "step",
        (one_step("2", "without_replacement", 0.23),), proposer=truncated(1, "without_replacement"),
    ),
    Mutant(
        "q at another temperature", "verified with q at half the temperature", "step", (one_step("1", "iid", 0.074),),
        Broken(other_temperature),
    ),
    Mutant(
        "sampled token dropped for its value", "where q is below 0.3; the root emits from p", "step",
        (one_step("1", "iid", 0.1),), Broken(dropped),
    ),
    Mutant(
        "sampled token dropped for its value", "no node holds token 0", "step", (one_step("2x1", "iid", 0.124),),
        proposer=Around(choosy),
    ),
    Mutant(
        "grammar trim then bonus", "illegal drafted tokens are dropped, the node above emits from p", "step",
        (one_step("1x1", "iid", 0.048, MASKED),),
        proposer=Around(trimmed),
    ),
    Mutant(
        "mask on residual only", "accepts by p before the mask", "step", (one_step("1x1", "iid", 0.0176, MASKED),),
        MaskedResidual(world=MASKED),
    ),
    Mutant(
        "lenience 0.99", "accepts with p / (0.99 q)", "step",
        (one_step("1", "iid", 0.0014), one_step("2x1", "without_replacement", 0.0026)), Lenient(0.99), Lenient(1.0),
    ),
    Mutant(
        "traversal a <- S", "in place of S / (S + 1 - a)", "step",
        (one_step("1x1", "iid", 0.02), one_step("2x2", "without_replacement", 0.023)), WEIGHT_IS_S, Traversal(),
    ),
    Mutant(
        "HSD as published", "the whole chain is accepted with the uncapped product of p / q", "step",
        (one_step("1x1", "iid", 0.00207),), HSD(), Traversal(),
    ),
    Mutant(
        "recovery shares draft noise", "the test takes the uniform that drew the token", "loop",
        (Case(NOISY, "iid", 0.25),), patch=lambda: shared(Purpose.STOP),
    ),
    Mutant(
        "recovery shares draft noise", "the residual takes the uniform that drew the token", "loop",
        (Case(NOISY, "iid", 0.229),), patch=lambda: shared(Purpose.EMIT),
    ),
    Mutant(
        "noise reused across steps", "a step number that does not advance", "loop", (Case(NOISY, "iid", 0.276),),
        patch=same_step,
    ),
    Mutant(
        "grammar trim then bonus", "illegal drafted tokens are dropped, the node above emits from p", "loop",
        (Case(Instance(Grammar(8, support=2, plain=True), "1x1", 2), "iid", 0.051),), proposer=Around(trimmed),
    ),
    Mutant(
        "tokens after EOS", "nothing is cut behind a stop token", "loop", (Case(LOOPS[4], "iid", 0.201),),
        patch=lambda: late_stop(0),
    ),
    Mutant(
        "tokens after EOS", "only the last token of a step is looked at", "loop", (Case(LOOPS[4], "iid", 0.201),),
        patch=lambda: late_stop(-1),
    ),
    Mutant(
        "recovery shares draft noise", "the test takes the uniform that drew the token", "seam",
        (Case(LOOPS[0], "iid", 1.0),), patch=lambda: shared(Purpose.STOP),
    ),
    Mutant(
        "recovery shares draft noise", "the residual takes the uniform that drew the token", "seam",
        (Case(LOOPS[0], "iid", 1.0),), patch=lambda: shared(Purpose.EMIT),
    ),
    Mutant(
        "noise reused across steps", "a step number that does not advance", "seam",
        (Case(LOOPS[0], "iid", 1.0),), patch=same_step,
    ),
    Mutant("residual = p", "token emits from p after a rejection", "samples", (Case(JOINT, "iid", 0.0),), Control()),
    Mutant("lenience 0.9", "accepts with p / (0.9 q)", "samples", (Case(JOINT, "iid", 0.0),), Lenient(0.9)),
    Mutant(
        "top-k draft verified with softmax q", "drawn from the two likeliest", "samples", (Case(JOINT, "iid", 0.0),),
        proposer=truncated(2),
    ),
    Mutant("noise reused across steps", "a step number that does not advance", "samples", (Case(JOINT, "iid", 0.0),),
           patch=same_step),
]  # fmt: skip


def identify(mutant: Mutant) -> str:
    """Layer and name, and how it is broken where another mutant shares both."""
    several = Counter((other.layer, other.name) for other in MUTANTS)[mutant.layer, mutant.name] > 1
    return f"{mutant.layer}: {mutant.name}" + (f" ({mutant.how})" if several else "")


# What kills them


class Kill(NamedTuple):
    """The result of a check.

    Args:
        tv: total variation; of samples the p-value.
        where: the difference in words; None if there is none.
    """

    tv: float
    where: str | None


@cache
def seen(mutant: Mutant) -> list[Kill]:
    """The results of the mutant's layer, case by case."""
    verifier = mutant.verifier or mutant.original
    with mutant.patch():
        return [check(mutant.layer, case.instance, mutant.proposer or case.drawn, verifier) for case in mutant.cases]


@cache
def original(layer: Layer, instance: Instance, drawn: Drawn, verifier: Verifier) -> Kill:
    """The result of the same check of the original."""
    return check(layer, instance, drawn, verifier)


def check(layer: Layer, instance: Instance, drafts: Proposer | Drawn, verifier: Verifier) -> Kill:
    if layer == "samples":
        p = p_value(drafts, verifier, instance)
        where = f"chi-square of {TEXTS} texts: p < {ALPHA:g} ({instance.name})"
        return Kill(p, where if p < ALPHA else None)
    with inverse() if layer == "loop" else nullcontext():
        proof = prove(drafts, verifier, [instance])
    (finding,) = proof.findings
    assert abs(finding.mass - 1) < EXACT and proof.drafts == ("reference" if isinstance(drafts, str) else "proposer")
    return Kill(finding.tv, finding.wrong and f"{finding.wrong} ({instance.name})")


def p_value(drafts: Proposer | Drawn, verifier: Verifier, instance: Instance = JOINT) -> float:
    """The p-value of sampled texts under the target distribution."""
    texts, p = joint(drafts, verifier, TEXTS, seed=0, instance=instance, watched=False)
    return chi_square(np.bincount(texts, minlength=len(p)), p).p_value


def table() -> str:
    """The text of ``experiments/exactness/mutants.csv``."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("mutant", "how", "killed_by", "tv", "where"))
    for mutant in MUTANTS:
        kill = seen(mutant)[-1]
        tv = f"{kill.tv:.2g}" if mutant.layer in ("step", "loop") else ""
        rows.writerow((mutant.name, mutant.how, mutant.layer, tv, kill.where or "survives"))
    return text.getvalue()


if __name__ == "__main__":
    print(table(), end="")
