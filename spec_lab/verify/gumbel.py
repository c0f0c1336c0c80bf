"""Gumbel: the target races over the noise the draft raced over, and a child is accepted iff it wins again.

With standard Gumbel noise g, arg max of log p + g has the law p. Draft and target that share g agree often, and either
alone has its own law. The noise says which token wins, so no other test may use it: a residual raced over the same g,
or an acceptance by p / q that knows g, is biased.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.probabilities import argmax
from spec_lab.verify.siblings import arrange, check_rows, repeated, rows_of, view
from spec_lab.verify.verdict import Verdict

RACED: frozenset[Drawn] = frozenset({"gumbel"})
NOBODY = -1


@dataclass(frozen=True)
class Gumbel:
    """y = arg max of log p + g, with the noise g of the row; descend if a child holds y, else emit y.

    Lossless for any draft: the noise of a row is independent of all that led there, so y ~ p. A leaf has no noise and
    emits a fresh choice from p.

    Source: Gumbel sampling in 2408.07978. There the noise belongs to the position, so that the output does not depend
    on the draft; here each round has noise of its own.
    """

    name = "gumbel"
    accepts = RACED
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The law of one step for ``p`` ``[R, V]``, given the noise: one-hot.

        Level by level, so that only rows a path reaches are raced: one for each tree and depth.

        Raises:
            ValueError: ``p`` has not one row per row of the forest; siblings repeat a token.
        """
        check_rows(draft, p)
        shape, parent = draft.shape, draft.shape.parent
        if not shape.nodes:
            return Verdict(np.ones(shape.rows), lambda rows: view(p, rows), given="noise")
        if repeated(draft) is not None:
            raise ValueError("siblings drawn in one race repeat a token")
        token = draft.token.cpu().numpy()
        inner = np.bincount(parent, minlength=shape.rows) > 0
        y = np.full(shape.rows, NOBODY)
        reached = np.arange(shape.rows) < shape.roots
        for level in arrange(shape).levels:
            racing = np.unique(level.parents[reached[level.parents]])
            if not len(racing):
                break
            y[racing] = winners(draft, p, racing)
            reached[shape.roots + level.nodes] = reached[level.parents] & (token[level.nodes] == y[level.parents])
        left = reached.copy()
        left[parent[reached[shape.roots :]]] = False

        def residual(rows: np.ndarray) -> Tensor:
            late = np.unique(rows[inner[rows] & (y[rows] == NOBODY)])  # no path leads there
            if len(late):
                y[late] = winners(draft, p, late)
            emitted = y.copy()
            emitted[parent[token == y[parent]]] = NOBODY  # a child holds y
            law = rows_of(p, rows)
            law[torch.from_numpy(inner[rows])] = 0.0
            places = np.flatnonzero(emitted[rows] != NOBODY)
            law[torch.from_numpy(places), torch.from_numpy(emitted[rows[places]])] = 1.0
            return law

        return Verdict(left.astype(np.float64), residual, given="noise")


def winners(draft: Draft, p: Tensor, rows: np.ndarray) -> np.ndarray:
    """Arg max of log p + g at ``rows`` ``[n]`` that have noise, ``[n]``; nobody at a dead row. In float64."""
    assert draft.noise is not None and draft.q_row is not None
    race = view(p, rows).double().log().add_(view(draft.noise, draft.q_row[rows]))
    first = argmax(race)
    alive = race.gather(-1, first[:, None])[:, 0] > -torch.inf
    return torch.where(alive, first, NOBODY).cpu().numpy()


def match_probability(p: Tensor, q: Tensor) -> Tensor:  # [n, V], [n, V] -> [n]
    """P(arg max of log p + g = arg max of log q + g) for each pair of laws, in float64.

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
