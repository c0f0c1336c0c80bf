"""What the verifiers share: what they read of a draft, and recursive rejection of siblings as one number per row.

Let p be the target's distribution at a row, q the draft's before anything was drawn there, and c_0, c_1, .. the
children in drawing order. Each c_r was drawn from a distribution q_r of its own: a point mass (``point``), q (``iid``),
or q / Z_r off the earlier siblings drawn ``without`` replacement, where Z_r is the mass of q that they leave. Rejecting
c_r turns P_r into norm((a_r P_r - q_r)+), where a_r = 1 for recursive rejection (``token``) and the node's acceptance
weight in ``traversal``. Write P_r = W_r / S_r with S_r = sum W_r and W_0 = p; then

    W_{r+1} = (W_r - S_r / a_r q_r)+

A child is rejected only where a_r P_r(c_r) < q_r(c_r), so that W_{r+1}(c_r) = 0: a rejected sibling has no mass left,
whether a later q_r covers it or not, and a rejected point changes nothing else. So for siblings drawn in any mixture

    W_r = (p - theta_r q)+ off the points among c_0 .. c_{r-1}
    theta_0 = 0,  theta_{r+1} = theta_r + S_r / (a_r Z_r) if c_r was sampled, theta_r if it is a point

and a row's state is theta, S, a: three numbers. Rejecting a point takes its own mass off S; rejecting a sampled sibling
needs one sum of (p - theta q)+ over the vocabulary.

Numbers per row and per node are arrays as in ``arrays``: NumPy on the CPU, tensors elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import POINT, WITHOUT, Draft, Drawn, Schedule, upload
from spec_lab.verify.arrays import CHUNK, Array, Arrays, parts, rows_of, view, zeroed_

EVERY_DRAW: frozenset[Drawn] = frozenset({"iid", "without", "point"})
LARGE = 1e30  # largest theta for float32: 1 / Z, what a peaked q leaves to be drawn without replacement, may be more
HUGE = 1e307  # bounds theta: times a probability of zero it must stay zero
TINY = 1e-307  # under a division: 0 / 0 = 0


def check_rows(draft: Draft, p: Tensor) -> None:
    """Refuse target probabilities that do not fit the draft.

    Raises:
        ValueError: ``p`` is not ``[R, V]`` with one row per row of the forest.
    """
    if p.ndim != 2 or len(p) != draft.shape.rows:
        raise ValueError(
            f"target probabilities have shape {tuple(p.shape)}; the forest has {draft.shape.rows} rows, so [R, V] "
            f"must be [{draft.shape.rows}, V]"
        )


def repeated(draft: Draft) -> np.ndarray | None:
    """``[M]`` bool: an earlier sibling holds the same token; None where no sibling is repeated. Reads the tokens."""
    if len(set(zip(draft.shape.parent.tolist(), draft.token.tolist(), strict=True))) == draft.shape.nodes:
        return None
    keys = (draft.shape.parent << 32) + draft.token.cpu().numpy()
    again = np.ones(len(keys), dtype=bool)
    again[np.unique(keys, return_index=True)[1]] = False
    return again


@dataclass(frozen=True)
class NodeNumbers:
    """What recursive rejection reads of every node, all ``[M]`` float64, in the order of a schedule.

    Args:
        p: p(token | parent); 0 where an earlier sibling holds the token and points are among the siblings.
        q: q(token | parent), 0 where the parent has no q.
        own: the token's probability in the distribution from which it was drawn, above 0: 1 of a point.
        left: Z, the mass of q that siblings drawn without replacement left.
        sampled: 0 of a point, else 1.
    """

    p: Array
    q: Array
    own: Array
    left: Array
    sampled: Array


class Siblings:
    """A draft and p, read once: what every verifier needs per node. Arrays are those of ``Arrays``.

    Args:
        draft: a forest with M nodes, at least one.
        p: ``[R, V]``, the target's probabilities; a dead row is all zero.

    Raises:
        ValueError: ``p`` has not one row per row of the forest.
    """

    def __init__(self, draft: Draft, p: Tensor) -> None:
        check_rows(draft, p)
        self.draft, self.p = draft, p
        self.arrays = Arrays.like(p)
        self.shape = self.arrays.shape(draft.shape)
        self.mixed = "point" in draft.ways and len(draft.ways) > 1

    @cached_property
    def token(self) -> Array:  # [M]
        """The nodes' tokens."""
        return self.arrays.read(self.draft.token)

    @cached_property
    def children_token(self) -> Array:  # [R, K]
        """The tokens of each row's children; -1 fills up."""
        padded = self.padded(self.token, -1)
        return padded[self.shape.table]

    @cached_property
    def q_row(self) -> Array:  # [R]
        """Which row of q belongs to each row; rows without one have some other's."""
        assert self.draft.q_row is not None
        rows = np.maximum(self.draft.q_row, 0)
        return rows if self.arrays.device is None else upload(self.arrays.device, rows)[0]

    @cached_property
    def is_point(self) -> np.ndarray:  # [M] bool
        """Which nodes are points. On the host."""
        return self.draft.codes == POINT

    @cached_property
    def again(self) -> Array | None:
        """``[M]`` bool: an earlier sibling holds the same token. None for no node; on a device never None."""
        if self.arrays.device is None:
            return repeated(self.draft)
        token = self.children_token
        width = token.shape[1]
        earlier = torch.ones(width, width, dtype=torch.bool, device=token.device).tril(-1)
        same = ((token[:, :, None] == token[:, None, :]) & earlier).any(-1)
        return same[self.shape.parent, self.shape.rank]

    def padded(self, nodes: Array, value: float) -> Array:
        """Numbers of nodes ``[M]`` by row ``[R + 1]``: ``value`` at roots and at the last place, which -1 finds."""
        padded: Array
        if self.arrays.device is None:
            padded = np.full(self.shape.rows + 1, value, dtype=nodes.dtype)
        else:
            padded = torch.full((self.shape.rows + 1,), value, dtype=nodes.dtype, device=nodes.device)
        padded[self.shape.roots : -1] = nodes
        return padded

    def p_token(self) -> Array:  # [M]
        """p(token | parent) of every node."""
        return self._gather(self.p, self.shape.parent)

    def _gather(self, x: Tensor, rows: Array) -> Array:
        """``x[rows, token]``, ``[M]`` float64."""
        if self.arrays.device is None:
            return x.numpy()[rows, self.token].astype(np.float64)
        return x[rows, self.token].double()

    def drawn(self, order: Array) -> NodeNumbers:
        """What recursive rejection reads of every node.

        Args:
            order: ``[M]``, nodes in the order of the result.

        Raises:
            ValueError: a token cannot have been drawn as the draft states. (On a device nothing is checked: it would
                wait for it.)
        """
        draft, arrays, shape = self.draft, self.arrays, self.shape
        p_token, ones = self.p_token(), arrays.full(shape.nodes, 1.0)
        if "point" in draft.ways and self.again is not None:
            p_token = arrays.where(self.again, 0.0, p_token)
        if draft.ways == {"point"}:
            return NodeNumbers(p_token[order], 0.0 * ones, ones, ones, 0.0 * ones)
        assert draft.q is not None
        q_token = self._gather(draft.q, self.q_row[shape.parent])
        sampled = ones
        if self.mixed:
            assert draft.q_row is not None
            known = draft.q_row[draft.shape.parent] >= 0
            sampled, known = self._flags(~self.is_point, known)
            q_token = arrays.where(known, q_token, 0.0)
        self._check(q_token)
        own, left = arrays.at_least(q_token, TINY), ones
        if "without" in draft.ways and draft.shape.branches:
            left = self._left(q_token)
            own = own / left
        if self.mixed:
            own = arrays.where(sampled, own, 1.0)
            sampled = arrays.where(sampled, ones, 0.0)
        return NodeNumbers(p_token[order], q_token[order], own[order], left[order], sampled[order])

    def _flags(self, *flags: np.ndarray) -> list[Array]:
        """Booleans of the host, as arrays."""
        if self.arrays.device is None:
            return list(flags)
        return [one.bool() for one in upload(self.arrays.device, *flags)]

    def _check(self, q_token: Array) -> None:
        """Refuse tokens that cannot have been drawn as stated."""
        if self.arrays.device is not None:
            return
        draft, possible = self.draft, q_token > 0
        if self.mixed:
            possible = possible | self.is_point
        if not possible.all():
            raise ValueError(f"node {int(np.argmin(possible))} holds a token that has no mass in its parent's q")
        if "without" in draft.ways and self.again is not None:
            first = self.draft.codes == WITHOUT
            keys = (draft.shape.parent[first] << 32) + self.token[first]
            if len(np.unique(keys)) < len(keys):
                raise ValueError("siblings drawn without replacement repeat a token")

    def _left(self, q_token: Array) -> Array:  # [M]
        """Z, the mass of q that earlier siblings drawn without replacement left; 1 of all other nodes.

        It is summed from what is left, not subtracted from 1: a peaked q leaves little.
        """
        draft, arrays, shape = self.draft, self.arrays, self.shape
        assert draft.q is not None
        # Z_r = q off all siblings + q(c_r) + q(c_{r+1}) + ..
        without = draft.codes == WITHOUT
        several_host = np.flatnonzero(np.bincount(draft.shape.parent[without], minlength=draft.shape.rows) > 1)
        several, (chosen,) = arrays.index(several_host), self._flags(without)
        left = arrays.full((shape.rows, shape.table.shape[1]), 1.0)
        if not len(several_host):
            return left[shape.parent, shape.rank]
        table = shape.table[several]
        members = self.padded(chosen, False)[table]  # [n, K]
        tokens = arrays.where(members, self.children_token[several], -1)
        rest = arrays.read(zeroed_(rows_of(draft.q, self.q_row[several]), tokens, arrays).sum(-1).double())
        masses = arrays.where(members, self.padded(q_token, 0.0)[table], 0.0)
        some = arrays.full((len(several_host), masses.shape[1]), 1.0)
        for rank in range(masses.shape[1] - 1, 0, -1):
            rest = rest + masses[:, rank]
            some[:, rank] = rest
        if self.mixed or len(draft.ways) > 1:  # the first drawn without replacement is drawn from all of q
            earlier = arrays.where(members, 1.0, 0.0).cumsum(1)
            some = arrays.where(members & (earlier > 1), some, 1.0)
        left[several] = some
        return left[shape.parent, shape.rank]

    def schedule(self, by_turn: bool) -> Schedule:
        """Nodes by sibling rank, or by turn; sampled nodes before points."""
        if "point" not in self.draft.ways:
            return self.shape.by_turn if by_turn else self.shape.by_rank
        own = self.draft.shape
        nodes, parents, steps, last, sampled = own.schedule(own.turn if by_turn else own.rank, self.is_point)
        if self.arrays.device is not None:
            nodes, parents, last = upload(self.arrays.device, nodes, parents, last)
        return Schedule(nodes, parents, steps, last, sampled)

    @cached_property
    def points(self) -> Array:  # [R, K]
        """The tokens of each row's points, at their ranks; -1 elsewhere."""
        (point,) = self._flags(self.is_point)
        return self.arrays.where(self.padded(point, False)[self.shape.table], self.children_token, -1)

    def excess(self, rows: Array, theta: Array, before: Array | None = None) -> Tensor:
        """(p - theta q)+ off the rejected points at ``rows`` ``[n]`` with ``theta`` ``[n]``: ``[n, V]``, unnormalised.

        Args:
            before: ``[n]``, only points of lower sibling rank count as rejected; None for all points.
        """
        draft, arrays = self.draft, self.arrays
        x = rows_of(self.p, rows)
        if draft.q is not None and len(draft.q):
            q = view(draft.q, self.q_row[rows])
            if arrays.device is None:
                factor = torch.from_numpy(-np.minimum(theta, LARGE)).to(x.dtype)
                x.addcmul_(q.to(x.dtype), factor[:, None])
                x.relu_()
                if theta.max() > LARGE:
                    for place in np.flatnonzero(theta > LARGE).tolist():
                        exact = self.p[int(rows[place])].double() - q[place].double() * float(theta[place])
                        x[place] = exact.clamp_min_(0.0)
            else:  # no look at theta: in float64 none is too large
                x = x.double().addcmul_(q.double(), theta[:, None], value=-1).clamp_min_(0.0).to(self.p.dtype)
        if "point" in draft.ways:
            points = self.points[rows]
            if before is not None:
                ranks = self._ranks
                points = arrays.where(ranks[None, :] < before[:, None], points, -1)
            zeroed_(x, points, arrays)
        return x

    @cached_property
    def _ranks(self) -> Array:
        return self.arrays.range(self.shape.table.shape[1])

    def excess_mass(self, rows: Array, theta: Array, before: Array | None = None) -> Array:  # [n]
        """Sum of ``excess`` over the vocabulary."""
        sums = []
        for part in parts(len(rows), self.p, CHUNK):
            sums.append(self.excess(rows[part], theta[part], None if before is None else before[part]).sum(-1))
        return self.arrays.read((sums[0] if len(sums) == 1 else torch.cat(sums)).double())

    def left_after(self, nodes: Array, rows: Array, theta: Array, s: Array, weight: Array, split: int) -> Array:
        """S after rejecting ``nodes`` ``[n]`` below ``rows`` ``[n]``: ``split`` sampled ones first, then points.

        Args:
            theta: ``[n]``, with the nodes rejected; ``s``: ``[n]``, before; ``weight``: ``[n]``, W of their tokens.
        """
        if split == len(rows):
            return self.excess_mass(rows, theta, self._before(nodes))
        rest = self.arrays.at_least(s[split:] - weight[split:], 0.0)
        if not split:
            return rest
        summed = self.excess_mass(rows[:split], theta[:split], self._before(nodes[:split]))
        return np.concatenate([summed, rest]) if self.arrays.device is None else torch.cat([summed, rest])

    def _before(self, nodes: Array) -> Array | None:
        return self.shape.rank[nodes] if "point" in self.draft.ways else None

    def remainder(self, rows: Array, theta: Array) -> Tensor:
        """The residual distributions at ``rows`` ``[n]``, ``[n, V]`` unnormalised, for each row's ``theta`` ``[R]``."""
        rows = self.arrays.index(rows)
        mine = theta[rows]
        if self.arrays.device is None and "point" not in self.draft.ways and not mine.any():
            return rows_of(self.p, rows)
        return self.excess(rows, mine)

    def first_accepted(self, accept: Array) -> Array:
        """``[R]``: where the path ends if children are tried in drawing order and the first accepted is taken.

        Args:
            accept: ``[M]``, the probability that a node is accepted once its parent is, its earlier siblings not.
        """
        chance = self.padded(accept, 0.0)[self.shape.table]
        refuse = (1.0 - chance).cumprod(1)  # none of the first is accepted
        take = self.arrays.full(self.shape.rows + 1, 1.0)
        chance[:, 1:] = chance[:, 1:] * refuse[:, :-1]
        take[self.shape.table] = chance
        take[-1] = 1.0
        return take[self.shape.lineage].prod(1) * refuse[:, -1]


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
    siblings = Siblings(draft, p)
    shape, arrays, schedule = siblings.shape, siblings.arrays, siblings.schedule(by_turn=False)
    each = siblings.drawn(schedule.nodes)
    theta, s, accept = arrays.full(shape.rows, 0.0), arrays.full(shape.rows, 1.0), arrays.full(shape.nodes, 1.0)
    for start, sampled, points, _, end in schedule.steps:
        here = slice(start, end)
        nodes, m = schedule.nodes[here], schedule.parents[here]
        theta_m, s_m = theta[m], s[m]
        weight = arrays.at_least(each.p[here] - theta_m * each.q[here], 0.0)  # W(c)
        ratio = arrays.at_most(weight / arrays.at_least(s_m, TINY), 1.0) / each.own[here]
        accept[nodes] = arrays.at_most(ratio / lenience, 1.0)
        theta[m] = arrays.at_most(theta_m + lenience * s_m * each.sampled[here] / each.left[here], HUGE)
        if points > start:
            later = slice(0, points - start)
            rows = m[later]
            s[rows] = siblings.left_after(nodes[later], rows, theta[rows], s_m[later], weight[later], sampled - start)
    return siblings.first_accepted(accept), lambda rows: siblings.remainder(rows, theta)
