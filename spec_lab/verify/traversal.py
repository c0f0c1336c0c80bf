"""Traversal: bottom-up verification, whole paths first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify import parallel
from spec_lab.verify.arrays import Arrays
from spec_lab.verify.match import walk
from spec_lab.verify.rejection import Rejection
from spec_lab.verify.siblings import EVERY_DRAW, TINY
from spec_lab.verify.verdict import Replayed, Verdict, Verifier


@dataclass(frozen=True)
class Traversal(Verifier):
    """Visit leaves first; a leaf is where the path ends with its weight a, else it is deleted.

    Source: traversal verification (2505.12398, algorithm 2). On a chain this is block verification (2403.10444,
    algorithm 2).
    """

    name = "traversal"
    accepts = EVERY_DRAW
    accepts_mixed = True
    follows_argmax = True
    lossless = True
    replayed = Replayed(whole_rows=False, bounded="chains")

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``.

        Deterministic drafts read M numbers of p. Others sum over the vocabulary: on the CPU once for each node that can
        be deleted (nothing is visited after a weight of 1), on a device once per turn (a node's turn comes after its
        parent's and its earlier siblings'), and once for all last siblings together.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        if not draft.shape.nodes or draft.ways == {"deterministic"}:
            return walk(draft, p)
        if Arrays.like(p).device is not None:
            return Verdict(*parallel.traversal(draft, p))
        shape, rejection = draft.shape, Rejection(draft, p)
        stop, a = [0.0] * shape.rows, [1.0] * shape.rows
        for root, tour in enumerate(shape.tours):
            visited = 1.0  # the probability that no row visited so far is where the path ends
            for row, leaving in tour:
                node = row - shape.roots
                above = rejection.parent[node]
                if not leaving:  # a_c = min(1, a P(c) / q_c(c))
                    a[row] = a[above] and rejection.accept(node, a[above])
                    continue
                stop[row], visited = visited * a[row], visited * (1.0 - a[row])
                if not visited:
                    break
                if a[above]:  # delete c: S' = sum (a P - q_c)+,  a <- S' / (S' + 1 - a)
                    before = rejection.mass(above)
                    rejection.reject(node, a[above])
                    kept = a[above] * rejection.mass(above) / max(before, TINY)
                    rest = 1.0 - a[above]
                    a[above] = kept / max(kept + rest, TINY) if rest > 0.0 else 1.0
            stop[root] = visited
        return Verdict(np.array(stop), rejection.residual)
