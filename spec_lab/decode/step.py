"""One decoding step: the only place where proposer, runner, constraint, verifier and commit meet.

Prefill, chains, trees, batches, the autoregressive baseline, calibration, certification and the studies all run through
``step``, with other parts plugged in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
import torch

from spec_lab.constrain.applied import StepMasks, open_mask
from spec_lab.core.draft import Draft, Shape
from spec_lab.core.draft import empty as no_draft
from spec_lab.core.faults import attributed
from spec_lab.core.inference import inference
from spec_lab.core.probabilities import argmax_of_finite, finite_
from spec_lab.core.readback import Readback
from spec_lab.decode.arm import Arm
from spec_lab.decode.commit import Committed, Decision, act
from spec_lab.decode.proposer import Observation, release
from spec_lab.decode.recording import Distributions, Recorded, expanded, feature_hash, recorded_numbers
from spec_lab.decode.rows import (
    at_temperature_1,
    constrained_probs,
    draft_probabilities,
    expected_counts,
    history,
    logprobs_of,
    probability_of,
    target_probabilities,
    without_token_,
)
from spec_lab.decode.sequence import Batch, SequenceState, by_row
from spec_lab.decode.step_info import Chunk, StepInfo
from spec_lab.runners.runner import Output
from spec_lab.verify import Choice, check_draft, choose, greedy_path
from spec_lab.verify.arrays import Array


@inference
def step(sequences: Sequence[SequenceState], arm: Arm, chunks: Sequence[Chunk] = ()) -> StepInfo:
    """One forward of the target: draft below every sequence, verify, and commit what was chosen.

    Up to the forward the host reads one copy for each level that a draft model drafts, and one for masks; after it one,
    with all that is committed and recorded.

    Args:
        sequences: each with at least one pending token.
        arm: what decodes.
        chunks: further sequences of which only a part of the prompt is computed, in the same forward.

    Raises:
        PartError: the proposer or the verifier raised an error, or returned what cannot be; names it.
    """
    target, constraint, sequences = arm.target, arm.constraint, list(sequences)
    lm = target.lm
    clock = lm.clock
    clock.take()
    lm.capture(arm.proposer.requires.hidden)  # in every step: parts with other needs may alternate
    began = clock.mark()
    if not sequences:
        return _only_chunks(arm, chunks)
    read = Readback()
    pending = [sequence.pending for sequence in sequences]
    context, prefill = [len(one.tokens) for one in sequences], [one.prefill for one in sequences]
    computed = [len(one.kv) for one in sequences]

    # 1. Draft.
    draft_masks = None
    with clock.phase("propose"):
        if constraint is not None:
            draft_masks = constraint.draft_masks([one.constraint for one in sequences])
        if constraint is None or constraint.supports_drafts:
            draft = propose(arm, Batch(target, sequences, arm.draws, clock, draft_masks, read))
        else:
            draft = no_draft(len(sequences), lm.device)
    seconds = 0.0 if draft_masks is None else draft_masks.seconds

    # 2. Masks of the forest, perhaps in a thread during the forward.
    masked: StepMasks | Future[StepMasks] | None = None
    if constraint is not None:
        with clock.phase("mask"):
            draft, masked = constraint.masks([one.constraint for one in sequences], draft, draft_masks, read)
    shape, before = draft.shape, read.copies

    # 3. The target's forward.
    with clock.phase("target"):
        parts_of_prompts = [(one.kv, one.pending[:count]) for one, count in chunks]
        forest = computed_forest(draft)
        output: Output = lm.run(lm.prepare([one.kv for one in sequences], pending, forest, parts_of_prompts))
        raw = output.logits if forest is draft else output.logits[: shape.rows]
    if isinstance(masked, Future):
        with clock.phase("wait"):
            masked = masked.result()
    masks = None if masked is None else masked.masks
    on_target = constraint is not None and constraint.applied.on_target

    # 4. Target probabilities p.
    with clock.phase("probabilities"):
        to_read: dict[str, Array] = {}  # by the host
        samplings = [one.request.sampling for one in sequences]
        seen = history(sequences, draft, target) if any(s.repetition_penalty != 1 for s in samplings) else None
        allowed = open_mask(masks, raw.shape[-1], raw.device) if masks is not None and on_target else None
        logprobs = any(one.request.logprobs for one in sequences)
        without_p = allowed is None and seen is None and arm.choose is choose
        without_p = without_p and (not shape.nodes or (arm.follows_argmax(draft) and not logprobs))
        greedy = without_p and all(one.temperature == 0 for one in samplings)
        no_token = None
        if greedy:  # p is one-hot: the arg max of each row suffices
            to_read["token"], undefined = argmax_of_finite(raw if output.array is None else output.array[: shape.rows])
        else:
            memory = arm.memory.like(raw)
            logits = memory[: len(raw)].copy_(raw)
            undefined = finite_(logits)
            potential = None if masks is None else masks.potential
            p = constrained_probs(logits, by_row(samplings, shape.root), seen, allowed, potential, memory)
            if masks is not None and on_target:
                no_token = to_read["no_token"] = without_token_(p, draft, masks)
        if undefined is not None:
            to_read["undefined"] = undefined

    # 5. Verify: the distribution of where the accepted paths end; sample it. Then the one copy to the host.
    with clock.phase("verify"):
        given, forced = "draft", None
        if greedy and not shape.nodes:
            to_read |= arm.memory.certain(shape.roots)
        elif not greedy:
            with attributed("verifier", arm.verifier):
                verdict = arm.verifier(draft, p)
                choice = arm.choose(verdict, shape, p, arm.draws, [one.key for one in sequences])
            given, to_read["row"], to_read["token"], to_read["empty"] = verdict.given, *choice
            forced = masks.forced if masks is not None and on_target else None
            to_read["expected"], to_read["expected_emitted"] = expected_counts(verdict, shape, forced, no_token)
        if shape.nodes:
            to_read["drafted"] = draft.token if draft.array is None else draft.array[: shape.nodes]
        if logprobs:
            to_read["logprobs"], to_read["last_logprob"] = logprobs_of(
                raw, allowed, draft, to_read["row"], to_read["token"]
            )
        if arm.record.drafts:
            if shape.nodes and (q := draft_probabilities(draft)) is not None:
                to_read["q"] = q
            if not greedy:
                to_read["p"], to_read["stop"] = target_probabilities(draft, p), verdict.stop
                to_read["last_p"] = probability_of(p, to_read["row"], to_read["token"])
        rows = np.flatnonzero(arm.record.chosen(arm.draws, [one.key for one in sequences])[shape.root])
        if arm.record.top and len(rows):
            plain = at_temperature_1(raw, rows, by_row(samplings, shape.root), seen, allowed)
            numbers = recorded_numbers(rows, draft, plain, arm.record.top)
            to_read |= {f"recorded_{name}": one for name, one in numbers.items()}
        requires = arm.proposer.requires
        if requires.top_k:
            to_read["top_k"] = output.logits.topk(requires.top_k, -1).indices
        if requires.top_k or requires.logits:
            to_read["computed"] = forest.token
        host = dict(zip(to_read, read(*to_read.values()), strict=True))
        best = host["token"] if greedy else None  # of every row
        if greedy and shape.nodes:
            host |= arm.memory.certain(shape.roots) | _followed(shape, host)
        if arm.choose is choose and not greedy:
            with attributed("verifier", arm.verifier):
                Choice.check(host["token"])

    # 6. Commit: tokens, KV cache, constraint states.
    with clock.phase("commit"):
        row, token = host["row"], host["token"]
        broken, errors = dict.fromkeys(draft.broken, "nan"), dict(draft.broken)
        if "undefined" in host:
            for tree in set(shape.root[host["undefined"]].tolist()):
                broken[tree], errors[tree] = "nan", "the target's logits are NaN or infinite"
        if masked is not None:
            for tree, why in masked.failed.items():
                if on_target:
                    broken[tree], errors[tree] = "stuck", why
                else:
                    sequences[tree].unwatch(why)
        if no_token is not None:
            token = np.where(host["no_token"][row], -1, token)
        drafted: list[int] = host["drafted"].tolist() if shape.nodes else []
        of_path = None
        if "logprobs" in host:
            of_path = [
                [*host["logprobs"][[node - shape.roots for node in shape.path(end)]].tolist(), last]
                for end, last in zip(row.tolist(), host["last_logprob"].tolist(), strict=True)
            ]
        applied = None if constraint is None else constraint.applied
        decision = Decision(draft, drafted, row, token, masks, of_path, broken)
        committed = arm.commit(sequences, decision, applied, target.context)

        # 7. The proposer learns what was computed; then constraints act: forks and removed tokens.
        unbroken = [tree for tree in range(len(sequences)) if tree not in broken]
        observed = [
            _observation(arm, sequences[n], n, forest, committed[n], output, host, computed[n], context[n])
            for n in unbroken
        ]
        observed += [_chunk(arm, one, count, output, len(sequences) + n) for n, (one, count) in enumerate(chunks)]
        with attributed("proposer", arm.proposer):
            arm.proposer.observe(observed)
        if constraint is not None and on_target:
            settle([(sequences[n], committed[n]) for n in unbroken if sequences[n].finish is None], arm)
        failed = {sequences[tree]: why for tree, why in errors.items()}
        for got in committed:
            failed |= got.errors
    recorded = None
    if arm.record.drafts:
        recorded = Recorded(
            drafted, host.get("p"), host.get("q"), host.get("stop"), best, token, host.get("last_p"),
            None if masks is None or not on_target else masks.legal, forced, broken,
        )  # fmt: skip
    distributions = None
    if "recorded_p" in host:
        ids, top_p, top_q, rest = (host[f"recorded_{name}"] for name in ("ids", "p", "q", "rest"))
        states = {one.sequence: one.hidden for one in observed}
        features = [feature_hash(states.get(one)) for one in sequences]
        last = [tokens[-1] for tokens in pending]
        distributions = Distributions(rows, ids, top_p, top_q, rest, expanded(draft, rows), last, features)
    return StepInfo(
        sequences=sequences, draft=draft, committed=committed, chunks=list(chunks), errors=failed,
        context=context, pending=[len(tokens) for tokens in pending], prefill=prefill, attended=output.attended,
        expected=host["expected"], expected_emitted=host["expected_emitted"], given=given, empty=host["empty"],
        clock=clock, began=began, ended=clock.mark(), spans=clock.take(),
        mask_busy=seconds + (0.0 if masked is None else masked.seconds), draft_masks=seconds,
        copies_before=before, copies_after=read.copies - before, recorded=recorded, distributions=distributions,
    )  # fmt: skip


def _only_chunks(arm: Arm, chunks: Sequence[Chunk]) -> StepInfo:
    """A step in which no sequence is decoded."""
    lm = arm.target.lm
    clock, draft, nothing = lm.clock, no_draft(0, lm.device), np.empty(0)
    began = clock.mark()
    with clock.phase("target"):
        output = lm.run(lm.prepare([], [], draft, [(one.kv, one.pending[:count]) for one, count in chunks]))
    with clock.phase("commit"), attributed("proposer", arm.proposer):
        arm.proposer.observe([_chunk(arm, one, count, output, n) for n, (one, count) in enumerate(chunks)])
    return StepInfo(
        sequences=[], draft=draft, committed=[], chunks=list(chunks), errors={},
        context=[], pending=[], prefill=[], attended=output.attended,
        expected=nothing, expected_emitted=nothing, given="draft", empty=nothing,
        clock=clock, began=began, ended=clock.mark(), spans=clock.take(),
    )  # fmt: skip


def computed_forest(draft: Draft) -> Draft:
    """The forest of all rows that the target computes: the draft's, then those that are computed only."""
    return draft if draft.computed_only is None else Draft(draft.computed_shape, draft.computed_token)


def propose(arm: Arm, batch: Batch) -> Draft:
    """The proposer's draft, cut where the context ends.

    Raises:
        PartError: the proposer raised an error, or returned no draft for the batch, or one with tokens that the target
            does not have or with more rows than it declares, or one that the verifier does not support; names it.
    """
    proposer = arm.proposer
    with attributed("proposer", proposer):
        draft = proposer.propose(batch)
        if not isinstance(draft, Draft):
            raise TypeError(f"propose must return a Draft, not {type(draft).__name__}")
        if draft.shape.roots != len(batch.sequences):
            raise ValueError(f"its draft has {draft.shape.roots} trees for {len(batch.sequences)} sequences")
        if not draft.computed_shape.nodes:
            return draft
        _check_tokens(draft, batch.target.vocabulary)
        if (rows := draft.computed_shape.largest - 1) > arm.most_rows:
            raise ValueError(f"its draft has {rows} rows below one root, but it declares at most {arm.most_rows}")
    draft = draft.cut(batch.room())
    check_draft(proposer.name, arm.verifier, draft)
    return draft


def settle(committed: Sequence[tuple[SequenceState, Committed]], arm: Arm) -> None:
    """Let the constraint of each sequence act, and tell the proposer of forks and removed tokens.

    Raises:
        PartError: the proposer or the constraint raised an error. All forks are closed again.
    """
    if arm.constraint is None:
        return
    proposer, applied = arm.proposer, arm.constraint.applied

    def fork_state(one: SequenceState) -> object:
        with attributed("proposer", proposer):
            return proposer.fork(one.state)

    try:
        for sequence, done in committed:
            rewound = act(sequence, applied, arm.target.context, done, arm.made, fork_state)
            for one, length in rewound.items():
                with attributed("proposer", proposer):
                    proposer.rewind(one.state, length)
    except BaseException:  # the engine does not track these forks yet
        with suppress(Exception):  # the first error is the one to raise
            release(proposer, [one for _, done in committed for one in done.forks])
        raise


def _followed(shape: Shape, host: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outcome of a step without randomness, from the drafted tokens ``[M]`` and the arg max of each row ``[R]``."""
    row = greedy_path(shape, host["drafted"], host["token"])
    accepted = shape.depth[row]
    return {"row": row, "token": host["token"][row], "expected": accepted, "expected_emitted": accepted + 1}


def _check_tokens(draft: Draft, vocabulary: int) -> None:
    """Refuse draft tokens that the target does not have. Not on a GPU, where looking would wait for it.

    Raises:
        ValueError: names such a token.
    """
    if draft.array is None:
        return
    low, high = draft.array.min(), draft.array.max()
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"its draft holds the token {wrong}, but the target has {vocabulary} tokens, from 0")


def _observation(
    arm: Arm,
    sequence: SequenceState,
    tree: int,
    forest: Draft,
    got: Committed,
    output: Output,
    host: Mapping[str, np.ndarray],
    start: int,
    context: int,
) -> Observation:
    """What a sequence with a tree computed, from position ``start`` on; its root is token ``context - 1``."""
    requires, shape, end = arm.proposer.requires, forest.shape, len(sequence.kv)
    kept = got.count(accepted=True, kept=True) if got.path else 0
    accepted = [shape.places.item(row) for row in got.path[:kept]]
    hidden = output.observed(tree, accepted) if requires.hidden else None
    logits = top_k = None
    rows: list[int] = []
    if requires.logits or requires.top_k:
        own = shape.trees[tree]
        rows = [sequence.tokens[context - 1], *host["computed"][own[1:] - shape.roots].tolist()]
        if requires.logits:
            logits = output.logits[torch.from_numpy(own).to(output.logits.device)]
        if requires.top_k:
            top_k = host["top_k"][own]
    tokens = sequence.tokens[start : end + 1]
    return Observation(sequence, start, tokens, hidden, rows, logits, top_k, accepted)


def _chunk(arm: Arm, sequence: SequenceState, count: int, output: Output, place: int) -> Observation:
    """What a sequence computed of its prompt."""
    end = len(sequence.kv)
    hidden = output.observed(place) if arm.proposer.requires.hidden else None
    return Observation(sequence, end - count, sequence.tokens[end - count : end + 1], hidden)
