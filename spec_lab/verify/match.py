"""Match: sample from the target, and descend the tree as long as the sample was drafted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.shape import Shape
from spec_lab.verify.arrays import Array, Arrays, rows_of, view, zeroed_
from spec_lab.verify.siblings import EVERY_DRAW, Siblings, check_rows
from spec_lab.verify.verdict import Replayed, Verdict, Verifier

ANY_DRAW: frozenset[Drawn] = EVERY_DRAW | {"gumbel"}  # its choices are fresh: a race's noise is left alone


@dataclass(frozen=True)
class Match(Verifier):
    """Draw y ~ p; descend if a child holds y, else emit y. Lossless for any draft; q is not read.

    Source: naive sampling in SpecInfer (2305.09781, section 4.3); greedy verification at temperature 0.
    """

    name = "match"
    accepts = ANY_DRAW
    accepts_mixed = True
    follows_argmax = True
    lossless = True
    replayed = Replayed(whole_rows=False, top_down=True, in_turn=True, bounded="always")

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return the distribution of the descent for ``p`` ``[R, V]``; only M numbers of it are read here.

        Raises:
            ValueError: ``p`` has not one row per row of the forest.
        """
        return walk(draft, p)


def walk(draft: Draft, p: Tensor) -> Verdict:
    """Return the distribution of ``Match``.

    It needs p(token | parent) of the M nodes, and V numbers only for the rows asked.

    With deterministic drafts, recursive rejection and traversal have this distribution too. Zeroing a rejected sibling
    and renormalising leaves child r the probability p(c_r) that it is the one accepted. In traversal, a node whose
    earlier children have mass s carries a_s = a (1 - s) / (1 - a s), so child c gets a p(c) / (1 - a s), no child stops
    with probability 1 - a s, and every stop comes out as p of its path times the mass its children leave.

    Args:
        p: ``[R, V]``, the target's probabilities; a dead row is all zero.

    Raises:
        ValueError: ``p`` has not one row per row of the forest.
    """
    arrays = Arrays.like(p)
    if not draft.shape.nodes:
        check_rows(draft, p)
        return Verdict(arrays.full(draft.shape.rows, 1.0), lambda rows: view(p, arrays.index(rows)))
    siblings = Siblings(draft, p)
    shape = siblings.shape
    # reach[c] = reach[m] p(c | m);  stop[m] = reach[m] (1 - sum of p(c | m) over its children)
    chance = siblings.p_token()
    if siblings.again is not None:  # y leads to the first child that holds it
        chance = arrays.where(siblings.again, 0.0, chance)
    taken = siblings.padded(chance, 0.0)[shape.table].sum(1)
    reach = siblings.padded(chance, 1.0)[shape.lineage].prod(1)
    stop = reach * arrays.at_least(1.0 - taken, 0.0)

    def residual(rows: Array) -> Tensor:  # p without the children's tokens
        rows = arrays.index(rows)
        return zeroed_(rows_of(p, rows), siblings.children_token[rows], arrays)

    return Verdict(stop, residual)


def greedy_path(shape: Shape, token: np.ndarray, best: np.ndarray) -> np.ndarray:  # [M], [R] -> [B]
    """The rows at which ``walk`` ends at temperature 0, where p is certain of the arg max ``best`` of each row.

    Nothing of p is needed, neither on a device nor on the host.
    """
    child: dict[int, int] = {}
    wanted = best.tolist()
    for node, (parent, drafted) in enumerate(zip(shape.parent.tolist(), token.tolist(), strict=True), shape.roots):
        if wanted[parent] == drafted:
            child.setdefault(parent, node)  # of siblings with one token the first
    ends = list(range(shape.roots))
    for tree, row in enumerate(ends):
        while row in child:
            row = child[row]
        ends[tree] = row
    return np.array(ends)
