"""What every proposer offers: a draft in each step, and a life cycle in which it learns what the target computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from spec_lab.core.draft import SOME_WAYS, WAY, Draft, Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import Sampling
from spec_lab.core.protocols import COUNT, FACTS, FLAG, TEXT, TEXTS, Declared
from spec_lab.core.request import Request
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.models.target import Target
from spec_lab.runners.memory import StatesMemory
from spec_lab.runners.runner import ABILITIES, Ability, DraftRunner


@dataclass(frozen=True)
class Requires:
    """What a proposer requires of the target's forwards. The engine captures only this.

    Args:
        hidden: numbers of hidden states, as in transformers' ``hidden_states``: number i is the input of layer i (the
            output of layer i - 1), and -1 the state after the final norm, which enters the language-modelling head.
        logits: whether the raw logits (before masks, penalties and temperature) of all rows of a step are needed.
        top_k: how many of the likeliest tokens of all rows are needed; 0 for none.
        abilities: what the target's runner must be able to do besides (``runner.ABILITIES``).
        every_position: whether ``hidden`` is needed of every committed position; False: only of those that the target
            computes, so that the beginning of a prompt may come from a prefix cache.
    """

    hidden: tuple[int, ...] = ()
    logits: bool = False
    top_k: int = 0
    abilities: frozenset[Ability] = frozenset()
    every_position: bool = True


@dataclass(frozen=True, eq=False)
class Observation:
    """What the target computed for one sequence in one step. n positions were newly computed and committed.

    Args:
        sequence: which; its ``state`` is the proposer's.
        start: the first of the n positions.
        tokens: ``[n + 1]`` the tokens from ``start`` on: the last one follows the n computed ones. ``[n]`` where no
            token follows: the sequence ended with a computed token, or its constraint acts before the next one.
        hidden: ``[n, layers * H]`` the hidden states that the proposer requires, layers in the order asked for; in
            memory of their own.
        rows: ``[r]`` the tokens of the computed tree: its root, its nodes in order, rejected ones too, and the
            rows that are computed only. Empty for a part of a prompt.
        logits: ``[r, V]`` raw logits of these rows, where required.
        top_k: ``[r, k]`` their likeliest tokens, the likeliest first, on the host, where required.
        accepted: nodes of the accepted path that were kept, numbered within the tree from 0.
    """

    sequence: SequenceState
    start: int
    tokens: Sequence[int]
    hidden: Tensor | None = None
    rows: Sequence[int] = ()
    logits: Tensor | None = None
    top_k: np.ndarray | None = None
    accepted: Sequence[int] = ()


def _is_required(value: Any) -> bool:
    """Return whether a value is a ``Requires`` whose fields have their types."""
    return (
        isinstance(value, Requires)
        and isinstance(value.hidden, tuple)
        and all(isinstance(layer, Integral) for layer in value.hidden)
        and COUNT.fits(value.top_k)
        and isinstance(value.abilities, frozenset)
        and value.abilities <= ABILITIES.keys()
        and FLAG.fits(value.logits)
        and FLAG.fits(value.every_position)
    )


DECLARED = {
    "name": TEXT,
    "drawn": WAY,
    "nodes": COUNT,
    "requires": Declared(
        "spec_lab.propose.Requires(hidden=(numbers of hidden states, ..), logits=True or False, top_k=a whole number, "
        f"abilities=frozenset of {', '.join(sorted(ABILITIES))}, every_position=True or False)",
        _is_required,
    ),
    "branches": FLAG,
    "draws": SOME_WAYS,
    "forced_nodes": COUNT,
    "target_cells": COUNT,
    "shared_store": TEXT,
    "why_not_stopped": TEXT,
    "part_names": TEXTS,
    "facts": FACTS,
}
"""What a proposer's attributes must be."""


class Proposer(Protocol):
    """Drafts a tree below each sequence. It never sees the verifier. ``Lifecycle`` has defaults for most methods.

    Further abilities are Protocols of their own, asked for with ``isinstance``: ``Branching``, ``DrawsSeveralWays``,
    ``DraftsForcedTokens``, ``UsesTargetCells``, ``HoldsKVCache``, ``LearnsAcrossRequests``, ``StopsEarly``,
    ``ChoosesPart``, ``ChecksSampling``, ``CertifiableProposer``, and ``Described`` and ``Hashed`` of
    ``core.protocols``.

    A draft must follow from the sequences, from the states, from stores that are declared, and from the random choices
    of the batch (``batch.draws``) only: the same text gets the same draft when it is replayed. Stores that requests
    share are declared by ``LearnsAcrossRequests``.

    Order of calls: ``init`` when a request is admitted; in each step ``propose``, then ``observe`` (for sequences that
    end with this step as well, not for those whose logits are broken), then ``fork``, then ``rewind``; ``close`` at the
    end. After a preemption the state is closed and a new one made; its tokens are computed and observed again as parts
    of a prompt, without the rows, logits and accepted nodes of earlier steps: what was learned from these is lost.
    In the first step of a request, and wherever several tokens are pending, hidden states of computed positions only
    are known: a proposer may draft nothing then. Positions that come from a prefix cache are observed without hidden
    states, when the sequence is admitted.
    """

    @property
    def name(self) -> str:
        """As in configs and records."""
        ...

    @property
    def drawn(self) -> Drawn:
        """How siblings are drawn; a verifier that does not support it is refused when the run is composed."""
        ...

    @property
    def nodes(self) -> int:
        """Most rows below one root: drafted nodes, and rows that are computed only."""
        ...

    @property
    def requires(self) -> Requires:
        """What the target must return in addition to the logits that are verified."""
        ...

    def init(self, request: Request) -> Any:
        """Return the state of a new sequence, which the engine keeps in ``SequenceState.state``.

        Args:
            request: that the sequence belongs to; ``request.tokens`` is its prompt.
        """
        ...

    def propose(self, batch: Batch) -> Draft:
        """Return a draft with one tree per sequence, in order.

        Args:
            batch: the sequences ``[B]``, their states, where random choices come from, and how deep drafts may be
                (``batch.room()``).

        Returns:
            A draft with B roots and at most ``nodes`` rows below each; a tree may be empty. Its tokens are on
            ``batch.device``.
        """
        ...

    def observe(self, observed: Sequence[Observation]) -> None:
        """Learn what the target computed. Every committed position is observed exactly once, prompts in chunks.

        Args:
            observed: one entry for each sequence of the step, those of prompts included.
        """
        ...

    def fork(self, state: Any) -> Any:
        """Return an independent copy of a state, for a fork of its sequence."""
        ...

    def rewind(self, state: Any, length: int) -> None:
        """Forget positions, since tokens were removed.

        The token that followed the last position that is left may have changed as well. Positions from ``length`` on
        are observed again when they are computed again.

        Args:
            state: of the sequence.
            length: number of computed positions that are left.
        """
        ...

    def close(self, state: Any) -> None:
        """The sequence has ended: give back what is held for it."""
        ...


class Lifecycle:
    """The life cycle of a proposer that carries nothing, or whose state can be copied as it is."""

    requires = Requires()

    def init(self, request: Request) -> Any:
        """No state."""

    def observe(self, observed: Sequence[Observation]) -> None:
        """Nothing is learned."""

    def fork(self, state: Any) -> Any:
        """A deep copy."""
        return deepcopy(state)

    def rewind(self, state: Any, length: int) -> None:
        """Nothing to forget."""

    def close(self, state: Any) -> None:
        """Nothing is held."""


@runtime_checkable
class Branching(Protocol):
    """A proposer that declares whether it drafts trees."""

    @property
    def branches(self) -> bool:
        """Whether its drafts may be trees; False: they are chains."""
        ...


@runtime_checkable
class DrawsSeveralWays(Protocol):
    """A proposer whose nodes are drawn in several ways, perhaps below one parent."""

    @property
    def draws(self) -> frozenset[Drawn]:
        """All of them; ``drawn`` is the one that is sampled."""
        ...


@runtime_checkable
class DraftsForcedTokens(Protocol):
    """A proposer that drafts forced tokens in addition to its ``nodes``, where a constraint fast-forwards them."""

    @property
    def forced_nodes(self) -> int:
        """Most forced nodes below one root."""
        ...


@runtime_checkable
class UsesTargetCells(Protocol):
    """A proposer that drafts on cells of the target's KV cache."""

    @property
    def target_cells(self) -> int:
        """Most cells in use below one root while it drafts, those of pending tokens not counted."""
        ...


@runtime_checkable
class HoldsKVCache(Protocol):
    """A proposer with a KV cache of its own, whose size is known."""

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """Bytes for sequences of so many positions that are decoded together."""
        ...


@runtime_checkable
class LearnsAcrossRequests(Protocol):
    """A proposer with a store that requests share, so that a draft depends on what was decoded before and beside it.

    Verification makes every sequence's distribution the same whatever was drafted, but not its tokens: at a temperature
    above 0 they may differ when other requests are decoded with it.
    """

    @property
    def shared_store(self) -> str:
        """What requests share, in a few words for the manifest; empty where nothing is shared with these options."""
        ...

    def forget(self) -> None:
        """Empty the store, as after a warm-up, which decodes requests that are measured later."""
        ...


@runtime_checkable
class StopsEarly(Protocol):
    """A proposer that asks ``Batch.stop`` at every row it draws from where to stop."""

    @property
    def why_not_stopped(self) -> str:
        """Why a policy must not stop its drafts, with the option to change; empty where it may."""
        ...


@runtime_checkable
class ChoosesPart(Protocol):
    """A proposer of which one part drafts for a sequence, unless ``Limit.part`` names another."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts."""
        ...


@runtime_checkable
class ChecksSampling(Protocol):
    """A proposer that cannot draft for every way of sampling."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Check the sampling of the requests when the run is composed.

        Raises:
            ValueError: the proposer cannot draft for requests that are sampled so; names the option to change.
        """
        ...


@runtime_checkable
class CertifiableProposer(Protocol):
    """A proposer that can also be built for a toy target, so that ``certify`` can enumerate what it drafts."""

    def toy(self, target: Target, draft: DraftRunner, tree: tuple[tuple[int, ...], ...]) -> Proposer:
        """Return the same proposer for another target.

        Args:
            target: over a few tokens, with a context of a few.
            draft: a draft model over the same tokens, for proposers that have one.
            tree: the shape to draft, for proposers that have a static one: nodes as paths of child ranks.
        """
        ...


def forget(proposer: Proposer) -> None:
    """Let a proposer that ``LearnsAcrossRequests`` empty its store."""
    if isinstance(proposer, LearnsAcrossRequests):
        with attributed("proposer", proposer):
            proposer.forget()


def check_sampling(proposer: Proposer, sampling: Sampling) -> None:
    """Let a proposer that ``ChecksSampling`` check it.

    Raises:
        ValueError: it cannot draft for requests that are sampled so.
    """
    if isinstance(proposer, ChecksSampling):
        proposer.check_sampling(sampling)


def check_requires(proposer: Proposer, target: Target) -> None:
    """Refuse a proposer that requires what the target does not return.

    Raises:
        ValueError: names the proposer and what is missing.
    """
    has_abilities = target.lm.capabilities.abilities
    for name in sorted(proposer.requires.abilities - has_abilities):
        raise ValueError(
            f"proposer '{proposer.name}' requires {name} of the target ({ABILITIES[name]}), whose runner has "
            f"{', '.join(sorted(has_abilities)) or 'no such ability'}. Choose another proposer, or another target."
        )
    if not 0 <= proposer.requires.top_k <= target.vocabulary:
        raise ValueError(
            f"proposer '{proposer.name}' requires the top_k={proposer.requires.top_k} likeliest tokens of each row, "
            f"but the target has {target.vocabulary} tokens: require between 0 and {target.vocabulary} of them."
        )
    last = target.lm.capabilities.hidden_layers
    for layer in proposer.requires.hidden:
        if not last or not -last - 1 <= layer <= last:
            has = f"hidden states 0 to {last}" if last else "no hidden states"
            raise ValueError(
                f"proposer '{proposer.name}' requires hidden state {layer} of the target, whose runner returns {has}. "
                "Choose another proposer, or another target."
            )
    most = target.lm.capabilities.rollback
    if most is not None and branches(proposer):
        raise ValueError(
            f"proposer '{proposer.name}' drafts trees, but the target has recurrent layers, whose runner can take back "
            "rejected tokens of a chain only. Choose a proposer that drafts chains."
        )
    if most is not None and proposer.nodes > most:
        raise ValueError(
            f"proposer '{proposer.name}' drafts up to {proposer.nodes} tokens, but the target's runner can take back "
            f"{most}: set proposer.depth to at most {most}, or target.snapshots to {proposer.nodes}."
        )


def most_at_once(proposer: Proposer, target: Target) -> int | None:
    """Return the most sequences in one forward, with trees as large as the proposer declares; None for no limit."""
    has = target.lm.capabilities
    if has.leaves is None or branches(proposer) is False:
        return has.sequences
    fit = max(1, has.leaves // max(1, proposer.nodes))
    return fit if has.sequences is None else min(fit, has.sequences)


def release(proposer: Proposer, sequences: Iterable[SequenceState]) -> None:
    """Free the KV caches of sequences, and close the proposer's states for them.

    Raises:
        PartError: the first error of the proposer, after everything is freed.
    """
    first: BaseException | None = None
    for sequence in sequences:
        sequence.kv.close()
        state, sequence.state = sequence.state, None
        try:
            with attributed("proposer", proposer):
                proposer.close(state)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def most_rows(proposer: Proposer, forces: bool) -> int:
    """Return how many rows the proposer adds below one root at most.

    Args:
        proposer: drafts.
        forces: whether a constraint that applies to the draft fast-forwards forced tokens.
    """
    more = proposer.forced_nodes if forces and isinstance(proposer, DraftsForcedTokens) else 0
    return proposer.nodes + more


def most_cells(proposer: Proposer, forces: bool) -> int:
    """Return how many of the target's KV cells are in use below one root at most. Arguments as of ``most_rows``."""
    own = proposer.target_cells if isinstance(proposer, UsesTargetCells) else 0
    return max(own, most_rows(proposer, forces))


def kv_bytes(proposer: Proposer, positions: Sequence[int]) -> int:
    """Return the bytes of a proposer's own KV cache (``HoldsKVCache``); 0 where they are not known."""
    return proposer.kv_bytes(positions) if isinstance(proposer, HoldsKVCache) else 0


def runner_kv_bytes(lm: DraftRunner, reserves: Sequence[int]) -> int:
    """Return the bytes of a draft model's KV cache for sequences with these reserves; 0 where they are not known."""
    memory = lm.memory if isinstance(lm, StatesMemory) else None
    return 0 if memory is None else memory.kv_bytes(reserves)


def draws_of(proposer: Proposer) -> frozenset[Drawn]:
    """The ways in which the proposer draws nodes."""
    return proposer.draws if isinstance(proposer, DrawsSeveralWays) else frozenset({proposer.drawn})


def branches(proposer: Proposer) -> bool | None:
    """Whether the proposer's drafts may be trees; None where it does not declare it."""
    if isinstance(proposer, Branching):
        return proposer.branches
    return False if proposer.nodes <= 1 else None
