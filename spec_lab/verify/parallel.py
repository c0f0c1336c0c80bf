"""Rejection of siblings for p on a device: many nodes at once, and nothing is read back. Notation as in ``siblings``.

Results are those of ``rejection`` and ``Traversal`` on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import DETERMINISTIC, WITHOUT_REPLACEMENT, Draft
from spec_lab.core.shape import Schedule
from spec_lab.core.upload import upload
from spec_lab.verify.arrays import CHUNK, parts, rows_of, zeroed_
from spec_lab.verify.siblings import HUGE, TINY, Siblings


class NodeNumbers(NamedTuple):
    """The numbers of every node for rejection, all ``[M]`` float64, in the order of a schedule.

    Args:
        p: p(token | parent); 0 where an earlier sibling holds the token and a sibling is deterministic.
        q: q(token | parent), 0 where the parent has no q.
        drawn: the token's probability in the distribution from which it was drawn, above 0: 1 of a deterministic one.
        left: Z, the mass of q that siblings drawn without replacement left.
        sampled: 0 of a deterministic token, else 1.
    """

    p: Tensor
    q: Tensor
    drawn: Tensor
    left: Tensor
    sampled: Tensor


class Parallel:
    """A draft and p on a device, and how several nodes are rejected at once, at most one of each parent.

    Args:
        draft: has nodes, none of them drawn ``gumbel``.
        p: ``[R, V]``.
        by_turn: whether nodes come in turns, each after its parent and its earlier siblings; else by sibling rank.
    """

    def __init__(self, draft: Draft, p: Tensor, by_turn: bool) -> None:
        self.siblings = Siblings(draft, p)
        self.draft, self.arrays, self.shape = draft, self.siblings.arrays, self.siblings.shape
        self.schedule = self._schedule(by_turn)
        self.numbers = NodeNumbers(*(array[self.schedule.nodes] for array in self._drawn()))  # in the schedule's order
        self.theta, self.s = self.arrays.full(self.shape.rows, 0.0), self.arrays.full(self.shape.rows, 1.0)

    def _schedule(self, by_turn: bool) -> Schedule:
        """All nodes in steps, sampled nodes before deterministic ones."""
        if "deterministic" not in self.draft.ways:
            known: Schedule = self.shape.by_turn if by_turn else self.shape.by_rank
            return known
        shape = self.draft.shape
        schedule = shape.schedule(shape.turn if by_turn else shape.rank, self.draft.codes == DETERMINISTIC)
        nodes, parents, last = upload(self.siblings.p.device, schedule.nodes, schedule.parents, schedule.last)
        return schedule._replace(nodes=nodes, parents=parents, last=last)

    def _flags(self, *flags: np.ndarray) -> list[Tensor]:
        """Booleans of the host."""
        return upload(self.siblings.p.device, *flags)

    def _drawn(self) -> NodeNumbers:
        """In the order of the nodes. Whether tokens can have been drawn as stated is not checked: it would wait."""
        draft, shape, siblings = self.draft, self.shape, self.siblings
        p_token, ones = siblings.p_token(), self.arrays.full(shape.nodes, 1.0)
        if "deterministic" in draft.ways:
            again = siblings.again
            assert again is not None
            p_token = torch.where(again, 0.0, p_token)
        if draft.ways == {"deterministic"}:
            return NodeNumbers(p_token, 0.0 * ones, ones, ones, 0.0 * ones)
        q_token, sampled = siblings.q_token(), ones
        if "deterministic" in draft.ways:
            assert draft.q_row is not None
            sampled, known = self._flags(draft.codes != DETERMINISTIC, draft.q_row[draft.shape.parent] >= 0)
            q_token = torch.where(known, q_token, 0.0)
        left = self._left(q_token) if "without_replacement" in draft.ways and draft.shape.branches else ones
        drawn = torch.where(sampled > 0, q_token.clamp_min(TINY) / left, 1.0)
        return NodeNumbers(p_token, q_token, drawn, left, sampled.double())

    def _left(self, q_token: Tensor) -> Tensor:  # [M]
        """Z, the mass of q that earlier siblings drawn without replacement left; 1 of all other nodes.

        It is summed from what is left, not subtracted from 1: a peaked q leaves little.
        """
        draft, arrays, shape, siblings = self.draft, self.arrays, self.shape, self.siblings
        assert draft.q is not None
        # Z_r = q off all siblings + q(c_r) + q(c_{r+1}) + ..
        without = draft.codes == WITHOUT_REPLACEMENT
        several_host = np.flatnonzero(np.bincount(draft.shape.parent[without], minlength=draft.shape.rows) > 1)
        left = arrays.full((shape.rows, shape.table.shape[1]), 1.0)
        if not len(several_host):
            return left[shape.parent, shape.rank]
        several, (chosen,) = arrays.index(several_host), self._flags(without)
        table = shape.table[several]
        members = siblings.padded(chosen, False)[table]  # [n, K]
        tokens = torch.where(members, siblings.children_token[several], -1)
        rest = zeroed_(rows_of(draft.q, siblings.q_row[several]), tokens, arrays).sum(-1).double()
        masses = torch.where(members, siblings.padded(q_token, 0.0)[table], 0.0)
        suffix_sums = torch.ones_like(masses)
        for rank in range(masses.shape[1] - 1, 0, -1):
            rest = rest + masses[:, rank]
            suffix_sums[:, rank] = rest
        earlier = members.double().cumsum(1)  # the first drawn without replacement is drawn from all of q
        left[several] = torch.where(members & (earlier > 1), suffix_sums, 1.0)
        return left[shape.parent, shape.rank]

    @cached_property
    def _deterministic(self) -> Tensor:  # [R, K]
        """The deterministic tokens of each row, at their ranks; -1 elsewhere."""
        (given,) = self._flags(self.draft.codes == DETERMINISTIC)
        return torch.where(self.siblings.padded(given, False)[self.shape.table], self.siblings.children_token, -1)

    def excess(self, rows: Tensor, before: Tensor | None = None) -> Tensor:
        """(p - theta q)+ off the rejected deterministic tokens at ``rows`` ``[n]``: ``[n, V]``, unnormalised.

        Args:
            before: ``[n]``, only deterministic tokens of lower sibling rank count as rejected; None for all.
        """
        x = self.siblings.excess(rows, self.theta)
        if "deterministic" not in self.draft.ways:
            return x
        tokens = self._deterministic[rows]
        if before is not None:
            tokens = torch.where(self.arrays.range(tokens.shape[1]) < before[:, None], tokens, -1)
        return zeroed_(x, tokens, self.arrays)

    def left_after(self, which: slice | Tensor, split: int) -> Tensor:
        """S after rejecting nodes: ``split`` sampled ones, which theta contains, then deterministic ones.

        Args:
            which: their indices in the schedule.
        """
        nodes, rows = self.schedule.nodes[which], self.schedule.parents[which]
        before = self.shape.rank[nodes] if "deterministic" in self.draft.ways else None
        left = (self.s[rows] - self.weight(which)).clamp_min(0.0)
        for part in parts(split, self.siblings.p, CHUNK):
            part = slice(part.start, min(part.stop, split))
            left[part] = self.excess(rows[part], None if before is None else before[part]).sum(-1).double()
        return left

    def weight(self, which: slice | Tensor) -> Tensor:
        """W(c) of the nodes at the indices ``which`` in the schedule."""
        theta = self.theta[self.schedule.parents[which]]
        return (self.numbers.p[which] - theta * self.numbers.q[which]).clamp_min(0.0)


def recursive_rejection(draft: Draft, p: Tensor, lenience: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return ``stop`` ``[R]`` and ``residual`` as ``rejection.recursive_rejection``."""
    parallel = Parallel(draft, p, by_turn=False)
    schedule, numbers, theta, s = parallel.schedule, parallel.numbers, parallel.theta, parallel.s
    accept = torch.ones_like(numbers.p)
    for start, sampled, stop, _, end in schedule.steps:
        here = slice(start, end)
        m, weight = schedule.parents[here], parallel.weight(here)
        s_m = s[m]
        ratio = (weight / s_m.clamp_min(TINY)).clamp_max(1.0) / numbers.drawn[here]
        accept[schedule.nodes[here]] = (ratio / lenience).clamp_max(1.0)
        theta[m] = (theta[m] + lenience * s_m * numbers.sampled[here] / numbers.left[here]).clamp_max(HUGE)
        if stop > start:
            later = slice(start, stop)
            s[schedule.parents[later]] = parallel.left_after(later, sampled - start)
    return parallel.siblings.first_accepted(accept), parallel.excess


def traversal(draft: Draft, p: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return ``stop`` ``[R]`` and ``residual`` of ``Traversal``.

    A node's weight and distribution when first reached depend only on the siblings deleted before, so all weights are
    computed top down, and one product in visiting order gives the probability of each stop.
    """
    parallel = Parallel(draft, p, by_turn=True)
    shape, schedule, numbers, theta, s = parallel.shape, parallel.schedule, parallel.numbers, parallel.theta, parallel.s
    a = torch.ones_like(s)

    def delete(which: slice | Tensor, split: int) -> None:
        # S' = sum (a P - q_c)+ = a / S sum (p - theta q)+ off rejected deterministic tokens;  a <- S' / (S' + 1 - a)
        m = schedule.parents[which]
        before, mine = s[m], a[m]
        total = parallel.left_after(which, split)
        kept = mine * total / before.clamp_min(TINY)
        rest = 1.0 - mine
        a[m] = torch.where(rest > 0.0, kept / (kept + rest).clamp_min(TINY), 1.0)
        s[m] = total

    for start, sampled, stop, _, end in schedule.steps:
        # a_c = min(1, a P(c) / q_c(c))
        here = slice(start, end)
        m, w = schedule.parents[here], parallel.weight(here)
        s_m, a_m = s[m], a[m]
        ratio = (w / s_m.clamp_min(TINY)).clamp_max(1.0) / numbers.drawn[here]
        a[shape.roots + schedule.nodes[here]] = (a_m * ratio).clamp_max(1.0)
        # a deterministic token leaves theta as it is; a row without weight is never reached
        more = torch.where(a_m > 0, s_m * numbers.sampled[here] / (a_m * numbers.left[here]).clamp_min(TINY), 0.0)
        theta[m] = (theta[m] + more).clamp_max(HUGE)
        if stop > start:
            delete(slice(start, stop), sampled - start)
    delete(schedule.last, schedule.sampled)
    # visited[t, i] = prod of (1 - a) over the rows visited before visit i of tree t
    visited = parallel.arrays.full((shape.roots, draft.shape.grid.shape[1] + 1), 1.0)
    visited[shape.root, shape.visit + 1] = 1.0 - a
    return a * visited.cumprod(1)[shape.root, shape.visit], parallel.excess
