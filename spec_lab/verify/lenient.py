"""Lenient: token verification that accepts more than the target's distribution allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.options import Number, check_fields
from spec_lab.verify.match import walk
from spec_lab.verify.rejection import recursive_rejection
from spec_lab.verify.siblings import EVERY_DRAW
from spec_lab.verify.verdict import Replayed, Verdict, Verifier


@dataclass(frozen=True)
class Lenient(Verifier):
    """Recursive rejection with lenience l: accept with min(1, P(c) / (l q_c(c))), then P <- norm((P - l q_c)+).

    Source: the lenience of speculative sampling (2211.17192, appendix A.5), where q is multiplied by l before the
    comparison; on trees as in ``token``. It is lossless exactly where l = 1: then it is ``token``.

    Args:
        lenience: accept with min(1, p / (lenience q)); 1: as token, lossless; 0 would accept every token, illegal ones
            too.
    """

    lenience: Annotated[float, Number(1e-6, 1)]  # below, p / (l q) overflows sooner or later

    name = "lenient"
    accepts = EVERY_DRAW
    accepts_mixed = True
    replayed = Replayed(whole_rows=False, top_down=True, in_turn=True, bounded="always")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def lossless(self) -> bool:
        """Whether the output has the target's distribution: without lenience only."""
        return self.lenience == 1

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``; reads as much as ``token``.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        if not draft.shape.nodes:
            return walk(draft, p)
        return Verdict(*recursive_rejection(draft, p, self.lenience))
