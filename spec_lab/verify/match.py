"""Match: walk down the tree with target samples, as long as they were drafted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.verify.siblings import EVERY_DRAW, check_rows, rows_of, view
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
    shape = draft.shape
    check_rows(draft, p)
    if not shape.nodes:
        return Verdict(np.ones(shape.rows), lambda rows: view(p, rows))
    # reach[c] = reach[m] p(c | m);  stop[m] = reach[m] (1 - sum of p(c | m) over its children)
    tokens, steps = draft.token.tolist(), gather(p, shape, draft.token).tolist()
    reach, taken, found = [1.0] * shape.roots, [0.0] * shape.rows, set()
    for parent, token, step in zip(shape.parent.tolist(), tokens, steps, strict=True):
        if step > 0.0 and (parent, token) not in found:
            found.add((parent, token))
            reach.append(reach[parent] * step)
            taken[parent] += step
        else:  # y leads to the first child that holds it
            reach.append(0.0)
    stop = np.array([r * max(1.0 - t, 0.0) for r, t in zip(reach, taken, strict=True)])

    def residual(rows: np.ndarray) -> Tensor:  # p without the children's tokens
        law = rows_of(p, rows)
        numbers = law.numpy() if law.device.type == "cpu" else law  # NumPy writes a few numbers faster
        for place, row in enumerate(rows.tolist()):
            children = shape.children[row]
            if len(children):
                numbers[place, [tokens[child - shape.roots] for child in children]] = 0.0
        return law

    return Verdict(stop, residual)
