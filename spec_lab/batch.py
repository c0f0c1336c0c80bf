"""Live sequences: what has been emitted, what is computed, and how one step is committed."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.cells import Path
from spec_lab.clock import Mark
from spec_lab.draft import Draft
from spec_lab.law import Draws, Sampling
from spec_lab.target import Target


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
    """

    id: int
    name: str
    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"prompt '{self.name}' is empty")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")


@dataclass(eq=False)
class Sequence:
    """One growing sequence of a request.

    Its first ``len(path)`` tokens are computed; the rest, at least one while it lives, are pending.

    Args:
        request: whose it is.
        path: the cells of its computed tokens in the target.
        tokens: prompt and emitted tokens.
        branch: number of the fork; 0 is the first.
        round: forwards it has taken part in. Never runs backwards, so no choice reuses another's noise.
        finish: why it ended: "stop", "length", "context" or "nan"; None while it lives.
        state: what the proposer carries for it.
    """

    request: Request
    path: Path
    tokens: list[int]
    branch: int = 0
    round: int = 0
    finish: str | None = None
    state: Any = None

    @property
    def pending(self) -> list[int]:
        """Tokens committed and not yet computed."""
        return self.tokens[len(self.path) :]

    @property
    def emitted(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def who(self) -> tuple[int, int, int]:
        """(request, branch, round): what keys its choices in this round."""
        return (self.request.id, self.branch, self.round)


@dataclass(eq=False)
class Batch:
    """What a proposer sees: the live sequences, the target that verifies, and where choices come from."""

    target: Target
    sequences: list[Sequence]
    draws: Draws
    broken: dict[int, str] = field(default_factory=dict)
    """Trees of this round that must end, by head, each with what broke; filled by whoever sees it first."""
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


def by_row(samplings: Seq[Sampling], tree: np.ndarray) -> list[Sampling]:
    """Each row's sampling parameters, given those of the trees; just one for all rows where they agree."""
    first = samplings[0]
    return [first] if all(s == first for s in samplings[1:]) else [samplings[head] for head in tree]


@dataclass(frozen=True)
class Committed:
    """What one sequence got in one round.

    Args:
        path: rows of the accepted nodes, from the head down.
        accepted: tokens accepted, before cuts.
        emitted: tokens emitted, before cuts: accepted and the one after them.
        accepted_kept: accepted tokens left after stop tokens and limits.
        emitted_kept: likewise of all emitted.
    """

    path: list[int]
    accepted: int
    emitted: int
    accepted_kept: int
    emitted_kept: int


def commit(batch: Batch, draft: Draft, slots: Seq[np.ndarray], row: np.ndarray, token: np.ndarray) -> list[Committed]:
    """Append what was accepted and emitted; keep the accepted nodes' cells, drop the others.

    Stop tokens and limits cut here, inside an accepted path as well, and never touch verification. A broken tree gets
    nothing and its sequence ends.

    Args:
        slots: for each tree the cells its nodes hold, in row order.
        row: ``[B]`` where each accepted path ends.
        token: ``[B]`` the token emitted there.
    """
    cells, shape = batch.target.lm.cells, draft.shape
    drafted = draft.token.tolist()
    done = []
    for tree, sequence in enumerate(batch.sequences):
        if tree in batch.broken:
            path, emitted, kept, sequence.finish = [], [], 0, "nan"
        else:
            path = shape.path(int(row[tree]))
            emitted = [drafted[node - shape.heads] for node in path] + [int(token[tree])]
            kept, sequence.finish = _cut(sequence, emitted, batch.target.context)
        sequence.tokens += emitted[:kept]
        accepted = min(kept, len(path))
        if shape.nodes:
            held = slots[tree]
            places = shape.places[np.array(path[:accepted], dtype=np.int64)]
            cells.keep(sequence.path, held[places])
            rejected = np.ones(len(held), dtype=bool)
            rejected[places] = False
            cells.drop(sequence.path, held[rejected])
        sequence.round += 1
        done.append(Committed(path, len(path), len(emitted), accepted, kept))
    return done


def _cut(sequence: Sequence, emitted: list[int], context: int) -> tuple[int, str | None]:
    """How many of the emitted tokens stay, and why the sequence ends there, if it does."""
    request = sequence.request
    length = request.max_new_tokens - (len(sequence.tokens) - len(request.tokens))
    room = context - len(sequence.tokens)
    kept = min(len(emitted), length, room)
    if request.stop:
        for place, token in enumerate(emitted[:kept]):
            if token in request.stop:
                return place + 1, "stop"
    if kept == length:
        return kept, "length"
    return kept, "context" if kept == room else None
