"""Shared by the verifiers: their view of a draft, and recursive rejection of siblings as one number per row.

Let p be the target's distribution at a row, q the draft's before anything was drawn there, and c_0, c_1, .. the
children in drawing order. Each c_r was drawn from a distribution q_r of its own: a point mass (``deterministic``), q
(``iid``), or q / Z_r off the earlier siblings drawn ``without_replacement``, where Z_r is the mass of q that they
leave. Rejecting c_r turns P_r into norm((a_r P_r - q_r)+), where a_r = 1 for recursive rejection (``token``) and the
node's acceptance weight in ``traversal``. Write P_r = W_r / S_r with S_r = sum W_r and W_0 = p; then

    W_{r+1} = (W_r - S_r / a_r q_r)+

A child is rejected only where a_r P_r(c_r) < q_r(c_r), so that W_{r+1}(c_r) = 0: a rejected sibling has no mass left,
whether a later q_r covers it or not, and a rejected deterministic token changes nothing else. So for siblings drawn in
any mixture

    W_r = (p - theta_r q)+ off the deterministic tokens among c_0 .. c_{r-1}
    theta_0 = 0,  theta_{r+1} = theta_r + S_r / (a_r Z_r) if c_r was sampled, theta_r if it is deterministic

and a row's state is theta, S, a: three numbers. Rejecting a deterministic token takes its own mass off S; rejecting a
sampled sibling needs one sum of (p - theta q)+ over the vocabulary.

``rejection`` computes this node by node on the CPU, ``parallel`` for many nodes at once on a device.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.upload import upload
from spec_lab.verify.arrays import Array, Arrays, rows_of, view

EVERY_DRAW: frozenset[Drawn] = frozenset({"iid", "without_replacement", "deterministic"})
LARGE = 1e30  # largest theta for float32: 1 / Z, what a peaked q leaves to be drawn without replacement, may be more
HUGE = 1e307  # bounds theta: times a probability of zero it must stay zero
TINY = 1e-307  # under a division: 0 / 0 = 0


def check_rows(draft: Draft, p: Tensor) -> None:
    """Refuse target probabilities that do not fit the draft.

    Raises:
        ValueError: ``p`` is not ``[R, V]`` with one row per row of the forest.
    """
    if p.ndim != 2 or p.shape[0] != draft.shape.rows:
        raise ValueError(
            f"target probabilities have shape {tuple(p.shape)}; the forest has {draft.shape.rows} rows, so [R, V] "
            f"must be [{draft.shape.rows}, V]"
        )


def no_mass(node: int) -> ValueError:
    """A node that cannot have been drawn from the draft's q."""
    return ValueError(f"node {node} holds a token that has no mass in its parent's q")


def repeated(draft: Draft) -> np.ndarray | None:
    """``[M]`` bool: an earlier sibling holds the same token; None where no sibling is repeated. Reads the tokens."""
    if len(set(zip(draft.shape.parent.tolist(), draft.token.tolist(), strict=True))) == draft.shape.nodes:
        return None
    keys = (draft.shape.parent << 32) + draft.token.cpu().numpy()
    again = np.ones(len(keys), dtype=bool)
    again[np.unique(keys, return_index=True)[1]] = False
    return again


class Siblings:
    """The nodes of a draft with their probabilities p and q, as arrays that all verifiers read.

    The arrays are NumPy's on the CPU and torch's on a GPU (``Arrays``).

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
        if self.arrays.device is not None and self.draft.late is not None:
            return self.draft.late.q_row
        rows = np.maximum(self.draft.q_row, 0)
        return rows if self.arrays.device is None else upload(self.arrays.device, rows)[0]

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
            padded = np.empty(self.shape.rows + 1, dtype=nodes.dtype)
            padded[:] = value  # without np.full, which is slow Python
        else:
            padded = torch.full((self.shape.rows + 1,), value, dtype=nodes.dtype, device=nodes.device)
        padded[self.shape.roots : -1] = nodes
        return padded

    def p_token(self) -> Array:  # [M]
        """p(token | parent) of every node."""
        return self._gather(self.p, self.shape.parent)

    def q_token(self) -> Array:  # [M]
        """q(token | parent) of every node; of a deterministic one below a parent without q some number.

        Raises:
            ValueError: a token has no mass in q, on the CPU. (On a device nothing is checked: it would wait for it.)
        """
        assert self.draft.q is not None
        q_token = self._gather(self.draft.q, self.q_row[self.shape.parent])
        if self.arrays.device is None and not (q_token > 0).all():
            raise no_mass(int(q_token.argmin()))
        return q_token

    def _gather(self, x: Tensor, rows: Array) -> Array:
        """``x[rows, token]``, ``[M]`` float64."""
        if self.arrays.device is None:
            return x.numpy()[rows, self.token].astype(np.float64)
        return x[rows, self.token].double()

    def excess(self, rows: Array, theta: Array) -> Tensor:
        """(p - theta q)+ at ``rows`` ``[n]``, each with its own theta of ``[R]``: ``[n, V]``, unnormalised."""
        rows = self.arrays.index(rows)
        x, q = rows_of(self.p, rows), self.draft.q
        if q is None:
            return x
        if self.arrays.device is None:
            for index, row in enumerate(rows.tolist()):
                excess_(x[index], self.p[row], q[self.q_row.item(row)], theta.item(row))
            return x
        # no look at theta: in float64 none is too large
        q_rows = view(q, self.q_row[rows]).double()
        return x.double().addcmul_(q_rows, theta[rows, None], value=-1).clamp_min_(0.0).to(self.p.dtype)

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


def excess_(x: Tensor, p: Tensor, q: Tensor, theta: float) -> Tensor:
    """Write (p - theta q)+ of one row over ``x``, all ``[V]``."""
    if theta > LARGE:
        return x.copy_((p.double() - q.double() * theta).clamp_min_(0.0))
    return torch.sub(p, q, alpha=theta, out=x).relu_()
