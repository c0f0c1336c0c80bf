"""Traversal: bottom-up verification, whole paths first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft, Shape
from spec_lab.verify.match import walk
from spec_lab.verify.siblings import (
    EVERY_DRAW,
    TINY,
    acceptance,
    arrange,
    bottom_up,
    drawn_laws,
    excess_mass,
    remainder,
)
from spec_lab.verify.verdict import Verdict


@dataclass(frozen=True)
class Traversal:
    """Visit leaves first; a leaf is where the path ends with its weight a, else it is deleted.

    Source: traversal verification (2505.12398, algorithm 2). On a chain this is block verification (2403.10444,
    algorithm 2). A node's weight and law when first reached depend only on the siblings deleted before, so all weights
    are computed top down, and one product in visiting order gives the law of the walk.
    """

    name = "traversal"
    accepts = EVERY_DRAW
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The law of one step for ``p`` ``[R, V]``.

        Point drafts read M numbers of p; others sum over the vocabulary once per depth and sibling rank, and once for
        all last siblings together (on a chain: once). Notation as in ``siblings``.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        if draft.drawn == "point":
            return walk(draft, p)
        shape = draft.shape
        order = arrange(shape)
        p_token, q_token, z = drawn_laws(draft, p)
        theta, s, a = np.zeros(shape.rows), np.ones(shape.rows), np.ones(shape.rows)

        def delete(m: np.ndarray) -> None:
            # S' = sum (a P - q_c)+ = a / S sum (p - theta q)+;  a <- S' / (S' + 1 - a)
            total = excess_mass(draft, p, m, theta[m])
            kept = a[m] * total / np.maximum(s[m], TINY)
            rest = 1.0 - a[m]
            a[m] = np.where(rest > 0.0, kept / np.maximum(kept + rest, TINY), 1.0)
            s[m] = total

        for wave in order.waves:
            # a_c = min(1, a P(c) / q_c(c))
            nodes, m = wave.nodes, wave.parents
            ratio = acceptance(p_token, q_token, z, theta, s, wave)
            a[shape.roots + nodes] = np.minimum(a[m] * ratio, 1.0)
            theta[m] += np.where(a[m] > 0, s[m] / np.maximum(a[m] * z[nodes], TINY), 0.0)  # no weight: never reached
            if len(wave.unfinished):
                delete(wave.unfinished)
        if shape.nodes:
            delete(order.expanded)
        return Verdict(first_stop(shape, a), lambda rows: remainder(draft, p, rows, theta[rows]))


def first_stop(shape: Shape, weight: np.ndarray) -> np.ndarray:
    """``[R]``: the probability that a row is the first to stop when rows are visited bottom up.

    Args:
        weight: ``[R]``, the probability that a row stops once it is visited; 1 at heads.
    """
    rows, place = bottom_up(shape)
    go_on = np.ones((shape.roots, int(place.max(initial=0)) + 1))
    go_on[shape.root[rows], place] = 1.0 - weight[rows]
    # before[t, i] = prod of (1 - weight) over the rows visited before place i of tree t
    before = np.cumprod(np.concatenate([np.ones((shape.roots, 1)), go_on[:, :-1]], axis=1), axis=1)
    stop = np.empty(shape.rows)
    stop[rows] = weight[rows] * before[shape.root[rows], place]
    return stop
