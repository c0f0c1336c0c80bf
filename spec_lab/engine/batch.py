"""Live sequences: what has been emitted, what is computed, and how one step is committed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Mark
from spec_lab.core.draft import Shape
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import Draws
from spec_lab.engine.kv_cache import Path
from spec_lab.models.target import Target
from spec_lab.text.detokenizer import Stream

FINISHES = {
    "stop": "a stop token or stop string",
    "constraint": "its constraint ended it",
    "length": "max_new_tokens",
    "context": "the model's context is full",
    "runaway": "too many tokens were taken back",
    "nan": "logits that are NaN or infinite",
    "stuck": "its constraint cannot go on",
}
"""Why a sequence ends. The last two are errors."""

BROKEN = ("nan", "stuck")

ORIGINS = {
    "accepted": "drafted, and accepted",
    "forced": "its constraint left no other, drafted or not",
    "emitted": "chosen after the accepted ones",
}
"""Where a token came from."""


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Args:
        id: keys the request's randomness; unique in a run.
        name: as prompts and records call it.
        tokens: the prompt, at least one token.
        sampling: how to sample.
        max_new_tokens: most tokens to emit.
        stop: tokens that end the text; the one that stops it is kept.
        constraint: the request's own pattern, schema or grammar; empty: the constraint's.
        stop_strings: strings that end the text, which then ends before them; their tokens are kept.
        min_new_tokens: before that many no stop string ends the text. (Stop tokens are a constraint's: ``AtLeast``.)
        banned_strings: those that a constraint takes back; text that may become one is held back.
        healed: what token healing took off the prompt's end, which the output begins with; no part of its text.
        logprobs: whether each token's log-probability is wanted: under the model's own law, temperature 1, given what
            the constraint allows.
    """

    id: int
    name: str
    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    stop: frozenset[int] = frozenset()
    constraint: str = ""
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    banned_strings: tuple[str, ...] = ()
    healed: bytes = b""
    logprobs: bool = False

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"prompt '{self.name}' is empty")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")

    def check_fits(self, target: Target) -> None:
        """Refuse a prompt that the target cannot continue.

        Raises:
            ValueError: no room in the context; a token id that the target does not have.
        """
        if len(self.tokens) >= target.context:
            raise ValueError(
                f"prompt '{self.name}' has {len(self.tokens)} tokens; the context holds "
                f"{target.context}, one of them to be emitted: shorten the prompt"
            )
        if wrong := [token for token in self.tokens if not 0 <= token < target.vocabulary]:
            raise ValueError(
                f"prompt '{self.name}' holds the token id {wrong[0]}, but the target has {target.vocabulary} tokens, "
                "from 0: encode the prompt with the target's own tokenizer"
            )


@dataclass(eq=False)
class SequenceState:
    """One growing sequence of a request.

    Its first ``len(path)`` tokens are computed; the rest, at least one while it lives, are pending.

    Args:
        request: whose it is.
        path: the cells of its computed tokens in the target.
        tokens: prompt and emitted tokens.
        lineage: which fork of which fork it is; empty for the request's first sequence.
        round: forwards it has taken part in, those before a fork included. Never runs backwards, so no choice reuses
            another's noise.
        finish: why it ended (``FINISHES``); None while it lives.
        state: what the proposer carries for it.
        constraint: what binds it, a state at its end; None where nothing does.
        stream: reads it as text; None where nobody needs that. ``events`` are what it said and nobody has taken yet.
        born: tokens it had when it was forked (of the prompt, if it was not), less what was taken back of them since.
        spent: tokens it has emitted, those taken back included.
        forks: how often it was forked.
        unwatched: why an observing constraint could not go on; the output goes on without it. Empty for nothing.
        violated: tokens emitted when the first one came that an observing constraint does not allow; None for none.
        logprobs: of each emitted token, where the request wants them.
        origins: where each emitted token came from (``ORIGINS``), where a stream reads it.
        kept: False where its constraint, asked once the whole request had finished, chose others (``Ended``).
    """

    request: Request
    path: Path
    tokens: list[int]
    lineage: tuple[int, ...] = ()
    round: int = 0
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

    def unwatch(self, why: str) -> None:
        """Its constraint, which only observes or helps to draft, cannot go on."""
        self.constraint, self.unwatched = None, why

    @property
    def pending(self) -> list[int]:
        """Tokens committed and not yet computed."""
        return self.tokens[len(self.path) :]

    @property
    def emitted(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.tokens) :]

    @cached_property
    def branch(self) -> int:
        """Names the fork in the keys of its choices: 0 for the first sequence, a digest of the lineage for others."""
        return int.from_bytes(blake2b(repr(self.lineage).encode(), digest_size=7).digest()) if self.lineage else 0

    @property
    def who(self) -> tuple[int, int, int]:
        """(request, branch, round): what keys its choices in this round."""
        return (self.request.id, self.branch, self.round)


@dataclass(frozen=True)
class Ended:
    """A sequence that has finished, for a constraint that keeps some sequences of a request and not others.

    Args:
        lineage, finish: as of ``SequenceState``.
        tokens: emitted.
        logprobs: of these tokens; empty where the request wants none.
    """

    lineage: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str


class Guide(Protocol):
    """What may be drafted below nodes under a constraint."""

    @property
    def forces(self) -> bool:
        """Whether what is forced costs nothing: it is fast-forwarded in the output, and should be in drafts."""
        ...

    def __call__(self, shape: Shape, rows: np.ndarray, token: np.ndarray) -> np.ndarray:
        """What may be drawn below ``rows`` ``[n]`` of a forest that holds ``token`` ``[M]`` so far: ``[n, V]`` bool.

        Ask level by level, heads first. Where a row is all False nothing can be drafted.
        """
        ...


@dataclass(eq=False)
class Batch:
    """What a proposer sees: the live sequences, the target that verifies, and where choices come from."""

    target: Target
    sequences: list[SequenceState]
    draws: Draws
    made: Counter[int] = field(default_factory=Counter)
    """Forks made so far, by the request's id."""
    broken: dict[int, str] = field(default_factory=dict)
    """Trees of this round that must end, by head, each with what broke; filled by whoever sees it first."""
    guide: Guide | None = None
    """What a constraint lets the draft draw; None where none binds it. Proposers may use it, and need not."""
    marks: list[tuple[Mark, Mark]] = field(default_factory=list)
    """(start, end) of this round's calls of a draft model or heads; filled by the proposer."""

    @property
    def device(self) -> torch.device:
        """Where drafts' tokens belong."""
        return self.target.lm.device

    def room(self) -> list[int]:
        """For each sequence the deepest node whose position the context still holds."""
        return [self.target.context - len(sequence.tokens) for sequence in self.sequences]


def healed(batch: Batch, tree: np.ndarray, logits: Tensor, whose: str) -> Tensor:
    """The logits ``[n, V]``; trees with a row that has no law are marked broken and these rows zeroed in place.

    -inf is no mass, and well as long as some token has a finite logit. NaN, +inf or a row of only -inf is broken.

    Args:
        tree: ``[n]`` to which each row belongs.
        whose: logits they are, for the message.
    """
    if math.isfinite(float(logits.sum())):  # so are all its parts
        return logits
    bad = ~torch.isfinite(logits.amax(-1))  # NaN wins, then +inf; -inf is the largest only of its own kind
    for head in set(tree[bad.cpu().numpy()].tolist()):
        batch.broken[head] = f"the {whose}'s logits are NaN or infinite"
    return logits.masked_fill_(bad[:, None], 0.0)


def without_name(request: Request, why: str) -> str:
    """Return an error's text without the leading "request 'NAME':", for messages that begin with the name anyway."""
    return why.removeprefix(f"request '{request.name}'").removeprefix(":").lstrip()


def by_row(samplings: Seq[Sampling], tree: np.ndarray) -> list[Sampling]:
    """Each row's sampling parameters, given those of the trees; just one for all rows where they agree."""
    first = samplings[0]
    return [first] if all(s == first for s in samplings[1:]) else [samplings[head] for head in tree]
