"""Gumbel: the target races over the noise the draft raced over, and a child is accepted iff it wins again.

With standard Gumbel noise g, arg max of log p + g is distributed as p. Draft and target that share g agree often, and
either alone has its own distribution. The noise determines which token wins, so no other test may use it: a residual
raced over the same g, or an acceptance by p / q that knows g, is biased.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.probabilities import argmax
from spec_lab.verify.arrays import Array, rows_of, view
from spec_lab.verify.match import walk
from spec_lab.verify.siblings import Siblings
from spec_lab.verify.verdict import Verdict, Verifier

RACED: frozenset[Drawn] = frozenset({"gumbel"})
NOBODY, UNKNOWN = -1, -2


@dataclass(frozen=True)
class Gumbel(Verifier):
    """y = arg max of log p + g, with the noise g of the row; descend if a child holds y, else emit y.

    Lossless for any draft: the noise of a row is independent of all that led there, so y ~ p. A leaf has no noise and
    emits a fresh choice from p.

    Source: Gumbel sampling in 2408.07978. There the noise belongs to the position, so that the output does not depend
    on the draft; here each step has noise of its own.
    """

    name = "gumbel"
    accepts = RACED
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``, given the noise: one-hot.

        Level by level, so that only rows a path reaches are raced: one for each tree and depth.

        Raises:
            ValueError: ``p`` has not one row per row of the forest; siblings repeat a token.
        """
        if not draft.shape.nodes:
            bare = walk(draft, p)
            return Verdict(bare.stop, bare.residual, given="noise")
        siblings = Siblings(draft, p)
        arrays, shape, host = siblings.arrays, siblings.shape, siblings.arrays.device is None
        if host and siblings.again is not None:
            raise ValueError("siblings drawn in one race repeat a token")
        inner = shape.count > 0
        y: Array = inner * (UNKNOWN - NOBODY) + NOBODY  # the winner of each row; nobody races at a leaf
        end: Array = arrays.range(shape.roots)  # of each tree's path
        racing = end
        for _ in range(draft.shape.lineage.shape[1] - 1):
            y[racing] = best = arrays.where(inner[racing], winners(siblings, racing), NOBODY)
            below = shape.table[racing]
            hit = (siblings.children_token[racing] == best[:, None]) & (below >= 0) & (best >= 0)[:, None]
            child = arrays.where(hit, below, NOBODY)
            child = child.max(1) if host else child.amax(1)
            if host:  # only paths that go on
                trees, racing = shape.root[racing[child >= 0]], child[child >= 0]
                end[trees] = racing
                racing = racing[inner[racing]]
                if not len(racing):
                    break
            else:
                end = racing = arrays.where(child >= 0, child, racing)
        stop = arrays.full(shape.rows, 0.0)
        stop[end] = 1.0

        def residual(rows: Array) -> Tensor:
            rows = arrays.index(rows)
            if host:
                late = np.unique(rows[y[rows] == UNKNOWN])  # no path leads there
                if len(late):
                    y[late] = winners(siblings, late)
                winner = y[rows]
            else:
                winner = arrays.where(inner[rows], winners(siblings, rows), NOBODY)
            held = (siblings.children_token[rows] == winner[:, None]).any(1)  # by a child
            emits = arrays.tensor((winner >= 0) & ~held)
            emitted = rows_of(p, rows)
            emitted.masked_fill_(arrays.tensor(inner[rows])[:, None], 0.0)
            emitted_token = arrays.tensor(arrays.at_least(winner, 0))[:, None]
            mass = torch.where(emits[:, None], torch.ones_like(emitted[:, :1]), emitted.gather(1, emitted_token))
            return emitted.scatter_(1, emitted_token, mass)

        return Verdict(stop, residual, given="noise")


def winners(siblings: Siblings, rows: Array) -> Array:
    """Arg max of log p + g at ``rows`` ``[n]`` that have noise, ``[n]``; nobody at a dead row. In float64."""
    noise, p = siblings.draft.noise, siblings.p
    assert noise is not None
    race = view(p, rows).double().log().add_(view(noise, siblings.q_row[rows]))
    first = argmax(race)
    alive = race.gather(-1, first[:, None])[:, 0] > -torch.inf
    return siblings.arrays.read(torch.where(alive, first, NOBODY))


def match_probability(p: Tensor, q: Tensor) -> Tensor:  # [n, V], [n, V] -> [n]
    """P(arg max of log p + g = arg max of log q + g) for each pair of distributions, in float64.

        sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x),    over x with p_x, q_x > 0

    It lies between (1 - TV) / (1 + TV) and 1 - TV. In order of p_y / q_y the tokens up to x contribute q_y / q_x and
    those beyond p_y / p_x, so sorting takes the place of the double sum: O(V log V).

    Source: 2408.07978.
    """
    p, q = p.double(), q.double()
    order = (p / q).argsort(-1)  # infinite or not a number, and so last, where q is zero
    p, q = p.gather(-1, order), q.gather(-1, order)
    beyond = p.flip(-1).cumsum(-1).flip(-1)
    beyond = torch.cat([beyond[:, 1:], torch.zeros_like(beyond[:, :1])], -1)
    both = (p > 0) & (q > 0)
    total = q.cumsum(-1) / q + beyond / p  # infinite or not a number where one of the two is zero, and then not used
    return torch.where(both, 1.0 / total, 0.0).sum(-1)
