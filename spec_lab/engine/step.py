"""One decoding step: the only place where proposer, runner, constraint, verifier and commit meet.

Prefill, chains, trees, batches, the autoregressive baseline, calibration, certification and the studies all run through
``step``, with other parts plugged in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain import Masks, StepConstraint
from spec_lab.constrain.applied import StepMasks, open_mask
from spec_lab.core.clock import Clock, Mark, Span
from spec_lab.core.draft import Draft, Shape
from spec_lab.core.draft import empty as no_draft
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import argmax, logits_to_probs, one_hot_, probs_dtype
from spec_lab.core.randomness import Draws
from spec_lab.engine.commit import Commit, Committed, Decision, act, commit
from spec_lab.engine.proposer import Observation, Proposer
from spec_lab.engine.runner import Output
from spec_lab.engine.sequence import Batch, SequenceState, by_row, finite
from spec_lab.models.target import Target
from spec_lab.verify import Choice, Verdict, Verifier, check_draft, choose

PHASES = ("propose", "mask", "target", "wait", "probabilities", "verify", "commit")
"""What a step's time is split into, in order: masks are computed before the target's forward, or waited for after it.
"""

Chunk = tuple[SequenceState, int]
"""A sequence whose prompt is computed in parts, and how many of its pending tokens this step computes."""

Choose = Callable[[Verdict, Shape, Tensor, Draws, Sequence[tuple[int, int, int]]], Choice]
"""Samples a verdict. See ``verify.choose``."""


@dataclass(eq=False)
class Memory:
    """Memory for target probabilities, used again in every step. (Fresh megabytes cost more than the arithmetic.)"""

    scratch: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def like(self, logits: Tensor) -> Tensor:
        """``[>= R, V]``, in the dtype of probabilities."""
        rows, width = logits.shape
        if len(self.scratch) < rows or self.scratch.shape[1] != width:
            self.scratch = torch.empty(rows, width, dtype=probs_dtype(logits), device=logits.device)
        return self.scratch


@dataclass(frozen=True, eq=False)
class Parts:
    """What a step is made of.

    Args:
        target: its runner computes, its context bounds.
        proposer: drafts; the null proposer makes this autoregressive decoding.
        verifier: gives each step's distribution of outcomes.
        draws: where every random choice comes from.
        constraint: None for none.
        choose: samples the verdict; studies that sample nothing replace it.
        commit: applies what was chosen; studies that follow a given text replace it.
        made: forks made so far, by the request's id.
        memory: for probabilities.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    draws: Draws
    constraint: StepConstraint | None = None
    choose: Choose = choose
    commit: Commit = commit
    made: Counter[int] = field(default_factory=Counter)
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, eq=False)
class StepInfo:
    """What one step did: a row of the table ``rounds``, and for each sequence a row of the table ``steps``.

    Args:
        sequences: ``[B]`` those that took part with a tree.
        draft: what was drafted.
        committed: ``[B]`` what each sequence got.
        context: ``[B]`` tokens of each sequence when the step began; ``pending``: of them, those not computed.
        prefill: ``[B]`` whether the step computed the sequence's prompt, or the rest of it.
        expected: ``[B]`` expected accepted tokens, exact, forced ones left out.
        expected_emitted: ``[B]`` expected emitted tokens, likewise; forced ones that are appended later left out.
        given: what the expectation is conditional on: the "draft", or its "noise" as well.
        empty: ``[B]`` whether rounding left nothing of the residual distribution.
        attended: attended positions.
        chunks: sequences that only computed a part of their prompt, and how many tokens.
        errors: what broke, by sequence.
        clock: of the target's runner; reads the marks.
        began, ended: moments.
        spans: the phases, and the module calls of target and proposer.
        mask_busy: seconds spent on masks, wherever they ran; ``draft_masks``: of them, seconds inside propose.
    """

    sequences: list[SequenceState]
    draft: Draft
    committed: list[Committed]
    context: list[int]
    pending: list[int]
    prefill: list[bool]
    expected: np.ndarray
    expected_emitted: np.ndarray
    given: str
    empty: np.ndarray
    attended: int
    chunks: list[Chunk]
    errors: dict[SequenceState, str]
    clock: Clock
    began: Mark
    ended: Mark
    spans: list[Span]
    mask_busy: float = 0.0
    draft_masks: float = 0.0

    def slim(self) -> StepInfo:
        """The step without its draft distributions, which would fill the memory (V numbers for every node)."""
        if self.draft.q is None:
            return self
        return replace(self, draft=Draft(self.draft.shape, self.draft.token, computed_only=self.draft.computed_only))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, of the module calls inside propose and target, of masks, and of the whole step.

        A phase lasts from the end of the one before it, so that the phases add up to the whole step. On a GPU, call
        it only after ``clock.synchronise``.
        """
        found = dict.fromkeys((*PHASES, "target_forward", "propose_forward"), 0.0)
        before = self.began
        for name, start, end in self.spans:
            if name in PHASES:
                start, before = before, end
            found[name] += self.clock.seconds(start, end)
        found["commit"] += self.clock.seconds(before, self.ended)
        found["propose"] -= self.draft_masks
        found["mask_busy"] = self.mask_busy
        found["mask_wait"] = self.draft_masks + found.pop("mask") + found.pop("wait")
        found["whole"] = self.clock.seconds(self.began, self.ended)
        return found

    def row(self) -> dict[str, Any]:
        """Columns of ``rounds``."""
        return {
            "prefill": all(self.prefill),
            "live": len(self.sequences),
            "nodes": self.draft.shape.nodes,
            "cells": self.attended,
            "computed_only": int(self.draft.computed_only_nodes.sum()),
            "prefill_chunks": len(self.chunks),
            **self.seconds(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Columns of ``steps``, for each sequence."""
        shape, rows, extra = self.draft.shape, [], self.draft.computed_only_nodes
        for tree, (sequence, got) in enumerate(zip(self.sequences, self.committed, strict=True)):
            own, stop = shape.trees[tree], got.path[-1] if got.path else tree
            broken = sequence in self.errors and not got.tokens
            rows.append(
                {
                    "request": sequence.request.id,
                    "prefill": self.prefill[tree],
                    "pending": self.pending[tree],
                    "forced": got.forced,
                    "nodes": len(own) - 1,
                    "computed_only": int(extra[tree]),
                    "legal": got.legal,
                    "depth": int(shape.depth[own].max()),
                    "path": list(shape.ranks(stop)),
                    "stop_had_children": len(shape.children[stop]) > 0,
                    "accepted": len(got.path),
                    "emitted": got.count(),
                    "accepted_kept": got.count(accepted=True, kept=True),
                    "emitted_kept": got.count(kept=True),
                    "forced_accepted": got.count(accepted=True, forced=True),
                    "forced_accepted_kept": got.count(accepted=True, forced=True, kept=True),
                    "forced_emitted": got.count(forced=True),
                    "forced_emitted_kept": got.count(forced=True, kept=True),
                    "taken_back": got.removed,
                    "forks": len(got.forks),
                    "expected_accepted": float(self.expected[tree]),
                    "expected_emitted": float(self.expected_emitted[tree]),
                    "expected_kind": "" if broken else "exact" if self.given == "draft" else self.given,
                    "empty_residual": bool(self.empty[tree]),
                    "finish": "",
                    "context": self.context[tree],
                }
            )
        return rows


@torch.inference_mode()
def step(sequences: Sequence[SequenceState], parts: Parts, chunks: Sequence[Chunk] = ()) -> StepInfo:
    """One forward of the target: draft below every sequence, verify, and commit what was chosen.

    Args:
        sequences: each with at least one pending token.
        parts: what the step is made of.
        chunks: further sequences of which only a part of the prompt is computed, in the same forward.

    Raises:
        PartError: the proposer or the verifier raised an error, or returned what cannot be; names it.
        SpanFull: the KV cache cannot grow.
    """
    target, constraint, sequences = parts.target, parts.constraint, list(sequences)
    lm = target.lm
    clock = lm.clock
    clock.take()
    lm.capture(parts.proposer.requires.hidden)  # in every step: parts with other needs may take turns
    pending = [sequence.pending for sequence in sequences]
    context, prefill = [len(one.tokens) for one in sequences], [one.step == 0 for one in sequences]
    computed = [len(one.kv) for one in sequences]
    began = clock.mark()

    if not sequences:
        return _only_chunks(parts, chunks)

    # 1. Draft.
    draft_masks = None
    with clock.phase("propose"):
        if constraint is not None:
            draft_masks = constraint.draft_masks([one.constraint for one in sequences])
        if constraint is None or constraint.supports_drafts:
            draft = propose(parts, Batch(target, sequences, parts.draws, clock, draft_masks))
        else:
            draft = no_draft(len(sequences), lm.device)
    seconds = 0.0 if draft_masks is None else draft_masks.seconds

    # 2. Masks of the forest, perhaps in a thread beside the forward.
    found: StepMasks | Future[StepMasks] | None = None
    with clock.phase("mask"):
        if constraint is not None:
            draft, found = constraint.masks([one.constraint for one in sequences], draft, draft_masks)

    # 3. The target's forward.
    with clock.phase("target"):
        parts_of_prompts = [(one.kv, one.pending[:count]) for one, count in chunks]
        forest = computed_forest(draft)
        output: Output = lm.run(lm.prepare([one.kv for one in sequences], pending, forest, parts_of_prompts))
        raw = output.logits[: draft.shape.rows]
    with clock.phase("wait"):
        if isinstance(found, Future):
            found = found.result()
    masks = None if found is None else found.masks

    # 4. Target probabilities p.
    on_target = constraint is not None and constraint.applied.on_target
    broken = dict.fromkeys(draft.broken, "nan")
    errors = dict(draft.broken)
    allowed, silent = None, None
    with clock.phase("probabilities"):
        memory = parts.memory.like(raw)
        logits, without = finite(memory[: len(raw)].copy_(raw))
        for tree in set(draft.shape.root[without].tolist()):
            broken[tree], errors[tree] = "nan", "the target's logits are NaN or infinite"
        if found is not None:
            for tree, why in found.failed.items():
                if on_target:
                    broken[tree], errors[tree] = "stuck", why
                else:
                    sequences[tree].unwatch(why)
        samplings = [one.request.sampling for one in sequences]
        seen = history(sequences, draft, target) if any(s.repetition_penalty != 1 for s in samplings) else None
        if masks is not None and on_target:
            allowed = open_mask(masks, logits.shape[-1], logits.device)
        plain = not draft.shape.nodes and allowed is None and seen is None and parts.choose is choose
        greedy = plain and all(one.temperature == 0 for one in samplings)
        if not greedy:
            p = logits_to_probs(logits, by_row(samplings, draft.shape.root), seen, allowed, scratch=memory)
        if masks is not None and on_target:
            silent = _silent(draft, p, masks)

    # 5. Verify: the distribution of where the accepted paths end; sample it.
    with clock.phase("verify"):
        if greedy:  # p is one-hot and nothing was drafted: every verifier emits the arg max
            count, given = len(sequences), "draft"
            row, token, empty = np.arange(count), argmax(logits).cpu().numpy(), np.zeros(count, dtype=bool)
            expected, expected_emitted = np.zeros(count), np.ones(count)
        else:
            with attributed("verifier", parts.verifier):
                verdict = parts.verifier(draft, p)
                keys = [one.key for one in sequences]
                row, token, empty = parts.choose(verdict, draft.shape, p, parts.draws, keys).on_host()
            if silent is not None:
                token = np.where(silent[row], -1, token)
            expected, expected_emitted = _expected(verdict, draft.shape, masks if on_target else None, silent)
            given = verdict.given

    # 6. Commit: tokens, KV cache, constraint states.
    with clock.phase("commit"):
        logprobs = None
        if any(one.request.logprobs for one in sequences):
            logprobs = _logprobs(raw, allowed, draft, row, token)
        applied = None if constraint is None else constraint.applied
        decision = Decision(draft, row, token, masks, logprobs, broken)
        committed = parts.commit(sequences, decision, applied, target.context)

        # 7. The proposer learns what was computed; then constraints act: forks and removed tokens.
        fine = [tree for tree in range(len(sequences)) if tree not in broken]
        observed = [
            _observation(parts, sequences[n], n, forest, committed[n], output, computed[n], context[n]) for n in fine
        ]
        observed += [_chunk(parts, one, count, output, len(sequences) + n) for n, (one, count) in enumerate(chunks)]
        with attributed("proposer", parts.proposer):
            parts.proposer.observe(observed)
        if constraint is not None and on_target:
            for tree in fine:
                if sequences[tree].finish is None:
                    settle(sequences[tree], parts, committed[tree])
        for tree, got in enumerate(committed):
            if got.error:
                errors[tree] = got.error
    return StepInfo(
        sequences, draft, committed, context, [len(tokens) for tokens in pending], prefill, expected, expected_emitted,
        given, empty, output.attended, list(chunks), {sequences[tree]: why for tree, why in errors.items()},
        clock, began, clock.mark(), clock.take(), seconds + (0.0 if found is None else found.seconds), seconds,
    )  # fmt: skip


def _only_chunks(parts: Parts, chunks: Sequence[Chunk]) -> StepInfo:
    """A step in which no sequence is decoded."""
    lm = parts.target.lm
    clock, draft, nothing = lm.clock, no_draft(0, lm.device), np.empty(0)
    began = clock.mark()
    with clock.phase("target"):
        output = lm.run(lm.prepare([], [], draft, [(one.kv, one.pending[:count]) for one, count in chunks]))
    with clock.phase("commit"), attributed("proposer", parts.proposer):
        parts.proposer.observe([_chunk(parts, one, count, output, n) for n, (one, count) in enumerate(chunks)])
    return StepInfo(
        [], draft, [], [], [], [], nothing, nothing, "draft", nothing, output.attended, list(chunks), {}, clock, began,
        clock.mark(), clock.take(),
    )  # fmt: skip


def computed_forest(draft: Draft) -> Draft:
    """The forest of all rows that the target computes: the draft's, then those that are computed only."""
    return draft if draft.computed_only is None else Draft(draft.computed_shape, draft.computed_token)


def propose(parts: Parts, batch: Batch) -> Draft:
    """The proposer's draft, cut where the context ends.

    Raises:
        PartError: the proposer raised an error, or returned no draft for the batch, or one with tokens that the target
            does not have, or one that the verifier does not support; names it.
    """
    proposer = parts.proposer
    with attributed("proposer", proposer):
        draft = proposer.propose(batch)
        if not isinstance(draft, Draft):
            raise TypeError(f"propose must return a Draft, not {type(draft).__name__}")
        if draft.shape.roots != len(batch.sequences):
            raise ValueError(f"its draft has {draft.shape.roots} trees for {len(batch.sequences)} sequences")
        _check_tokens(draft, batch.target.vocabulary)
    draft = draft.cut(batch.room())
    check_draft(proposer.name, parts.verifier, draft)
    return draft


def settle(sequence: SequenceState, parts: Parts, done: Committed) -> None:
    """Let the sequence's constraint act, and tell the proposer of forks and removed tokens."""
    if parts.constraint is None:
        return
    proposer = parts.proposer

    def fork_state(one: SequenceState) -> object:
        with attributed("proposer", proposer):
            return proposer.fork(one.state)

    rewound = act(sequence, parts.constraint.applied, parts.target.context, done, parts.made, fork_state)
    for one, length in rewound.items():
        with attributed("proposer", proposer):
            proposer.rewind(one.state, length)


def _check_tokens(draft: Draft, vocabulary: int) -> None:
    """Refuse draft tokens that the target does not have. Not on a GPU, where looking would wait for it.

    Raises:
        ValueError: names such a token.
    """
    if not draft.shape.nodes or draft.token.device.type != "cpu":
        return
    low, high = (int(one) for one in draft.token.aminmax())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"its draft holds the token {wrong}, but the target has {vocabulary} tokens, from 0")


def _silent(draft: Draft, p: Tensor, masks: Masks) -> np.ndarray:  # [R] bool
    """Rows at which nothing is emitted: barriers, and legal ones that the constraint leaves no mass.

    A verifier needs a distribution at every row. There it gets all mass on a token that no child holds, so that a path
    that comes there ends there; that token then is never emitted.
    """
    silent = masks.barrier | (masks.legal & (p.sum(-1) == 0).cpu().numpy())
    shape = draft.shape
    for row in np.flatnonzero(silent).tolist():
        taken = set(draft.token[torch.from_numpy(shape.children[row] - shape.roots)].tolist())
        free = next(token for token in range(p.shape[-1]) if token not in taken)
        one_hot_(torch.tensor([free]), p[row : row + 1])
    return silent


def _expected(
    verdict: Verdict, shape: Shape, masks: Masks | None, silent: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Expected accepted and emitted tokens of each tree ``[B]``, forced ones left out."""
    if masks is None or silent is None:
        accepted = verdict.expected_accepted(shape)
        return accepted, accepted + 1.0
    single = masks.forced
    depth = np.zeros(shape.rows, dtype=np.int64)
    for row, parent in enumerate(shape.parent.tolist(), start=shape.roots):
        depth[row] = depth[parent] + (not single[parent])
    last = ~single & ~silent
    return tuple(  # type: ignore[return-value]
        np.bincount(shape.root, weights=verdict.stop * what, minlength=shape.roots) for what in (depth, depth + last)
    )


def _logprobs(
    logits: Tensor, allowed: Tensor | None, draft: Draft, row: np.ndarray, token: np.ndarray
) -> list[list[float]]:
    """For each tree, log-probabilities of the accepted tokens and the one after them; see ``Request``."""
    shape, found = draft.shape, []
    for tree, (end, last) in enumerate(zip(row.tolist(), token.tolist(), strict=True)):
        path = shape.path(end)
        rows = torch.tensor([tree, *path], device=logits.device)
        own = logits[rows].float() if logits.dtype != torch.float64 else logits[rows]
        if allowed is not None:
            own = own.masked_fill(~allowed[rows], -torch.inf)
        tokens = [*draft.token[[node - shape.roots for node in path]].tolist(), max(last, 0)]
        own = own.log_softmax(-1)
        found.append(own.gather(-1, torch.tensor(tokens, device=own.device)[:, None])[:, 0].tolist())
    return found


def history(sequences: Sequence[SequenceState], draft: Draft, target: Target) -> Tensor:
    """``[R, V]`` bool: the tokens that occur before the one sampled at each row, along its own path."""
    shape = draft.shape
    seen = torch.zeros(shape.rows, target.vocabulary, dtype=torch.bool)
    for root, sequence in enumerate(sequences):
        seen[root, sequence.tokens] = True
    token = draft.token.tolist()
    for row in range(shape.roots, shape.rows):
        seen[row] = seen[shape.parent[row - shape.roots]]
        seen[row, token[row - shape.roots]] = True
    return seen.to(target.lm.device)


def _observation(
    parts: Parts,
    sequence: SequenceState,
    tree: int,
    draft: Draft,
    got: Committed,
    output: Output,
    start: int,
    context: int,
) -> Observation:
    """What a sequence with a tree computed, from position ``start`` on; its root is token ``context - 1``."""
    requires, shape, end = parts.proposer.requires, draft.shape, len(sequence.kv)
    own = shape.trees[tree]
    accepted = shape.places[np.array(got.path[: got.count(accepted=True, kept=True)], dtype=np.int64)]
    hidden = logits = top_k = None
    rows: list[int] = []
    if requires.hidden:
        hidden = output.pending[tree]
        if len(accepted):
            hidden = torch.cat([hidden, output.nodes[tree][torch.from_numpy(accepted).to(hidden.device)]])
        hidden = hidden[: end - start]
    if requires.logits or requires.top_k:
        logits = output.logits[torch.from_numpy(own).to(output.logits.device)]
        rows = [sequence.tokens[context - 1], *draft.token[torch.from_numpy(own[1:] - shape.roots)].tolist()]
        if requires.top_k:
            top_k = logits.topk(requires.top_k, -1).indices
    tokens = sequence.tokens[start : end + 1]
    return Observation(
        sequence, start, tokens, hidden, rows, logits if requires.logits else None, top_k, accepted.tolist()
    )


def _chunk(parts: Parts, sequence: SequenceState, count: int, output: Output, place: int) -> Observation:
    """What a sequence computed of its prompt."""
    end = len(sequence.kv)
    hidden = output.pending[place] if parts.proposer.requires.hidden else None
    return Observation(sequence, end - count, sequence.tokens[end - count : end + 1], hidden)
