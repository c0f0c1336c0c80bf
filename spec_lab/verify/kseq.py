"""KSeq: top-down verification of independent siblings, all of them against the same distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify.arrays import Array, Arrays, parts, view
from spec_lab.verify.match import walk
from spec_lab.verify.siblings import TINY, Siblings
from spec_lab.verify.verdict import Replayed, Verdict, Verifier

CHUNK = 2**16  # numbers in one temporary of a sum: several of them stay in a cache


@dataclass(frozen=True)
class KSeq(Verifier):
    """K-SEQ: accept the first of k iid siblings that passes min(1, p / (rho q)); rejecting one leaves p as it is.

    Source: SpecTr (2310.15141, algorithm 2). With beta(rho) = sum min(q, p / rho) the residual is proportional to
    p - min(q, p / rho) (1 - (1 - beta)^k) / beta. That is nowhere negative, and the output has the distribution p, for
    every rho with (1 - (1 - beta)^k) / beta <= rho. The least such rho in [1, k] accepts most, at least 1 - 1/e of what
    optimal transport does. There both sides are equal and the residual is (p - rho q)+. One child: rho = 1, as in
    ``token``. The number of siblings must not follow from their tokens (true of ``iid``): it is not exact otherwise.
    """

    name = "kseq"
    accepts = frozenset({"iid"})
    lossless = True
    replayed = Replayed(whole_rows=False, in_turn=True, bounded="always")

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``.

        On the CPU rows with several children are summed over the vocabulary some four to seven times, others not at
        all; on a device ``STEPS`` times.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q.
        """
        if not draft.shape.nodes:
            return walk(draft, p)
        siblings = Siblings(draft, p)
        arrays, q_token, rho = siblings.arrays, siblings.q_token(), min_rho(draft, p)
        rho_q = rho[siblings.shape.parent] * arrays.at_least(q_token, TINY)
        accept = arrays.at_most(siblings.p_token() / rho_q, 1.0)
        return Verdict(siblings.first_accepted(accept), lambda rows: siblings.excess(rows, rho))


STEPS, NEWTON = 20, 12
"""Steps towards rho, and Newton's steps in each, on a device: there nothing is read back to see when they may end. The
CPU, which sees it, needed at most 17 and 10 over 4000 random p and q of 3 to 5000 tokens and 2 to 12 siblings."""


def min_rho(draft: Draft, p: Tensor) -> Array:
    """``[R]`` float64: the least rho that is lossless at each row with children; 0 where nothing was drawn.

    Let d = 1 - beta = sum (q - p / rho)+, so that rho is sought where 1 + d + .. + d^(k-1) = rho. With T = {rho q > p}
    d is Q_T - P_T / rho, and for any other set that is no more. So the root for the T of one rho is at most the root
    sought: from 1 the roots rise to it, and where T changes no more it is exact, up to the rounding of the sums. (Its
    own rounding hardly matters: near p = q rho has half the digits, but both sides are equal to the last.) Summed so,
    d is exactly 0 where p = q, also where they do not quite sum to 1.
    """
    siblings = Siblings(draft, p)
    arrays, shape = siblings.arrays, siblings.shape
    rho = arrays.where(shape.count > 0, arrays.full(shape.rows, 1.0), 0.0)
    rows, max_k = arrays.index(np.flatnonzero(draft.shape.count > 1)), int(draft.shape.count.max(initial=0))
    precision = torch.finfo(p.dtype).eps
    for _ in range(STEPS if arrays.device is not None else 1000):
        if not len(rows):
            break
        p_mass, q_mass = masses_above(siblings, rows, rho[rows])
        before = rho[rows]
        root = root_of(p_mass, q_mass, shape.count[rows], max_k, arrays)
        rho[rows] = root = arrays.where(root > before, root, before)
        if arrays.device is None:
            rows = rows[root > before * (1.0 + precision)]
    return rho


def masses_above(siblings: Siblings, rows: Array, rho: Array) -> tuple[Array, Array]:
    """Masses of p and of q on T = {rho q > p} at ``rows`` ``[n]``: two ``[n]`` float64."""
    draft, p, arrays = siblings.draft, siblings.p, siblings.arrays
    assert draft.q is not None
    masses = []
    for part in parts(len(rows), p, CHUNK):
        p_rows, q_rows = view(p, rows[part]), view(draft.q, siblings.q_row[rows[part]]).to(p.dtype)
        factor = arrays.tensor(rho[part]).to(p.dtype)[:, None]
        above = torch.addcmul(p_rows, q_rows, factor, value=-1).lt_(0)  # 0 or 1
        masses.append(torch.stack([(mass * above).sum(-1, dtype=torch.float64) for mass in (p_rows, q_rows)]))
    p_mass, q_mass = arrays.read(torch.cat(masses, -1))
    return p_mass, q_mass


def root_of(p_mass: Array, q_mass: Array, k: Array, max_k: int, arrays: Arrays) -> Array:
    """The rho of 1 + d + .. + d^(k-1) = rho with d = Q - P / rho, all ``[n]``; no k is above ``max_k``.

    In d this is (Q - d) (1 + d + .. + d^(k-1)) = P. As Q <= 1 the left side falls and is concave, and d^k <= Q - P at
    the root: from there Newton's steps come down on it, and stop where rounding does.
    """
    q_mass = arrays.at_most(q_mass, 1.0)
    order = arrays.full(len(k), 1.0) / k  # (torch divides a number by int64 in float32)
    d = arrays.at_least(q_mass - p_mass, 0.0) ** order
    total, slope = series(d, k, max_k, arrays)
    for _ in range(NEWTON if arrays.device is not None else 1000):
        over = arrays.at_least(p_mass - (q_mass - d) * total, 0.0)
        lower = arrays.at_least(d - over / arrays.at_least(total - (q_mass - d) * slope, TINY), 0.0)
        if arrays.device is None and not (lower < d).any():
            break
        d = arrays.where(lower < d, lower, d) if arrays.device is not None else lower
        total, slope = series(d, k, max_k, arrays)
    return total


def series(d: Array, k: Array, max_k: int, arrays: Arrays) -> tuple[Array, Array]:
    """1 + d + .. + d^(k-1) and its derivative, by Horner's rule: k at d = 1, where the closed form is 0 / 0."""
    total, slope = 0.0 * d + 1.0, 0.0 * d
    for power in range(1, max_k):
        more = power < k
        slope = arrays.where(more, slope * d + total, slope)
        total = arrays.where(more, total * d + 1.0, total)
    return total, slope
