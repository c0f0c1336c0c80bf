"""The papers' verifiers in NumPy, one tree and one node at a time: oracles of the vectorised ones.

Each takes a draft and p ``[R, V]`` and returns ``stop [R]`` and ``emit [R, V]`` (rows sum to 1, or are all zero).
"""

from __future__ import annotations

import numpy as np

from spec_lab.core.draft import WAYS, Draft

Ends = tuple[np.ndarray, np.ndarray]


def norm(weights: np.ndarray) -> np.ndarray:
    """Weights normalised; zeros stay zeros."""
    return weights / weights.sum() if weights.sum() > 0 else np.zeros_like(weights)


def drawn_from(draft: Draft) -> np.ndarray:
    """``[M, V]``: the distribution each node's token was drawn from, given its earlier siblings."""
    shape, token = draft.shape, draft.token.tolist()
    width = 1 + max(token, default=0) if draft.q is None else draft.q.shape[1]
    probabilities = np.zeros((shape.nodes, width))
    for row in range(shape.rows):
        taken = []  # by earlier siblings drawn without replacement
        for child in shape.children[row] - shape.roots:
            way = WAYS[draft.codes[child]]
            if way == "deterministic":
                probabilities[child, token[child]] = 1.0
                continue
            q = draft.q[draft.q_row[row]].double().numpy().copy()
            if way == "without_replacement":
                q[taken] = 0.0
                taken.append(token[child])
            probabilities[child] = norm(q)
    return probabilities


def ratio(p: float, q: float) -> float:
    """min(1, p / q) with 0 / 0 = 0."""
    return min(1.0, p / q) if q > 0 else float(p > 0)


def widen(rows: np.ndarray, vocabulary: int) -> np.ndarray:
    """Point masses of small tokens, over the whole vocabulary."""
    return np.pad(rows, ((0, 0), (0, vocabulary - rows.shape[1])))


def token(draft: Draft, p: np.ndarray, lenience: float = 1.0) -> Ends:
    """Recursive rejection, top down; with a ``lenience`` below 1 lossy."""
    shape, tokens, q = draft.shape, draft.token.tolist(), widen(drawn_from(draft), p.shape[1])
    stop, emit = np.zeros(shape.rows), np.zeros_like(p)

    def visit(row: int, reach: float) -> None:
        residual = p[row]
        for child in shape.children[row] - shape.roots:
            x = tokens[child]
            accept = ratio(residual[x], lenience * q[child, x])
            visit(child + shape.roots, reach * accept)
            reach *= 1 - accept
            residual = norm(np.maximum(residual - lenience * q[child], 0))
        stop[row], emit[row] = reach, residual

    for root in range(shape.roots):
        visit(root, 1.0)
    return stop, emit


def kept(a: float, s: float) -> float:
    """a <- S / (S + 1 - a) with 0 / 0 = 1: the weight of a node that has lost a child."""
    return s / (s + 1 - a) if s + 1 - a > 0 else 1.0


def traversal(draft: Draft, p: np.ndarray) -> Ends:
    """Traversal: follow first living children to a leaf, stop there or delete it."""
    shape, tokens, q = draft.shape, draft.token.tolist(), widen(drawn_from(draft), p.shape[1])
    stop, emit = np.zeros(shape.rows), np.zeros_like(p)
    living = [rows.tolist() for rows in shape.children]
    residual = [row.copy() for row in p]
    for root in range(shape.roots):
        a, reach = {root: 1.0}, 1.0
        while True:
            row = root
            while living[row]:
                child = living[row][0]
                if child not in a:
                    x = tokens[child - shape.roots]
                    a[child] = ratio(a[row] * residual[row][x], q[child - shape.roots, x])
                row = child
            stop[row], emit[row] = reach * a[row], norm(residual[row])
            reach *= 1 - a[row]
            if row == root:
                break
            m = int(shape.parent[row - shape.roots])
            living[m].pop(0)
            left = np.maximum(a[m] * residual[m] - q[row - shape.roots], 0)
            s = left.sum()
            residual[m] = norm(left)
            a[m] = 1.0 if m == root else kept(a[m], s)
    return stop, emit


def block(draft: Draft, p: np.ndarray) -> Ends:
    """Block verification of one chain: the accepted length is the last i with eta_i <= h_i."""
    tokens, q, gamma = draft.token.tolist(), drawn_from(draft), draft.shape.nodes
    weight, h, emit = 1.0, np.ones(gamma + 1), np.zeros_like(p)
    for i in range(gamma + 1):
        if i > 0:
            weight = min(1.0, weight * p[i - 1, tokens[i - 1]] / q[i - 1, tokens[i - 1]])
        if i == gamma:
            h[i], emit[i] = weight, p[i]
            break
        left = np.maximum(weight * p[i] - q[i], 0)
        h[i], emit[i] = kept(weight, left.sum()), norm(left)
    return h * np.append(np.cumprod(1 - h[::-1])[::-1][1:], 1.0), emit


def match(draft: Draft, p: np.ndarray) -> Ends:
    """The walk: y ~ p, descend if a child holds it."""
    shape, tokens = draft.shape, draft.token.tolist()
    stop, emit = np.zeros(shape.rows), np.zeros_like(p)

    def visit(row: int, reach: float) -> None:
        first = {tokens[child - shape.roots]: child for child in reversed(shape.children[row])}
        for child in shape.children[row]:
            x = tokens[child - shape.roots]
            visit(child, reach * p[row, x] if first[x] == child else 0.0)
        emit[row] = [0.0 if x in first else mass for x, mass in enumerate(p[row])]
        stop[row] = reach * (1 - sum(p[row, x] for x in first))
        emit[row] = norm(emit[row])

    for root in range(shape.roots):
        visit(root, 1.0)
    return stop, emit
