"""Rejection of siblings one at a time, on the CPU. Notation as in ``siblings``.

Numbers per row and per node are Python's: after a forward the CPU's caches are cold, and the first calls of a dozen
different NumPy functions cost more than a loop over a tree. A sum over the vocabulary is computed when it is first
read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import DETERMINISTIC, WAYS, WITHOUT_REPLACEMENT, Draft
from spec_lab.verify import parallel
from spec_lab.verify.arrays import Array, Arrays
from spec_lab.verify.siblings import HUGE, TINY, Siblings, check_rows, excess_, no_mass


class Rejection:
    """The rest of p at every row after the children rejected so far.

    Args:
        draft: has nodes, none of them drawn ``gumbel``.
        p: ``[R, V]`` on the CPU; a dead row is all zero.

    Attributes:
        parent: each node's parent, a row.

    Raises:
        ValueError: ``p`` does not fit the forest; a token cannot have been drawn as the draft states.
    """

    def __init__(self, draft: Draft, p: Tensor) -> None:
        check_rows(draft, p)
        rows = draft.shape.rows
        self.parent: list[int] = draft.shape.parent.tolist()
        self._token: list[int] = draft.token.tolist()
        drawn = draft.drawn
        self._code = [WAYS.index(drawn)] * draft.shape.nodes if isinstance(drawn, str) else drawn.tolist()
        self._p, self._q, self._scratch = p, draft.q, torch.empty_like(p[0])
        self._q_row: list[int] = [-1] * rows if draft.q_row is None else draft.q_row.tolist()
        self._theta = [0.0] * rows
        self._mass: list[float | None] = [1.0] * rows  # S; None where it must be summed
        self._deterministic: dict[int, list[int]] = {}  # of each row, the deterministic tokens rejected
        self._without: dict[int, list[int]] = {}  # of each row, the children drawn without replacement
        self._left: dict[int, float] = {}  # Z of the later of these, once one below the row is read
        value = p.numpy().item
        self._p_token = [*map(value, self.parent, self._token)]  # p(token | parent)
        self._q_token = [0.0] * draft.shape.nodes  # q(token | parent); 0 where the parent has no q
        if draft.q is not None:
            value, q_rows = draft.q.numpy().item, [self._q_row[row] for row in self.parent]
            self._q_token = [value(k, token) if k >= 0 else 0.0 for k, token in zip(q_rows, self._token, strict=True)]
        self._check()

    def _check(self) -> None:
        """Refuse tokens that cannot have been drawn as stated; next to deterministic ones a token has mass once."""
        for node, code in enumerate(self._code):
            if code != DETERMINISTIC and not self._q_token[node] > 0:
                raise no_mass(node)
            if code == WITHOUT_REPLACEMENT:
                self._without.setdefault(self.parent[node], []).append(node)
        for nodes in self._without.values():
            if len(nodes) > 1 and len({self._token[node] for node in nodes}) < len(nodes):
                raise ValueError("siblings drawn without replacement repeat a token")
        if DETERMINISTIC in self._code:
            held = set()
            for node, token in enumerate(self._token):
                key = self.parent[node], token
                if key in held:
                    self._p_token[node] = 0.0
                held.add(key)

    def mass(self, row: int) -> float:
        """S."""
        mass = self._mass[row]
        if mass is None:
            mass = self._mass[row] = self._excess_(self._scratch, row).sum().item()
        return mass

    def accept(self, node: int, a: float) -> float:
        """min(1, a P(c) / q_c(c)): the probability that ``node`` is accepted now."""
        share = min(self._weight(node) / max(self.mass(self.parent[node]), TINY), 1.0)
        if self._code[node] == DETERMINISTIC:
            return min(a * share, 1.0)
        return min(a * share * self._z(node) / max(self._q_token[node], TINY), 1.0)

    def reject(self, node: int, a: float) -> None:
        """P <- norm((a P - q_c)+)."""
        row = self.parent[node]
        if self._code[node] == DETERMINISTIC:
            self._mass[row] = max(self.mass(row) - self._weight(node), 0.0)
            self._deterministic.setdefault(row, []).append(self._token[node])
        else:
            self._theta[row] = min(self._theta[row] + self.mass(row) / max(a * self._z(node), TINY), HUGE)
            self._mass[row] = None

    def residual(self, rows: Array) -> Tensor:
        """The rest at ``rows`` ``[n]``: ``[n, V]``, unnormalised."""
        x = torch.empty(len(rows), self._p.shape[1], dtype=self._p.dtype)
        for index, row in enumerate(rows.tolist()):
            self._excess_(x[index], row)
        return x

    def _excess_(self, x: Tensor, row: int) -> Tensor:
        """W ``[V]``, written over ``x``."""
        if self._theta[row]:
            assert self._q is not None
            excess_(x, self._p[row], self._q[self._q_row[row]], self._theta[row])
        else:
            x.copy_(self._p[row])
        if row in self._deterministic:
            x.numpy()[self._deterministic[row]] = 0.0  # NumPy writes a few numbers faster
        return x

    def _weight(self, node: int) -> float:
        """W(c)."""
        return max(self._p_token[node] - self._theta[self.parent[node]] * self._q_token[node], 0.0)

    def _z(self, node: int) -> float:
        """Z, the mass of q that earlier siblings drawn without replacement left; 1 of nodes drawn otherwise.

        It is summed from what is left, not subtracted from 1: a peaked q leaves little.
        """
        if self._code[node] != WITHOUT_REPLACEMENT:
            return 1.0
        row = self.parent[node]
        first, *others = nodes = self._without[row]
        if node == first:
            return 1.0
        if node not in self._left:
            # Z_r = q off all siblings + q(c_r) + q(c_{r+1}) + ..
            assert self._q is not None
            rest = self._q[self._q_row[row]].clone()
            values = rest.numpy()  # which writes a few numbers faster
            for sibling in nodes:
                values[self._token[sibling]] = 0.0
            left = rest.sum().item()
            for sibling in reversed(others):
                self._left[sibling] = left = left + self._q_token[sibling]
        return self._left[node]


def recursive_rejection(draft: Draft, p: Tensor, lenience: float = 1.0) -> tuple[Array, Callable[[Array], Tensor]]:
    """Try children in drawing order, accept with min(1, P(c) / (l q_c(c))), on rejection P <- norm((P - l q_c)+).

    Args:
        draft: has nodes.
        p: ``[R, V]``.
        lenience: l.

    Returns:
        ``stop`` ``[R]`` and ``residual`` as in ``Verdict``.

    Raises:
        ValueError: ``p`` does not fit the forest; a token cannot have been drawn as the draft states.
    """
    if Arrays.like(p).device is not None:
        return parallel.recursive_rejection(draft, p, lenience)
    if draft.shape.nodes >= MANY and not draft.shape.branches and "deterministic" not in draft.ways:
        return _chains(draft, p, lenience)
    rejection, roots, a = Rejection(draft, p), draft.shape.roots, 1.0 / lenience
    stop = [1.0] * roots  # of each row so far: the path leads there, and to none of its children tried
    for node, row in enumerate(rejection.parent):
        reached = stop[row]
        accept = rejection.accept(node, a) if reached else 0.0
        stop.append(reached * accept)
        stop[row] = reached * (1.0 - accept)
        if stop[row]:  # else nothing is left to be tried or emitted here
            rejection.reject(node, a)
    return np.array(stop), rejection.residual


MANY = 64
"""As many nodes of chains are verified together; fewer are faster one at a time."""


def _chains(draft: Draft, p: Tensor, lenience: float) -> tuple[Array, Callable[[Array], Tensor]]:
    """``recursive_rejection`` where every sampled node is an only child: there S = Z = 1, and theta = l below a row."""
    siblings = Siblings(draft, p)
    accept = np.minimum(siblings.p_token() / (lenience * siblings.q_token()), 1.0)
    theta = np.zeros(draft.shape.rows)
    theta[draft.shape.parent] = lenience
    return siblings.first_accepted(accept), lambda rows: siblings.excess(rows, theta)
