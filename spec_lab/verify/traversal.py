"""Traversal: bottom-up verification, whole paths first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify.arrays import Array
from spec_lab.verify.match import walk
from spec_lab.verify.siblings import EVERY_DRAW, HUGE, TINY, Siblings
from spec_lab.verify.verdict import Verdict


@dataclass(frozen=True)
class Traversal:
    """Visit leaves first; a leaf is where the path ends with its weight a, else it is deleted.

    Source: traversal verification (2505.12398, algorithm 2). On a chain this is block verification (2403.10444,
    algorithm 2). A node's weight and distribution when first reached depend only on the siblings deleted before, so all
    weights are computed top down, and one product in visiting order gives the probability of each stop.
    """

    name = "traversal"
    accepts = EVERY_DRAW
    accepts_mixed = True
    follows_argmax = True
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``.

        Point drafts read M numbers of p; others sum over the vocabulary once per turn (a node's turn comes after its
        parent's and its earlier siblings'), and once for all last siblings together (on a chain: once). Notation as in
        ``siblings``.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        if not draft.shape.nodes or draft.ways == {"point"}:
            return walk(draft, p)
        siblings = Siblings(draft, p)
        shape, arrays, schedule = siblings.shape, siblings.arrays, siblings.schedule(by_turn=True)
        each = siblings.drawn(schedule.nodes)  # in the schedule's order
        theta, s, a = (arrays.full(shape.rows, value) for value in (0.0, 1.0, 1.0))
        weight = arrays.full(shape.nodes, 0.0)  # W(c) when c is reached

        def delete(which: Array, split: int) -> None:
            # S' = sum (a P - q_c)+ = a / S sum (p - theta q)+ off rejected points;  a <- S' / (S' + 1 - a)
            nodes, m = schedule.nodes[which], schedule.parents[which]
            before, mine = s[m], a[m]
            total = siblings.left_after(nodes, m, theta[m], before, weight[which], split)
            kept = mine * total / arrays.at_least(before, TINY)
            rest = 1.0 - mine
            a[m] = arrays.where(rest > 0.0, kept / arrays.at_least(kept + rest, TINY), 1.0)
            s[m] = total

        for start, sampled, points, _, end in schedule.steps:
            # a_c = min(1, a P(c) / q_c(c))
            here = slice(start, end)
            m = schedule.parents[here]
            theta_m, s_m, a_m = theta[m], s[m], a[m]
            weight[here] = w = arrays.at_least(each.p[here] - theta_m * each.q[here], 0.0)
            ratio = arrays.at_most(w / arrays.at_least(s_m, TINY), 1.0) / each.own[here]
            a[shape.roots + schedule.nodes[here]] = arrays.at_most(a_m * ratio, 1.0)
            # a point leaves theta as it is; a row without weight is never reached
            more = arrays.where(a_m > 0, s_m * each.sampled[here] / arrays.at_least(a_m * each.left[here], TINY), 0.0)
            theta[m] = arrays.at_most(theta_m + more, HUGE)
            if points > start:
                delete(slice(start, points), sampled - start)
        delete(schedule.last, schedule.sampled)
        return Verdict(first_stop(siblings, a), lambda rows: siblings.remainder(rows, theta))


def first_stop(siblings: Siblings, weight: Array) -> Array:
    """``[R]``: the probability that a row is the first to stop when rows are visited bottom up.

    Args:
        weight: ``[R]``, the probability that a row stops once it is visited; 1 at roots.
    """
    shape, arrays = siblings.shape, siblings.arrays
    # before[t, i] = prod of (1 - weight) over the rows visited before place i of tree t
    before = arrays.full((shape.roots, siblings.draft.shape.grid.shape[1] + 1), 1.0)
    before[shape.root, shape.visit + 1] = 1.0 - weight
    return weight * before.cumprod(1)[shape.root, shape.visit]
