"""Commit a step: append and cut tokens, keep accepted nodes in the KV cache, advance constraints, and let them act."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spec_lab.constrain import AppliedConstraint, ConstraintError, Masks
from spec_lab.constrain.applied import forced_token
from spec_lab.constrain.protocol import action_of, allows, calling
from spec_lab.core.draft import Draft
from spec_lab.decode.sequence import SequenceState

MAX_FORKS = 256
"""Most forks of one request; one more is an error."""

MAX_ACTIONS = 1000
"""Most actions in a row without a token between them."""

RUNAWAY = 32
"""A sequence that has emitted this many times its limit, removed tokens included, is ended."""

NOTHING_LEFT = "its constraint allows no token here that has any probability under the model"


class Emitted(NamedTuple):
    """A token that a step emitted.

    Args:
        origin: where it comes from (``sequence.ORIGINS``).
        kept: whether it is left after stop tokens and limits.
    """

    token: int
    origin: str
    kept: bool


@dataclass(frozen=True)
class Decision:
    """Where each tree's accepted path ends, and what is emitted there.

    Args:
        drafted: ``[M]`` its tokens, on the host.
        row: ``[B]`` where each accepted path ends.
        token: ``[B]`` the token emitted there; -1 for none.
        masks: of the forest; None without a constraint.
        logprobs: for each tree the log-probabilities of its accepted tokens and the bonus or recovered one; None where
            not needed.
        broken: trees without a commit: why each sequence ends ("nan", "stuck").
    """

    draft: Draft
    drafted: Sequence[int]
    row: np.ndarray
    token: np.ndarray
    masks: Masks | None = None
    logprobs: Sequence[Sequence[float]] | None = None
    broken: Mapping[int, str] = field(default_factory=dict)


@dataclass
class Committed:
    """Tokens that one sequence got in one step.

    Args:
        path: rows of the accepted nodes, from the root down.
        tokens: all tokens emitted: first the accepted ones, then the bonus or recovered one, then forced ones.
        forced: drafted nodes that were the only ones their constraint allows.
        legal: drafted nodes that the constraint allows.
        removed: tokens that an action removed again.
        errors: why it failed, or one of its new forks.
    """

    path: list[int]
    tokens: list[Emitted] = field(default_factory=list)
    forced: int = 0
    legal: int = 0
    removed: int = 0
    forks: list[SequenceState] = field(default_factory=list)
    errors: dict[SequenceState, str] = field(default_factory=dict)

    def count(self, accepted: bool = False, forced: bool = False, kept: bool = False) -> int:
        """How many tokens were emitted; of them, only accepted ones, only forced ones, only kept ones."""
        some: Iterable[Emitted] = self.tokens[: len(self.path)] if accepted else self.tokens
        return sum((not forced or emitted.origin == "forced") and (not kept or emitted.kept) for emitted in some)


Commit = Callable[[Sequence[SequenceState], Decision, AppliedConstraint | None, int], list[Committed]]
"""How a step's choices are committed. See ``commit``."""


def commit(
    sequences: Sequence[SequenceState], decision: Decision, applied: AppliedConstraint | None, context: int
) -> list[Committed]:
    """Append what was accepted and emitted, and keep the accepted nodes in the KV cache.

    Stop tokens, stop strings and limits cut here, inside an accepted path as well, and do not affect verification. A
    broken tree gets no tokens and its sequence ends. Constraints advance; their actions come later (``act``).

    Args:
        sequences: ``[B]``.
        applied: the constraint; None for none.
        context: most tokens of a sequence.
    """
    single = None
    if decision.masks is not None and applied is not None and applied.on_target:
        single = decision.masks.forced
    return [_commit(sequence, tree, decision, single, applied, context) for tree, sequence in enumerate(sequences)]


def _commit(
    sequence: SequenceState,
    tree: int,
    decision: Decision,
    single: np.ndarray | None,
    applied: AppliedConstraint | None,
    context: int,
) -> Committed:
    shape, masks = decision.draft.shape, decision.masks
    nodes = shape.trees[tree][1:] if shape.nodes else NO_NODES
    sequence.step, sequence.prefill = sequence.step + 1, False
    done = Committed([], legal=len(nodes) if masks is None else int(masks.legal[nodes].sum()))
    if single is not None and len(nodes) and masks is not None:
        done.forced = int((single[shape.parent[nodes - shape.roots]] & masks.legal[nodes]).sum())
    if tree in decision.broken:
        sequence.finish = decision.broken[tree]
        sequence.kv.accept()
        return done
    row, last = int(decision.row[tree]), int(decision.token[tree])
    done.path = shape.path(row)
    accepted = len(done.path)
    rows = [*done.path, row] if last >= 0 else done.path  # of the accepted tokens; then where the last one is sampled
    tokens = [decision.drafted[node - shape.roots] for node in done.path] + ([last] if last >= 0 else [])
    above = [tree, *done.path]
    after = "recovered" if shape.count[row] else "bonus"
    kept = 0
    for depth, (token, at) in enumerate(zip(tokens, rows, strict=True)):
        forced = single is not None and bool(single[above[depth]])
        origin = "forced" if forced else "accepted" if depth < accepted else after
        keep = sequence.finish is None
        done.tokens.append(Emitted(token, origin, keep))
        if not keep:
            continue
        if masks is not None and sequence.constraint is not None:
            legal = bool(masks.legal[at]) and (depth < accepted or allows(masks.bits[at], token))
            _watch(sequence, legal)
        logprob = decision.logprobs[tree][depth] if decision.logprobs is not None else float("nan")
        if error := _append(sequence, token, logprob, origin, applied, context):
            done.errors[sequence] = error
        kept += depth < accepted
    sequence.kv.accept([shape.places.item(row) for row in done.path[:kept]])
    on_target = applied is not None and applied.on_target
    if sequence.finish is None and on_target and last < 0 and masks is not None and not masks.barrier[row]:
        sequence.finish, done.errors[sequence] = "stuck", NOTHING_LEFT
    return done


NO_NODES = np.empty(0, dtype=np.int64)


def act(
    sequence: SequenceState,
    applied: AppliedConstraint,
    context: int,
    done: Committed,
    made: Counter[int],
    fork_state: Callable[[SequenceState], object],
) -> dict[SequenceState, int]:
    """Carry out the actions of a sequence's constraint and append forced tokens, until it can be drafted for.

    Args:
        applied: its constraint, on the target.
        context: most tokens of a sequence.
        done: where all is counted, and forks are listed.
        made: forks made so far, by the request's id.
        fork_state: a copy of the proposer's state for a fork of the given sequence.

    Returns:
        For each sequence whose computed positions became fewer, how many are left.
    """
    rewound: dict[SequenceState, int] = {}
    fresh = [sequence]
    while fresh:
        acting, actions = fresh.pop(), 0
        computed = len(acting.kv)
        try:
            while acting.finish is None:
                with calling(applied.constraint):
                    action = action_of(applied.constraint, acting.constraint)
                actions += 1
                if actions > MAX_ACTIONS:
                    raise ConstraintError(f"its constraint took {MAX_ACTIONS} actions without a token between them")
                if action is None:
                    _limit(acting, context)
                    if acting.finish is not None:
                        break
                    with calling(applied.constraint):
                        token = forced_token(acting.constraint) if applied.fast_forward else None
                    if token is None:
                        break
                    actions = 0
                    if why := _append(acting, token, 0.0, "forced", applied, context):
                        done.errors[acting] = why
                    done.tokens.append(Emitted(token, "forced", True))
                elif not action:
                    acting.finish = "constraint"
                elif len(action) > 1 and (acting.prefill or not len(acting.kv)):
                    break  # the next step computes the prompt: forks then share its cells
                else:
                    # Check everything first, so that an error leaves no fork without its constraint.
                    for onward in action:
                        _check(acting, onward.backtrack)
                    made[acting.request.id] += len(action) - 1
                    if made[acting.request.id] > MAX_FORKS:
                        raise ConstraintError(f"its constraint made more than {MAX_FORKS} forks of the request")
                    forks = []
                    for number in range(1, len(action)):
                        forks.append(fork(acting, number, fork_state))
                        done.forks.append(forks[-1])
                    fresh += forks
                    if acting in rewound:  # their proposer's states have not been rewound either
                        rewound |= {other: len(other.kv) for other in forks}
                    acting.forks += len(action) > 1
                    for live, onward in zip([acting, *forks], action, strict=True):
                        done.removed += onward.backtrack
                        live.constraint = onward.state
                        if onward.backtrack:
                            remove(live, onward.backtrack)
                            rewound[live] = len(live.kv)
        except ConstraintError as error:
            acting.finish, done.errors[acting] = "stuck", str(error)
        if len(acting.kv) >= len(acting.tokens):  # the last token is always pending
            acting.kv.truncate(len(acting.tokens) - 1)
        if len(acting.kv) < computed or acting in rewound:
            rewound[acting] = len(acting.kv)
    return rewound


def fork(
    sequence: SequenceState, number: int, fork_state: Callable[[SequenceState], object] = lambda _: None
) -> SequenceState:
    """Return a fork of the sequence: it shares the KV cache of its tokens, and has random choices of its own."""
    state = fork_state(sequence)  # first: an error leaves no KV cache behind
    return SequenceState(
        sequence.request,
        sequence.kv.fork(),
        list(sequence.tokens),
        (*sequence.lineage, sequence.forks, number),
        sequence.step,
        state=state,
        stream=None if sequence.stream is None else sequence.stream.fork(),
        born=len(sequence.tokens),
        spent=sequence.spent,
        logprobs=list(sequence.logprobs),
        origins=list(sequence.origins),
        prefill=False,
    )


def remove(sequence: SequenceState, count: int) -> None:
    """Remove the last ``count`` tokens, from the KV cache as well.

    Raises:
        ConstraintError: they reach into the prompt.
    """
    emitted = _check(sequence, count)
    if not count:
        return
    del sequence.tokens[-count:]
    del sequence.logprobs[len(sequence.emitted) :]
    del sequence.origins[len(sequence.emitted) :]
    sequence.born = min(sequence.born, len(sequence.tokens))
    if len(sequence.kv) > len(sequence.tokens):
        sequence.kv.truncate(len(sequence.tokens))
    if sequence.stream is not None and not sequence.stream.finished:
        ahead = sequence.stream.count - (emitted - count)  # the stream has removed a banned string itself
        sequence.events += sequence.stream.rewind(ahead)


def _check(sequence: SequenceState, count: int) -> int:
    """How many tokens have been emitted, if ``count`` of them can be removed."""
    emitted = len(sequence.tokens) - len(sequence.request.tokens)
    if not 0 <= count <= emitted:
        raise ConstraintError(f"its constraint removes {count} tokens, but {emitted} have been emitted")
    return emitted


def _append(
    sequence: SequenceState, token: int, logprob: float, origin: str, applied: AppliedConstraint | None, context: int
) -> str:
    """Append one token; unless it ends the sequence, advance the constraint. Return the error, or an empty string."""
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
        return ""
    if applied is not None and sequence.constraint is not None:
        try:
            with calling(applied.constraint):
                sequence.constraint.advance(token)
                if sequence.constraint.action() is not None:
                    return ""  # it may remove tokens: limits count afterwards
        except ConstraintError as error:
            if applied.on_target:
                sequence.finish = "stuck"
                return str(error)
            sequence.unwatch(str(error))
    _limit(sequence, context)
    return ""


def _watch(sequence: SequenceState, legal: bool) -> None:
    """Note the first token that an observing constraint does not allow: from there on nothing can be checked."""
    if not legal:
        sequence.violated, sequence.constraint = len(sequence.emitted), None


def _limit(sequence: SequenceState, context: int) -> None:
    request = sequence.request
    if len(sequence.tokens) - len(request.tokens) >= request.max_new_tokens:
        sequence.finish = "length"
    elif len(sequence.tokens) >= context:
        sequence.finish = "context"
    elif sequence.spent >= RUNAWAY * request.max_new_tokens:
        sequence.finish = "runaway"
