"""Relaxed: accept what is among the target's likeliest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from spec_lab.core.options import Share, Whole, check_fields
from spec_lab.verify.longest_path import LongestPath
from spec_lab.verify.verdict import Replayed


@dataclass(frozen=True)
class Relaxed(LongestPath):
    """Accept x where it is among the ``top`` likeliest tokens and p(x) >= max p - delta; of all such paths the longest.

    Source: relaxed acceptance of TensorRT-LLM for DeepSeek-R1 (there on chains, while the model thinks, and with greedy
    target tokens), whose recipe is top = 10, delta = 0.6. Tokens as likely as the last of the likeliest count among
    them. Of equally long paths the one listed first; the token after it is drawn from p. Lossy, and q is not read. It
    compares the distribution that is sampled: at temperature 0 that is one-hot, and this is greedy verification.

    Args:
        top: so many likeliest tokens of the target may be accepted.
        delta: accepted tokens' probability is at most this much below the likeliest token's.
    """

    top: Annotated[int, Whole(1, 2**20)] = 10
    delta: Share = 0.6

    name = "relaxed"
    replayed = Replayed(whole_rows=False, bounded="always")  # replay completes its rows

    def __post_init__(self) -> None:
        check_fields(self)

    def bound(self, p: Tensor) -> Tensor:
        """The larger of the ``top``-th largest mass and max p - delta, of distributions ``[n, V]``: ``[n]``."""
        largest = p.topk(min(self.top, p.shape[-1]), -1).values.double()
        return torch.maximum(largest[:, -1], largest[:, 0] - self.delta)
