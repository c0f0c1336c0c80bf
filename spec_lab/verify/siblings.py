"""What the verifiers share: the order of a forest, and recursive rejection of siblings as one number per row.

Let p be the target's law at a row, q the draft's, c_0, c_1, .. the children drawn there, and Z_r the mass of q that
c_0 .. c_{r-1} leave when drawn without replacement (iid: 1), so that c_r was drawn from q_r = q / Z_r off the earlier
siblings. Rejecting c_r turns P_r into norm((a_r P_r - q_r)+), where a_r = 1 for recursive rejection (``token``) and the
node's acceptance weight in ``traversal``. Write P_r = W_r / S_r with S_r = sum W_r and W_0 = p; then

    W_{r+1} = (W_r - S_r / a_r q_r)+

A child is rejected only where a_r P_r(c_r) < q_r(c_r), so that W_{r+1}(c_r) = 0: rejected siblings have no mass left,
whether q_r still covers them (iid) or not (without replacement). So for both ways of drawing

    W_r = (p - theta_r q)+        theta_0 = 0,  theta_{r+1} = theta_r + S_r / (a_r Z_r)

and a row's state is theta, S, a: host numbers. Work over the vocabulary is one sum of (p - theta q)+ per sibling rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, Shape
from spec_lab.verify.verdict import CHUNK, gather, gather_rows, parts

EVERY_DRAW: frozenset[Drawn] = frozenset({"iid", "without", "point"})
LARGE = 1e30  # largest theta for float32: 1 / Z, what a peaked q leaves to be drawn without replacement, may be more
HUGE = 1e307  # bounds theta: times a law's zero it must stay zero
TINY = 1e-307  # under a division: 0 / 0 = 0


@dataclass(frozen=True, eq=False)
class Group:
    """Some nodes ``[n]``, their parents' rows ``[n]``, and of those the rows with a later child."""

    nodes: np.ndarray
    parents: np.ndarray
    unfinished: np.ndarray


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A forest's nodes, grouped for loops over depths and sibling ranks.

    Args:
        expanded: rows that have children.
        levels: nodes of each depth from 1 on.
        ranks: nodes of each sibling rank from 0 on.
        waves: nodes of each (depth, rank), depth by depth.
    """

    expanded: np.ndarray
    levels: list[Group]
    ranks: list[Group]
    waves: list[Group]


@lru_cache(maxsize=256)
def arrange(shape: Shape) -> Arrangement:
    """The arrangement of ``shape``; kept for shapes that come again."""
    parent, depth, rank = shape.parent, shape.depth[shape.roots :], shape.rank
    count = np.bincount(parent, minlength=shape.rows)

    def groups(key: np.ndarray) -> list[Group]:
        order = np.argsort(key, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(key) else []
        return [Group(nodes, parent[nodes], parent[nodes][count[parent[nodes]] > rank[nodes] + 1]) for nodes in parts]

    width = int(rank.max(initial=0)) + 1
    return Arrangement(np.flatnonzero(count), groups(depth), groups(rank), groups(depth * width + rank))


@lru_cache(maxsize=256)
def bottom_up(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """The order in which traversal visits rows: children before their parent, siblings in the order drawn.

    Returns:
        ``[R]`` rows in visiting order, tree by tree, and ``[R]`` each one's place within its tree.
    """
    order: list[int] = []
    place: list[int] = []
    for head in range(shape.roots):
        backwards, stack = [], [head]
        while stack:
            row = stack.pop()
            backwards.append(row)
            stack.extend(shape.children[row].tolist())
        order += backwards[::-1]
        place += range(len(backwards))
    return np.array(order), np.array(place)


def check_rows(draft: Draft, p: Tensor) -> None:
    """Refuse a target law that does not fit the draft.

    Raises:
        ValueError: ``p`` is not ``[R, V]`` with one row per row of the forest.
    """
    if p.ndim != 2 or len(p) != draft.shape.rows:
        raise ValueError(f"the target's law has shape {tuple(p.shape)}; the forest has {draft.shape.rows} rows")


def repeated(draft: Draft) -> np.ndarray | None:
    """``[M]`` bool: an earlier sibling holds the same token; None where no sibling is repeated."""
    if len(set(zip(draft.shape.parent.tolist(), draft.token.tolist(), strict=True))) == draft.shape.nodes:
        return None
    keys = (draft.shape.parent << 32) + draft.token.cpu().numpy()
    again = np.ones(len(keys), dtype=bool)
    again[np.unique(keys, return_index=True)[1]] = False
    return again


def drawn_laws(draft: Draft, p: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each node p(token | parent), q(token | parent) and Z, the mass of q its earlier siblings left.

    All ``[M]`` float64, q and Z at least ``TINY``. Z is summed from what is left, not subtracted from 1: a peaked q
    leaves little.

    Raises:
        ValueError: ``p`` does not fit the forest; or a token cannot have been drawn as the draft says.
    """
    check_rows(draft, p)
    assert draft.q is not None and draft.q_row is not None
    shape, parent = draft.shape, draft.shape.parent
    p_token = gather(p, shape, draft.token)
    q_token = gather_rows(draft.q, draft.q_row[parent], draft.token)
    if not (q_token > 0).all():
        raise ValueError(f"node {int(np.argmin(q_token > 0))} holds a token that its parent's q gives no mass")
    q_token, left = np.maximum(q_token, TINY), np.ones(shape.nodes)
    if draft.drawn == "iid" or len(arrange(shape).ranks) < 2:
        return p_token, q_token, left
    if repeated(draft) is not None:
        raise ValueError("siblings drawn without replacement repeat a token")
    # Z_r = q off all siblings + q(c_r) + q(c_{r+1}) + ..
    order = arrange(shape)
    several = order.ranks[0].unfinished
    slot = np.full(shape.rows, -1)
    slot[several] = np.arange(len(several))
    nodes = np.flatnonzero(slot[parent] >= 0)
    q = rows_of(draft.q, draft.q_row[several])
    q[torch.from_numpy(slot[parent[nodes]]).to(p.device), draft.token[torch.from_numpy(nodes).to(p.device)]] = 0.0
    rest = np.ones(shape.rows)
    rest[several] = q.sum(-1).cpu().numpy()
    for group in reversed(order.ranks[1:]):
        rest[group.parents] += q_token[group.nodes]
        left[group.nodes] = rest[group.parents]
    return p_token, q_token, left


def acceptance(
    p_token: np.ndarray, q_token: np.ndarray, left: np.ndarray, theta: np.ndarray, s: np.ndarray, group: Group
) -> np.ndarray:
    """P(c) / q_c(c) for the nodes of a group ``[n]``: (p(c) - theta q(c))+ / S over q(c) / Z."""
    q, m = q_token[group.nodes], group.parents
    w = np.maximum(p_token[group.nodes] - theta[m] * q, 0.0)
    return np.minimum(w / np.maximum(s[m], TINY), 1.0) / (q / left[group.nodes])


def first_accepted(shape: Shape, accept: np.ndarray) -> np.ndarray:
    """``[R]``: where the path ends if each row's children are tried in the order drawn and the first accepted is taken.

    Args:
        accept: ``[M]``, the probability that a node is accepted once its parent is and its earlier siblings are not.
    """
    order = arrange(shape)
    # take[c]: c is the child accepted at its parent;  refuse[m]: no child of m is
    take, refuse = np.zeros(shape.nodes), np.ones(shape.rows)
    for group in order.ranks:
        take[group.nodes] = refuse[group.parents] * accept[group.nodes]
        refuse[group.parents] *= 1.0 - accept[group.nodes]
    reach = np.ones(shape.rows)
    for level in order.levels:
        reach[shape.roots + level.nodes] = reach[level.parents] * take[level.nodes]
    return reach * refuse


def excess(draft: Draft, p: Tensor, rows: np.ndarray, theta: np.ndarray) -> Tensor:
    """(p - theta q)+ at ``rows`` ``[n]`` with ``theta`` ``[n]``: ``[n, V]``, not normalised."""
    assert draft.q is not None and draft.q_row is not None
    q_row = np.maximum(draft.q_row[rows], 0)  # where nothing was drawn theta is 0
    law, q = rows_of(p, rows), view(draft.q, q_row)
    law.addcmul_(q.to(p.dtype), _column(np.minimum(theta, LARGE), p), value=-1).clamp_min_(0.0)
    for place in np.flatnonzero(theta > LARGE).tolist():
        law[place] = (p[int(rows[place])].double() - q[place].double() * min(float(theta[place]), HUGE)).clamp_min_(0.0)
    return law


def _column(values: np.ndarray, like: Tensor) -> Tensor:  # [n] -> [n, 1]
    return torch.from_numpy(values).to(like)[:, None]


def excess_mass(draft: Draft, p: Tensor, rows: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Sum of (p - theta q)+ at ``rows`` ``[n]``, some: ``[n]``."""
    sums = [excess(draft, p, rows[part], theta[part]).sum(-1) for part in parts(len(rows), p, CHUNK)]
    return (sums[0] if len(sums) == 1 else torch.cat(sums)).cpu().numpy()


def remainder(draft: Draft, p: Tensor, rows: np.ndarray, theta: np.ndarray) -> Tensor:
    """The residual law at ``rows`` ``[n]`` for ``theta`` ``[n]``, ``[n, V]``; where nothing was drafted p itself."""
    if not theta.any():
        return rows_of(p, rows)
    return excess(draft, p, rows, theta)


def rows_of(x: Tensor, rows: np.ndarray) -> Tensor:
    """A copy of ``x[rows]``. (On the CPU, indexing by a tensor starts a team of threads however small the rows.)"""
    return x.index_select(0, torch.from_numpy(rows).to(x.device))


def view(x: Tensor, rows: np.ndarray) -> Tensor:
    """``x[rows]``, not to be written to."""
    return x.narrow(0, int(rows[0]), 1) if len(rows) == 1 else rows_of(x, rows)
