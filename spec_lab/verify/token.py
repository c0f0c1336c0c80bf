"""Token: top-down verification, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify.match import walk
from spec_lab.verify.siblings import EVERY_DRAW, acceptance, arrange, drawn_laws, excess_mass, first_accepted, remainder
from spec_lab.verify.verdict import Verdict


@dataclass(frozen=True)
class Token:
    """Recursive rejection: accept each child with min(1, P(c) / q_c(c)), on rejection P <- norm((P - q_c)+).

    Source: on chains speculative sampling (2211.17192, algorithm 1; 2302.01318, algorithm 2); on trees with iid
    siblings multi-step speculative sampling (SpecInfer, 2305.09781, algorithm 2), without replacement 2402.14160
    (algorithm 2) and Sequoia (2402.12374, algorithm 2). A leaf that is accepted emits a bonus token from p.
    """

    name = "token"
    accepts = EVERY_DRAW
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The law of one step for ``p`` ``[R, V]``.

        Point drafts and chains read M numbers of p and of q; other trees sum over the vocabulary once per sibling rank
        after the first. Notation as in ``siblings``.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        if draft.drawn == "point":
            return walk(draft, p)
        shape = draft.shape
        p_token, q_token, z = drawn_laws(draft, p)
        theta, s, accept = np.zeros(shape.rows), np.ones(shape.rows), np.empty(shape.nodes)
        for rank, group in enumerate(arrange(shape).ranks):
            nodes, m = group.nodes, group.parents
            if rank > 0:
                s[m] = excess_mass(draft, p, m, theta[m])
            accept[nodes] = np.minimum(acceptance(p_token, q_token, z, theta, s, group), 1.0)
            theta[m] += s[m] / z[nodes]
        return Verdict(first_accepted(shape, accept), lambda rows: remainder(draft, p, rows, theta[rows]))
