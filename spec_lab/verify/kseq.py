"""KSeq: top-down verification of independent siblings, all of them against the same law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.verify.siblings import TINY, drawn_laws, first_accepted, remainder, view
from spec_lab.verify.verdict import Verdict, parts

CHUNK = 2**16  # numbers in one temporary of a sum: several of them stay in a cache


@dataclass(frozen=True)
class KSeq:
    """K-SEQ: accept the first of k iid siblings that passes min(1, p / (rho q)); rejecting one leaves p as it is.

    Source: SpecTr (2310.15141, algorithm 2). With beta(rho) = sum min(q, p / rho) the residual is proportional to
    p - min(q, p / rho) (1 - (1 - beta)^k) / beta. That is nowhere negative, and the output has the law p, for every rho
    with (1 - (1 - beta)^k) / beta <= rho. The least such rho in [1, k] accepts most, at least 1 - 1/e of what optimal
    transport does. There both sides are equal and the residual is (p - rho q)+. One child: rho = 1, as in ``token``.
    """

    name = "kseq"
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid"})
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The law of one step for ``p`` ``[R, V]``.

        Rows with several children are summed over the vocabulary some four to seven times, others not at all.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q.
        """
        shape = draft.shape
        p_token, q_token, _ = drawn_laws(draft, p)
        rho = least_rho(draft, p)
        accept = np.minimum(p_token / (rho[shape.parent] * q_token), 1.0)
        return Verdict(first_accepted(shape, accept), lambda rows: remainder(draft, p, rows, rho[rows]))


def least_rho(draft: Draft, p: Tensor) -> np.ndarray:
    """``[R]`` float64: the least rho that is lossless at each row with children; 0 where nothing was drawn.

    Let d = 1 - beta = sum (q - p / rho)+, so that rho is sought where 1 + d + .. + d^(k-1) = rho. With T = {rho q > p}
    d is Q_T - P_T / rho, and for any other set that is no more. So the root for the T of one rho is at most the root
    sought: from 1 the roots rise to it, and where T changes no more it is exact, up to the rounding of the sums. (Its
    own rounding hardly matters: near p = q rho has half the digits, but both sides are equal to the last.) Summed so,
    d is exactly 0 where p = q, also where they do not quite sum to 1.
    """
    k = np.bincount(draft.shape.parent, minlength=draft.shape.rows)
    rho = np.minimum(k, 1).astype(np.float64)
    rows, precision = np.flatnonzero(k > 1), torch.finfo(p.dtype).eps
    while len(rows):
        p_mass, q_mass = masses_above(draft, p, rows, rho[rows])
        root = np.maximum(root_of(p_mass, q_mass, k[rows]), rho[rows])
        rises = root > rho[rows] * (1.0 + precision)
        rho[rows] = root
        rows = rows[rises]
    return rho


def masses_above(draft: Draft, p: Tensor, rows: np.ndarray, rho: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masses of p and of q on T = {rho q > p} at ``rows`` ``[n]``, some: two ``[n]`` float64."""
    assert draft.q is not None and draft.q_row is not None
    masses = []
    for part in parts(len(rows), p, CHUNK):
        p_some, q_some = view(p, rows[part]), view(draft.q, draft.q_row[rows[part]]).to(p.dtype)
        above = torch.addcmul(p_some, q_some, torch.from_numpy(rho[part]).to(p)[:, None], value=-1).lt_(0)  # 0 or 1
        masses.append(torch.stack([(law * above).sum(-1, dtype=torch.float64) for law in (p_some, q_some)]))
    p_mass, q_mass = torch.cat(masses, -1).cpu().numpy()
    return p_mass, q_mass


def root_of(p_mass: np.ndarray, q_mass: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The rho of 1 + d + .. + d^(k-1) = rho with d = Q - P / rho, all ``[n]``.

    In d this is (Q - d) (1 + d + .. + d^(k-1)) = P. As Q <= 1 the left side falls and is concave, and d^k <= Q - P at
    the root: from there Newton's steps come down on it, and stop where rounding does.
    """
    q_mass = np.minimum(q_mass, 1.0)
    d = np.maximum(q_mass - p_mass, 0.0) ** (1.0 / k)
    while True:
        total, slope = series(d, k)
        over = p_mass - (q_mass - d) * total
        lower = np.maximum(d - np.maximum(over, 0.0) / np.maximum(total - (q_mass - d) * slope, TINY), 0.0)
        if not (lower < d).any():
            return total
        d = lower


def series(d: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 + d + .. + d^(k-1) and its derivative, by Horner's rule: k at d = 1, where the closed form is 0 / 0."""
    total, slope = np.ones_like(d), np.zeros_like(d)
    for power in range(1, int(k.max())):
        more = power < k
        slope = np.where(more, slope * d + total, slope)
        total = np.where(more, total * d + 1.0, total)
    return total, slope
