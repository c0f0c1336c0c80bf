"""Match: walk down the tree with target samples, as long as they were drafted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_lab.draft import Draft, Drawn
from spec_lab.verify.siblings import EVERY_DRAW, arrange, check_rows, repeated, rows_of, view
from spec_lab.verify.verdict import Verdict, gather

ANY_DRAW: frozenset[Drawn] = EVERY_DRAW | {"gumbel"}  # its choices are fresh: a race's noise is left alone


@dataclass(frozen=True)
class Match:
    """Draw y ~ p; descend if a child holds y, else emit y. Lossless for any draft, blind to q.

    Source: naive sampling in SpecInfer (2305.09781, section 4.3); greedy verification at temperature 0.
    """

    name = "match"
    accepts = ANY_DRAW
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The law of the walk for ``p`` ``[R, V]``; only M numbers of it are read here.

        Raises:
            ValueError: ``p`` has not one row per row of the forest.
        """
        return walk(draft, p)


def walk(draft: Draft, p: Tensor) -> Verdict:
    """The walk as a law: the host needs p(token | parent) of the M nodes, and V numbers only for the rows asked.

    With point drafts, recursive rejection and traversal are this law too. Zeroing a rejected sibling and renormalising
    leaves child r the probability p(c_r) that it is the one accepted. In traversal, a node whose earlier children have
    mass s carries a_s = a (1 - s) / (1 - a s), so child c gets a p(c) / (1 - a s), no child stops with probability
    1 - a s, and every stop comes out as p of its path times the mass its children leave.

    Args:
        p: ``[R, V]``, the target's law; a dead row is all zero.

    Raises:
        ValueError: ``p`` has not one row per row of the forest.
    """
    shape, parent = draft.shape, draft.shape.parent
    check_rows(draft, p)
    if not shape.nodes:
        return Verdict(np.ones(shape.rows), lambda rows: view(p, rows))
    # reach[c] = reach[m] p(c | m);  stop[m] = reach[m] (1 - sum of p(c | m) over its children)
    step = gather(p, shape, draft.token)
    again = repeated(draft)
    if again is not None:
        step[again] = 0.0  # y leads to the first child that holds it
    left = np.maximum(1.0 - np.bincount(parent, weights=step, minlength=shape.rows), 0.0)
    reach = np.ones(shape.rows)
    for level in arrange(shape).levels:
        reach[shape.heads + level.nodes] = reach[level.parents] * step[level.nodes]

    def residual(rows: np.ndarray) -> Tensor:  # p without the children's tokens
        law = rows_of(p, rows)
        for place, row in enumerate(rows.tolist()):
            children = shape.children[row]
            if len(children):
                law[place, draft.token[torch.from_numpy(children - shape.heads).to(p.device)]] = 0.0
        return law

    return Verdict(reach * left, residual)
