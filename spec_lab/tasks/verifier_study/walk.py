"""Drafts along recorded texts: at some positions every proposer drafts, and nothing of it stays."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.randomness import Draws
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import SequenceState
from spec_lab.engine.step import Memory, Parts, StepInfo, step
from spec_lab.engine.study import Capture, choose_nothing, commit_nothing
from spec_lab.models.target import Target
from spec_lab.propose import Null, Proposer
from spec_lab.results.writer import Outcome
from spec_lab.tasks.lab import Loop
from spec_lab.verify import Match


@dataclass(frozen=True, eq=False)
class Drafted:
    """What one proposer drafted at one position.

    Args:
        position: tokens of the true prefix, prompt included.
        proposer: its name in the run.
        draft: one tree.
        p: ``[R, V]`` the target probabilities over it. They are valid until the walk continues.
        key: (request, branch, step) of the choices made here.
        info: of the step.
        broken: what broke; empty for nothing.
    """

    position: int
    proposer: str
    draft: Draft
    p: Tensor
    key: tuple[int, int, int]
    info: StepInfo
    broken: str


def sample(target: Target, request: Request, seed: int) -> Outcome:
    """The request's text as the target alone samples it."""
    return Loop(target, Null.load(target), Match(), seed).decode([request]).outcomes[0]


def places(request: Request, text: Sequence[int], every: int) -> range:
    """The prefixes drafted below: from the first token after the prompt on, as long as a token follows in the text."""
    return range(len(request.tokens) + 1, len(text), every)


def walk(
    target: Target, proposers: Mapping[str, Proposer], request: Request, text: Sequence[int], every: int, draws: Draws
) -> Generator[Drafted, None, None]:
    """Every proposer's draft at every place of ``text``, the prompt and what followed it.

    At a place the last token is pending and all before it are computed, as in a decode step. Each proposer has a
    sequence of its own, so that it observes every position exactly once. Choices are keyed by request and position, so
    one tree drawn in several ways shares its uniforms. A walk that is abandoned must be closed, to free the KV cache.
    """
    capture, memory, sequences = Capture(), Memory(), {}
    try:
        for name, proposer in proposers.items():
            kv = target.lm.open(len(text) + proposer.nodes)
            sequences[name] = SequenceState(request, kv, [], state=proposer.init(request))
        for position in places(request, text, every):
            for name, proposer in proposers.items():
                one = sequences[name]
                parts = Parts(target, proposer, capture, draws, None, choose_nothing, commit_nothing, memory=memory)
                one.tokens, one.step = list(text[:position]), position
                if between := len(one.pending) - 1:
                    step([], parts, [(one, between)])
                info = step([one], parts)
                assert capture.draft is not None and capture.p is not None
                broken = info.errors.get(one, "")
                yield Drafted(
                    position, name, capture.draft, capture.p, (request.id, one.branch, position), info, broken
                )
    finally:
        for name, one in sequences.items():
            proposers[name].close(one.state)
            one.kv.close()
