"""A proposer that drafts as much as a policy allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from spec_lab.core.draft import Draft, empty
from spec_lab.core.faults import attributed
from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import brief_repr
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.propose.hybrid import Hybrid, PartStates
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner


def adapt(proposer: Proposer, policy: Policy) -> Adaptive:
    """Put a proposer under a policy.

    Raises:
        ValueError: see ``check_pair`` and ``check_admission``; the proposer has a policy already.
    """
    if isinstance(proposer, Adaptive):
        raise ValueError(
            f"proposer '{proposer.name}' has the policy '{proposer.policy.name}' already: choose one of them"
        )
    check_pair(proposer, policy.name, policy.stop, policy.parts)
    if type(policy).admit is not Policy.admit:
        check_admission(proposer, policy.name)
    return Adaptive({proposer.name: proposer}, policy)


def check_pair(proposer: Proposer, policy: str, stop: StopRule | None, parts: Sequence[str]) -> None:
    """Check that a proposer can do what a policy decides. Policies that measure costs check it before they measure.

    Args:
        proposer: drafts.
        policy: the policy's name.
        stop, parts: as in ``Policy``.

    Raises:
        ValueError: the policy stops drafts early, and the proposer cannot, or does so by itself already; the policy
            chooses a part, and the proposer has no such part.
    """
    if stop is not None:
        if proposer.why_not_stopped is None:
            raise ValueError(
                f"policy '{policy}' stops drafts by their probabilities, and proposer '{proposer.name}' does not ask "
                "it while it drafts: choose a policy of depths (fixed, heuristic, bandit, goodput), or a proposer that "
                "grows trees token by token, such as draft_chain or eagle"
            )
        if why := proposer.why_not_stopped:
            raise ValueError(f"policy '{policy}' stops drafts early, but {why}")
    if parts:
        known = proposer.part_names
        if unknown := [part for part in parts if part not in known]:
            has = f"has the parts {', '.join(known)}" if known else "does not choose between parts, as best_of does"
            raise ValueError(f"policy '{policy}' names the part {unknown[0]}, but proposer '{proposer.name}' {has}")


def check_admission(proposer: Proposer, policy: str) -> None:
    """Check that a policy may choose the rows of a proposer's drafts that are verified (``Policy.admit``).

    Raises:
        ValueError: it may not; says why.
    """
    if why := proposer.why_not_admitted:
        raise ValueError(f"policy '{policy}' chooses which rows of a draft are verified, but {why}")


@dataclass
class Decided:
    """State of an adaptive proposer for a sequence, beside the states of its parts.

    Args:
        state: the policy's.
        last: the outcome of the last draft, its accepted nodes still unknown; None where nothing is to be learned.
    """

    state: Any
    last: DraftOutcome | None = None


@dataclass(frozen=True, eq=False)
class Adaptive(Hybrid):
    """A proposer under a policy. It declares and records what the proposer does, and "policy" in addition.

    Args:
        parts: the proposer by its name, as the only part.
        policy: decides.
    """

    parts: Mapping[str, Proposer]
    policy: Policy

    @property
    def proposer(self) -> Proposer:
        """The proposer that drafts."""
        return self.proposers[0]

    @property
    def name(self) -> str:
        """The proposer's."""
        return self.proposer.name

    @property
    def nodes(self) -> int:
        """The proposer's."""
        return self.proposer.nodes

    @property
    def requires(self) -> Requires:
        """The proposer's."""
        return self.proposer.requires

    @property
    def text_only(self) -> bool:
        """As the proposer's."""
        return self.proposer.text_only

    @property
    def shared_store(self) -> str:
        """The proposer's and the policy's."""
        return "; ".join(part.shared_store for part in (self.proposer, self.policy) if part.shared_store)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {**self.proposer.facts, "policy": {"name": self.policy.name, **self.policy.facts}}

    def forget(self) -> None:
        """Empty both stores."""
        super().forget()
        with attributed("policy", self.policy):
            self.policy.forget()

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Adaptive:
        """See ``Proposer``. Outcomes are enumerated side by side: they share nothing."""
        return Adaptive(self.toy_parts(target, draft, tree), self.policy.toy())

    def toy_of_batch(self, target: Target, draft: DraftRunner, tree: Choices) -> Adaptive:
        """See ``Proposer``."""
        return Adaptive(self.toy_parts(target, draft, tree), self.policy.toy_of_batch())

    def init(self, request: Request, record: Any = None) -> PartStates:
        """See ``Proposer``."""
        with attributed("policy", self.policy):
            state = self.policy.init(request)
        return super().init(request, Decided(state))

    @cached_property
    def _skips(self) -> bool:
        """Whether the proposer is not asked where nothing may be drafted: not where it may learn from rows of its own
        that are computed only.
        """
        return not (self.requires.logits or self.requires.top_k)

    @cached_property
    def _nothing(self) -> Callable[[tuple[Limit, ...], torch.device], Draft]:
        """Return an empty draft with these limits, the same one each time, as ``propose.null.Null`` does."""

        def nothing(limits: tuple[Limit, ...], device: torch.device) -> Draft:
            return replace(empty(len(limits), device), limits=limits)

        return lru_cache(maxsize=256)(nothing)

    @cached_property
    def _observes(self) -> bool:
        """Whether the proposer learns anything from what is observed."""
        return type(self.proposer).observe is not Proposer.observe

    def propose(self, batch: Batch) -> Draft:
        """Let the policy decide, and draft no deeper than it allows. Nothing costs no more than decoding without a
        proposer.

        Raises:
            ValueError: the policy decided nothing sensible for the batch.
        """
        decisions: list[Decided] = [sequence.state.own for sequence in batch.sequences]
        with attributed("policy", self.policy):
            limits = list(self.policy.decide(batch, [decided.state for decided in decisions]))
            if len(limits) != len(decisions) or not all(isinstance(limit, Limit) for limit in limits):
                raise ValueError(
                    f"decide must return {len(decisions)} Limit, one for each sequence, not {brief_repr(limits)}"
                )
        live = len(decisions)
        if self._skips and all(limit.depth == 0 for limit in limits):
            for sequence, decided, limit in zip(batch.sequences, decisions, limits, strict=True):
                decided.last = DraftOutcome(decided.state, limit, 0, 0, 0, live, len(sequence.tokens))
            return self._nothing(tuple(limits), batch.device)
        inner = replace(self.view(batch, 0), limits=limits, stop=self.policy.stop, measure=self.policy.measure)
        draft = self.proposer.propose(inner).cut_nodes(inner.room())
        with attributed("policy", self.policy):
            admitted = self.policy.admit(batch, [decided.state for decided in decisions], draft)
        if admitted is not None:
            kept = [tree[1:][admitted[tree[1:]]] for tree in draft.shape.trees]
            limits = [
                replace(limit, rows=tuple(draft.shape.places[rows].tolist()))
                for limit, rows in zip(limits, kept, strict=True)
            ]
            draft = draft if admitted.all() else draft.keep(admitted)[0]
        deepest = np.zeros(live, dtype=np.int64)
        np.maximum.at(deepest, draft.shape.root, draft.shape.depth)
        every = zip(batch.sequences, decisions, limits, deepest.tolist(), draft.acceptable_nodes.tolist(), strict=True)
        for sequence, decided, limit, levels, nodes in every:
            decided.last = DraftOutcome(decided.state, limit, levels, nodes, 0, live, len(sequence.tokens))
        return replace(draft, limits=tuple(limits))

    def observe(self, observed: Sequence[Observation]) -> None:
        """Let the proposer observe, and the policy learn."""
        outcomes = []
        for observation in observed:
            decided: Decided = observation.sequence.state.own
            if decided.last is not None:
                path, ended = observation.accepted, observation.sequence.finish is not None
                known = path or ended
                outcomes.append(
                    replace(decided.last, accepted=len(path), path=path, ended=ended) if known else decided.last
                )
                decided.last = None
        if outcomes:
            with attributed("policy", self.policy):
                self.policy.learn(outcomes)
        if self._observes:
            self.proposer.observe([
                replace(
                    observation, sequence=replace(observation.sequence, state=observation.sequence.state.each[0])
                )
                for observation in observed
            ])  # fmt: skip

    def fork(self, state: PartStates, record: Any = None) -> PartStates:
        """See ``Proposer``."""
        return super().fork(state, Decided(deepcopy(state.own.state)))
