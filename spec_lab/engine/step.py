"""The decode loop. There is only this one: prefill, chains, trees, batches and the baseline all run through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain import AppliedConstraint, ConstraintError, Masks, StepConstraint
from spec_lab.constrain.applied import open_mask
from spec_lab.core.clock import Clock, Mark
from spec_lab.core.draft import Draft, Shape
from spec_lab.core.draft import empty as no_draft
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import logits_to_probs, one_hot_, probs_dtype
from spec_lab.core.randomness import Draws
from spec_lab.engine.batch import Batch, Ended, Request, SequenceState, by_row, healed, without_name
from spec_lab.engine.commit import Committed, Step, commit, settle
from spec_lab.models.target import Target
from spec_lab.propose.proposer import Proposer, branches
from spec_lab.text.detokenizer import Rules, Stream
from spec_lab.verify import Verdict, Verifier, chains_only, check_draft, check_pair, choose

PHASES = ("propose", "mask", "target", "wait", "law", "verify", "commit")
"""What a round's time is split into, in order: masks are computed before the target, or waited for after it."""


@dataclass(frozen=True, eq=False)
class Round:
    """One forward of the batch and what came of it.

    Args:
        sequences: those that took part.
        draft: what was proposed.
        expected: ``[B]`` expected accepted tokens, exact, forced ones left out.
        expected_emitted: ``[B]`` expected emitted tokens, likewise; those appended as forced are.
        given: what the expectation is given: the "draft", or its "noise" as well.
        empty: ``[B]`` whether rounding had left nothing of the residual.
        committed: what each sequence got.
        context: each sequence's tokens when the round began.
        pending: tokens each sequence had pending.
        prefill: whether each sequence's pending tokens were its prompt.
        attended: cells attended.
        marks: the moments between phases, ``len(PHASES) + 1`` of them.
        target_marks: start and end of the target's module calls; ``proposer_marks`` of the draft's or heads'.
        mask_busy: seconds spent on masks, wherever they ran; ``guided``: of them, seconds inside propose.
    """

    sequences: list[SequenceState]
    draft: Draft
    expected: np.ndarray
    expected_emitted: np.ndarray
    given: str
    empty: np.ndarray
    committed: list[Committed]
    context: list[int]
    pending: list[int]
    prefill: list[bool]
    attended: int
    marks: list[Mark]
    target_marks: list[tuple[Mark, Mark]]
    proposer_marks: list[tuple[Mark, Mark]]
    mask_busy: float = 0.0
    guided: float = 0.0

    def seconds(self, clock: Clock) -> dict[str, float]:
        """Seconds of each phase; of the module calls inside propose and target; of masks; of the whole."""
        bounds = zip(PHASES, self.marks, self.marks[1:], strict=False)
        seconds = {phase: clock.seconds(start, end) for phase, start, end in bounds}
        seconds["target_forward"] = sum(clock.seconds(*pair) for pair in self.target_marks)
        seconds["propose_forward"] = sum(clock.seconds(*pair) for pair in self.proposer_marks)
        seconds["propose"] -= self.guided
        seconds["mask_busy"] = self.mask_busy
        seconds["mask_wait"] = self.guided + seconds.pop("mask") + seconds.pop("wait")
        seconds["whole"] = clock.seconds(self.marks[0], self.marks[-1])
        return seconds


@dataclass(eq=False)
class Group:
    """Requests decoded together. Iterate it to decode; afterwards ``sequences`` holds every result.

    Args:
        target: verifies.
        proposer: drafts; the null proposer makes this the autoregressive baseline.
        verifier: decides.
        requests: decoded as one batch until each has finished.
        draws: where every random choice comes from.
        binding: the constraint; None for none.
        pieces: the bytes of each token, for requests with stop strings, and for listeners.
        listen: whether every sequence is read as text (``Sequence.events``).

    Raises:
        ValueError: a verifier that cannot judge what the proposer draws, or a prompt that fills the context.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    requests: Sequence[Request]
    draws: Draws
    binding: AppliedConstraint | None = None
    pieces: Sequence[bytes] | None = None
    listen: bool = False
    sequences: list[SequenceState] = field(init=False)
    errors: dict[str, str] = field(init=False, default_factory=dict)
    _bound: StepConstraint | None = field(init=False, default=None)
    _scratch: Tensor | None = field(init=False, default=None)
    _chains_only: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._chains_only = chains_only(self.verifier)
        check_pair(self.proposer.name, self.proposer.drawn, self.verifier, branches(self.proposer))
        for request in self.requests:
            request.check_fits(self.target)
        if self.binding is not None and getattr(self.binding.constraint, "reads_logprobs", False):
            self.requests = [replace(request, logprobs=True) for request in self.requests]

    @torch.inference_mode()
    def __iter__(self) -> Iterator[Round]:
        """Decode; one round per forward."""
        self.sequences = []
        self._bound = None if self.binding is None else StepConstraint(self.binding)
        batch = Batch(self.target, [], self.draws)
        try:
            for request in self.requests:
                batch.sequences.append(self._open(request))
            self.sequences = list(batch.sequences)
            self._begin(batch)
            self._retire(batch)
            while batch.sequences:
                done = self._round(batch)
                self._retire(batch)
                yield done
        finally:  # an abandoned or failing group gives its cells back as well
            if self._bound is not None:
                self._bound.close()
            for sequence in batch.sequences:
                self._close(sequence)

    def _begin(self, batch: Batch) -> None:
        """Constraints start at the end of the prompts; what they want at once is done."""
        batch.broken = {}
        for head, sequence in enumerate(list(batch.sequences)):
            if self._bound is None:
                continue
            try:
                sequence.constraint = self._bound.start(sequence.request)
            except ConstraintError as error:
                if self._bound.binding.on_target:
                    sequence.finish, batch.broken[head] = "stuck", str(error)
                else:
                    sequence.unwatch(str(error))
                continue
            # An action waits for the first round, which computes the prompt: forks then share its cells.
            if self._bound.binding.on_target and sequence.constraint.action() is None:
                done = Committed([])
                settle(batch, head, sequence, self._bound.binding, done)
                self._adopt(batch, [done])
        self._note(batch, self.sequences)

    def _round(self, batch: Batch) -> Round:
        lm, clock, bound = self.target.lm, self.target.lm.clock, self._bound
        sequences = list(batch.sequences)
        pending = [s.pending for s in sequences]
        context, prefill = [len(s.tokens) for s in sequences], [not len(s.path) for s in sequences]
        batch.broken, batch.marks = {}, []
        lm.keep_hidden(self.proposer.wants_hidden)  # every round: groups with other wishes may take turns

        marks = [clock.mark()]
        if bound is not None:
            bound.begin(batch)
        if bound is None or bound.supports_drafts:
            draft = propose(self.proposer, batch)
            if self._chains_only:
                check_draft(self.proposer.name, self.verifier, draft.shape)
        else:
            draft = no_draft(len(sequences), batch.device)
        marks.append(clock.mark())
        masks = None
        if bound is not None:
            draft, masks = bound.narrow(batch, draft)
        marks.append(clock.mark())
        output = lm.forward([s.path for s in sequences], pending, draft)
        marks.append(clock.mark())
        if bound is not None and masks is None:
            masks = bound.masks()
        marks.append(clock.mark())
        memory = self._memory(output.logits)
        logits = healed(batch, draft.shape.root, memory[: len(output.logits)].copy_(output.logits), "target")
        samplings = [s.request.sampling for s in sequences]
        seen = history(batch, draft) if any(s.repetition_penalty != 1 for s in samplings) else None
        binds = masks is not None and self.binding is not None and self.binding.on_target
        allowed = open_mask(masks, logits.shape[-1], logits.device) if binds and masks is not None else None
        p = logits_to_probs(logits, by_row(samplings, draft.shape.root), seen, allowed, scratch=memory)
        silent = _silence(draft, p, masks) if binds and masks is not None else None
        marks.append(clock.mark())
        with attributed("verifier", self.verifier):
            verdict = self.verifier(draft, p)
            row, token, empty = choose(verdict, draft.shape, p, self.draws, [s.who for s in sequences])
        if silent is not None:
            token = np.where(silent[row], -1, token)
        expected, expected_emitted = _expected(verdict, draft.shape, masks if binds else None, silent)
        marks.append(clock.mark())
        logprobs = None
        if any(s.request.logprobs for s in sequences):
            logprobs = _logprobs(output.logits, allowed, draft, row, token)
        committed = commit(batch, Step(draft, output.slots, row, token, masks, logprobs), self.binding)
        self._adopt(batch, committed)
        marks.append(clock.mark())

        self._note(batch, sequences)
        return Round(
            sequences, draft, expected, expected_emitted, verdict.given, empty, committed, context,
            [len(tokens) for tokens in pending], prefill, output.attended, marks, output.marks, batch.marks,
            0.0 if bound is None else bound.busy, 0.0 if bound is None else bound.guided,
        )  # fmt: skip

    def _adopt(self, batch: Batch, committed: Sequence[Committed]) -> None:
        """Forks join the batch."""
        for done in committed:
            batch.sequences += done.children
            self.sequences += done.children

    def _note(self, batch: Batch, sequences: Sequence[SequenceState]) -> None:
        """What broke, in words."""
        for head, why in batch.broken.items():
            sequence = sequences[head]
            self.errors[sequence.request.name] = (
                f"request '{sequence.request.name}', step {max(sequence.round - 1, 0)}: "
                f"{without_name(sequence.request, why)}; "
                f"it ends with the {len(sequence.emitted)} tokens emitted so far"
            )

    def _memory(self, logits: Tensor) -> Tensor:
        """Room for this round's law."""
        rows, width = logits.shape
        if self._scratch is None or len(self._scratch) < rows:
            self._scratch = torch.empty(rows, width, dtype=probs_dtype(logits), device=logits.device)
        return self._scratch

    def _open(self, request: Request) -> SequenceState:
        tokens = min(len(request.tokens) + request.max_new_tokens, self.target.context)
        path = self.target.lm.cells.open(tokens + self.proposer.nodes)
        live = SequenceState(request, path, list(request.tokens), born=len(request.tokens))
        if request.stop_strings or self.listen:
            if self.pieces is None:
                raise ValueError(f"request '{request.name}' is to be read as text, but nobody gave the tokens' bytes")
            rules = Rules(request.stop, request.stop_strings, request.banned_strings, request.min_new_tokens)
            live.stream = Stream(self.pieces, rules, request.healed)
        return live

    def _close(self, sequence: SequenceState) -> None:
        cells = self.target.lm.cells
        self.proposer.close(sequence)
        cells.close(sequence.path)

    def _retire(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if sequence.finish is not None:
                if sequence.stream is not None and not sequence.stream.finished:
                    sequence.events += sequence.stream.end(sequence.finish)
                self._close(sequence)
        over = {id(s.request): s.request for s in batch.sequences if s.finish is not None}
        batch.sequences = [s for s in batch.sequences if s.finish is None]
        for request in over.values():
            if all(s.request is not request for s in batch.sequences):
                self._choose(request)

    def _choose(self, request: Request) -> None:
        """The request's sequences have all finished: its constraint may keep some of them only."""
        keep = None if self.binding is None else getattr(self.binding.constraint, "keep", None)
        if keep is None:
            return
        own = sorted((s for s in self.sequences if s.request is request), key=lambda s: s.lineage)
        ended = [Ended(s.lineage, tuple(s.emitted), tuple(s.logprobs), str(s.finish)) for s in own]
        try:
            kept = set(keep(ended))
            if not kept <= set(range(len(own))):
                raise ValueError(f"there are sequences 0 to {len(own) - 1}, not {sorted(kept)}")
        except Exception as error:  # all of them stay
            what = f"{type(error).__name__}: {error}"
            why = f"request '{request.name}': its constraint cannot choose which sequences to keep: {what}"
            self.errors.setdefault(request.name, why)
            return
        for place, sequence in enumerate(own):
            sequence.kept = place in kept


def propose(proposer: Proposer, batch: Batch) -> Draft:
    """The proposer's draft, cut where the context ends.

    Raises:
        PartError: the proposer raised an error, or returned no draft for the batch, or one with tokens that the target
            does not have; names it.
    """
    with attributed("proposer", proposer):
        draft = proposer.propose(batch)
        if not isinstance(draft, Draft):
            raise TypeError(f"propose must return a Draft, not {type(draft).__name__}")
        if draft.shape.roots != len(batch.sequences):
            raise ValueError(f"its draft has {draft.shape.roots} trees for {len(batch.sequences)} sequences")
        _check_tokens(draft, batch.target.vocabulary)
        return draft.cut(batch.room())


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


def _silence(draft: Draft, p: Tensor, masks: Masks) -> np.ndarray:  # [R] bool
    """Rows at which nothing is emitted: barriers, and legal ones that the constraint leaves no mass.

    A verifier wants a law everywhere. There it gets all mass on a token that no child holds, so that a path that comes
    there ends there; that token then is never emitted.
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
        laws = own.log_softmax(-1)
        found.append(laws.gather(-1, torch.tensor(tokens, device=laws.device)[:, None])[:, 0].tolist())
    return found


def history(batch: Batch, draft: Draft) -> Tensor:
    """``[R, V]`` bool: the tokens that occur before the one sampled at each row, along its own path."""
    shape = draft.shape
    seen = torch.zeros(shape.rows, batch.target.vocabulary, dtype=torch.bool)
    for head, sequence in enumerate(batch.sequences):
        seen[head, sequence.tokens] = True
    token = draft.token.tolist()
    for row in range(shape.roots, shape.rows):
        seen[row] = seen[shape.parent[row - shape.roots]]
        seen[row, token[row - shape.roots]] = True
    return seen.to(batch.device)
