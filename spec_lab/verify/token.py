"""Token: top-down verification, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify.match import walk
from spec_lab.verify.rejection import recursive_rejection
from spec_lab.verify.siblings import EVERY_DRAW
from spec_lab.verify.verdict import Replayed, Verdict, Verifier


@dataclass(frozen=True)
class Token(Verifier):
    """Recursive rejection: accept each child with min(1, P(c) / q_c(c)), on rejection P <- norm((P - q_c)+).

    Source: on chains speculative sampling (2211.17192, algorithm 1; 2302.01318, algorithm 2); on trees with iid
    siblings multi-step speculative sampling (SpecInfer, 2305.09781, algorithm 2), without replacement 2402.14160
    (algorithm 2) and Sequoia (2402.12374, algorithm 2). A leaf that is accepted emits a bonus token from p.
    """

    name = "token"
    accepts = EVERY_DRAW
    accepts_mixed = True
    follows_argmax = True
    lossless = True
    replayed = Replayed(whole_rows=False, top_down=True, in_turn=True, bounded="always")

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The distribution of one step for ``p`` ``[R, V]``.

        Deterministic drafts and chains read M numbers of p and of q. Other trees sum over the vocabulary: on the CPU
        once for each later sibling that can be reached, on a device once per sibling rank after the first.

        Raises:
            ValueError: ``p`` does not fit the forest; a token has no mass in its q; siblings drawn without replacement
                repeat a token.
        """
        if not draft.shape.nodes or draft.ways == {"deterministic"}:
            return walk(draft, p)
        return Verdict(*recursive_rejection(draft, p))
