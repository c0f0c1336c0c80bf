"""The optimal-transport bound: how often any verifier at all can emit a drafted token.

A verifier sees n siblings drawn from q and emits one token distributed as p. Over all joint distributions of both

    alpha* = max P(the token is one of the drafts) = 1 - max over sets H of [P(all drafts lie in H) - p(H)]

(2410.18234; 2502.18779; 2511.15898): where all drafts lie in H the token can do so with probability p(H) only. The best
H is a prefix of the tokens in ascending order of p / q (2502.18779), so that V + 1 sets are looked at instead of 2^V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Drawn

STEP = 0.2  # of the quadrature in log t; its error is 1e-14 up to a dozen siblings, 1e-7 at 40 (with 0.1: 1e-14)
START = -17.0  # log t where it starts: the integrand is O(t^2), what lies below is under 1e-14
TINY = 1e-290  # less mass of q counts as none: its inverse is a time that overflows
CHUNK = 2**18  # numbers in one temporary of the quadrature; fits a cache


def transport_bound(p: Tensor, q: Tensor, count: int, drawn: Drawn) -> np.ndarray:
    """The largest acceptance of ``count`` siblings drawn from q by any verifier that emits from p: ``[n]`` float64.

    Drawn ``iid`` P(all drafts lie in H) = q(H)^count. Drawn ``without_replacement`` at most q's support is drafted;
    ``gumbel`` drafts are distributed alike, and the bound covers verifiers that share the noise. Of deterministic
    drafts (``deterministic``) there is nothing to compute: they are given, and p(drafts) is reached.

    Args:
        p: ``[n, V]``, target probabilities; a dead row (all zero) accepts nothing.
        q: ``[n, V]``, draft probabilities; of a row of zeros nothing is drafted.
        count: siblings drawn. None: nothing is accepted.

    Raises:
        ValueError: p and q of different shapes, negative or NaN; a negative count; drawn ``deterministic``.
    """
    masses = inside(p, q, (count,), drawn)
    if masses is None:
        return np.zeros(len(p))
    lost = (masses.drafts[count] - masses.target).max(-1)  # the empty set's 0 is no more than the whole support's 1 - p
    return np.where(masses.support > 0, np.clip(1.0 - lost, 0.0, 1.0), 0.0)


class Inside(NamedTuple):
    """Masses of the sets H that can be the best: the first j + 1 tokens of a row in ascending order of p / q.

    Args:
        target: ``[n, S]`` p(H); S is the largest support of q.
        drafts: P(all drafts lie in H) by the number of siblings, ``[n, S]`` each.
        support: ``[n]`` tokens of each row that can be drafted.
    """

    target: np.ndarray
    drafts: dict[int, np.ndarray]
    support: np.ndarray


def inside(p: Tensor, q: Tensor, counts: Sequence[int], drawn: Drawn) -> Inside | None:
    """Return the masses of all sets that can be the best; None where nothing is drafted.

    Args:
        p, q, drawn: as in ``transport_bound``.
        counts: numbers of siblings.

    Raises:
        ValueError: as ``transport_bound``.
    """
    if drawn == "deterministic":
        raise ValueError("deterministic drafts are not random: what can be accepted of them is p(drafts)")
    if p.ndim != 2 or p.shape != q.shape:
        raise ValueError(f"p and q must have equal shapes (got {tuple(p.shape)} and {tuple(q.shape)})")
    if min(counts) < 0:
        raise ValueError(f"{min(counts)} siblings cannot be drawn")
    target, draft = _normalised(p), _normalised(q)
    draft[draft < TINY] = 0.0
    support = (draft > 0).sum(-1)
    if max(counts) == 0 or not support.any():
        return None
    # tokens that are never drafted stand last: in H they only cost
    ratio = np.divide(target, draft, out=np.full_like(draft, np.inf), where=draft > 0)
    order = np.argsort(ratio, axis=-1, kind="stable")[:, : int(support.max())]
    target, draft = np.take_along_axis(target, order, -1), np.take_along_axis(draft, order, -1)
    return Inside(np.cumsum(target, -1), {count: _every(draft, support, count, drawn) for count in counts}, support)


def _every(draft: np.ndarray, support: np.ndarray, count: int, drawn: Drawn) -> np.ndarray:  # [n, S]
    """P(all ``count`` drafts lie among the first j + 1 tokens)."""
    if drawn == "iid" or count <= 1:
        return np.cumsum(draft, -1) ** count
    every = np.zeros_like(draft)
    partial = support > count  # else all of the support is drafted, and lies in H only where H is all of it
    if partial.any():
        every[partial] = all_inside(draft[partial], count)
    drafted = np.flatnonzero(support)
    every[drafted, support[drafted] - 1] = 1.0
    return every


def all_inside(q: np.ndarray, count: int) -> np.ndarray:
    """P(``count`` draws without replacement lie among the first j + 1 tokens), for each j: ``[n, V]``.

    Let token i ring after an exponential time of rate q_i; tokens are drawn in the order in which they ring. With
    N_H(t) the tokens of H that have rung by t, all draws lie in H unless fewer than ``count`` of H rang before the
    first outside, whose time has rate c = 1 - q(H):

        P = 1 - int_0^inf c e^{-ct} P(N_H(t) < count) dt = q(H) - c int_0^inf e^{-ct} P(1 <= N_H(t) < count) dt

    For two draws this is q(H) - c sum_{i in H} q_i / (1 - q_i). Complements are summed, not subtracted from 1: a peaked
    q leaves little, and what is drawn next depends on that little alone.

    Args:
        q: ``[n, V]`` float64, distributions with more than ``count`` tokens in their support.
        count: at least 2.
    """
    outside = np.zeros_like(q)
    outside[:, :-1] = np.cumsum(q[:, :0:-1], -1)[:, ::-1]
    if count == 2:
        rest = 1.0 - q
        top = q.argmax(-1)[:, None]
        others = q.copy()
        np.put_along_axis(others, top, 0.0, -1)
        np.put_along_axis(rest, top, others.sum(-1, keepdims=True), -1)
        missed = outside * np.cumsum(q / rest, -1)
    else:
        rows = max(1, CHUNK // (count * 128))
        parts = [_missed(q[i : i + rows], outside[i : i + rows], count) for i in range(0, len(q), rows)]
        missed = np.concatenate(parts)
    return np.cumsum(q, -1) - missed


def _missed(q: np.ndarray, outside: np.ndarray, count: int) -> np.ndarray:  # [n, V]
    """P(some, but fewer than ``count`` tokens of H ring before the first outside).

    The trapezoidal rule in log t: all rates, however far apart, are covered alike, and the integrand is analytic where
    Re t > 0, so few points are enough. The distribution of N_H(t), cut at ``count``, grows token by token.
    """
    # until count tokens have rung the others do so at a rate of at least `slowest`; that time is over at the end
    slowest = np.sort(q, -1)[:, : 1 - count].sum(-1).min()
    end = np.log(50.0 + 5.0 * count) - np.log(slowest)
    t = np.exp(np.arange(START, end + STEP, STEP))
    chance = np.zeros((count, len(q), len(t)))  # [k, n, T]: P(N_H(t) = k)
    chance[0] = 1.0
    missed = np.empty_like(q)
    for j in range(q.shape[-1]):
        silent = np.multiply.outer(-q[:, j], t)
        rung = -np.expm1(silent)
        new = chance[:-1] * rung
        chance *= np.exp(silent)
        chance[1:] += new
        c = outside[:, j]
        missed[:, j] = c * STEP * np.einsum("knt,nt,t->n", chance[1:], np.exp(np.multiply.outer(-c, t)), t)
    return missed


def _normalised(x: Tensor) -> np.ndarray:  # [n, V]
    """``x`` in float64, rows summing to 1 where they are not all zero."""
    mass = x.detach().cpu().double().numpy()
    if not (mass >= 0).all():
        raise ValueError("a distribution has a negative entry or NaN")
    total = mass.sum(-1, keepdims=True)
    return mass / np.where(total > 0, total, 1.0)


def spechub_acceptance(p: Tensor, q: Tensor, lumps: int = 0) -> np.ndarray:
    """The probability ``[n]`` that SpecHub (2411.05289) accepts one of its two drafted tokens, in closed form.

    It drafts pairs that contain the hub a, the likeliest token of q: x ~ q, and beside it a, or below x = a a second
    token from q without a. The target's mass of x != a is taken from the pairs (x, a), then (a, x), and what these
    pairs have left goes to a: a transport of p, so the output is lossless, and the best one of these pairs.

    Args:
        p, q: ``[n, V]``, as in ``transport_bound``.
        lumps: last columns that stand for several tokens each, of which none is the hub.
    """
    target, draft = _normalised(p), _normalised(q)
    rows, hub = np.arange(len(draft)), draft[:, : draft.shape[1] - lumps].argmax(-1)
    rest = 1.0 - draft[rows, hub]
    # of x != a: Q(x, a) + Q(a, x), with Q(x, a) = q(x) and Q(a, x) = q(a) q(x) / (1 - q(a))
    pairs = np.divide(draft, rest[:, None], out=np.zeros_like(draft), where=rest[:, None] > 0)
    taken = np.minimum(target, pairs)
    taken[rows, hub] = 0.0
    total = taken.sum(-1)
    return np.where(draft.any(-1), total + np.minimum(target[rows, hub], 1.0 - total), 0.0)
