"""How a round is committed: tokens appended and cut, cells kept and dropped, constraints moved on, actions taken."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from spec_lab.constrain import AppliedConstraint, ConstraintError, Masks
from spec_lab.constrain.applied import forced_token
from spec_lab.constrain.protocol import allows
from spec_lab.core.draft import Draft
from spec_lab.engine.batch import Batch, SequenceState

MOST_FORKS = 256
"""Forks that one request may make in all; one more breaks it."""

MOST_ACTIONS = 1000
"""Actions in a row, without a token between them."""

RUNAWAY = 32
"""A sequence that has emitted this many times its limit, tokens taken back included, is ended."""

NOTHING_LEFT = "its constraint allows nothing here that the model gives any probability"


@dataclass(frozen=True)
class Step:
    """One round's draft, and where its accepted paths end.

    Args:
        draft: what was drafted.
        slots: for each tree the cells its nodes hold, in row order.
        row: ``[B]`` where each accepted path ends.
        token: ``[B]`` the token emitted there; -1 for none.
        masks: of the forest; None without a constraint.
        logprobs: for each tree the log-probabilities of its accepted tokens and the one after; None where not wanted.
    """

    draft: Draft
    slots: Seq[np.ndarray]
    row: np.ndarray
    token: np.ndarray
    masks: Masks | None = None
    logprobs: Seq[Seq[float]] | None = None


@dataclass
class Committed:
    """What one sequence got in one round.

    Args:
        path: rows of the accepted nodes, from the head down.
        accepted: tokens accepted, before cuts.
        emitted: tokens emitted, before cuts: accepted, the one after them, and those appended as forced.
        accepted_kept: accepted tokens left after stop tokens and limits.
        emitted_kept: likewise of all emitted.
        forced: of the drafted nodes, those that the constraint left no choice for.
        forced_accepted, forced_emitted, forced_accepted_kept, forced_emitted_kept: forced tokens of these.
        legal: drafted nodes that the constraint allows.
        taken_back: tokens that an action took back.
        children: forks of it.
    """

    path: list[int]
    accepted: int = 0
    emitted: int = 0
    accepted_kept: int = 0
    emitted_kept: int = 0
    forced: int = 0
    forced_accepted: int = 0
    forced_emitted: int = 0
    forced_accepted_kept: int = 0
    forced_emitted_kept: int = 0
    legal: int = 0
    taken_back: int = 0
    children: list[SequenceState] = field(default_factory=list)


def commit(batch: Batch, step: Step, binding: AppliedConstraint | None = None) -> list[Committed]:
    """Append what was accepted and emitted; keep the accepted nodes' cells, drop the others; apply what is wanted.

    Stop tokens, stop strings and limits cut here, inside an accepted path as well, and never touch verification. A
    broken tree gets nothing and its sequence ends. Forks are in ``Committed.children``, not yet in the batch.
    """
    single = None
    if step.masks is not None and binding is not None and binding.on_target:
        single = step.masks.forced
    drafted = step.draft.token.tolist()
    return [
        _commit(batch, tree, sequence, step, drafted, single, binding) for tree, sequence in enumerate(batch.sequences)
    ]


def _commit(
    batch: Batch,
    tree: int,
    sequence: SequenceState,
    step: Step,
    drafted: list[int],
    single: np.ndarray | None,
    binding: AppliedConstraint | None,
) -> Committed:
    shape, masks = step.draft.shape, step.masks
    nodes = shape.trees[tree][1:] if shape.nodes else np.empty(0, dtype=np.int64)
    sequence.round += 1
    done = Committed([], legal=len(nodes) if masks is None else int(masks.legal[nodes].sum()))
    if single is not None and len(nodes) and masks is not None:
        done.forced = int((single[shape.parent[nodes - shape.roots]] & masks.legal[nodes]).sum())
    if tree in batch.broken:
        sequence.finish = sequence.finish or "nan"
    else:
        row, last = int(step.row[tree]), int(step.token[tree])
        done.path = shape.path(row)
        rows = [*done.path, row] if last >= 0 else done.path  # of the accepted tokens; then where the last one is drawn
        emitted = [drafted[node - shape.roots] for node in done.path] + ([last] if last >= 0 else [])
        done.accepted, done.emitted = len(done.path), len(emitted)
        above = [tree, *done.path]
        for place, (token, at) in enumerate(zip(emitted, rows, strict=True)):
            forced = single is not None and bool(single[above[place]])
            own = place < len(done.path)
            done.forced_accepted += forced and own
            done.forced_emitted += forced
            if sequence.finish is not None:
                continue
            if masks is not None and sequence.constraint is not None:
                legal = bool(masks.legal[at]) and (own or allows(masks.bits[at], token))
                _observe(sequence, legal)
            logprob = step.logprobs[tree][place] if step.logprobs is not None else float("nan")
            origin = "forced" if forced else "accepted" if own else "emitted"
            binds = binding is None or binding.on_target
            _append(batch, tree, sequence, token, logprob, origin, binds)
            done.emitted_kept += 1
            done.accepted_kept += own
            done.forced_accepted_kept += forced and own
            done.forced_emitted_kept += forced
    _keep_cells(batch, tree, sequence, step, done)
    if sequence.finish is None and binding is not None and binding.on_target:
        if last < 0 and masks is not None and not masks.barrier[row]:
            _stuck(batch, tree, sequence, NOTHING_LEFT)
        settle(batch, tree, sequence, binding, done)
    return done


def settle(batch: Batch, tree: int, sequence: SequenceState, binding: AppliedConstraint, done: Committed) -> None:
    """Apply every action that the sequence's constraint wants, and append what it forces, until it may be drafted for.

    What it did is counted in ``done``; forks are put there.
    """
    fresh = [sequence]
    while fresh:
        one, actions = fresh.pop(), 0
        try:
            while one.finish is None:
                action = one.constraint.action()
                actions += 1
                if actions > MOST_ACTIONS:
                    raise ConstraintError(f"its constraint wanted {MOST_ACTIONS} actions without a token between them")
                if action is None:
                    _limit(batch, one)
                    if one.finish is not None:
                        break
                    token = forced_token(one.constraint) if binding.fast_forward else None
                    if token is None:
                        break
                    actions = 0
                    _append(batch, tree, one, token, 0.0, "forced")
                    done.emitted += 1
                    done.emitted_kept += 1
                    done.forced_emitted += 1
                    done.forced_emitted_kept += 1
                elif not action:
                    one.finish = "constraint"
                elif len(action) > 1 and not len(one.path):
                    break  # the next round computes the prompt: forks then share its cells
                else:
                    # Nothing is done before all of it can be: no fork is left without what binds it.
                    for onward in action:
                        _check(one, onward.backtrack)
                    batch.made[one.request.id] += len(action) - 1
                    if batch.made[one.request.id] > MOST_FORKS:
                        raise ConstraintError(f"its constraint made more than {MOST_FORKS} forks of the request")
                    children = [fork(batch, one, number) for number in range(1, len(action))]
                    done.children += children
                    fresh += children
                    one.forks += len(action) > 1
                    for live, onward in zip([one, *children], action, strict=True):
                        done.taken_back += onward.backtrack
                        live.constraint = onward.state
                        rewind(batch, live, onward.backtrack)
        except ConstraintError as error:
            _stuck(batch, tree, one, str(error))
        if len(one.path) >= len(one.tokens):  # the last token is always pending
            batch.target.lm.cells.backtrack(one.path, len(one.tokens) - 1)


def fork(batch: Batch, sequence: SequenceState, number: int) -> SequenceState:
    """A second sequence with the same past: it shares the cells, and has random choices of its own."""
    lineage = (*sequence.lineage, sequence.forks, number)
    return SequenceState(
        sequence.request,
        batch.target.lm.cells.fork(sequence.path),
        list(sequence.tokens),
        lineage,
        sequence.round,
        state=sequence.state,
        stream=None if sequence.stream is None else sequence.stream.fork(),
        born=len(sequence.tokens),
        spent=sequence.spent,
        logprobs=list(sequence.logprobs),
        origins=list(sequence.origins),
    )


def rewind(batch: Batch, sequence: SequenceState, count: int) -> None:
    """Take back the last ``count`` tokens, and their cells.

    Raises:
        ConstraintError: they reach into the prompt.
    """
    emitted = _check(sequence, count)
    if not count:
        return
    del sequence.tokens[-count:]
    del sequence.logprobs[len(sequence.tokens) - len(sequence.request.tokens) :]
    del sequence.origins[len(sequence.tokens) - len(sequence.request.tokens) :]
    sequence.born = min(sequence.born, len(sequence.tokens))
    if len(sequence.path) > len(sequence.tokens):
        batch.target.lm.cells.backtrack(sequence.path, len(sequence.tokens))
    if sequence.stream is not None and not sequence.stream.finished:
        ahead = sequence.stream.count - (emitted - count)  # a banned string the stream has seen, and taken back, itself
        sequence.events += sequence.stream.rewind(ahead)


def _check(sequence: SequenceState, count: int) -> int:
    """How many tokens have been emitted, if ``count`` of them can be taken back."""
    emitted = len(sequence.tokens) - len(sequence.request.tokens)
    if not 0 <= count <= emitted:
        raise ConstraintError(f"its constraint takes back {count} tokens; {emitted} have been emitted")
    return emitted


def _append(
    batch: Batch, tree: int, sequence: SequenceState, token: int, logprob: float, origin: str, binds: bool = True
) -> None:
    """One more token; perhaps it ends the sequence, else the constraint moves on, which may bind the output or not."""
    request = sequence.request
    sequence.tokens.append(token)
    sequence.spent += 1
    if request.logprobs:
        sequence.logprobs.append(logprob)
    if sequence.stream is not None:
        sequence.origins.append(origin)
        sequence.events += sequence.stream.push(token, logprob)
    if token in request.stop or (sequence.stream is not None and sequence.stream.finished):
        sequence.finish = "stop"
        return
    if sequence.constraint is not None:
        try:
            sequence.constraint.advance(token)
            if sequence.constraint.action() is not None:
                return  # it may take tokens back: limits count afterwards
        except ConstraintError as error:
            if binds:
                _stuck(batch, tree, sequence, str(error))
                return
            sequence.unwatch(str(error))
    _limit(batch, sequence)


def _limit(batch: Batch, sequence: SequenceState) -> None:
    request = sequence.request
    if len(sequence.tokens) - len(request.tokens) >= request.max_new_tokens:
        sequence.finish = "length"
    elif len(sequence.tokens) >= batch.target.context:
        sequence.finish = "context"
    elif sequence.spent >= RUNAWAY * request.max_new_tokens:
        sequence.finish = "runaway"


def _observe(sequence: SequenceState, legal: bool) -> None:
    """Note the first token that the constraint does not allow; from there on there is nothing to judge by."""
    if not legal:
        sequence.violated = len(sequence.emitted)
        sequence.constraint = None


def _stuck(batch: Batch, tree: int, sequence: SequenceState, why: str) -> None:
    sequence.finish = "stuck"
    batch.broken[tree] = why


def _keep_cells(batch: Batch, tree: int, sequence: SequenceState, step: Step, done: Committed) -> None:
    """The accepted nodes' cells stay, the others are dropped."""
    cells, shape = batch.target.lm.cells, step.draft.shape
    if shape.nodes:
        held = step.slots[tree]
        places = shape.places[np.array(done.path[: done.accepted_kept], dtype=np.int64)]
        cells.keep(sequence.path, held[places])
        rejected = np.ones(len(held), dtype=bool)
        rejected[places] = False
        cells.drop(sequence.path, held[rejected])
