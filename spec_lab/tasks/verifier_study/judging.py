"""Who judges whom, and what every verifier says of one prompt's drafts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.randomness import CounterDraws, Draws
from spec_lab.engine.request import Request, without_name
from spec_lab.propose import Null, Proposer, branches, draws_of
from spec_lab.results.parts import Rows
from spec_lab.tasks.lab import Lab
from spec_lab.tasks.verifier_study.walk import Drafted, sample, walk
from spec_lab.verify import Verdict, Verifier, check_draft, choose, misfit
from spec_lab.verify.transport import transport_bound


def proposers_of(lab: Lab) -> dict[str, Proposer]:
    """The proposers by name; the null proposer drafts nothing to judge and is left out.

    Raises:
        ValueError: there is none; one refuses the sampling.
    """
    named = {"speculative": lab.proposer, **lab.more_proposers}
    proposers = {name: one for name, one in named.items() if not isinstance(one, Null)}
    if not proposers:
        raise ValueError("nothing drafts: name a proposer, or add some, e.g. +proposer@arms.tree=draft_tree")
    for one in proposers.values():
        getattr(one, "check", lambda _: None)(lab.sampling)
    return proposers


def pairs(
    proposers: Mapping[str, Proposer], verifiers: Mapping[str, Verifier]
) -> tuple[dict[str, dict[str, Verifier]], list[dict[str, str]]]:
    """The verifiers that judge each proposer's drafts, and the pairs left out.

    Raises:
        ValueError: a verifier that judges none of the proposers, or a proposer that no verifier judges.
    """
    draws = sorted({one.drawn for one in proposers.values()})
    for name, verifier in verifiers.items():
        if not verifier.accepts & {*draws}:
            raise ValueError(
                f"verifier '{name}' supports drafts drawn {', '.join(sorted(verifier.accepts))}, but the proposers "
                f"draw {', '.join(draws)}: add a proposer that draws so, or leave it out with '~verifiers.{name}'"
            )
    judges, left_out = {}, []
    for name, proposer in proposers.items():
        judges[name] = {
            key: one
            for key, one in verifiers.items()
            if misfit(name, draws_of(proposer), one, branches(proposer)) is None
        }
        left_out += [
            {"proposer": name, "drawn": proposer.drawn, "verifier": key} for key in verifiers if key not in judges[name]
        ]
        if not judges[name]:
            what = f"draws '{proposer.drawn}'"
            if any(proposer.drawn in one.accepts for one in verifiers.values()):
                what = f"drafts trees drawn '{proposer.drawn}'"  # and those verify chains only
            raise ValueError(f"proposer '{name}' {what}, which no verifier here supports; add one")
    return judges, left_out


# One prompt --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def of_prompt(
    lab: Lab,
    proposers: Mapping[str, Proposer],
    judges: Mapping[str, Mapping[str, Verifier]],
    request: Request,
    seed: int,
    every: int,
    repeats: int,
) -> tuple[dict[str, Any], Rows]:
    """The row of the prompt's recorded text, and the rows of all drafts along it."""
    outcome = sample(lab.target, request, seed)
    tokens, errors = [*request.tokens, *outcome.tokens], [outcome.error] if outcome.error else []
    draws, clock, rows = CounterDraws(seed), lab.target.lm.clock, []
    bounds = Bounds()
    with closing(walk(lab.target, proposers, request, tokens, every, draws)) as steps:
        for step in steps:
            if step.broken:
                why = without_name(request, step.broken)
                errors.append(f"request '{request.name}', position {step.position}, {step.proposer}: {why}")
                continue
            verdicts = ask(judges[step.proposer], step, draws, clock, repeats)
            shared = _shared(request, step)
            bounds.add(step)
            for name, (verdict, seconds) in verdicts.items():
                rows.append(
                    {
                        **shared,
                        "id": f"{request.id}/{step.position}/{step.proposer}/{name}",
                        "verifier": name,
                        "lossless": judges[step.proposer][name].lossless,
                        "given": verdict.given,
                        "expected_accepted": float(verdict.expected_accepted(step.draft.shape)[0]),
                        "first_level": float(verdict.stop[step.draft.shape.roots :].sum()),
                        "verify": seconds,
                    }
                )
    found = bounds.found()
    for row in rows:
        row["bound"] = found[row["position"], row["proposer"]]
    prompt = lab.prompts[request.id]
    one = {
        "id": str(request.id),
        "request": request.id,
        "name": prompt.name,
        "workload": prompt.workload,
        "prompt_tokens": len(request.tokens),
        "tokens": tokens,
        "error": "; ".join(errors),
    }
    return one, rows


def ask(
    verifiers: Mapping[str, Verifier], step: Drafted, draws: Draws, clock: Clock, repeats: int
) -> dict[str, tuple[Verdict, float]]:
    """Each verifier's verdict on the very same draft and law, and the median seconds of verification and choice.

    The verifiers take turns, each time another one first. Repeated, they meet the laws in the processor's cache.
    """
    names, verdicts = list(verifiers), {}
    for verifier in verifiers.values():
        check_draft(step.proposer, verifier, step.draft)
    marks: dict[str, list] = {name: [] for name in names}
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock.mark()
            with attributed("verifier", verifiers[name]):
                verdicts[name] = verifiers[name](step.draft, step.p)
                choose(verdicts[name], step.draft.shape, step.p, draws, [step.key])
            marks[name].append((start, clock.mark()))
    clock.synchronise()
    return {name: (verdicts[name], median(clock.seconds(*pair) for pair in marks[name])) for name in names}


def _shared(request: Request, step: Drafted) -> dict[str, Any]:
    """What the rows of one draft have in common."""
    shape, seconds = step.draft.shape, step.info.seconds()
    return {
        "request": request.id,
        "position": step.position,
        "proposer": step.proposer,
        "drawn": " and ".join(sorted(step.draft.ways)),
        "nodes": shape.nodes,
        "depth": int(shape.depth.max()),
        "children": len(shape.children[0]),
        **{name: seconds[name] for name in ("propose", "target", "probabilities", "target_forward")},
    }


class Bounds:
    """The transport bound of the first level of many drafts; those of one kind are computed together."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], float] = {}
        self._laws: dict[tuple[str, int], list[tuple[tuple[int, str], Tensor, Tensor]]] = {}

    def add(self, step: Drafted) -> None:
        """Keep what is needed of ``step``."""
        draft, key = step.draft, (step.position, step.proposer)
        first = draft.shape.children[0]
        if draft.ways == {"point"} or not len(first):
            self._known[key] = covered(draft, step.p[0])
            return
        if len(draft.ways) > 1:  # no closed form is known
            self._known[key] = float("nan")
            return
        (drawn,) = draft.ways
        assert draft.q is not None and draft.q_row is not None
        p, q = step.p[0].clone(), draft.q[int(draft.q_row[0])].clone()
        self._laws.setdefault((drawn, len(first)), []).append((key, p, q))

    def found(self) -> dict[tuple[int, str], float]:
        """The bounds by position and proposer."""
        found = dict(self._known)
        for (drawn, count), kept in self._laws.items():
            keys, p, q = zip(*kept, strict=True)
            bounds = transport_bound(torch.stack(p), torch.stack(q), count, cast(Drawn, drawn))
            found |= dict(zip(keys, bounds.tolist(), strict=True))
        return found


def covered(draft: Draft, p: Tensor) -> float:
    """The mass of ``p`` ``[V]`` on the tokens of the first level: no verifier accepts more of a draft that is given."""
    first = draft.shape.children[0] - draft.shape.roots
    tokens = np.unique(draft.token.cpu().numpy()[first])
    return float(p.cpu().double().numpy()[tokens].sum())
