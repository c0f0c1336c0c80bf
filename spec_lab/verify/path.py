"""What verifiers share that judge each node by itself and accept the longest path that passes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft, Shape
from spec_lab.verify.siblings import arrange, check_rows, view
from spec_lab.verify.verdict import CHUNK, Verdict, gather, parts


def accept_longest(draft: Draft, p: Tensor, least: Callable[[Tensor], Tensor], strictly: bool) -> Verdict:
    """Accept the longest path from the head whose tokens all have enough mass in p; then emit from p at its end.

    Of equally long paths the one whose end is listed first. A token without mass is never accepted, whatever the bound:
    it may be illegal.

    Args:
        p: ``[R, V]``, the target's law; a dead row is all zero.
        least: maps laws ``[n, V]`` to the mass ``[n]`` that a token needs there.
        strictly: whether it needs more than that.

    Raises:
        ValueError: ``p`` has not one row per row of the forest.
    """
    check_rows(draft, p)
    shape, expanded = draft.shape, arrange(draft.shape).expanded
    p_token, bound = gather(p, shape, draft.token), np.zeros(shape.rows)
    for part in parts(len(expanded), p, CHUNK):
        bound[expanded[part]] = least(view(p, expanded[part])).cpu().numpy()
    bound = bound[shape.parent]
    passes = (p_token > bound if strictly else p_token >= bound) & (p_token > 0)
    stop = np.zeros(shape.rows)
    stop[ends(shape, passes)] = 1.0
    return Verdict(stop, lambda rows: view(p, rows))


def ends(shape: Shape, passes: np.ndarray) -> np.ndarray:
    """``[B]``: of each tree the deepest row below which no node of its path fails; the first listed of equals.

    Args:
        passes: ``[M]`` bool.
    """
    alive = np.ones(shape.rows, dtype=bool)
    for level in arrange(shape).levels:
        alive[shape.roots + level.nodes] = alive[level.parents] & passes[level.nodes]
    before = np.arange(shape.rows)[::-1]  # the earlier a row, the larger
    score = np.where(alive, shape.depth * shape.rows + before, -1)
    best = np.full(shape.roots, -1)
    np.maximum.at(best, shape.root, score)
    return shape.rows - 1 - best % shape.rows
