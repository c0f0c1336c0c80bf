"""Cascade: token verification against p where the draft defers to the target, against q elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spec_lab.core.options import Share, check_fields
from spec_lab.verify.aimed import Aimed, allowed
from spec_lab.verify.verdict import Replayed


@dataclass(frozen=True)
class Cascade(Aimed):
    """Speculative cascade: aim at pi = p where the draft defers to the target, at pi = q where it does not.

    Source: 2405.19261 (algorithm 5, table 1). Deferral by rule:

        chow   max q < 1 - alpha
        diff   max q < max p - alpha
        opt    max q < max p - alpha TV(p, q)

    Lossy, and exact against pi. See ``Aimed`` for rows without q, and for constraints.

    Args:
        alpha: cost of deferring to the target; the larger, the more draft tokens are accepted.
        rule: where the draft defers: max q < 1 - alpha (chow), max p - alpha (diff), max p - alpha TV(p, q) (opt).
    """

    alpha: Share = 0.1
    rule: Literal["chow", "diff", "opt"] = "opt"

    name = "cascade"
    lossless = False
    replayed = Replayed(top_down=True)

    def __post_init__(self) -> None:
        check_fields(self)

    def mix(self, p: Tensor, q: Tensor) -> Tensor:
        """See ``Aimed``."""
        return torch.where(self.defers(p, q), p, allowed(q, p))

    def defers(self, p: Tensor, q: Tensor) -> Tensor:  # [n, V], [n, V] -> [n, 1]
        """Whether the draft defers to the target."""
        surest = q.amax(-1, keepdim=True)
        if self.rule == "chow":
            return surest < 1 - self.alpha
        cost: float | Tensor = self.alpha
        if self.rule == "opt":
            cost = self.alpha * (q - p).clamp_min_(0.0).sum(-1, keepdim=True)  # TV
        return surest < p.amax(-1, keepdim=True) - cost
