"""The decode loop. There is only this one: prefill, chains, trees, batches and the baseline all run through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spec_lab.batch import Batch, Committed, Request, by_row, commit, healed
from spec_lab.batch import Sequence as Live
from spec_lab.cells import Path
from spec_lab.clock import Clock, Mark
from spec_lab.draft import Draft
from spec_lab.law import Draws, law, law_dtype
from spec_lab.propose.proposer import Proposer
from spec_lab.target import Target
from spec_lab.verify import Verifier, check_pair, choose

PHASES = ("propose", "target", "law", "verify", "commit")
"""What a round's time is split into, in order."""


@dataclass(frozen=True, eq=False)
class Round:
    """One forward of the batch and what came of it.

    Args:
        sequences: those that took part.
        draft: what was proposed.
        expected: ``[B]`` expected accepted tokens, exact.
        given: what the expectation is given: the "draft", or its "noise" as well.
        empty: ``[B]`` whether rounding had left nothing of the residual.
        committed: what each sequence got.
        context: each sequence's tokens when the round began.
        pending: tokens each sequence had pending.
        prefill: whether each sequence's pending tokens were its prompt.
        attended: cells attended.
        marks: the moments between phases, ``len(PHASES) + 1`` of them.
        target_marks: start and end of the target's module calls; ``proposer_marks`` of the draft's or heads'.
    """

    sequences: list[Live]
    draft: Draft
    expected: np.ndarray
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

    def seconds(self, clock: Clock) -> dict[str, float]:
        """Seconds of each phase; of the module calls inside propose and target; of the whole."""
        bounds = zip(PHASES, self.marks, self.marks[1:], strict=False)
        seconds = {phase: clock.seconds(start, end) for phase, start, end in bounds}
        seconds["target_forward"] = sum(clock.seconds(*pair) for pair in self.target_marks)
        seconds["propose_forward"] = sum(clock.seconds(*pair) for pair in self.proposer_marks)
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

    Raises:
        ValueError: a verifier that cannot judge what the proposer draws, or a prompt that fills the context.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    requests: Sequence[Request]
    draws: Draws
    sequences: list[Live] = field(init=False)
    errors: dict[str, str] = field(init=False, default_factory=dict)
    _scratch: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_pair(self.proposer.name, self.proposer.drawn, self.verifier)
        for request in self.requests:
            if len(request.tokens) >= self.target.context:
                raise ValueError(
                    f"prompt '{request.name}' has {len(request.tokens)} tokens; the context holds "
                    f"{self.target.context}, one of them to be emitted: shorten the prompt"
                )

    @torch.inference_mode()
    def __iter__(self) -> Iterator[Round]:
        """Decode; one round per forward."""
        self.sequences = []
        batch = Batch(self.target, [], self.draws)
        try:
            for request in self.requests:
                batch.sequences.append(Live(request, self._open(request), list(request.tokens)))
            self.sequences = list(batch.sequences)
            while batch.sequences:
                done = self._round(batch)
                self._retire(batch)
                yield done
        finally:  # an abandoned or failing group gives its cells back as well
            for sequence in batch.sequences:
                self._close(sequence)

    def _round(self, batch: Batch) -> Round:
        lm, clock = self.target.lm, self.target.lm.clock
        sequences = list(batch.sequences)
        pending = [s.pending for s in sequences]
        context, prefill = [len(s.tokens) for s in sequences], [s.round == 0 for s in sequences]
        batch.broken, batch.marks = {}, []
        lm.keep_hidden(self.proposer.wants_hidden)  # every round: groups with other wishes may take turns

        marks = [clock.mark()]
        draft = self.proposer.propose(batch).cut(batch.room())
        marks.append(clock.mark())
        output = lm.forward([s.path for s in sequences], pending, draft)
        marks.append(clock.mark())
        memory = self._memory(output.logits)
        logits = healed(batch, draft.shape.root, memory[: len(output.logits)].copy_(output.logits), "target")
        samplings = [s.request.sampling for s in sequences]
        seen = history(batch, draft) if any(s.repetition_penalty != 1 for s in samplings) else None
        p = law(logits, by_row(samplings, draft.shape.root), seen, scratch=memory)
        marks.append(clock.mark())
        verdict = self.verifier(draft, p)
        row, token, empty = choose(verdict, draft.shape, p, self.draws, [s.who for s in sequences])
        expected = verdict.expected_accepted(draft.shape)
        marks.append(clock.mark())
        committed = commit(batch, draft, output.slots, row, token)
        marks.append(clock.mark())

        for head, why in batch.broken.items():
            sequence = sequences[head]
            self.errors[sequence.request.name] = (
                f"request '{sequence.request.name}', step {sequence.round - 1}: {why}; "
                f"it ends with the {len(sequence.emitted)} tokens emitted so far"
            )
        return Round(
            sequences, draft, expected, verdict.given, empty, committed, context,
            [len(tokens) for tokens in pending], prefill, output.attended, marks, output.marks, batch.marks,
        )  # fmt: skip

    def _memory(self, logits: Tensor) -> Tensor:
        """Room for this round's law."""
        rows, width = logits.shape
        if self._scratch is None or len(self._scratch) < rows:
            self._scratch = torch.empty(rows, width, dtype=law_dtype(logits), device=logits.device)
        return self._scratch

    def _open(self, request: Request) -> Path:
        tokens = min(len(request.tokens) + request.max_new_tokens, self.target.context)
        return self.target.lm.cells.open(tokens + self.proposer.nodes)

    def _close(self, sequence: Live) -> None:
        cells = self.target.lm.cells
        self.proposer.close(sequence)
        cells.close(sequence.path)

    def _retire(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if sequence.finish is not None:
                self._close(sequence)
        batch.sequences = [s for s in batch.sequences if s.finish is None]


def history(batch: Batch, draft: Draft) -> Tensor:
    """``[R, V]`` bool: the tokens that occur before the one sampled at each row, along its own path."""
    shape = draft.shape
    seen = torch.zeros(shape.rows, batch.target.vocabulary, dtype=torch.bool)
    for head, sequence in enumerate(batch.sequences):
        seen[head, sequence.tokens] = True
    token = draft.token.tolist()
    for row in range(shape.heads, shape.rows):
        seen[row] = seen[shape.parent[row - shape.heads]]
        seen[row, token[row - shape.heads]] = True
    return seen.to(batch.device)
