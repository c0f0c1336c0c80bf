"""Several proposers as the parts of one: each with its own states, its own view of a batch, and its share of a draft.

Shared by the hybrids, ``union`` and ``best_of``. A part sees sequences that carry its own state, and observes its own
nodes only, so that it works as it does alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from spec_lab.core.draft import WAYS, ComputedOnly, Draft, Drawn, Shape
from spec_lab.core.probabilities import Sampling
from spec_lab.core.protocols import Hashed, facts_of
from spec_lab.core.request import Request
from spec_lab.decode.proposer import (
    CertifiableProposer,
    DraftsForcedTokens,
    LearnsAcrossRequests,
    Observation,
    Proposer,
    Requires,
    UsesTargetCells,
    branches,
    check_sampling,
    draws_of,
    forget,
    kv_bytes,
)
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner


@dataclass
class PartStates:
    """What a hybrid carries for a sequence.

    Args:
        each: the states of the parts, in order.
        own: what the hybrid itself has learned.
        nodes: of the last step: for each part that drafted, its nodes as numbers within the sequence's tree, in the
            part's order; rows that are computed only are numbered after all nodes.
        rows: number of rows of that tree, the root included; another number was computed where the step cut the draft.
    """

    each: list[Any]
    own: Any = None
    nodes: dict[int, list[int]] = field(default_factory=dict)
    rows: int = 0


@dataclass(frozen=True, eq=False)
class ProposerParts:
    """The parts of a hybrid, and what they declare together.

    Args:
        named: proposers by name, in order.
    """

    named: Mapping[str, Proposer]

    @cached_property
    def all(self) -> tuple[Proposer, ...]:
        """The proposers in order."""
        return tuple(self.named.values())

    @cached_property
    def draws(self) -> frozenset[Drawn]:
        """All ways in which they draw nodes."""
        return frozenset[Drawn]().union(*map(draws_of, self.all))

    @cached_property
    def drawn(self) -> Drawn:
        """The way in which nodes are sampled; "point" where none is."""
        return next((way for way in WAYS if way != "point" and way in self.draws), "point")

    @cached_property
    def branches(self) -> bool:
        """Whether a part may draft trees, or does not declare it."""
        return any(branches(one) is not False for one in self.all)

    @cached_property
    def requires(self) -> Requires:
        """What any of them requires."""
        every = [one.requires for one in self.all]
        hidden = dict.fromkeys(layer for one in every for layer in one.hidden)
        return Requires(
            tuple(hidden),
            any(one.logits for one in every),
            max((one.top_k for one in every), default=0),
            frozenset[Any]().union(*(one.abilities for one in every)),
            not hidden or any(one.every_position for one in every if one.hidden),
        )

    @property
    def forced_nodes(self) -> int:
        """Most forced nodes below one root, of all parts together."""
        return sum(one.forced_nodes for one in self.all if isinstance(one, DraftsForcedTokens))

    @property
    def target_cells(self) -> int:
        """See ``UsesTargetCells``; of all parts together, since one may hold its draft while another drafts."""
        return sum(one.target_cells for one in self.all if isinstance(one, UsesTargetCells))

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """See ``HoldsKVCache``; of all parts together."""
        return sum(kv_bytes(one, positions) for one in self.all)

    @property
    def sha256(self) -> str | None:
        """Of the hashes of the parts' files, or the only one of them; None where no part was read from files."""
        hashes = [one.sha256 for one in self.all if isinstance(one, Hashed) and one.sha256 is not None]
        if len(hashes) < 2:
            return hashes[0] if hashes else None
        return sha256(" ".join(hashes).encode()).hexdigest() if any(hashes) else ""

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep of each part."""
        return {name: {"name": one.name, "drawn": one.drawn, **facts_of(one)} for name, one in self.named.items()}

    @property
    def shared_store(self) -> str:
        """See ``LearnsAcrossRequests``."""
        stores = {name: one.shared_store for name, one in self.named.items() if isinstance(one, LearnsAcrossRequests)}
        return "; ".join(f"{name}: {what}" for name, what in stores.items() if what)

    def forget(self) -> None:
        """See ``LearnsAcrossRequests``."""
        for one in self.all:
            forget(one)

    def check_sampling(self, sampling: Sampling) -> None:
        """See ``ChecksSampling``."""
        for one in self.all:
            check_sampling(one, sampling)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> ProposerParts:
        """See ``CertifiableProposer``; parts that are not certifiable run on the toy target as they are."""
        return ProposerParts({
            name: one.toy(target, draft, tree) if isinstance(one, CertifiableProposer) else one
            for name, one in self.named.items()
        })  # fmt: skip

    def init(self, request: Request, own: Any = None) -> PartStates:
        """States of a new sequence."""
        made: list[Any] = []
        try:
            for one in self.all:
                made.append(one.init(request))
        except BaseException:
            for one, state in zip(self.all, made, strict=False):
                one.close(state)
            raise
        return PartStates(made, own)

    def view(self, batch: Batch, part: int, sequences: Sequence[int] | None = None) -> Batch:
        """What a part sees of a batch, or of some of its sequences: its forest has its own masks of a constraint."""
        numbers = range(len(batch.sequences)) if sequences is None else sequences
        own = [replace(one, state=one.state.each[part]) for one in (batch.sequences[n] for n in numbers)]
        masks = None if batch.draft_masks is None else batch.draft_masks.view(numbers)
        limits = [batch.limits[n] for n in numbers] if batch.limits else ()
        return replace(batch, sequences=own, draft_masks=masks, limits=limits)

    def observe(self, observed: Sequence[Observation]) -> None:
        """Let each part observe what it requires, and the rows that it drafted."""
        for part, one in enumerate(self.all):
            one.observe([self._of_part(each, part) for each in observed])

    def _of_part(self, observed: Observation, part: int) -> Observation:
        state, requires = observed.sequence.state, self.all[part].requires
        hidden = observed.hidden
        if hidden is not None and requires.hidden != self.requires.hidden:
            width = hidden.shape[1] // len(self.requires.hidden)
            columns = [self.requires.hidden.index(layer) * width for layer in requires.hidden]
            hidden = torch.cat([hidden[:, at : at + width] for at in columns], 1) if columns else None
        seen = replace(observed, sequence=replace(observed.sequence, state=state.each[part]), hidden=hidden)
        nodes = state.nodes.get(part, [])
        place = {node: number for number, node in enumerate(nodes)}
        accepted = []
        for node in observed.accepted:
            if node not in place:
                break
            accepted.append(place[node])
        if (
            observed.rows and len(observed.rows) != state.rows
        ):  # the step cut the draft: which rows are left is not known
            return replace(seen, rows=(), logits=None, top_k=None, accepted=())
        if not observed.rows or not (requires.logits or requires.top_k):
            return replace(seen, rows=(), logits=None, top_k=None, accepted=accepted)
        rows = [0, *(node + 1 for node in nodes)]
        logits = observed.logits[torch.tensor(rows)] if requires.logits and observed.logits is not None else None
        top_k = observed.top_k[rows, : requires.top_k] if requires.top_k and observed.top_k is not None else None
        return replace(seen, rows=[observed.rows[row] for row in rows], logits=logits, top_k=top_k, accepted=accepted)

    def fork(self, state: PartStates, own: Any = None) -> PartStates:
        """Independent copies of all states."""
        return PartStates([one.fork(each) for one, each in zip(self.all, state.each, strict=True)], own)

    def rewind(self, state: PartStates, length: int) -> None:
        """Rewind every part."""
        for one, each in zip(self.all, state.each, strict=True):
            one.rewind(each, length)

    def close(self, state: PartStates) -> None:
        """Close every part, the first error last."""
        first: BaseException | None = None
        for one, each in zip(self.all, state.each, strict=True):
            try:
                one.close(each)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


def join(batch: Batch, drafts: Sequence[Draft], owners: Sequence[Sequence[int]]) -> tuple[Draft, list[list[list[int]]]]:
    """Put the trees of several drafts below the roots of one forest: side by side, or below one root in this order.

    Args:
        batch: whose roots they are.
        drafts: at most one of them has sampled nodes below the same root.
        owners: for each draft the number of each of its sequences within the batch.

    Returns:
        The forest, and for each draft and each of its trees the nodes as numbers within the tree of the forest, those
        of rows that are computed only after all nodes.
    """
    roots = len(batch.sequences)
    nodes, extras = sum(one.shape.nodes for one in drafts), 0
    start, parents, extra_parents, codes, q_rows, begun = roots, [], [], [], np.full(roots + nodes, -1), 0
    rows_of = []  # for each draft, the new row of each of its rows
    for one, own in zip(drafts, owners, strict=True):
        shape, count = one.computed_shape, one.shape.nodes
        more = shape.nodes - count
        new = np.concatenate([
            np.asarray(own, dtype=np.int64), start + np.arange(count), roots + nodes + extras + np.arange(more)
        ])  # fmt: skip
        above = new[shape.parent]
        parents.append(above[:count])
        extra_parents.append(above[count:])
        codes.append(one.codes)
        if one.q is not None and one.q_row is not None:
            has = one.q_row >= 0
            q_rows[new[: len(has)][has]] = one.q_row[has] + begun
            begun += len(one.q)
        rows_of.append(new)
        start, extras = start + count, extras + more
    shape = Shape(roots, np.concatenate(parents).astype(np.int64) if parents else np.empty(0, dtype=np.int64))
    token = _cat([one.token for one in drafts], batch)
    extra = None
    if extras:
        own_tokens = [one.computed_only.token for one in drafts if one.computed_only is not None]
        extra = ComputedOnly(np.concatenate(extra_parents), _cat(own_tokens, batch))
    broken = {own[tree]: why for one, own in zip(drafts, owners, strict=True) for tree, why in one.broken.items()}
    q = [one.q for one in drafts if one.q is not None]
    code = np.concatenate(codes) if codes else np.empty(0, dtype=np.int8)
    if q and code.any():
        one_hot = all(one.one_hot for one in drafts if one.q is not None)
        draft = Draft(shape, token, code, torch.cat(q), q_rows, None, broken, extra, one_hot)
    else:
        draft = Draft(shape, token, broken=broken, computed_only=extra)
    places = draft.computed_shape.places
    found = [
        [places[new[rows[1:]]].tolist() for rows in one.computed_shape.trees]
        for one, new in zip(drafts, rows_of, strict=True)
    ]
    return draft, found


def _cat(tokens: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
    return torch.cat(list(tokens)) if tokens else torch.empty(0, dtype=torch.long, device=batch.device)


def note(batch: Batch, draft: Draft, parts: Sequence[int], owners: Sequence[Sequence[int]], found: Any) -> None:
    """Keep which rows of each sequence's tree each part drafted, for ``ProposerParts.observe``.

    Args:
        batch: the sequences, whose states are ``PartStates``.
        draft: the forest that is returned.
        parts: for each draft that was joined the part that drafted it.
        owners, found: as of ``join``.
    """
    for sequence, size in zip(batch.sequences, draft.computed_shape.sizes.tolist(), strict=True):
        sequence.state.nodes, sequence.state.rows = {}, size
    for part, own, nodes in zip(parts, owners, found, strict=True):
        for tree, numbers in zip(own, nodes, strict=True):
            batch.sequences[tree].state.nodes[part] = numbers
