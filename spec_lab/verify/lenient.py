"""Lenient: token verification that accepts more than the target's law allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.options import share
from spec_lab.verify.match import walk
from spec_lab.verify.siblings import (
    EVERY_DRAW,
    TINY,
    acceptance,
    arrange,
    check_rows,
    drawn_laws,
    excess_mass,
    first_accepted,
    remainder,
    repeated,
)
from spec_lab.verify.verdict import Verdict, gather

LEAST = 1e-6
"""The least lenience. Below, p / (l q) overflows sooner or later."""


@dataclass(frozen=True)
class Lenient:
    """Recursive rejection with lenience l: accept with min(1, P(c) / (l q_c(c))), then P <- norm((P - l q_c)+).

    Source: the lenience of speculative sampling (2211.17192, appendix A.5), where q is multiplied by l before the
    comparison; on trees as in ``token``. It is lossless exactly where l = 1: then it is ``token``.

    Args:
        lenience: l, from 1e-6 to 1; the smaller, the more is accepted.
    """

    lenience: float

    name = "lenient"
    accepts = EVERY_DRAW

    def __post_init__(self) -> None:
        if share("verifier.lenience", self.lenience) < LEAST:
            raise ValueError(
                f"verifier.lenience must be above 0, at least {LEAST:g}, not {self.lenience}: at 0 every token "
                "would be accepted, illegal ones too"
            )

    @property
    def lossless(self) -> bool:
        """Whether the output has the target's law: without lenience only."""
        return self.lenience == 1

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The law of one step for ``p`` ``[R, V]``. Notation as in ``siblings``; reads as much as ``token``.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        shape, point = draft.shape, draft.drawn == "point"
        if point:  # q_c is 1 at c: a rejected token loses all its mass, S is what is left
            check_rows(draft, p)
            p_token, again = gather(p, shape, draft.token), repeated(draft)
            if again is not None:
                p_token[again] = 0.0
        else:
            p_token, q_token, z = drawn_laws(draft, p)
        theta, s, accept = np.zeros(shape.rows), np.ones(shape.rows), np.empty(shape.nodes)
        for rank, group in enumerate(arrange(shape).ranks):
            nodes, m = group.nodes, group.parents
            if point:
                ratio = p_token[nodes] / np.maximum(s[m], TINY)
                s[m] -= p_token[nodes]
            else:
                if rank > 0:
                    s[m] = excess_mass(draft, p, m, theta[m])
                ratio = acceptance(p_token, q_token, z, theta, s, group)
                theta[m] += self.lenience * s[m] / z[nodes]
            accept[nodes] = np.minimum(ratio / self.lenience, 1.0)
        residual = walk(draft, p).residual if point else lambda rows: remainder(draft, p, rows, theta[rows])
        return Verdict(first_accepted(shape, accept), residual)
