"""A walk along recorded texts: at some places every proposer drafts, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_lab.core.clock import Mark
from spec_lab.core.draft import Draft, empty
from spec_lab.core.probabilities import logits_to_probs, probs_dtype
from spec_lab.core.randomness import Draws
from spec_lab.engine.batch import Batch, Request, SequenceState, by_row, healed
from spec_lab.engine.step import history, propose
from spec_lab.models.target import Target
from spec_lab.propose import Null, Proposer
from spec_lab.results.writer import Outcome
from spec_lab.tasks.lab import Loop
from spec_lab.verify import Match


@dataclass(frozen=True, eq=False)
class Step:
    """What one proposer drafted at one place.

    Args:
        position: tokens of the true prefix, prompt included.
        proposer: its name in the run.
        draft: one tree.
        p: ``[R, V]`` the target's laws over it. They live until the walk goes on.
        who: (request, branch, round), which key the choices made here.
        marks: the moments around drafting, the target and the law, four of them.
        target_marks: start and end of the target's module calls.
        broken: what broke; empty for nothing.
    """

    position: int
    proposer: str
    draft: Draft
    p: Tensor
    who: tuple[int, int, int]
    marks: list[Mark]
    target_marks: list[tuple[Mark, Mark]]
    broken: str


def sample(target: Target, request: Request, seed: int) -> Outcome:
    """The request's text as the target alone samples it: the project's loop with the null proposer."""
    return Loop(target, Null.load(target), Match(), seed).decode([request]).outcomes[0]


def places(request: Request, text: Sequence[int], every: int) -> range:
    """The prefixes drafted below: from the first token after the prompt on, as long as a token follows in the text."""
    return range(len(request.tokens) + 1, len(text), every)


@torch.inference_mode()
def walk(
    target: Target, proposers: Mapping[str, Proposer], request: Request, text: Sequence[int], every: int, draws: Draws
) -> Generator[Step, None, None]:
    """Every proposer's draft at every place of ``text``, the prompt and what followed it.

    At a place the last token is pending and all before it are computed, as in a decode step. Drafts are keyed by
    request and position, so one tree drawn in several ways shares its uniforms. They are dropped when the walk goes on.
    A walk that is abandoned must be closed, to give its cells back.
    """
    lm, cells, clock = target.lm, target.lm.cells, target.lm.clock
    lm.keep_hidden(any(one.wants_hidden for one in proposers.values()))
    path = cells.open(len(text) + max((one.nodes for one in proposers.values()), default=0))
    own = {name: SequenceState(request, path, []) for name in proposers}  # each with its proposer's state
    memory = torch.empty(0)
    try:
        for position in places(request, text, every):
            prefix = list(text[:position])
            if between := prefix[len(path) : -1]:
                lm.forward([path], [between], empty(1, lm.device))
            for name, proposer in proposers.items():
                live = own[name]
                live.tokens, live.round = list(prefix), position
                batch = Batch(target, [live], draws)
                marks = [clock.mark()]
                draft = propose(proposer, batch)
                marks.append(clock.mark())
                output = lm.forward([path], [prefix[-1:]], draft)
                marks.append(clock.mark())
                if len(memory) < len(output.logits):
                    memory = torch.empty(output.logits.shape, dtype=probs_dtype(output.logits), device=lm.device)
                logits = memory[: len(output.logits)].copy_(output.logits)
                logits = healed(batch, draft.shape.root, logits, "target")
                seen = history(batch, draft) if request.sampling.repetition_penalty != 1 else None
                p = logits_to_probs(logits, by_row([request.sampling], draft.shape.root), seen, scratch=memory)
                marks.append(clock.mark())
                yield Step(position, name, draft, p, live.who, marks, output.marks, batch.broken.get(0, ""))
                cells.drop(path, output.slots[0])
                cells.backtrack(path, position - 1)
    finally:
        for name, proposer in proposers.items():
            proposer.close(own[name])
        cells.close(path)
