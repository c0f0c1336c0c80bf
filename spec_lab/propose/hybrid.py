"""Several proposers as the parts of one: each with its own states, its own view of a batch, and its share of a draft.

Shared by the hybrids ``union`` and ``best_of``, and by proposers under a policy. A part sees sequences that carry its
own state, and observes its own nodes only, so that it works as it does alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from spec_lab.core.draft import WAYS, ComputedOnly, Draft, Drawn
from spec_lab.core.options import WrongOption
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape
from spec_lab.core.upload import rows_at
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner


@dataclass
class PartStates:
    """States of a hybrid's parts for a sequence.

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


def check_parts(parts: Mapping[str, Proposer]) -> None:
    """Check that proposers can be the parts of a hybrid.

    Raises:
        ValueError: fewer than two; one that shares its noise with the verifier.
    """
    if len(parts) < 2:
        raise WrongOption("parts must name at least two proposers")
    if any("gumbel" in part.draws for part in parts.values()):
        raise WrongOption("parts: a part drawn 'gumbel' shares its noise with the verifier; choose another")


class Hybrid(Proposer):
    """A proposer that is made of others: what it declares and its life cycle are theirs, together.

    ``parts`` are the proposers by name, in order. Subclasses are dataclasses with this field.
    """

    parts: Mapping[str, Proposer]

    @cached_property
    def proposers(self) -> tuple[Proposer, ...]:
        """The parts in order."""
        return tuple(self.parts.values())

    @cached_property
    def draws(self) -> frozenset[Drawn]:
        """All ways in which they draw nodes."""
        return frozenset[Drawn]().union(*(part.draws for part in self.proposers))

    @cached_property
    def drawn(self) -> Drawn:
        """The way in which nodes are sampled; "deterministic" where none is."""
        return next((way for way in WAYS if way != "deterministic" and way in self.draws), "deterministic")

    @cached_property
    def branches(self) -> bool:
        """Whether a part may draft trees, or does not declare it."""
        return any(part.branches is not False for part in self.proposers)

    @cached_property
    def requires(self) -> Requires:
        """Outputs that any of the parts requires."""
        every = [part.requires for part in self.proposers]
        hidden = dict.fromkeys(layer for requires in every for layer in requires.hidden)
        return Requires(
            tuple(hidden),
            any(requires.logits for requires in every),
            max((requires.top_k for requires in every), default=0),
            frozenset[Any]().union(*(requires.abilities for requires in every)),
            not hidden or any(requires.every_position for requires in every if requires.hidden),
        )

    @property
    def forced_nodes(self) -> int:
        """Sum over all parts."""
        return sum(part.forced_nodes for part in self.proposers)

    @property
    def target_cells(self) -> int:
        """Sum over all parts, since one may hold its draft while another drafts."""
        return sum(part.target_cells for part in self.proposers)

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """Return the sum over all parts."""
        return sum(part.kv_bytes(positions) for part in self.proposers)

    @property
    def sha256(self) -> str | None:
        """Hash of the hashes of the parts' files, or the only one of them; None where no part was read from files."""
        hashes = [part.sha256 for part in self.proposers if part.sha256 is not None]
        if len(hashes) < 2:
            return hashes[0] if hashes else None
        return sha256(" ".join(hashes).encode()).hexdigest() if any(hashes) else ""

    @property
    def part_facts(self) -> dict[str, Any]:
        """Facts of each part, by its name."""
        return {name: {"name": part.name, "drawn": part.drawn, **part.facts} for name, part in self.parts.items()}

    @property
    def shared_store(self) -> str:
        """The shared stores of the parts, by name."""
        return "; ".join(f"{name}: {part.shared_store}" for name, part in self.parts.items() if part.shared_store)

    def forget(self) -> None:
        """Empty every part's store."""
        for part in self.proposers:
            part.forget()

    def check_sampling(self, sampling: Sampling) -> None:
        """Check it for every part."""
        for part in self.proposers:
            part.check_sampling(sampling)

    def toy_parts(self, target: Target, draft: DraftRunner, tree: Choices) -> dict[str, Proposer]:
        """Return the parts for a toy target."""
        return {name: part.toy(target, draft, tree) for name, part in self.parts.items()}

    def init(self, request: Request, record: Any = None) -> PartStates:
        """States of a new sequence; ``record`` is what the hybrid itself knows of it."""
        made: list[Any] = []
        try:
            for part in self.proposers:
                made.append(part.init(request))
        except BaseException:
            for part, state in zip(self.proposers, made, strict=False):
                part.close(state)
            raise
        return PartStates(made, record)

    def view(self, batch: Batch, part: int, sequences: Sequence[int] | None = None) -> Batch:
        """Return a batch, or some of its sequences, as a part sees it: its forest has its own masks of a constraint."""
        numbers = range(len(batch.sequences)) if sequences is None else sequences
        viewed = [replace(batch.sequences[n], state=batch.sequences[n].state.each[part]) for n in numbers]
        masks = None if batch.draft_masks is None else batch.draft_masks.view(numbers)
        limits = [batch.limits[n] for n in numbers] if batch.limits else ()
        return replace(batch, sequences=viewed, draft_masks=masks, limits=limits, deferred=False)

    def observe(self, observed: Sequence[Observation]) -> None:
        """Let each part observe what it requires, and the rows that it drafted."""
        for number, part in enumerate(self.proposers):
            part.observe([self._of_part(each, number) for each in observed])

    def _of_part(self, observed: Observation, part: int) -> Observation:
        state, requires = observed.sequence.state, self.proposers[part].requires
        hidden = observed.hidden
        if hidden is not None and requires.hidden != self.requires.hidden:
            width = hidden.shape[1] // len(self.requires.hidden)
            columns = [self.requires.hidden.index(layer) * width for layer in requires.hidden]
            hidden = torch.cat([hidden[:, at : at + width] for at in columns], 1) if columns else None
        seen = replace(observed, sequence=replace(observed.sequence, state=state.each[part]), hidden=hidden)
        nodes = state.nodes.get(part, [])
        number_of = {node: number for number, node in enumerate(nodes)}
        accepted = []
        for node in observed.accepted:
            if node not in number_of:
                break
            accepted.append(number_of[node])
        if observed.rows and len(observed.rows) != state.rows:
            # the step cut the draft: which rows are left is not known
            return replace(seen, rows=(), logits=None, top_k=None, accepted=())
        if not observed.rows or not (requires.logits or requires.top_k):
            return replace(seen, rows=(), logits=None, top_k=None, accepted=accepted)
        rows = [0, *(node + 1 for node in nodes)]
        logits = rows_at(observed.logits, rows) if requires.logits and observed.logits is not None else None
        top_k = observed.top_k[rows, : requires.top_k] if requires.top_k and observed.top_k is not None else None
        return replace(seen, rows=[observed.rows[row] for row in rows], logits=logits, top_k=top_k, accepted=accepted)

    def fork(self, state: PartStates, record: Any = None) -> PartStates:
        """Independent copies of all states."""
        return PartStates([part.fork(each) for part, each in zip(self.proposers, state.each, strict=True)], record)

    def rewind(self, state: PartStates, length: int) -> None:
        """Rewind every part."""
        for part, each in zip(self.proposers, state.each, strict=True):
            part.rewind(each, length)

    def close(self, state: PartStates) -> None:
        """Close every part, the first error last."""
        first: BaseException | None = None
        for part, each in zip(self.proposers, state.each, strict=True):
            try:
                part.close(each)
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
    nodes, extras = sum(draft.shape.nodes for draft in drafts), 0
    start, parents, extra_parents, codes, q_rows, begun = roots, [], [], [], np.full(roots + nodes, -1), 0
    rows_of = []  # for each draft, the new row of each of its rows
    for part, trees in zip(drafts, owners, strict=True):
        shape, count = part.computed_shape, part.shape.nodes
        more = shape.nodes - count
        new = np.concatenate([
            np.asarray(trees, dtype=np.int64), start + np.arange(count), roots + nodes + extras + np.arange(more)
        ])  # fmt: skip
        above = new[shape.parent]
        parents.append(above[:count])
        extra_parents.append(above[count:])
        codes.append(part.codes)
        if part.q is not None and part.q_row is not None:
            has = part.q_row >= 0
            q_rows[new[: len(has)][has]] = part.q_row[has] + begun
            begun += len(part.q)
        rows_of.append(new)
        start, extras = start + count, extras + more
    shape = Shape(roots, np.concatenate(parents).astype(np.int64) if parents else np.empty(0, dtype=np.int64))
    token = _cat([draft.token for draft in drafts], batch)
    extra = None
    if extras:
        own_tokens = [draft.computed_only.token for draft in drafts if draft.computed_only is not None]
        extra = ComputedOnly(np.concatenate(extra_parents), _cat(own_tokens, batch))
    broken = {
        trees[tree]: why for draft, trees in zip(drafts, owners, strict=True) for tree, why in draft.broken.items()
    }
    q = [draft.q for draft in drafts if draft.q is not None]
    code = np.concatenate(codes) if codes else np.empty(0, dtype=np.int8)
    if q and code.any():
        one_hot = all(draft.one_hot for draft in drafts if draft.q is not None)
        draft = Draft(shape, token, code, torch.cat(q), q_rows, None, broken, extra, one_hot)
    else:
        draft = Draft(shape, token, broken=broken, computed_only=extra)
    if any(part.greedy_q is not None for part in drafts):
        unknown = [part.token.new_full((part.shape.nodes,), torch.nan, dtype=torch.float64) for part in drafts]
        stated = [none if part.greedy_q is None else part.greedy_q for part, none in zip(drafts, unknown, strict=True)]
        draft = replace(draft, greedy_q=torch.cat(stated))
    places = draft.computed_shape.places
    numbers = [
        [places[new[rows[1:]]].tolist() for rows in draft.computed_shape.trees]
        for draft, new in zip(drafts, rows_of, strict=True)
    ]
    return draft, numbers


def _cat(tokens: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
    return torch.cat(list(tokens)) if tokens else torch.empty(0, dtype=torch.long, device=batch.device)


def note(batch: Batch, draft: Draft, parts: Sequence[int], owners: Sequence[Sequence[int]], numbers: Any) -> None:
    """Keep which rows of each sequence's tree each part drafted, for ``Hybrid.observe``.

    Args:
        batch: the sequences, whose states are ``PartStates``.
        draft: the forest that is returned.
        parts: for each draft that was joined the part that drafted it.
        owners, numbers: as in ``join``.
    """
    for sequence, size in zip(batch.sequences, draft.computed_shape.sizes.tolist(), strict=True):
        sequence.state.nodes, sequence.state.rows = {}, size
    for part, trees, nodes in zip(parts, owners, numbers, strict=True):
        for tree, drafted in zip(trees, nodes, strict=True):
            batch.sequences[tree].state.nodes[part] = drafted
