"""Values with which a policy cuts some of a toy's drafts and leaves others whole.

With the values of a run it often does neither: a measured cost, a threshold for texts of thousands of tokens or a first
depth of 5 leave every draft of a toy as it is, so that enumerating it would not test a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from spec_lab.core.limit import Limit, StopRule
from spec_lab.policy.costs import DraftCosts

DEPTH = 3
"""The largest depth that is considered: that of the deepest toy tree."""

COSTS = DraftCosts({1: {1: {0: 1.0, 1: 1.3, 2: 1.6, 3: 1.9}}})
"""Seconds of a step by its levels: at an acceptance of 0.7 two levels are best, after a rejection none is."""

STAIRCASE = DraftCosts({1: {1: {0: 1.0, 1: 1.2, 2: 1.4, 3: 2.1}, 2: {0: 1.0, 1: 1.5, 2: 2.1, 3: 2.9}}})
"""Seconds of a step by the rows of each sequence that are verified, for one sequence and for two."""

LIKELIEST = torch.linspace(0.5, 0.95, 10)
ROWS = torch.stack([LIKELIEST, 1 - LIKELIEST], -1)
"""Draft probabilities that rules are tried on, ``[10, 2]``: toys whose loops are enumerated draft from two tokens."""


def threshold(rule: StopRule, share: float = 2 / 3) -> float:
    """Return the threshold at which a rule stops about this share of ``ROWS``."""
    path = torch.ones(len(ROWS))
    stopped = {
        level / 100: float(rule(ROWS, path, torch.full_like(path, level / 100)).float().mean()) for level in range(101)
    }
    return min(stopped, key=lambda level: abs(stopped[level] - share))


def limits(given: Sequence[Limit], stop: StopRule | None) -> tuple[Limit, ...]:
    """Return a run's limits with the depths and thresholds of toys, each once, in the same order.

    Depths keep their order (None is the deepest one) and become 3 and lower ones, a single one 2. Thresholds keep their
    order and stop about as many of the rows in equal steps.
    """
    depths = sorted({_depth(limit) for limit in given})
    levels = sorted({limit.threshold for limit in given})
    shares = [rank / (len(levels) + 1) for rank in range(1, len(levels) + 1)]
    stops = [0.0] * len(levels) if stop is None else sorted(threshold(stop, share) for share in shares)
    toys = [
        replace(
            limit,
            depth=2 if len(depths) == 1 else round(DEPTH * depths.index(_depth(limit)) / (len(depths) - 1)),
            threshold=stops[levels.index(limit.threshold)],
        )
        for limit in given
    ]
    return tuple(dict.fromkeys(toys))


def _depth(limit: Limit) -> float:
    return float("inf") if limit.depth is None else limit.depth
