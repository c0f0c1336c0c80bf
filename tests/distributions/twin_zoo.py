"""Twins of the other verifiers: as in their papers, one tree and one node at a time.

As in ``twin``: each takes a draft and p ``[R, V]`` and returns ``stop [R]`` and ``emit [R, V]``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spec_lab.core.draft import Draft
from tests.distributions import twin
from tests.distributions.twin import Ends, norm, ratio

# K-SEQ


def beta(rho: float, p: np.ndarray, q: np.ndarray) -> float:
    """The probability that one draft is accepted."""
    return float(np.minimum(q, p / rho).sum())


def one_of(k: int, b: float) -> float:
    """1 - (1 - b)^k over b, the factor of the residual, as a series: nothing cancels where b is small; k at b = 0."""
    return sum((1 - b) ** i for i in range(k))


def bisected(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The least rho in [1, k] with (1 - (1 - beta)^k) / beta <= rho."""
    low, high = 1.0, float(k)
    for _ in range(100):
        middle = (low + high) / 2
        if one_of(k, beta(middle, p, q)) <= middle + 1e-15:
            high = middle
        else:
            low = middle
    return high


def kseq(draft: Draft, p: np.ndarray, rho_of: Callable[[np.ndarray, np.ndarray, int], float] = bisected) -> Ends:
    """K-SEQ (2310.15141, algorithm 2), top down. ``rho_of``: in place of the least rho."""
    shape, tokens = draft.shape, draft.token.tolist()
    stop, emit = np.zeros(shape.rows), np.zeros_like(p)

    def visit(row: int, reach: float) -> None:
        children = shape.children[row]
        emit[row] = norm(p[row])
        if len(children):
            q = draft.q[draft.q_row[row]].double().numpy()
            rho = rho_of(p[row], q, len(children))
            for child in children:
                x = tokens[child - shape.roots]
                accept = ratio(p[row, x], rho * q[x])
                visit(child, reach * accept)
                reach *= 1 - accept
            factor = one_of(len(children), beta(rho, p[row], q))
            emit[row] = norm(np.maximum(p[row] - np.minimum(q, p[row] / rho) * factor, 0))
        stop[row] = reach

    for root in range(shape.roots):
        visit(root, 1.0)
    return stop, emit


# The longest path of acceptable tokens


def typical_accepts(p: np.ndarray, x: int, epsilon: float, delta: float) -> bool:
    """2401.10774, section 2.3.1: p(x) > min(epsilon, delta exp(-H(p)))."""
    entropy = -sum(mass * np.log(mass) for mass in p if mass > 0)
    return bool(p[x] > min(epsilon, delta * np.exp(-entropy)))


def relaxed_accepts(p: np.ndarray, x: int, top: int, delta: float) -> bool:
    """x is among the ``top`` likeliest, and at most ``delta`` less likely than the likeliest."""
    likelier = int((p > p[x]).sum())
    return bool(p[x] > 0 and likelier < top and p[x] >= p.max() - delta)


def longest(draft: Draft, p: np.ndarray, accepts: Callable[[np.ndarray, int], bool]) -> Ends:
    """The longest path of accepted tokens, the first of equals; p at its end."""
    shape, tokens = draft.shape, draft.token.tolist()
    stop, emit = np.zeros(shape.rows), np.array([norm(row) for row in p])
    for root, rows in enumerate(shape.trees):
        best = root
        for row in rows.tolist():
            path = shape.path(row)
            above = [root, *path[:-1]]
            good = all(accepts(p[m], tokens[c - shape.roots]) for m, c in zip(above, path, strict=False))
            if good and len(path) > len(shape.path(best)):
                best = row
        stop[best] = 1.0
    return stop, emit


def typical(draft: Draft, p: np.ndarray, epsilon: float, delta: float) -> Ends:
    return longest(draft, p, lambda row, x: typical_accepts(row, x, epsilon, delta))


def relaxed(draft: Draft, p: np.ndarray, top: int, delta: float) -> Ends:
    return longest(draft, p, lambda row, x: relaxed_accepts(row, x, top, delta))


# Cascades


def pi(p: np.ndarray, q: np.ndarray, alpha: float, rule: str) -> np.ndarray:
    """(1 - r) q + r p of one row, with q cut to the tokens that p allows (2405.19261, table 1)."""
    tv = np.maximum(q - p, 0).sum()
    bar = {"chow": 1 - alpha, "diff": p.max() - alpha, "opt": p.max() - alpha * tv}[rule]
    r = q.max() < bar
    cut = norm(np.where(p > 0, q, 0))
    return p if r or not cut.any() else cut


def aim(draft: Draft, p: np.ndarray, alpha: float, rule: str) -> np.ndarray:
    """``[R, V]``: pi at every row; p where nothing was drawn."""
    targets = p.copy()
    for row in range(draft.shape.rows):
        if len(draft.shape.children[row]):
            targets[row] = pi(p[row], draft.q[draft.q_row[row]].double().numpy(), alpha, rule)
    return targets


def cascade(draft: Draft, p: np.ndarray, alpha: float, rule: str) -> Ends:
    return twin.token(draft, aim(draft, p, alpha, rule))
