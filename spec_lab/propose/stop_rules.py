"""Rules that stop a draft where its tokens are likely to be rejected. See ``core.limit.StopRule``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def entropy(probs: Tensor) -> Tensor:  # [n, V] -> [n]
    """Entropy of each row in nats."""
    return torch.special.entr(probs).sum(-1)


@dataclass(frozen=True)
class Confidence:
    """Stops after a token drawn where every token has a lower probability than the threshold.

    Dynamic draft lengths (2405.04304), Draft&Verify (2309.08168, section 3.2) and transformers'
    ``assistant_confidence_threshold`` compare the probability of the drawn token; here it is the maximum, so that
    whether drafting stops is known before the token is drawn.
    """

    before: bool = False
    reads_path: bool = False

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return probs.amax(-1) < threshold


@dataclass(frozen=True)
class AdaEdl:
    """Stops before a token where the bound 1 - sqrt(gamma H) on its acceptance is below the threshold.

    Source: AdaEDL (2410.18351, equation 4), gamma = 0.2.
    """

    gamma: float = 0.2
    before: bool = True
    reads_path: bool = False

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return 1 - (self.gamma * entropy(probs)).sqrt() < threshold


@dataclass(frozen=True)
class Svip:
    """Stops after a token drawn where sqrt(c H), a bound on its rejection, is above the threshold.

    Source: SVIP (2411.18462, section 3), c = 0.15.
    """

    c: float = 0.15
    before: bool = False
    reads_path: bool = False

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return (self.c * entropy(probs)).sqrt() > threshold


@dataclass(frozen=True)
class Gain:
    """Stops before a node whose expected gain in tokens is below the threshold: its probability to be accepted.

    By the draft's own probabilities that is the product along the path (OPT-Tree 2406.17276), times the largest one at
    the row, which the best of its children has.
    """

    before: bool = True
    reads_path: bool = True

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return path * probs.amax(-1) < threshold
