"""The engine: requests are admitted, decoded together in steps, and retired (continuous batching).

A fixed group is the special case in which all requests are there from the start and all fit into one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from spec_lab.constrain import ConstraintError
from spec_lab.constrain.protocol import calling
from spec_lab.core.faults import attributed
from spec_lab.core.options import whole
from spec_lab.core.request import BROKEN, Ended, Request, without_name
from spec_lab.decode.arm import Arm, Memory
from spec_lab.decode.commit import Committed
from spec_lab.decode.prefix_cache import copier
from spec_lab.decode.proposer import Observation, release
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import Chunk, StepInfo, settle, step
from spec_lab.runners.runner import KVSequence
from spec_lab.text.detokenizer import Rules, Stream


@dataclass(frozen=True)
class Limits:
    """How much an engine does at once.

    Args:
        max_batch_size: most requests decoded together; None for no limit. The target's runner may have a limit of its
            own (``max_at_once``), beyond which requests wait. llama.cpp has 256 sequence ids: where requests and their
            forks are more, decoding ends with an error.
        max_prefill_tokens: most tokens of sequences with several pending tokens (prompts, tokens computed again after a
            preemption, forced tokens) computed in one step; longer ones are computed in chunks over several steps,
            together with the decoding of others. None for no limit.
        max_kv_tokens: most tokens of admitted sequences, summed over them: of each its tokens, the next one, and the
            rows that a draft may add (``Proposer.nodes``, and ``forced_nodes`` where forced tokens
            are drafted), or the cells that drafting uses where these are more (``target_cells``). The cells in use
            are at most so many, since cells that forks share are counted for each of them; allocated memory is not
            bounded, since it grows in blocks, and a prefix cache has a limit of its own. None for no limit. Requests
            wait until there is room. Where decoding needs more than there is, the sequence that was admitted last, or
            was forked last, is preempted: its KV cache is freed, and computed again when it is admitted again.
    """

    max_batch_size: int | None = None
    max_prefill_tokens: int | None = None
    max_kv_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_prefill_tokens", "max_kv_tokens"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, otherwise=", or null")


@dataclass(eq=False)
class Engine:
    """Decodes requests. ``step`` until ``has_unfinished`` is false, or iterate; ``close`` when it is abandoned earlier.

    Args:
        arm: what decodes. The engine counts its forks in a copy of its own.
        listen: whether every sequence is read as text (``SequenceState.events``).
        limits: how much is done at once.

    After decoding, ``sequences`` holds every sequence in the order of admission, forks after them, and ``errors`` the
    error of each sequence that has one.
    """

    arm: Arm
    listen: bool = False
    limits: Limits = field(default_factory=Limits)
    sequences: list[SequenceState] = field(init=False, default_factory=list)
    errors: dict[SequenceState, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.arm = replace(self.arm, memory=Memory())  # it is freed with the engine
        self._ids: set[int] = set()
        self._waiting: deque[Request | SequenceState] = deque()
        self._live: list[SequenceState] = []  # in the order of admission
        applied = self.arm.applied
        self._logprobs = applied is not None and applied.constraint.reads_logprobs

    # Requests --------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; it is admitted by the next step that has room for it.

        Raises:
            ValueError: a prompt that does not fit the target's context, or the KV cache by itself; an id that was added
                before; stop strings without the bytes of the tokens; sampling that the proposer cannot draft for; under
                ``distribution="global"`` one whose valid outputs cannot be enumerated.
        """
        request.check_fits(self.arm.target.context, self.arm.target.vocabulary)
        try:
            self.arm.proposer.check_sampling(request.sampling)
        except ValueError as error:
            raise ValueError(f"request '{request.name}': proposer '{self.arm.proposer.name}': {error}") from error
        if request.id in self._ids:
            raise ValueError(f"request '{request.name}' has the id {request.id} of another one, which keys its choices")
        if self.arm.pieces is None and (request.stop_strings or self.listen):
            raise ValueError(f"request '{request.name}' needs text, but the bytes of the tokens are not known")
        most = self.limits.max_kv_tokens
        if most is not None and (needed := self._tokens(request)) > most:
            raise ValueError(
                f"request '{request.name}' may need {needed} tokens of KV cache, max_kv_tokens is {most}: raise it, "
                "shorten the prompt or ask for fewer new tokens"
            )
        if self.arm.conditional is not None:
            self.arm.conditional.check(request)
        self._ids.add(request.id)
        self._waiting.append(replace(request, logprobs=True) if self._logprobs else request)

    def abort(self, request_id: int) -> None:
        """End all sequences of a request, with finish "aborted"; nothing happens where it has ended already."""
        # A request that never started leaves no sequence.
        preempted = [
            waiting
            for waiting in self._waiting
            if isinstance(waiting, SequenceState) and waiting.request.id == request_id
        ]
        self._waiting = deque(waiting for waiting in self._waiting if _id(waiting) != request_id)
        for sequence in preempted + self._live:
            if sequence.request.id == request_id:
                sequence.finish = "aborted"
        self._retire(preempted)

    def has_unfinished(self) -> bool:
        """Whether a request is decoded or waiting."""
        return bool(self._live or self._waiting)

    @property
    def live(self) -> Sequence[SequenceState]:
        """The admitted sequences."""
        return self._live

    # Decoding --------------------------------------------------------------------------------------------------------

    def step(self) -> StepInfo | None:
        """Admit what fits, and decode one step; None where nothing was left to compute.

        Raises:
            PartError: see ``step.step``. The engine is closed.
        """
        try:
            if self._waiting:
                self._admit()
                self._retire()
            if not self._live:
                return None
            self._make_room()
            ready, chunks = self._plan()
            info = step(ready, self.arm, chunks)
            for sequence, why in info.errors.items():
                self._note(sequence, why)
            for got in info.committed:
                self._live += got.forks
                self.sequences += got.forks
            self._retire()
            return info
        except BaseException:
            with suppress(Exception):  # the first error is the one to raise
                self.close()
            raise

    def __iter__(self) -> Iterator[StepInfo]:
        """Decode until nothing is left; an iterator that is closed or fails closes the engine as well."""
        try:
            while self.has_unfinished():
                if (info := self.step()) is not None:
                    yield info
        finally:
            self.close()

    def close(self) -> None:
        """End decoding: free all KV caches and states, and drop waiting requests.

        Raises:
            PartError: the proposer's first error, after everything is freed.
        """
        live, self._live = self._live, []
        self._waiting.clear()
        if self.arm.constraint is not None:
            self.arm.constraint.close()
        release(self.arm.proposer, live)

    # Admission -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting requests in order, as long as there is room."""
        while self._waiting:
            if self.arm.max_at_once is not None and len(self._live) >= self.arm.max_at_once:
                return
            most, first = self.limits.max_batch_size, self._waiting[0]
            if most is not None and len({sequence.request.id for sequence in self._live} | {_id(first)}) > most:
                return
            tokens = len(first.tokens)
            room = self.limits.max_kv_tokens
            if room is not None and self._live and self._used() + tokens + 1 + self.arm.max_cells > room:
                return
            self._waiting.popleft()
            if isinstance(first, SequenceState):
                self._reopen(first)
            else:
                self._open(first)

    def _open(self, request: Request) -> None:
        kv, state = self._begin(request, request.tokens)
        sequence = SequenceState(
            request, kv, list(request.tokens), state=state, born=len(request.tokens), reused=len(kv)
        )
        self._live.append(sequence)
        self.sequences.append(sequence)
        if self.arm.pieces is not None and (request.stop_strings or self.listen):
            rules = Rules(request.stop, request.stop_strings, request.banned_strings, request.min_new_tokens)
            sequence.stream = Stream(self.arm.pieces, rules, request.healed)
        self._observe_reused(sequence)
        self._constrain(sequence)

    def _begin(self, request: Request, tokens: Sequence[int]) -> tuple[KVSequence, Any]:
        """Return a KV cache and a proposer's state for a sequence of the request; if one fails, neither is kept."""
        reserve = self._tokens(request)
        if self.arm.prefix_cache is None:
            kv = self.arm.target.lm.open(reserve)
        else:
            live = [(sequence.tokens, sequence.kv) for sequence in self._live]
            kv = self.arm.prefix_cache.open(copier(self.arm.target), tokens, reserve, live)
        try:
            with attributed("proposer", self.arm.proposer):
                return kv, self.arm.proposer.init(request)
        except BaseException:
            kv.close()
            raise

    def _observe_reused(self, sequence: SequenceState) -> None:
        """Let the proposer observe the positions that came from the prefix cache."""
        if end := len(sequence.kv):
            with attributed("proposer", self.arm.proposer):
                self.arm.proposer.observe([Observation(sequence, 0, sequence.tokens[: end + 1])])

    def _constrain(self, sequence: SequenceState) -> None:
        """Start the constraint at the end of the prompt, and carry out its first actions."""
        constraint = self.arm.constraint
        if constraint is None:
            return
        on_target = constraint.applied.on_target
        try:
            sequence.constraint = constraint.start(sequence.request)
            with calling(constraint.constraint):
                acts = on_target and sequence.constraint.action() is not None
        except ConstraintError as error:
            if on_target:
                sequence.finish = "stuck"
                self._note(sequence, str(error))
            else:
                sequence.unwatch(str(error))
            return
        # An action waits for the first step, which computes the prompt: forks then share its cells.
        if on_target and not acts:
            done = Committed([])
            settle([(sequence, done)], self.arm)
            for failed, why in done.errors.items():
                self._note(failed, why)
            self._live += done.forks
            self.sequences += done.forks

    def _reopen(self, sequence: SequenceState) -> None:
        """Admit a preempted sequence again: all its tokens are pending."""
        sequence.kv, sequence.state = self._begin(sequence.request, sequence.tokens)
        sequence.prefill = True
        self._live.append(sequence)
        self._observe_reused(sequence)

    def _tokens(self, request: Request) -> int:
        """Most tokens of the KV cache that a sequence of the request needs."""
        return min(len(request.tokens) + request.max_new_tokens, self.arm.target.context) + self.arm.max_cells

    def _used(self) -> int:
        """See ``Limits.max_kv_tokens``: what the next step needs if nothing else is admitted."""
        return sum(len(sequence.tokens) + 1 + self.arm.max_cells for sequence in self._live)

    def _make_room(self) -> None:
        """Preempt the sequences admitted last until the next step fits."""
        room = self.limits.max_kv_tokens
        while room is not None and len(self._live) > 1 and self._used() > room:
            sequence = self._live.pop()
            release(self.arm.proposer, [sequence])
            self._waiting.appendleft(sequence)

    def _plan(self) -> tuple[list[SequenceState], list[Chunk]]:
        """The sequences that decode in this step, and those that compute a chunk of their prompt."""
        budget, live = self.limits.max_prefill_tokens, self._live[: self.arm.max_at_once]
        if budget is None:
            return live, []
        ready, chunks = [], []
        for sequence in live:
            count = len(sequence.pending)
            if count <= max(budget, 1):
                budget -= count if count > 1 else 0
                ready.append(sequence)
            elif budget:
                chunks.append((sequence, budget))
                budget = 0
        return ready, chunks

    # Retirement ------------------------------------------------------------------------------------------------------

    def _retire(self, preempted: Sequence[SequenceState] = ()) -> None:
        """Free the sequences that have finished, and end their requests.

        Args:
            preempted: finished ones that hold nothing.
        """
        live = [sequence for sequence in self._live if sequence.finish is not None]
        over = [*live, *preempted]
        if not over:
            return
        for sequence in over:
            _end_text(sequence)
        if self.arm.prefix_cache is not None:
            for sequence in live:
                if sequence.finish not in BROKEN:
                    self.arm.prefix_cache.keep(copier(self.arm.target), sequence.tokens, sequence.kv)
        self._live = [sequence for sequence in self._live if sequence.finish is None]
        release(self.arm.proposer, live)
        left = {id(sequence.request) for sequence in self._live}
        left |= {id(waiting.request) for waiting in self._waiting if isinstance(waiting, SequenceState)}
        for request in {id(sequence.request): sequence.request for sequence in over}.values():
            if id(request) not in left:
                self._keep(request)

    def _keep(self, request: Request) -> None:
        """The request's sequences have all finished: its constraint may keep only some of them."""
        constraint = None if self.arm.applied is None else self.arm.applied.constraint
        keep = None if constraint is None else constraint.keep
        if keep is None:
            return
        sequences = sorted(
            (sequence for sequence in self.sequences if sequence.request is request),
            key=lambda sequence: sequence.lineage,
        )
        ended = [
            Ended(sequence.lineage, tuple(sequence.emitted), tuple(sequence.logprobs), str(sequence.finish))
            for sequence in sequences
        ]
        try:
            kept = set(keep(ended))
            if not kept <= set(range(len(sequences))):
                raise ValueError(f"there are sequences 0 to {len(sequences) - 1}, not {sorted(kept)}")
        except Exception as error:  # all of them stay
            what = f"{type(error).__name__}: {error}"
            why = f"request '{request.name}': its constraint cannot choose which sequences to keep: {what}"
            self.errors.setdefault(sequences[0], why)
            return
        for number, sequence in enumerate(sequences):
            sequence.kept = number in kept

    def _note(self, sequence: SequenceState, why: str) -> None:
        self.errors[sequence] = (
            f"request '{sequence.request.name}', step {max(sequence.step - 1, 0)}: "
            f"{without_name(sequence.request, why)}; "
            f"it ends with the {len(sequence.emitted)} tokens emitted so far"
        )


def _end_text(sequence: SequenceState) -> None:
    """Release the text that was held back."""
    if sequence.stream is not None and not sequence.stream.finished:
        sequence.events += sequence.stream.end(str(sequence.finish))


def _id(waiting: Request | SequenceState) -> int:
    return waiting.id if isinstance(waiting, Request) else waiting.request.id


def fixed_group(arm: Arm, requests: Sequence[Request], listen: bool = False) -> Engine:
    """An engine with requests that are decoded together from the first step on. Arguments as in ``Engine``.

    Raises:
        ValueError: see ``Engine.add``.
    """
    engine = Engine(arm, listen)
    for request in requests:
        engine.add(request)
    return engine
