"""DIVERSED: token verification against a fixed mixture of target and draft."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spec_lab.core.options import Share, check_fields
from spec_lab.verify.aimed import Aimed, allowed


@dataclass(frozen=True)
class Diversed(Aimed):
    """Aim at pi = w p + (1 - w) q, the static form of DIVERSED's ensemble of target and draft.

    Source: 2604.07622. (There a network may learn w for each token; here w is a constant.) Where p has mass on
    all of q, a drafted token of a chain is accepted with probability 1 - w TV(p, q), and the distribution of the next
    token is (1 - w) TV(p, q) from p: so w traces what a lossy rule of this kind gains and costs. Lossy, and exact
    against pi. See ``Aimed`` for rows without q, and where p does not have all tokens of q.

    Args:
        weight: w of the target; 1: as token, lossless; 0: every drafted token is accepted that p allows.
    """

    weight: Share = 0.5

    name = "diversed"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def lossless(self) -> bool:
        """Whether the output has the target's distribution: at weight 1 only."""
        return self.weight == 1

    def mix(self, p: Tensor, q: Tensor) -> Tensor:
        """See ``Aimed``."""
        return p if self.weight == 1 else self.weight * p + (1 - self.weight) * allowed(q, p)
