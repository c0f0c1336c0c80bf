"""The base class of verifiers that check each node by itself and accept the longest path that passes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.shape import DeviceShape, Shape
from spec_lab.verify.arrays import CHUNK, Array, parts, view
from spec_lab.verify.match import ANY_DRAW, walk
from spec_lab.verify.siblings import Siblings
from spec_lab.verify.verdict import Verdict, Verifier


class LongestPath(Verifier):
    """Accepts the longest path from the root whose tokens all have enough mass in p; then emits from p at its end.

    Of equally long paths the one whose end is listed first. A token without mass is never accepted, whatever the bound:
    it may be illegal. Lossy, and q is not read.
    """

    accepts = ANY_DRAW
    accepts_mixed = True
    lossless = False
    strictly: ClassVar[bool] = False
    """Whether a token needs more mass than its bound."""

    @abstractmethod
    def bound(self, p: Tensor) -> Tensor:
        """Return the mass ``[n]`` that a token needs, by distributions ``[n, V]``."""

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The path, which the draft and ``p`` ``[R, V]`` settle, and the distribution after it.

        Raises:
            ValueError: ``p`` has not one row per row of the forest.
        """
        if not draft.shape.nodes:
            return walk(draft, p)
        siblings = Siblings(draft, p)
        shape, arrays = siblings.shape, siblings.arrays
        p_token, bound = siblings.p_token(), arrays.full(shape.rows, 0.0)
        for part in parts(len(shape.expanded), p, CHUNK):
            rows = shape.expanded[part]
            bound[rows] = arrays.read(self.bound(view(p, rows)).double())
        bound = bound[shape.parent]
        passes = (p_token > bound if self.strictly else p_token >= bound) & (p_token > 0)
        stop = arrays.full(shape.rows, 0.0)
        stop[ends(shape, passes)] = 1.0
        return Verdict(stop, lambda rows: view(p, arrays.index(rows)))


def ends(shape: Shape | DeviceShape, passes: Array) -> Array:
    """``[B]``: of each tree the deepest row below which no node of its path fails; the first listed of equals.

    Args:
        passes: ``[M]`` bool, on the shape's device.
    """
    rows = shape.rows
    if isinstance(shape, Shape):
        alive = np.ones(rows + 1, dtype=bool)
        alive[shape.roots : -1] = passes
        score = np.full(rows + 1, -1)  # the earlier a row, the larger
        score[:-1] = np.where(alive[shape.lineage].all(1), (shape.depth + 1) * rows - 1 - np.arange(rows), -1)
        return rows - 1 - score[shape.grid].max(1) % rows
    passing = torch.ones(rows + 1, dtype=torch.bool, device=passes.device)
    passing[shape.roots : -1] = passes
    number = (shape.depth + 1) * rows - 1 - torch.arange(rows, device=passes.device)
    scores = torch.where(passing[shape.lineage].all(1), number, -1)
    return rows - 1 - torch.cat([scores, scores.new_full((1,), -1)])[shape.grid].amax(1) % rows
