"""Rules that stop a draft where its tokens are likely to be rejected. See ``core.limit.StopRule``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.limit import StopRule
from spec_lab.core.upload import upload

RuleName = Literal["confidence", "adaedl", "svip"]
"""Rules that a policy may name."""


@dataclass(frozen=True)
class Stop:
    """A rule that stops drafts early, with its thresholds.

    Args:
        threshold: ``[B]`` for each tree.
    """

    rule: StopRule
    threshold: np.ndarray

    def __call__(self, probs: Tensor, trees: np.ndarray, path: np.ndarray | None = None) -> Tensor:  # [n] bool
        """At which rows drafting stops, given draft probabilities ``[n, V]``, each row's tree, and ``path`` ``[n]``."""
        above, least = upload(probs.device, np.ones(len(trees)) if path is None else path, self.threshold[trees])
        return self.rule(probs, above.to(probs.dtype), least.to(probs.dtype))


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

    name: ClassVar[str] = "confidence"
    before: ClassVar[bool] = False
    reads_path: ClassVar[bool] = False

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return probs.amax(-1) < threshold


@dataclass(frozen=True)
class AdaEdl:
    """Stops before a token where the bound 1 - sqrt(factor H) on its acceptance is below the threshold.

    Source: AdaEDL (2410.18351, equation 4), factor 0.2.
    """

    factor: float = 0.2
    name: ClassVar[str] = "adaedl"
    before: ClassVar[bool] = True
    reads_path: ClassVar[bool] = False

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return 1 - (self.factor * entropy(probs)).sqrt() < threshold


@dataclass(frozen=True)
class Svip:
    """Stops after a token drawn where sqrt(factor H), a bound on its rejection, is above the threshold.

    Source: SVIP (2411.18462, section 3), factor 0.15.
    """

    factor: float = 0.15
    name: ClassVar[str] = "svip"
    before: ClassVar[bool] = False
    reads_path: ClassVar[bool] = False

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return (self.factor * entropy(probs)).sqrt() > threshold


@dataclass(frozen=True)
class Gain:
    """Stops after nodes whose probability to be accepted is below the threshold.

    By the draft's own probabilities that of a node is the product along its path (OPT-Tree 2406.17276); the best child
    of a row has the row's times its largest one. The children of that row are drawn, since the forward that tells
    their probabilities is paid already; what is saved is the forward below them.
    """

    name: ClassVar[str] = "gain"
    before: ClassVar[bool] = False
    reads_path: ClassVar[bool] = True

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """See ``StopRule``."""
        return path * probs.amax(-1) < threshold


def described(rule: StopRule | None) -> dict[str, Any]:
    """Return a rule's options for records; ``rule_of`` reads them."""
    if rule is None:
        return {}
    return {"rule": rule.name, **(asdict(rule) if is_dataclass(rule) and not isinstance(rule, type) else {})}


def rule_of(facts: Mapping[str, Any]) -> StopRule | None:
    """The rule of which a record keeps ``facts``; None where it keeps none.

    Raises:
        ValueError: no rule of this module.
    """
    factor = facts.get("factor", 0.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ValueError(f"the factor of a rule that stops drafts is a number, not {str(factor)[:100]!r}")
    factors = (float(factor),) if "factor" in facts else ()
    match facts.get("rule"):
        case None:
            return None
        case "confidence":
            return Confidence()
        case "adaedl":
            return AdaEdl(*factors)
        case "svip":
            return Svip(*factors)
        case "gain":
            return Gain()
    raise ValueError(
        f"there is no rule {str(facts['rule'])[:100]!r} that stops drafts; there are confidence, adaedl, svip and gain"
    )
