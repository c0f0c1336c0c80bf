"""Draft passes of ``CausalLM``: rows computed ahead of the target's forward by some of its layers, on its own KV cells.

The cells belong to ``CellSequence.ahead`` until the target's forward takes them over or frees them. They are freed as
well when the sequence is closed or shortened, and when another draft pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Draft, Shape, upload
from spec_lab.core.inference import inference
from spec_lab.runners.draft_pass import Partial, Route
from spec_lab.runners.kv_cache import Ahead, CellSequence
from spec_lab.runners.prepare import Packer, Planned, Prepared, Uncommitted

Call = Callable[[Prepared, Phase], tuple[Tensor | None, Tensor | None]]
"""Runs the layers of a draft pass: logits ``[n, V]`` of the rows to keep, and the states of all rows ``[N, X]``."""


class CausalDraftPass:
    """A ``draft_pass.DraftPass``.

    Args:
        packer: of the model.
        route: which layers run.
        taps: numbers of the hidden states that the later forward returns and does not compute again, ascending.
        max_pending: maximum number of pending tokens of a sequence.
        call: see ``Call``. The states are those of ``taps``, then the output of the last layer that ran.
    """

    def __init__(self, packer: Packer, route: Route, taps: tuple[int, ...], max_pending: int, call: Call) -> None:
        self.packer, self.route, self.taps = packer, route, taps
        self.max_pending, self.call = max_pending, call
        self.states: list[Tensor] = []  # [N, X] of each call
        self.rows = 0
        self.token: Tensor | None = None
        self.host: np.ndarray | None = None
        self._sequences: Sequence[CellSequence] = ()

    @inference
    def forward(
        self, sequences: Sequence[CellSequence], pending: Sequence[Sequence[int]], timed: Phase, every: bool = False
    ) -> Partial:
        """See ``draft_pass.DraftPass``.

        Raises:
            ValueError: more pending tokens than ``max_pending``.
        """
        if max(map(len, pending)) > self.max_pending:
            raise ValueError(f"a draft pass computes at most {self.max_pending} pending tokens of a sequence")
        for one in sequences:
            one.forget_ahead()
        planned = self.packer.plan(sequences, pending, None, 0)
        for one, new, tokens in zip(sequences, planned.new, pending, strict=True):
            one.ahead = Ahead(self, list(tokens), new.taken, self.rows + new.start)
        self._sequences = sequences
        total, device = planned.numbers.shape[1], self.packer.device
        keep: Tensor | int = 0
        if not every and total > len(pending):
            ends = np.array([rows.stop - 1 for rows in planned.pending], dtype=np.int64)
            keep = 1 if len(pending) == 1 else upload(device, ends)[0]
        (ids,) = upload(device, planned.numbers[0])
        return self._call(self.packer.finish_level(planned, ids, keep), timed)

    @inference
    def extend(
        self,
        sequences: Sequence[CellSequence | None],
        shape: Shape,
        rows: np.ndarray,
        token: np.ndarray,
        timed: Phase,
    ) -> Partial:
        """See ``draft_pass.DraftPass``."""
        planned = self._plan_nodes(sequences, shape, rows, token)
        return self._call(self.packer.finish_level(planned, torch.from_numpy(token).to(self.packer.device)), timed)

    def finish(self, token: Tensor, host: np.ndarray | None = None) -> None:
        """See ``draft_pass.DraftPass``."""
        self.token, self.host = token, host

    def drop(self, clear: bool = False) -> None:
        """See ``draft_pass.DraftPass``."""
        for one in self._sequences:
            if one.ahead is not None and one.ahead.owner is self:
                one.forget_ahead(clear)
        self._sequences = ()

    def _call(self, prepared: Prepared, timed: Phase) -> Partial:
        logits, states = self.call(prepared, timed)
        exits = None
        if states is not None:
            self.states.append(states)
            exits = states.tensor_split(len(self.taps) + 1, -1)[-1]
        self.rows += prepared.ids.shape[1]
        return Partial(logits, exits)

    def _plan_nodes(
        self, sequences: Sequence[CellSequence | None], shape: Shape, rows: np.ndarray, token: np.ndarray
    ) -> Planned:
        """Take cells for nodes, which attend to pending tokens and to their ancestors among the nodes."""
        new, start = [], 0
        for tree, sequence in enumerate(sequences):
            chosen = np.flatnonzero(shape.root[rows] == tree)
            if sequence is None or sequence.ahead is None or not len(chosen):
                continue
            ahead, own = sequence.ahead, rows[chosen]
            length, count = len(sequence), len(ahead.slots)
            nodes, places, root = shape.trees[tree][1:], shape.places, length + count - 1
            if len(ahead.nodes) < len(nodes):
                more = np.full(len(nodes) - len(ahead.nodes), -1, dtype=np.int64)
                ahead.nodes, ahead.rows = np.concatenate([ahead.nodes, more]), np.concatenate([ahead.rows, more])
            before = nodes[ahead.nodes >= 0]
            taken = self.packer.cells.take(sequence, len(own))
            ahead.nodes[places[own]], ahead.rows[places[own]] = taken, self.rows + start + np.arange(len(own))
            above = places[shape.parent[own - shape.roots]]
            for place, parent, one in zip(places[own].tolist(), above.tolist(), token[chosen].tolist(), strict=True):
                ahead.parents[place] = parent, one
            both = np.concatenate([before, own])
            sees = np.concatenate([np.ones((len(own), count), dtype=bool), shape.ancestors[own][:, both]], axis=1)
            mask = None if sees.all() else np.where(sees, np.float32(0), np.float32(-np.inf))
            slots = np.concatenate([ahead.slots, ahead.nodes[places[both]]])
            key = np.concatenate([np.arange(length, length + count), root + shape.depth[both]])
            new.append(Uncommitted(start, sequence, taken, root + shape.depth[own], slots, key, mask))
            start += len(own)
        positions = np.concatenate([one.query for one in new])
        return Planned(np.stack([np.zeros_like(positions), positions]), new, [], [], [])


@dataclass(frozen=True, eq=False)
class Continued:
    """A forward that continues from a draft pass.

    Args:
        whole: all rows, which run the layers from ``route.end`` of the draft pass on.
        rest: those rows that the draft pass has not computed, which run the layers before first; None for none.
        states: ``[n, X]`` what the draft pass computed.
        order: ``[N]`` the row of each row of ``whole`` among these states and then ``rest``'s.
        end: the layer from which it continues.
        taps: of the draft pass.
    """

    whole: Prepared
    rest: Prepared | None
    states: Tensor
    order: Tensor
    end: int
    taps: tuple[int, ...]


def continue_from(
    packer: Packer,
    sequences: Sequence[CellSequence],
    pending: Sequence[Sequence[int]],
    draft: Draft,
    prefill: Sequence[tuple[CellSequence, Sequence[int]]],
    chunk: int,
    taps: Callable[[int], tuple[int, ...]],
) -> Continued | None:
    """Prepare a forward that continues from the sequences' draft pass; None where there is none to continue from.

    Args:
        packer, sequences, pending, draft, prefill, chunk: as of ``Packer.prepare``.
        taps: the hidden states that the draft pass must have, given the layer to continue from.
    """
    owner = next((one.ahead.owner for one in sequences if one.ahead is not None), None)
    tokens = draft.array
    if owner is not None and tokens is None and draft.token is owner.token:
        tokens = owner.host
    end = None if owner is None else owner.route.end
    fits = owner is not None and end is not None and owner.token is not None and owner.taps == taps(end)
    for one, own in zip(sequences, pending, strict=True):
        ahead = one.ahead
        if ahead is not None and not (fits and ahead.owner is owner and ahead.tokens == list(own)):
            one.forget_ahead()
    for one, _ in prefill:
        one.forget_ahead()
    if owner is None or end is None or all(one.ahead is None for one in sequences):
        return None
    every = [*sequences, *(one for one, _ in prefill)]
    every_pending = [*pending, *(own for _, own in prefill)]
    early, ends = packer.chunks(every, every_pending, chunk)
    given, sources = {}, []
    for tree, one in enumerate(every):
        ahead, count = one.ahead, len(ends[tree])
        if ahead is None:
            nodes = len(draft.shape.trees[tree]) - 1 if tree < len(sequences) and draft.shape.nodes else 0
            sources.append(np.full(count + nodes, -1, dtype=np.int64))
            continue
        found = _matched(ahead, draft.shape, tree, tokens)
        packer.cells.drop(one, _release(ahead, found))
        given[tree] = np.concatenate([ahead.slots, _pick(ahead.nodes, found)])
        sources.append(np.concatenate([np.arange(ahead.first, ahead.first + count), _pick(ahead.rows, found)]))
    planned = packer.plan(every, ends, draft, len(sequences), given)
    source = np.concatenate(sources)
    missing = np.flatnonzero(source < 0)
    rest = packer.finish_level(_part(planned, missing), NO_TOKENS) if len(missing) else None
    for one in sequences:
        one.ahead = None  # the plan owns its cells now
    whole = packer.finish(planned, draft)
    source[missing] = owner.rows + np.arange(len(missing))
    order, index = upload(packer.device, source, missing)
    if rest is not None:
        rest = rest.with_ids(whole.ids.index_select(1, index))
    return Continued(whole.after(early), rest, torch.cat(owner.states), order, end, owner.taps)


NO_TOKENS = torch.empty(0, dtype=torch.long)


def _matched(ahead: Ahead, shape: Shape, tree: int, tokens: np.ndarray | None) -> np.ndarray:  # [m]
    """For each node of a tree the node computed ahead with the same tokens on its path, each at most once; else -1.

    Args:
        tokens: ``[M]`` of the forest; None where they are not known on the host: no node is known to be the same.
    """
    nodes = shape.trees[tree][1:] if shape.nodes else NO_NODES
    found = np.full(len(nodes), -1, dtype=np.int64)
    if not len(nodes) or not ahead.parents or tokens is None:
        return found
    free: dict[tuple[int, int], list[int]] = {}
    for place in sorted(ahead.parents, reverse=True):
        free.setdefault(ahead.parents[place], []).append(place)
    places, parent, roots = shape.places, shape.parent, shape.roots
    for node in nodes.tolist():
        above = int(places[parent[node - roots]])
        mine = above if above < 0 else int(found[above])
        if above >= 0 and mine < 0:
            continue
        same = free.get((mine, int(tokens[node - roots])))
        if same:
            found[places[node]] = same.pop()
    return found


NO_NODES = np.empty(0, dtype=np.int64)


def _pick(values: np.ndarray, places: np.ndarray) -> np.ndarray:  # [m]
    """The values at ``places``; -1 where a place is -1."""
    picked = np.full(len(places), -1, dtype=np.int64)
    picked[places >= 0] = values[places[places >= 0]]
    return picked


def _release(ahead: Ahead, found: np.ndarray) -> np.ndarray:
    """Take the cells of computed nodes that are not ``found`` out of ``ahead``; return them."""
    unused = ahead.nodes >= 0
    unused[found[found >= 0]] = False
    cells = ahead.nodes[unused]
    ahead.nodes[unused] = -1
    return cells


def _part(planned: Planned, rows: np.ndarray) -> Planned:
    """Some of the rows of a plan, as rows of a forward of their own that attends to the same tokens."""
    new, start = [], 0
    for one in planned.new:
        own = rows[(rows >= one.start) & (rows < one.start + len(one.taken))] - one.start
        if not len(own):
            continue
        mask = None if one.mask is None else one.mask[own]
        causal = one.causal and len(own) == len(one.taken)
        new.append(Uncommitted(start, one.sequence, one.taken[own], one.query[own], one.slots, one.key, mask, causal))
        start += len(own)
    return Planned(planned.numbers[:, rows], new, [], [], [])
