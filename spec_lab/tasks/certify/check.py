"""``spec-lab check`` and ``spec_lab.testing``: a part in the making on a few toys, in seconds.

Every outcome is enumerated, as in ``certify``; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, get_args

import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.draft import Draft, Drawn
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy.adaptive import Adaptive
from spec_lab.propose import Proposer
from spec_lab.tasks.certify.certificate import Proof, policy_of, prove
from spec_lab.tasks.certify.exact import MIN_TOKENS, Finding
from spec_lab.tasks.certify.instances import (
    CONSTRAINED,
    PIECES,
    QUICK,
    TOGETHER,
    TOYS,
    Instance,
    conditioned,
    constrained,
    under,
)
from spec_lab.tasks.certify.outputs import EXACT
from spec_lab.tasks.certify.toy_models import code, table_models
from spec_lab.verify import Verifier, misfit

SMALLEST = Instance(TOYS[0], "1")
"""One draft token, in one step."""

COLUMNS = 80


@dataclass(frozen=True, eq=False)
class Rebuilt(Proposer):
    """A proposer that is built anew for each toy target, as it is for a run's target.

    Args:
        make: builds it for a target.
        name, drawn, nodes, draws, branches, shared_store: as it declares them.
        facts: the policy that it is under.
    """

    make: Callable[[Target], Proposer]
    name: str
    drawn: Drawn
    nodes: int
    draws: frozenset[Drawn]
    branches: bool | None
    shared_store: str
    facts: Mapping[str, Any]

    @staticmethod
    def of(make: Callable[[Target], Proposer]) -> Rebuilt:
        """Return what ``make`` builds, which it can for a toy target."""
        made = make(toy_target())
        facts = {"policy": {"name": made.policy.name}} if isinstance(made, Adaptive) else {}
        return Rebuilt(make, made.name, made.drawn, made.nodes, made.draws, made.branches, made.shared_store, facts)

    def propose(self, batch: Batch) -> Draft:
        """Not called: what ``toy`` returns drafts."""
        raise NotImplementedError

    def toy(self, target: Target, draft: object, tree: tuple[tuple[int, ...], ...]) -> Proposer:
        """Return its toy version, built for the toy target."""
        return self.make(target).toy(target, draft, tree)  # type: ignore[arg-type]

    def toy_of_batch(self, target: Target, draft: object, tree: tuple[tuple[int, ...], ...]) -> Proposer:
        """Return its toy version for several requests, built for the toy target."""
        return self.make(target).toy_of_batch(target, draft, tree)  # type: ignore[arg-type]


def toy_target(v: int = TOYS[0].v) -> Target:
    """Return a target over ``v`` tokens whose probabilities are random numbers, for what builds a proposer."""
    return table_models(TOYS[0] if v == TOYS[0].v else CONSTRAINED, MIN_TOKENS)[0]


def toy_vocabulary() -> Vocabulary:
    """Return the vocabulary of toys under a constraint: a, b, ab, c and the end of a text."""
    return Vocabulary.plain(PIECES, len(PIECES) - 1)


@dataclass(frozen=True)
class CheckedPair:
    """The result of a pair of proposer and verifier.

    Args:
        drafts: who drafted: the proposer's name, or "reference" for a draft model that draws as asked.
        drawn: how siblings were drawn.
        proof: the result of enumeration; None where a part failed.
        error: of the part that failed, or why the pair was not enumerated; empty for none.
        toys: the instances, the smallest first.
        further: names of the policy and the constraint, where the pair has them.
        note: what the result does not show; empty for nothing.
    """

    drafts: str
    drawn: Drawn
    verifier: Verifier
    proof: Proof | None
    error: str = ""
    toys: Sequence[Instance] = ()
    further: tuple[str, ...] = ()
    note: str = ""

    @property
    def smallest(self) -> tuple[Instance, Finding] | None:
        """The smallest instance whose output is wrong, and what was found there; None where none is."""
        wrong = [] if self.proof is None else [finding for finding in self.proof.findings if finding.wrong]
        findings = {finding.instance: finding for finding in wrong}
        return next(((toy, findings[toy.name]) for toy in self.toys if toy.name in findings), None)

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        proof = self.proof
        if proof is None or not proof.findings:
            return "NOT CHECKED"
        worst = proof.worst.tv if proof.worst else 0.0
        if self.verifier.lossless and proof.failure is not None:
            return f"NOT LOSSLESS, total variation {worst:.2g}"
        if self.error:
            return "NOT CHECKED"
        if self.verifier.lossless or worst <= EXACT:
            return f"lossless, total variation {worst:.1e}"
        words = f"lossy, as declared: total variation up to {worst:.2g}"
        aim = proof.own_target_tv
        return words if aim is None else f"{words}, {aim:.1e} from its own target (aim)"

    @property
    def failed(self) -> bool:
        """Whether the pair is not what it declares, or could not be checked."""
        aim = None if self.proof is None else self.proof.own_target_tv
        wrong = self.verifier.lossless and self.smallest is not None
        return bool(self.error) or wrong or (not self.verifier.lossless and aim is not None and not aim <= EXACT)

    def lines(self, columns: int = COLUMNS) -> Iterator[str]:
        """Yield the result in lines of so many columns."""
        who = "drafts of a reference" if self.drafts == "reference" else self.drafts
        outcomes = 0 if self.proof is None else sum(finding.outcomes for finding in self.proof.findings)
        size = f" ({len(self.toys)} toy models, {outcomes} outcomes)" * bool(outcomes)
        pair = " + ".join((f"{who} ({self.drawn})", self.verifier.name, *self.further))
        yield from wrap(f"{pair}: {self.verdict}{size}", columns)
        notes = [self.error] if self.error else [] if self.proof is None else list(self.proof.missing)
        for note in (*notes, *[self.note] * bool(self.note)):
            yield from wrap(note, columns, initial_indent="  ", subsequent_indent="  ")
        if self.verifier.lossless and self.smallest is not None:
            shows_q = self.drafts == "reference" and self.drawn != "deterministic"
            yield from counter_example(*self.smallest, shows_q, columns)


def counter_example(toy: Instance, finding: Finding, shows_q: bool, columns: int) -> Iterator[str]:
    """Yield an instance whose output is wrong: what came with which probability, and what should have.

    Args:
        shows_q: whether a draft model drafted, so that its q is known, and the verifier was given it.
        columns: of a line.
    """
    what = f"Smallest counter-example: {toy.name}. There, {finding.wrong}."
    yield from wrap(what, columns, initial_indent="  ", subsequent_indent="  ")
    if finding.after is None:
        return
    _, text, emitted, p = finding.after
    rows = {"token": [str(token) for token in range(len(p))]}
    rows["emitted"], rows["target p"] = ([f"{number:.4f}" for number in row] for row in (emitted, p))
    if shows_q:
        full = toy.start + text
        q = toy.toy.probabilities(len(full))[1][code(full, toy.toy.v)]
        rows["draft q"] = [f"{number:.4f}" for number in q]
    yield f"  After the text {list(text)}:"
    for name, cells in rows.items():
        yield "    " + f"{name:<9}" + "".join(f"{cell:>9}" for cell in cells)


def check(
    verifier: Verifier,
    proposer: Proposer | Callable[[Target], Proposer] | None = None,
    applied: AppliedConstraint | None = None,
) -> list[CheckedPair]:
    """Enumerate what a verifier emits, with the proposer's drafts, on a few toys.

    Args:
        verifier: verifies.
        proposer: drafts; or what builds it for a target, which is called for toys. None: a reference drafts, in each
            way of drawing that the verifier accepts.
        applied: a constraint, under which loops are enumerated as well: its ``toy``, or itself where it has none and is
            of another package.

    Returns:
        One result for each way of drawing. What shares something between requests is enumerated on two of them too.
    """
    toys = (SMALLEST, *sorted(QUICK, key=_size), *constrained_toys(applied))
    further = () if applied is None else (applied.constraint.name,)
    if proposer is None:
        drawn = [way for way in get_args(Drawn) if way in verifier.accepts]
        ways = [way for way in drawn if way != "gumbel" or len(drawn) == 1]
        return [replace(_checked("reference", way, verifier, way, toys), further=further) for way in ways]
    part = proposer if isinstance(proposer, Proposer) else Rebuilt.of(proposer)
    if policy := policy_of(part):
        further = (policy, *further)
    if why := misfit(part.name, part.draws, verifier, part.branches):
        return [CheckedPair(part.name, part.drawn, verifier, None, why, further=further)]
    pairs = TOGETHER[:2] if part.shared_store else ()
    result, note = _checked(part.name, part.drawn, verifier, part, (*toys, *pairs)), ""
    if policy and not result.failed and _cuts_nothing(part, verifier, result):
        note = f"Policy '{policy}' cut no draft on these toys, of at most {MIN_TOKENS} tokens: "
        note += "let its toy() return smaller limits to check what it cuts."
    return [replace(result, further=further, note=note)]


def constrained_toys(applied: AppliedConstraint | None) -> tuple[Instance, ...]:
    """Return the loops under a constraint that are enumerated: under its own toy version; for one that cannot be built
    for a toy, under grammars that are applied as it is.

    Raises:
        ValueError: a constraint of another package that has no toy version is built for other tokens.
    """
    if applied is None:
        return ()
    constraint = applied.constraint
    toy = constraint.toy(toy_vocabulary())
    if toy is None and type(constraint).__module__.partition(".")[0] != __name__.partition(".")[0]:
        if constraint.vocabulary != len(PIECES):
            raise ValueError(
                f"constraint '{constraint.name}' is built for {constraint.vocabulary} tokens, and has no "
                "toy(vocabulary): let load accept the toy vocabulary (a, b, ab, c, end), or write toy"
            )
        toy = constraint
    if toy is not None:
        return under(applied, toy)
    return (conditioned() if applied.is_global else constrained())[:3:2]


def _size(toy: Instance) -> tuple[int, int]:
    return toy.tokens, len(toy.tree)


def _checked(
    drafts: str, drawn: Drawn, verifier: Verifier, drafting: Proposer | Drawn, toys: Sequence[Instance]
) -> CheckedPair:
    """Return the result of a pair on toys."""
    try:
        proof = _proof(drafting, verifier, toys)
    except ValueError as error:
        return CheckedPair(drafts, drawn, verifier, None, str(error), toys)
    why = "" if proof.failure else "; ".join(proof.missing)
    return CheckedPair(drafts, drawn, verifier, proof, why, toys)


def _proof(drafting: Proposer | Drawn, verifier: Verifier, toys: Sequence[Instance]) -> Proof:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a toy has a few numbers
    try:
        return prove(drafting, verifier, toys)
    finally:
        torch.set_num_threads(threads)


def _cuts_nothing(proposer: Proposer, verifier: Verifier, result: CheckedPair) -> bool:
    """Return whether a proposer under a policy drafted as much as it does without one, on the toys without a constraint
    that decode one request.
    """

    def free(target: Target) -> Proposer:
        made = proposer.make(target) if isinstance(proposer, Rebuilt) else proposer
        return made.proposer if isinstance(made, Adaptive) else made

    assert result.proof is not None
    alone = replace(proposer, make=free) if isinstance(proposer, Rebuilt) else free(toy_target())
    toys = [toy for toy in result.toys if toy.applied is None and toy.requests == 1]
    with suppress(ValueError):
        without = {finding.instance: _size_of(finding) for finding in _proof(alone, verifier, toys).findings}
        findings = [finding for finding in result.proof.findings if finding.instance in without]
        return all(_size_of(finding) == without[finding.instance] for finding in findings)
    return False


def _size_of(finding: Finding) -> tuple[int, int]:
    return finding.outcomes, finding.drafted
