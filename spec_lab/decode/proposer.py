"""Base class of proposers: a draft in each step, and a life cycle in which they learn what the target computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from spec_lab.core.draft import SOME_WAYS, WAY, Draft, Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import Sampling
from spec_lab.core.protocols import COUNT, FACTS, FLAG, TEXT, TEXT_OR_NONE, TEXTS, Declared, Part, default
from spec_lab.core.reading import Reading
from spec_lab.core.request import Request
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.models.target import Target
from spec_lab.runners.runner import ABILITIES, Ability, DraftRunner, Runner


@dataclass(frozen=True)
class Requires:
    """Outputs of the target's forwards that a proposer requires. The engine captures only this.

    Args:
        hidden: numbers of hidden states, as in transformers' ``hidden_states``: number i is the input of layer i (the
            output of layer i - 1), L of a model with L layers is the state before the final norm, and -1 the state
            after it, which enters the language-modelling head.
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
    """Outputs that the target computed for one sequence in one step. n positions were newly computed and committed.

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
    "branches": Declared("True, False or None", lambda value: value is None or FLAG.fits(value)),
    "draws": SOME_WAYS,
    "forced_nodes": COUNT,
    "target_cells": COUNT,
    "shared_store": TEXT,
    "text_only": FLAG,
    "why_not_stopped": TEXT_OR_NONE,
    "why_not_admitted": TEXT,
    "part_names": TEXTS,
    "predicts": FLAG,
    "facts": FACTS,
    "reading": Declared("spec_lab.core.reading.Reading", lambda value: isinstance(value, Reading)),
    "sha256": TEXT_OR_NONE,
}
"""Required types of a proposer's attributes."""


class Proposer(Part):
    """Drafts a tree below each sequence. It never sees the verifier.

    A proposer states ``name``, ``drawn`` and ``nodes``, as attributes or properties, and drafts in ``propose``. All
    other members have defaults: they declare nothing, and carry nothing from step to step.

    A draft must follow from the sequences, from the states, from stores that are declared (``shared_store``), and from
    the random choices of the batch (``batch.draws``) only: the same text gets the same draft when it is replayed.

    Order of calls: ``init`` when a request is admitted; in each step ``propose``, then ``observe`` (for sequences that
    end with this step as well, not for those whose logits are broken), then ``fork``, then ``rewind``; ``close`` at the
    end. After a preemption the state is closed and a new one made; its tokens are computed and observed again as parts
    of a prompt, without the rows, logits and accepted nodes of earlier steps: what was learned from these is lost.
    In the first step of a request, and wherever several tokens are pending, hidden states of computed positions only
    are known: a proposer may draft nothing then. Positions that come from a prefix cache are observed without hidden
    states, when the sequence is admitted.
    """

    @default
    @abstractmethod
    def drawn(self) -> Drawn:
        """How siblings are drawn; a verifier that does not support it is refused when the run is composed."""

    @default
    @abstractmethod
    def nodes(self) -> int:
        """Most rows below one root: drafted nodes, and rows that are computed only."""

    @abstractmethod
    def propose(self, batch: Batch) -> Draft:
        """Return a draft with one tree per sequence, in order. Not called in steps in which a policy allows no draft at
        all, unless ``requires`` names logits or top-k of rows.

        Args:
            batch: the sequences ``[B]``, their states, where random choices come from, and how deep drafts may be
                (``batch.room()``).

        Returns:
            A draft with B roots and at most ``nodes`` rows below each; a tree may be empty. Its tokens are on
            ``batch.device``.
        """

    # What is declared, when a run is composed

    @default
    def requires(self) -> Requires:
        """Outputs that the target must return in addition to the logits that are verified."""
        return Requires()

    @default
    def branches(self) -> bool | None:
        """Whether drafts may be trees; False: they are chains; None: not declared, so each draft is checked."""
        return False if self.nodes <= 1 else None

    @default
    def draws(self) -> frozenset[Drawn]:
        """All ways in which nodes are drawn, perhaps below one parent; ``drawn`` is the one that is sampled."""
        return frozenset({self.drawn})

    @default
    def forced_nodes(self) -> int:
        """Most nodes below one root in addition to ``nodes``, where a constraint fast-forwards forced tokens."""
        return 0

    @default
    def target_cells(self) -> int:
        """Most cells of the target's KV cache below one root in use while drafting, without those of pending tokens."""
        return 0

    @default
    def why_not_stopped(self) -> str | None:
        """Why a policy must not stop drafts early, with the option to change; empty where it may; None for a proposer
        that does not ask ``Batch.stop`` at every row it draws from where to stop.
        """
        return None

    @default
    def why_not_admitted(self) -> str:
        """Why a policy must not choose which rows of a draft are verified, with the option to change; empty where it
        may. It may where a sampled node has children, or none, for what is known of its own path.
        """
        return ""

    @default
    def part_names(self) -> tuple[str, ...]:
        """The parts of which one drafts for a sequence, unless ``Limit.part`` names another; empty for no parts."""
        return ()

    @default
    def predicts(self) -> bool:
        """Whether its drafts state what it predicts of their own acceptance (``Draft.predict``)."""
        return False

    @default
    def shared_store(self) -> str:
        """State that requests share, in a few words; empty where drafts follow from their own text only.

        Verification makes every sequence's distribution the same whatever was drafted, but not its tokens: at a
        temperature above 0 they may differ when other requests are decoded with it.
        """
        return ""

    @default
    def text_only(self) -> bool:
        """Whether its draft distribution after a text follows from that text alone, wherever the step began, as a draft
        model's does; replay then follows its steps along recorded texts.
        """
        return False

    @default
    def sha256(self) -> str | None:
        """Hash of the files it was read from; empty where it is not known, None where there are none."""
        return None

    @default
    def reading(self) -> Reading:
        """How the conventions of its files are read; empty where its files leave nothing open."""
        return Reading()

    def check_sampling(self, sampling: Sampling) -> None:
        """Check the sampling of the requests when the run is composed.

        Raises:
            ValueError: it cannot draft for requests that are sampled so; names the option to change.
        """

    def scores(self, batch: Batch) -> Sequence[float] | None:
        """Return the expected accepted tokens for each sequence ``[B]``, from what is known before anything is drawn;
        None where it is not known. ``propose`` is called next, perhaps with fewer sequences.
        """
        return None

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """Return the bytes of a KV cache of its own, for sequences of so many positions that are decoded together."""
        return 0

    def toy(self, target: Target, draft: DraftRunner, tree: tuple[tuple[int, ...], ...]) -> Proposer:
        """Return the same proposer for a toy target, so that ``certify`` can enumerate what it drafts.

        Args:
            target: over a few tokens, with a context of a few.
            draft: a draft model over the same tokens, for proposers that have one.
            tree: the shape to draft, for proposers that have a static one: nodes as paths of child ranks.
        """
        return self

    def toy_of_batch(self, target: Target, draft: DraftRunner, tree: tuple[tuple[int, ...], ...]) -> Proposer:
        """Return the toy for several requests that are decoded together, where what they share matters.

        Args:
            target, draft, tree: as in ``toy``.
        """
        return self.toy(target, draft, tree)

    # Life cycle

    def init(self, request: Request) -> Any:
        """Return the state of a new sequence, which the engine keeps in ``SequenceState.state``.

        Args:
            request: that the sequence belongs to; ``request.tokens`` is its prompt.
        """

    def observe(self, observed: Sequence[Observation]) -> None:
        """Learn what the target computed. Every committed position is observed exactly once, prompts in chunks.

        Args:
            observed: one entry for each sequence of the step, those of prompts included.
        """

    def fork(self, state: Any) -> Any:
        """Return an independent copy of a state, for a fork of its sequence."""
        return deepcopy(state)

    def rewind(self, state: Any, length: int) -> None:
        """Forget positions, since tokens were removed.

        The token that followed the last position that is left may have changed as well. Positions from ``length`` on
        are observed again when they are computed again.

        Args:
            state: of the sequence.
            length: number of computed positions that are left.
        """

    def close(self, state: Any) -> None:
        """Free what is held for a sequence that has ended."""

    def forget(self) -> None:
        """Empty the store that requests share, as after a warm-up, which decodes requests that are measured later."""


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


def runner_kv_bytes(lm: Runner, reserves: Sequence[int]) -> int:
    """Return the bytes of a draft model's KV cache for sequences with these reserves; 0 where they are not known."""
    return 0 if lm.memory is None else lm.memory.kv_bytes(reserves)
