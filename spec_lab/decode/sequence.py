"""Sequences while they are decoded, and what a proposer sees of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch

from spec_lab.core.clock import Clock
from spec_lab.core.history import TextHistories
from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import Draws
from spec_lab.core.readback import Readback
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape
from spec_lab.models.target import Target
from spec_lab.runners.runner import KVSequence
from spec_lab.text.detokenizer import Stream

ORIGINS = {
    "accepted": "drafted and accepted",
    "forced": "the only token that its constraint allows, drafted or not",
    "recovered": "sampled from the residual distribution after a rejection",
    "bonus": "sampled from the target distribution after the accepted tokens, none rejected",
}
"""Where a token comes from."""


@dataclass(eq=False)
class SequenceState:
    """One growing sequence of a request.

    Its first ``len(kv)`` tokens are computed; the rest, at least one while it is decoded, are pending.

    Args:
        request: that it belongs to.
        kv: the KV cache of its computed tokens in the target.
        tokens: prompt and emitted tokens.
        lineage: which fork of which fork it is; empty for the request's first sequence.
        step: steps that have sampled for it, those before a fork included. It never decreases, so that no choice
            reuses another's uniform.
        finish: why it ended (``request.FINISHES``); None until then.
        state: the proposer's.
        constraint: its constraint's state after its last token; None where nothing constrains it.
        stream: its detokenizer; None where nobody needs text. ``events`` are those that nobody has read yet.
        born: tokens it had when it was forked (of the prompt, if it was not), less those removed since.
        spent: tokens it has emitted, removed ones included.
        forks: how often it was forked.
        unwatched: why an observing constraint failed; the output continues without it. Empty for nothing.
        violated: tokens emitted before the first that an observing constraint does not allow; None for none.
        logprobs: of each emitted token, where the request needs them.
        origins: where each emitted token comes from (``ORIGINS``), where a stream reads it.
        kept: False where its constraint, asked once the whole request had finished, chose others (``Ended``).
        reused: positions whose keys and values came from a prefix cache when it was admitted first.
        prefill: whether the next step in which it is decoded computes its prompt, or all that a preemption freed.
    """

    request: Request
    kv: KVSequence
    tokens: list[int]
    lineage: tuple[int, ...] = ()
    step: int = 0
    finish: str | None = None
    state: Any = None
    constraint: Any = None
    stream: Stream | None = None
    events: list[Any] = field(default_factory=list)
    born: int = 0
    spent: int = 0
    forks: int = 0
    unwatched: str = ""
    violated: int | None = None
    logprobs: list[float] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    kept: bool = True
    reused: int = 0
    prefill: bool = True

    def unwatch(self, why: str) -> None:
        """Continue without its constraint, which only observes or helps to draft, and has failed."""
        self.constraint, self.unwatched = None, why

    @property
    def pending(self) -> list[int]:
        """Tokens committed and not yet computed."""
        return self.tokens[len(self.kv) :]

    @property
    def emitted(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.tokens) :]

    @cached_property
    def branch(self) -> int:
        """Names the fork in the keys of its choices: 0 for the first sequence, a digest of the lineage for others."""
        return int.from_bytes(blake2b(repr(self.lineage).encode(), digest_size=7).digest()) if self.lineage else 0

    @property
    def key(self) -> tuple[int, int, int]:
        """(request, branch, step): what keys its choices in this step."""
        return (self.request.id, self.branch, self.step)


class DraftMasks(Protocol):
    """Token masks of a constraint below the nodes of a draft that still grows."""

    @property
    def forces(self) -> bool:
        """Whether forced tokens are appended to the output without a forward, and should be drafted without one."""
        ...

    def __call__(self, shape: Shape, rows: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Return the tokens allowed below ``rows`` ``[n]`` of a forest with tokens ``token`` ``[M]``: ``[n, V]`` bool.

        Ask level by level, roots first. Where a row is all False nothing can be drafted.
        """
        ...

    def view(self, roots: Sequence[int]) -> DraftMasks:
        """The masks for another forest, below these of the roots: a hybrid's parts have a forest each.

        What they spend of a budget is spent for all views.
        """
        ...


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of one step, as a proposer sees them.

    Args:
        target: verifies.
        sequences: ``[B]`` those that are drafted for.
        draws: every random choice of the draft comes from here.
        clock: records the phase "propose_forward": the calls of a draft model or of heads.
        draft_masks: what a constraint allows the draft to draw; None without one. A proposer need not use it.
        read: reads tensors on the host, once for each level that is drafted.
        limits: ``[B]`` what a policy allows; empty without one.
        stop: the policy's rule that stops drafts early, with the thresholds of ``limits``; None without one.
        measure: what a policy measures at each row before its children are drawn, ``[n]`` from draft probabilities
            ``[n, V]`` at temperature 1 below what a constraint allows; kept as ``Draft.measured``. None for nothing.
        deferred: whether a draft may stay on the device until the step reads its tokens (``Draft.late``).
        recorded: whether drafted tokens are recorded, so that a draft states ``greedy_q``.
    """

    target: Target
    sequences: Sequence[SequenceState]
    draws: Draws
    clock: Clock = field(default_factory=Clock)
    draft_masks: DraftMasks | None = None
    read: Readback = field(default_factory=Readback)
    limits: Sequence[Limit] = ()
    stop: StopRule | None = None
    measure: Callable[[torch.Tensor], torch.Tensor] | None = None
    deferred: bool = False
    recorded: bool = False

    @property
    def device(self) -> torch.device:
        """Where draft tokens belong."""
        return self.target.lm.device

    def room(self) -> list[int]:
        """Return for each sequence the largest depth that the context and a policy allow."""
        room = [self.target.context - len(sequence.tokens) for sequence in self.sequences]
        if not self.limits:
            return room
        return [
            most if limits.depth is None else min(most, limits.depth)
            for most, limits in zip(room, self.limits, strict=True)
        ]


def text_histories(
    sequences: Sequence[SequenceState], samplings: Sequence[Sampling], vocabulary: int, device: torch.device
) -> TextHistories | None:
    """Return the histories of sequences that are sampled by ``samplings``. See ``TextHistories.of``."""
    texts = (sequence.tokens for sequence in sequences)
    prompts = (len(sequence.request.tokens) for sequence in sequences)
    return TextHistories.of(texts, prompts, samplings, vocabulary, device)


def by_row(samplings: Sequence[Sampling], tree: np.ndarray) -> list[Sampling]:
    """Each row's sampling parameters, given those of the trees; just one for all rows where they agree."""
    first = samplings[0]
    return [first] if all(s == first for s in samplings[1:]) else [samplings[root] for root in tree]
