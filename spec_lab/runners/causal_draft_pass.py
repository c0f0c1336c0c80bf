"""Draft passes of ``CausalLM``: rows computed ahead of the target's forward by some of its layers, on its own KV cells.

The cells belong to ``CellSequence.ahead`` until the target's forward takes them over or frees them. They are freed as
well when the sequence is closed or shortened, and when another draft pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Draft
from spec_lab.core.inference import inference
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload
from spec_lab.runners.draft_pass import Partial, Route
from spec_lab.runners.forward import ModelCall
from spec_lab.runners.kv_cache import Ahead, CellSequence
from spec_lab.runners.layer_ranges import LayerRanges
from spec_lab.runners.prepare import Packer, Planned, Prepared, lengthened


class CausalDraftPass:
    """A draft that is computed by some of the target's layers. Its cells are not part of the sequences.

    Args:
        taps: numbers of the hidden states that the later forward returns and does not compute again, ascending.
        logits: whether it computes logits.
    """

    def __init__(
        self, packer: Packer, ranges: LayerRanges, route: Route, taps: tuple[int, ...], logits: bool = True
    ) -> None:
        self.packer, self.ranges, self.route, self.taps, self.logits = packer, ranges, route, taps, logits
        self.states: list[Tensor] = []  # [N, X] of each call: the taps, then the output of the last layer that ran
        self.rows = 0
        self.token: Tensor | None = None
        self.host: np.ndarray | None = None
        self._sequences: Sequence[CellSequence] = ()

    @inference
    def forward(
        self, sequences: Sequence[Any], pending: Sequence[Sequence[int]], timed: Phase, every: bool = False
    ) -> Partial:
        """Compute pending tokens; called once, before any node.

        Args:
            sequences: ``[B]`` the target's.
            pending: ``[B]`` the tokens that follow, at least one and at most ``max_pending`` each.
            every: logits of all rows, not of the last one of each sequence.

        Raises:
            ValueError: more pending tokens than ``Runner.max_pending``.
        """
        if max(map(len, pending)) > self.packer.chunk:
            raise ValueError(f"a draft pass computes at most {self.packer.chunk} pending tokens of a sequence")
        for sequence in sequences:
            sequence.forget_ahead()
        planned = self.packer.plan(sequences, pending, None, 0)
        for sequence, new, tokens in zip(sequences, planned.new, pending, strict=True):
            sequence.ahead = Ahead(self, list(tokens), new.taken, self.rows + new.start)
        self._sequences = sequences
        keep: np.ndarray | int = 0
        if not every and planned.numbers.shape[1] > len(pending):
            ends = np.array([rows.stop - 1 for rows in planned.pending], dtype=np.int64)
            keep = 1 if len(pending) == 1 else ends
        return self._call(self.packer.finish_level(planned, planned.numbers[0], keep), timed)

    @inference
    def extend(
        self,
        sequences: Sequence[Any],
        shape: Shape,
        rows: np.ndarray,
        token: np.ndarray,
        timed: Phase,
    ) -> Partial:
        """Compute nodes whose ancestors are computed. Arguments as in ``runner.DraftRunner.extend``."""
        planned, in_tree = self.packer.plan_level(sequences, shape, rows, ahead=True), shape.places
        for new in planned.new:
            ahead, part = new.sequence.ahead, slice(new.start, new.start + len(new.taken))
            assert ahead is not None
            ahead.rows = lengthened(ahead.rows, len(ahead.held))
            ahead.rows[in_tree[rows[part]]] = self.rows + new.start + np.arange(len(new.taken))
            parents = in_tree[shape.parent[rows[part] - shape.roots]].tolist()
            known = zip(parents, token[part].tolist(), strict=True)
            ahead.parents |= dict(zip(in_tree[rows[part]].tolist(), known, strict=True))
        return self._call(self.packer.finish_level(planned, token), timed)

    def finish(self, token: Tensor, host: np.ndarray | None = None) -> None:
        """The draft is complete: the target's forward continues from the rows that are computed.

        If the forward's draft differs, as after a constraint has merged forced tokens, it continues from those rows
        that occur in both, and the others are given back. The tokens of such a draft must be in the host's memory;
        where they are not, as on a GPU, it continues from the rows of pending tokens only.

        Args:
            token: ``[M]`` the tokens of the draft.
            host: the same on the host; needed where ``token`` is not in the host's memory.
        """
        self.token, self.host = token, host

    def drop(self, clear: bool = False) -> None:
        """Give back all cells. Harmless when repeated.

        Args:
            clear: whether to overwrite them with zeros, for what is not finite: a mask does not remove NaN (0 x NaN).
        """
        for sequence in self._sequences:
            if sequence.ahead is not None and sequence.ahead.owner is self:
                sequence.forget_ahead(clear)
        self._sequences = ()

    def _call(self, prepared: Prepared, timed: Phase) -> Partial:
        with timed:
            inputs = () if self.route.end is None else (*self.taps, self.route.end)
            logits, states = self.ranges.first(prepared, self.route, inputs, self.logits)
        exits = None
        if states is not None:
            self.states.append(states)
            exits = states.tensor_split(len(self.taps) + 1, -1)[-1]
        self.rows += prepared.ids.shape[1]
        return Partial(logits, exits)


@dataclass(frozen=True, eq=False, kw_only=True)
class Continued(Prepared):
    """A forward that continues from a draft pass: all rows run the layers from the end of its route on.

    Args:
        end: the layer from which it continues.
        rest: those rows that the draft pass has not computed, which run the layers before first; None for none.
        order: ``[N]`` the row of each row among the states of the draft pass and then those of ``rest``.
    """

    owner: CausalDraftPass
    end: int
    rest: Prepared | None
    order: Tensor

    def compute(self, call: ModelCall) -> tuple[Tensor, Tensor | None]:
        """See ``forward.Forward``. The layers that the draft pass ran are computed of no row twice."""
        layers, ranges, parts = (*self.owner.taps, self.end), self.owner.ranges, list(self.owner.states)
        if self.rest is not None:
            _, states = ranges.first(self.rest, Route(0, self.end), layers, logits=False)
            parts += [] if states is None else [states]
        states = torch.cat(parts).index_select(0, self.order)
        return ranges.rest(self, self.end, dict(zip(layers, states.tensor_split(len(layers), -1), strict=True)))


def continue_from(
    packer: Packer,
    sequences: Sequence[CellSequence],
    pending: Sequence[Sequence[int]],
    draft: Draft,
    prefill: Sequence[tuple[CellSequence, Sequence[int]]],
    taps: Callable[[int], tuple[int, ...]],
) -> Continued | None:
    """Prepare a forward that continues from the sequences' draft pass; None where there is none to continue from.

    Args:
        packer, sequences, pending, draft, prefill: as in ``Packer.prepare``.
        taps: the hidden states that the draft pass must have, given the layer to continue from.
    """
    owner = next((sequence.ahead.owner for sequence in sequences if sequence.ahead is not None), None)
    tokens = draft.array
    if owner is not None and tokens is None and draft.token is owner.token:
        tokens = owner.host
    end = None if owner is None else owner.route.end
    fits = owner is not None and end is not None and owner.token is not None and owner.taps == taps(end)
    for sequence, new_tokens in zip(sequences, pending, strict=True):
        ahead = sequence.ahead
        if ahead is not None and not (fits and ahead.owner is owner and ahead.tokens == list(new_tokens)):
            sequence.forget_ahead()
    for sequence, _ in prefill:
        sequence.forget_ahead()
    if owner is None or end is None or all(sequence.ahead is None for sequence in sequences):
        return None
    every = [*sequences, *(sequence for sequence, _ in prefill)]
    early, ends = packer.early(every, [*pending, *(new_tokens for _, new_tokens in prefill)])
    given, sources = {}, []
    for tree, sequence in enumerate(every):
        ahead, count = sequence.ahead, len(ends[tree])
        if ahead is None:
            nodes = len(draft.shape.trees[tree]) - 1 if tree < len(sequences) and draft.shape.nodes else 0
            sources.append(np.full(count + nodes, -1, dtype=np.int64))
            continue
        same = _matched(ahead, draft.shape, tree, tokens)
        packer.cells.drop(sequence, _release(ahead, same))
        given[tree] = np.concatenate([ahead.slots, _pick(ahead.held, same)])
        sources.append(np.concatenate([np.arange(ahead.first, ahead.first + count), _pick(ahead.rows, same)]))
    planned = packer.plan(every, ends, draft, len(sequences), given)
    source = np.concatenate(sources)
    missing = np.flatnonzero(source < 0)
    rest = packer.finish_level(_part(planned, missing), NO_TOKENS) if len(missing) else None
    for sequence in sequences:
        sequence.ahead = None  # the plan owns its cells now
    whole = packer.finish(planned, draft, early)
    source[missing] = owner.rows + np.arange(len(missing))
    order, index = upload(packer.device, source, missing)
    if rest is not None:
        rest = replace(rest, ids=whole.ids.index_select(1, index))
    return Continued(**vars(whole), owner=owner, end=end, rest=rest, order=order)


NO_TOKENS = torch.empty(0, dtype=torch.long)


def _matched(ahead: Ahead, shape: Shape, tree: int, tokens: np.ndarray | None) -> np.ndarray:  # [m]
    """For each node of a tree the node computed ahead with the same tokens on its path, each at most once; else -1.

    Args:
        tokens: ``[M]`` of the forest; None where they are not known on the host: no node is known to be the same.
    """
    nodes = shape.trees[tree][1:] if shape.nodes else NO_NODES
    match = np.full(len(nodes), -1, dtype=np.int64)
    if not len(nodes) or not ahead.parents or tokens is None:
        return match
    free: dict[tuple[int, int], list[int]] = {}
    for computed in sorted(ahead.parents, reverse=True):
        free.setdefault(ahead.parents[computed], []).append(computed)
    in_tree, parent, roots = shape.places, shape.parent, shape.roots
    for node in nodes.tolist():
        above = int(in_tree[parent[node - roots]])
        mine = above if above < 0 else int(match[above])
        if above >= 0 and mine < 0:
            continue
        same = free.get((mine, int(tokens[node - roots])))
        if same:
            match[in_tree[node]] = same.pop()
    return match


NO_NODES = np.empty(0, dtype=np.int64)


def _pick(values: np.ndarray, indices: np.ndarray) -> np.ndarray:  # [m]
    """The values at ``indices``; -1 where an index is -1."""
    picked = np.full(len(indices), -1, dtype=np.int64)
    picked[indices >= 0] = values[indices[indices >= 0]]
    return picked


def _release(ahead: Ahead, kept: np.ndarray) -> np.ndarray:
    """Take the cells of computed nodes that are not ``kept`` out of ``ahead``; return them."""
    unused = ahead.held >= 0
    unused[kept[kept >= 0]] = False
    cells = ahead.held[unused]
    ahead.held[unused] = -1
    return cells


def _part(planned: Planned, rows: np.ndarray) -> Planned:
    """Some of the rows of a plan, as rows of a forward of their own that attends to the same tokens."""
    new, start = [], 0
    for whole in planned.new:
        part = rows[(rows >= whole.start) & (rows < whole.start + len(whole.taken))] - whole.start
        if not len(part):
            continue
        mask = None if whole.mask is None else whole.mask[part]
        causal = whole.causal and len(part) == len(whole.taken)
        taken, query = whole.taken[part], whole.query[part]
        new.append(whole._replace(start=start, taken=taken, query=query, mask=mask, causal=causal))
        start += len(part)
    return Planned(planned.numbers[:, rows], new, [], [], [])
