"""Drafts along recorded texts, and what every verifier returns for each of them.

The texts are sampled from the target, and the drafts from the proposers. Given a draft, nothing more is sampled: the
expected number of accepted tokens, sum stop * depth, and the probability that a first-level token is accepted,
1 - stop(root), follow from the verifier's ``stop``. Where the verifier reads the noise of the draft (Gumbel), ``stop``
is 0 or 1, a sampled outcome.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.randomness import CounterDraws, Draws
from spec_lab.core.request import Request, without_name
from spec_lab.decode.arm import Arm, Memory
from spec_lab.decode.recording import Recording
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import StepInfo, step
from spec_lab.decode.study import Capture, choose_nothing, commit_nothing
from spec_lab.models.target import Target
from spec_lab.propose import Null, Proposer
from spec_lab.results.table_parts import Rows
from spec_lab.results.writer import Outcome, replay_rows_of
from spec_lab.tasks.lab import Lab, Loop
from spec_lab.verify import Match, Verdict, Verifier, check_draft, choose, misfit
from spec_lab.verify.transport import transport_bound

NO_RECORDING = Recording()


def proposers_of(lab: Lab) -> dict[str, Proposer]:
    """Return the proposers by arm, without the null proposer, which drafts nothing.

    Raises:
        ValueError: there is none; one cannot draft for the sampling.
    """
    proposers = {name: proposer for name, proposer in lab.proposers().items() if not isinstance(proposer, Null)}
    if not proposers:
        raise ValueError(
            "no proposer drafts: choose one with proposer=, or add some, e.g. +proposer@arms.tree=draft_tree"
        )
    for proposer in proposers.values():
        proposer.check_sampling(lab.sampling)
    return proposers


def pairs(
    proposers: Mapping[str, Proposer], verifiers: Mapping[str, Verifier]
) -> tuple[dict[str, dict[str, Verifier]], list[dict[str, str]]]:
    """Return the verifiers that support each proposer's drafts, and the pairs left out.

    Raises:
        ValueError: a verifier that supports no proposer's drafts, or a proposer whose drafts no verifier supports.
    """
    draws = sorted({proposer.drawn for proposer in proposers.values()})
    for name, verifier in verifiers.items():
        if not verifier.accepts & {*draws}:
            raise ValueError(
                f"verifier '{name}' supports drafts drawn {', '.join(sorted(verifier.accepts))}, but the proposers "
                f"draw {', '.join(draws)}: add a proposer that draws so, or leave it out with '~verifiers.{name}'"
            )
    fitting, left_out = {}, []
    for name, proposer in proposers.items():
        fitting[name] = {
            key: verifier
            for key, verifier in verifiers.items()
            if misfit(name, proposer.draws, verifier, proposer.branches) is None
        }
        left_out += [
            {"proposer": name, "drawn": proposer.drawn, "verifier": key}
            for key in verifiers
            if key not in fitting[name]
        ]
        if not fitting[name]:
            what = f"draws '{proposer.drawn}'"
            if any(proposer.drawn in verifier.accepts for verifier in verifiers.values()):
                what = f"drafts trees drawn '{proposer.drawn}'"  # and those verify chains only
            raise ValueError(f"proposer '{name}' {what}, which no verifier here supports; add one")
    return fitting, left_out


# Drafts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drafted:
    """Draft of one proposer at one position.

    Args:
        position: tokens of the recorded prefix, prompt included.
        proposer: its arm.
        p: ``[R, V]`` the target probabilities of its rows, valid until the next draft.
        key: (request, branch, step) of the choices made here.
        broken: the error of the step; empty for none.
    """

    position: int
    proposer: str
    draft: Draft
    p: Tensor
    key: tuple[int, int, int]
    info: StepInfo
    broken: str


def sample(target: Target, request: Request, seed: int) -> Outcome:
    """Return the request's text as the target alone samples it."""
    return Loop(target, Null.load(target), Match(), CounterDraws(seed)).decode([request]).outcomes[0]


def positions(request: Request, text: Sequence[int], every: int) -> range:
    """Return the prefixes at which is drafted: from the first token after the prompt, while a token follows."""
    return range(len(request.tokens) + 1, len(text), every)


def drafts_along(
    target: Target,
    proposers: Mapping[str, Proposer],
    request: Request,
    text: Sequence[int],
    every: int,
    draws: Draws,
    record: Recording = NO_RECORDING,
) -> Generator[Drafted, None, None]:
    """Yield every proposer's draft at every position of ``text``, the prompt and what followed it.

    The last token of the prefix is pending and all before it are computed, as in a decode step. Each proposer has a
    sequence of its own, so that it observes every position exactly once. Choices are keyed by request and position, so
    that one tree drawn in several ways shares its uniforms. Close the generator to free the KV cache.
    """
    capture, memory, sequences = Capture(), Memory(), {}
    try:
        for name, proposer in proposers.items():
            kv = target.lm.open(len(text) + proposer.nodes)
            sequences[name] = SequenceState(request, kv, [], state=proposer.init(request))
        for position in positions(request, text, every):
            for name, proposer in proposers.items():
                sequence = sequences[name]
                arm = Arm(
                    target, proposer, capture, draws, record=record, choose=choose_nothing, commit=commit_nothing,
                    memory=memory,
                )  # fmt: skip
                sequence.tokens, sequence.step = list(text[:position]), position
                if between := len(sequence.pending) - 1:
                    step([], arm, [(sequence, between)])
                info = step([sequence], arm)
                assert capture.draft is not None and capture.p is not None
                broken = info.errors.get(sequence, "")
                yield Drafted(
                    position, name, capture.draft, capture.p, (request.id, sequence.branch, position), info, broken
                )
    finally:
        for name, sequence in sequences.items():
            proposers[name].close(sequence.state)
            sequence.kv.close()


# Verdicts ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def of_prompt(
    lab: Lab,
    proposers: Mapping[str, Proposer],
    verifiers: Mapping[str, Mapping[str, Verifier]],
    request: Request,
    seed: int,
    every: int,
    repeats: int,
    record: Recording = NO_RECORDING,
) -> tuple[dict[str, Any], Rows, Rows]:
    """Return the row of the prompt's recorded text, the rows of all drafts along it, and those of ``replay``.

    Args:
        proposers: by arm.
        verifiers: by arm and name, as ``pairs`` returns them.
        every: tokens between two drafts.
        repeats: how often each verification is timed.
        record: what is recorded of each draft.
    """
    outcome = sample(lab.target, request, seed)
    tokens, errors = [*request.tokens, *outcome.tokens], [outcome.error] if outcome.error else []
    draws, clock, rows = CounterDraws(seed), lab.target.lm.clock, []
    bounds, vocabulary = Bounds(), lab.target.vocabulary
    replay: Rows = []
    with closing(drafts_along(lab.target, proposers, request, tokens, every, draws, record)) as drafts:
        for drafted in drafts:
            if drafted.broken:
                why = without_name(request, drafted.broken)
                errors.append(f"request '{request.name}', position {drafted.position}, {drafted.proposer}: {why}")
                continue
            replay += replay_rows_of([drafted.info], request.id, drafted.proposer, vocabulary, forward_is_position=True)
            shared = _shared(request, drafted)
            bounds.add(drafted)
            for name, (verdict, seconds) in verdicts(
                verifiers[drafted.proposer], drafted, draws, clock, repeats
            ).items():
                rows.append(
                    {
                        **shared,
                        "id": f"{request.id}/{drafted.position}/{drafted.proposer}/{name}",
                        "verifier": name,
                        "lossless": verifiers[drafted.proposer][name].lossless,
                        "given": verdict.given,
                        "expected_accepted": float(verdict.expected_accepted(drafted.draft.shape)[0]),
                        "first_level": float(verdict.stop[drafted.draft.shape.roots :].sum()),
                        "verify": seconds,
                    }
                )
    values = bounds.found()
    for row in rows:
        row["bound"] = values[row["position"], row["proposer"]]
    prompt = lab.prompts[request.id]
    text = {
        "id": str(request.id),
        "request": request.id,
        "name": prompt.name,
        "workload": prompt.workload,
        "prompt_tokens": len(request.tokens),
        "tokens": tokens,
        "error": "; ".join(errors),
    }
    return text, rows, replay


def verdicts(
    verifiers: Mapping[str, Verifier], drafted: Drafted, draws: Draws, clock: Clock, repeats: int
) -> dict[str, tuple[Verdict, float]]:
    """Return each verifier's verdict on the same draft and probabilities, and the median seconds of verification and
    choice.

    In each repetition another verifier is the first. After the first call p is in the processor's cache.
    """
    names, verdicts = list(verifiers), {}
    for verifier in verifiers.values():
        check_draft(drafted.proposer, verifier, drafted.draft)
    marks: dict[str, list] = {name: [] for name in names}
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock.mark()
            with attributed("verifier", verifiers[name]):
                verdicts[name] = verifiers[name](drafted.draft, drafted.p)
                choose(verdicts[name], drafted.draft.shape, drafted.p, draws, [drafted.key])
            marks[name].append((start, clock.mark()))
    clock.synchronise()
    return {name: (verdicts[name], median(clock.seconds(*pair) for pair in marks[name])) for name in names}


def _shared(request: Request, drafted: Drafted) -> dict[str, Any]:
    """Return what the rows of one draft have in common."""
    shape, seconds = drafted.draft.shape, drafted.info.seconds()
    return {
        "request": request.id,
        "position": drafted.position,
        "proposer": drafted.proposer,
        "drawn": " and ".join(sorted(drafted.draft.ways)),
        "nodes": shape.nodes,
        "depth": shape.deepest,
        "children": len(shape.children[0]),
        **{name: seconds[name] for name in ("propose", "target", "probabilities", "target_forward")},
    }


class Bounds:
    """The optimal-transport bound of the first level of many drafts. Those of one kind are computed together."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], float] = {}
        self._waiting: dict[tuple[str, int], list[tuple[tuple[int, str], Tensor, Tensor]]] = {}

    def add(self, drafted: Drafted) -> None:
        """Keep p and q at the root of a draft."""
        draft, key = drafted.draft, (drafted.position, drafted.proposer)
        first = draft.shape.children[0]
        if draft.ways == {"deterministic"} or not len(first):
            self._known[key] = covered(draft, drafted.p[0])
            return
        if len(draft.ways) > 1:  # no closed form is known
            self._known[key] = float("nan")
            return
        (drawn,) = draft.ways
        assert draft.q is not None and draft.q_row is not None
        p, q = drafted.p[0].clone(), draft.q[int(draft.q_row[0])].clone()
        self._waiting.setdefault((drawn, len(first)), []).append((key, p, q))

    def found(self) -> dict[tuple[int, str], float]:
        """Return the bounds by position and proposer."""
        known = dict(self._known)
        for (drawn, count), kept in self._waiting.items():
            keys, p, q = zip(*kept, strict=True)
            bounds = transport_bound(torch.stack(p), torch.stack(q), count, cast(Drawn, drawn))
            known |= dict(zip(keys, bounds.tolist(), strict=True))
        return known


def covered(draft: Draft, p: Tensor) -> float:
    """Return the probability ``p`` ``[V]`` of the first-level tokens: no verifier accepts more of a given draft."""
    first = draft.shape.children[0] - draft.shape.roots
    tokens = np.unique(draft.token.cpu().numpy()[first])
    return float(p.cpu().double().numpy()[tokens].sum())
