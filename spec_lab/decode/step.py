"""One decoding step: the only place where proposer, runner, constraint, verifier and commit meet.

Prefill, chains, trees, batches, the autoregressive baseline, calibration, certification and the studies all run through
``step``, with other parts plugged in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_lab.core.clock import Clock, Mark
from spec_lab.core.draft import BROKEN, Draft
from spec_lab.core.draft import empty as no_draft
from spec_lab.core.faults import attributed
from spec_lab.core.inference import inference
from spec_lab.core.readback import Readback
from spec_lab.core.upload import rows_at, uploads
from spec_lab.decode.arm import Arm
from spec_lab.decode.commit import Committed, Decision, act
from spec_lab.decode.masking import Masking
from spec_lab.decode.outcome import target_distribution
from spec_lab.decode.proposer import Observation, Requires, release
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.decode.step_info import Chunk, StepInfo
from spec_lab.decode.step_recorder import StepRecorder
from spec_lab.runners.runner import Output, Runner
from spec_lab.verify import check_draft
from spec_lab.verify.arrays import Array


@inference
def step(sequences: Sequence[SequenceState], arm: Arm, chunks: Sequence[Chunk] = ()) -> StepInfo:
    """One forward of the target: draft below every sequence, verify, and commit what was chosen.

    Up to the forward the host reads one copy for each level that a draft model drafts, and one for masks; after it one.

    Args:
        sequences: each with at least one pending token.
        chunks: further sequences of which only a part of the prompt is computed, in the same forward.

    Raises:
        PartError: the proposer or the verifier raised an error, or returned what cannot be; names it.
    """
    clock, read = arm.target.lm.clock, Readback()
    clock.take()
    arm.target.lm.capture(arm.proposer.requires.hidden)  # in every step: arms that require others may take turns
    arm.target.lm.count_experts(arm.record.experts)
    start = Start.of(sequences, chunks, clock.mark())
    if not sequences:
        return _only_chunks(arm, start)
    with clock.stage("propose"):  # 1. Draft.
        masking = Masking(arm.constraint, sequences)
        deferred = masking.constraint is None and arm.target.lm.device.type != "cpu"
        batch = Batch(
            arm.target, start.sequences, arm.draws, clock, masking.of_draft, read, deferred=deferred,
            recorded=arm.record.drafts,
        )  # fmt: skip
        draft = propose(arm, batch) if masking.supports_drafts else no_draft(len(sequences), batch.device)
    draft = masking.mask(draft, clock, read)  # 2. Masks of the forest, perhaps in a thread during the forward.
    before = read.copies
    with clock.stage("target"):  # 3. The target's forward.
        output, forest = forward(arm.target.lm, start, draft)
    masking.wait(clock)
    with clock.stage("probabilities"):  # 4. Target probabilities p.
        p = target_distribution(arm, start.sequences, draft, output, masking.on_target)
    with clock.stage("verify"):  # 5. The distribution of where accepted paths end, sampled; the one copy to the host.
        recorder, wanted = StepRecorder(arm, draft, start.sequences), p.verify()
        wanted |= recorder.wanted(p, wanted, output) | _required(arm.proposer.requires, output, forest)
        host = p.settle(dict(zip(wanted, read(*wanted.values()), strict=True)))
    with clock.stage("commit"):  # 6. Commit: tokens, KV cache, constraint states.
        broken = _broken(draft, host, masking, start.sequences)
        ends = {tree: finish for tree, (finish, _) in broken.items()}
        committed = arm.commit(
            start.sequences, _decision(draft, host, masking, ends), masking.applied, arm.target.context
        )
        # 7. The proposer learns what was computed; then constraints act: forks and removed tokens.
        unbroken = [tree for tree in range(len(committed)) if tree not in broken]
        observed = _observe(arm, start, unbroken, forest, committed, output, host)
        if masking.on_target is not None:
            alive = [tree for tree in unbroken if start.sequences[tree].finish is None]
            settle([(start.sequences[tree], committed[tree]) for tree in alive], arm)
    errors = {start.sequences[tree]: why for tree, (_, why) in broken.items()}
    for got in committed:
        errors |= got.errors
    return start.done(
        draft, committed, output.attended, clock, errors,
        expected=host["expected"], expected_emitted=host["expected_emitted"], given=p.given, empty=host["empty"],
        mask_busy=masking.seconds, draft_masks=masking.draft_seconds, copies_before=before,
        copies_after=read.copies - before,
        recorded=recorder.drafts(p, host, masking, ends), distributions=recorder.distributions(host, observed),
        experts=recorder.experts(host, output, forest, committed),
    )  # fmt: skip


@dataclass(eq=False)
class Start:
    """The sequences of a step when it begins.

    Args:
        sequences: ``[B]`` that are decoded.
        chunks: of which only a part of the prompt is computed.
        began: a mark of the clock.
        pending: ``[B]`` tokens that are not computed.
        context: ``[B]`` numbers of tokens, ``computed`` of them computed.
        prefill: ``[B]`` as in ``StepInfo``.
        uploaded: the count of uploads.
    """

    sequences: list[SequenceState]
    chunks: list[Chunk]
    began: Mark
    pending: list[Sequence[int]]
    context: list[int]
    computed: list[int]
    prefill: list[bool]
    uploaded: int

    @staticmethod
    def of(sequences: Sequence[SequenceState], chunks: Sequence[Chunk], began: Mark) -> Start:
        """Return that of a step with these sequences."""
        return Start(
            list(sequences), list(chunks), began,
            [sequence.pending for sequence in sequences],
            [len(sequence.tokens) for sequence in sequences],
            [len(sequence.kv) for sequence in sequences],
            [sequence.prefill for sequence in sequences],
            uploads(),
        )  # fmt: skip

    def done(
        self, draft: Draft, committed: list[Committed], attended: int, clock: Clock,
        errors: dict[SequenceState, str], **more: Any,
    ) -> StepInfo:  # fmt: skip
        """Return what the step did."""
        pending = [len(tokens) for tokens in self.pending]
        return StepInfo(
            sequences=self.sequences, draft=draft, committed=committed, context=self.context, pending=pending,
            prefill=self.prefill, attended=attended, chunks=self.chunks, errors=errors, clock=clock,
            began=self.began, ended=clock.mark(), spans=clock.take(), uploads=uploads() - self.uploaded, **more,
        )  # fmt: skip


def forward(lm: Runner, start: Start, draft: Draft) -> tuple[Output, Draft]:
    """Compute pending tokens, a draft and the chunks of prompts; return the output, and the forest that it is of."""
    forest = computed_forest(draft)
    prompts = [(sequence.kv, sequence.pending[:count]) for sequence, count in start.chunks]
    return lm.run(lm.prepare([sequence.kv for sequence in start.sequences], start.pending, forest, prompts)), forest


def _required(requires: Requires, output: Output, forest: Draft) -> dict[str, Array]:
    """Return the arrays that the host reads for the proposer."""
    required: dict[str, Array] = {}
    if requires.top_k:
        required["top_k"] = output.logits.topk(requires.top_k, -1).indices
    if requires.top_k or requires.logits:
        required["computed"] = forest.token
    return required


def _broken(
    draft: Draft, host: Mapping[str, np.ndarray], masking: Masking, sequences: Sequence[SequenceState]
) -> dict[int, tuple[str, str]]:
    """For each tree without a commit how its sequence ends, and why. Constraints that only observe end nothing."""
    broken = {tree: ("nan", why) for tree, why in draft.broken.items()}
    if "undrafted" in host:
        broken |= dict.fromkeys(np.flatnonzero(host["undrafted"]).tolist(), ("nan", BROKEN))
    if "undefined" in host:
        undefined = set(draft.shape.root[host["undefined"]].tolist())
        broken |= dict.fromkeys(undefined, ("nan", "the target's logits are NaN or infinite"))
    for tree, why in masking.failed.items():
        if masking.on_target is not None:
            broken[tree] = "stuck", why
        else:
            sequences[tree].unwatch(why)
    return broken


def _decision(draft: Draft, host: Mapping[str, np.ndarray], masking: Masking, broken: Mapping[int, str]) -> Decision:
    """Return the decision on the tokens to commit."""
    shape, row, logprobs = draft.shape, host["row"], None
    if "logprobs" in host:
        logprobs = [
            [*host["logprobs"][[node - shape.roots for node in shape.path(end)]].tolist(), last]
            for end, last in zip(row.tolist(), host["last_logprob"].tolist(), strict=True)
        ]
    drafted: list[int] = host["drafted"].tolist() if shape.nodes else []
    return Decision(draft, drafted, row, host["token"], masking.masks, logprobs, broken)


def _observe(
    arm: Arm, start: Start, trees: Sequence[int], forest: Draft, committed: Sequence[Committed], output: Output,
    host: Mapping[str, np.ndarray],
) -> list[Observation]:  # fmt: skip
    """Let the proposer learn what was computed for these trees and for chunks of prompts; return it."""
    observed = [
        _observation(
            arm, start.sequences[tree], tree, forest, committed[tree], output, host, start.computed[tree],
            start.context[tree],
        )
        for tree in trees
    ]  # fmt: skip
    first = len(start.sequences)
    observed += [_chunk(arm, *chunk, output, first + number) for number, chunk in enumerate(start.chunks)]
    with attributed("proposer", arm.proposer):
        if forest.late is not None and forest.late.finish is not None:
            forest.late.finish(host["drafted"])
        arm.proposer.observe(observed)
    return observed


def _only_chunks(arm: Arm, start: Start) -> StepInfo:
    """A step in which no sequence is decoded."""
    lm = arm.target.lm
    clock, draft, nothing = lm.clock, no_draft(0, lm.device), np.empty(0)
    with clock.stage("target"):
        output, _ = forward(lm, start, draft)
    with clock.stage("commit"):
        _observe(arm, start, [], draft, [], output, {})
    return start.done(
        draft, [], output.attended, clock, {}, expected=nothing, expected_emitted=nothing, given="draft", empty=nothing
    )


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
        if (rows := draft.computed_shape.largest - 1) > arm.max_rows:
            raise ValueError(f"its draft has {rows} rows below one root, but it declares at most {arm.max_rows}")
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

    def fork_state(sequence: SequenceState) -> object:
        with attributed("proposer", proposer):
            return proposer.fork(sequence.state)

    try:
        for sequence, done in committed:
            rewound = act(sequence, applied, arm.target.context, done, arm.made, fork_state)
            for shortened, length in rewound.items():
                with attributed("proposer", proposer):
                    proposer.rewind(shortened.state, length)
    except BaseException:  # the engine does not track these forks yet
        with suppress(Exception):  # the first error is the one to raise
            release(proposer, [fork for _, done in committed for fork in done.forks])
        raise


def _check_tokens(draft: Draft, vocabulary: int) -> None:
    """Refuse draft tokens that the target does not have. Not on a GPU, where looking would wait for it."""
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
    """Return what a sequence with a tree computed, from position ``start`` on; its root is token ``context - 1``."""
    requires, shape, end = arm.proposer.requires, forest.shape, len(sequence.kv)
    kept = got.count(accepted=True, kept=True) if got.path else 0
    accepted = [shape.places.item(row) for row in got.path[:kept]]
    hidden = output.observed(tree, accepted) if requires.hidden else None
    logits = top_k = None
    rows: list[int] = []
    if requires.logits or requires.top_k:
        tree_rows = shape.trees[tree]
        rows = [sequence.tokens[context - 1], *host["computed"][tree_rows[1:] - shape.roots].tolist()]
        if requires.logits:
            logits = rows_at(output.logits, tree_rows.tolist())
        if requires.top_k:
            top_k = host["top_k"][tree_rows]
    tokens = sequence.tokens[start : end + 1]
    return Observation(sequence, start, tokens, hidden, rows, logits, top_k, accepted)


def _chunk(arm: Arm, sequence: SequenceState, count: int, output: Output, number: int) -> Observation:
    """Return what a sequence computed of its prompt."""
    end = len(sequence.kv)
    hidden = output.observed(number) if arm.proposer.requires.hidden else None
    return Observation(sequence, end - count, sequence.tokens[end - count : end + 1], hidden)
