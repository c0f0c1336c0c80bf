"""Typical: accept what is typical of the target, at whatever probability it would have drawn it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_lab.core.options import Share, check_fields
from spec_lab.verify.longest_path import LongestPath
from spec_lab.verify.verdict import Replayed


@dataclass(frozen=True)
class Typical(LongestPath):
    """Accept x where p(x) > min(epsilon, delta exp(-H(p))), H the entropy; of all such paths the longest.

    Source: typical acceptance of Medusa (2401.10774, section 2.3.1), with the defaults of its code: epsilon = 0.09 and
    delta = sqrt(epsilon). Of equally long paths the one listed first is taken; Medusa's code takes the likeliest. The
    paper's step always emits one greedy token; here the token after the path is drawn from p. Lossy; q is not read. At
    temperature 0 p is one-hot, and this is greedy verification.

    Args:
        epsilon: accept where p(x) > min(epsilon, delta exp(-H(p))).
        delta: factor of the bound that falls with the entropy; Medusa's code recommends sqrt(epsilon).
    """

    epsilon: Share = 0.09
    delta: Share = 0.3

    name = "typical"
    replayed = Replayed(whole_rows=False, bounded="always")  # replay completes its rows
    strictly = True

    def __post_init__(self) -> None:
        check_fields(self)

    def bound(self, p: Tensor) -> Tensor:
        """min(epsilon, delta exp(-H)) of distributions ``[n, V]``: ``[n]``."""
        entropy = torch.special.entr(p).sum(-1, dtype=torch.float64)  # 0 log 0 = 0
        return (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon)
