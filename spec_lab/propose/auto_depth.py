"""``depth: auto`` of look-up proposers: the depth of the most expected tokens per second, by measured costs of rows.

A look-up costs next to nothing, and what its draft costs in the target's forward differs from 2 % of a step for each
token to 80 % for the first one. So the depth is chosen as calibrated trees are (``calibrate``), with a stated prior of
acceptance in place of measured accuracies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import Number, Whole
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.core.user_cache import default_folder
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.calibrate import Calibration, calibrate
from spec_lab.propose.cost_cache import CostCache
from spec_lab.propose.trees import depth_of

log = logging.getLogger(__name__)

DEEPEST = 16
"""Largest depth that is chosen."""

MAX_DEPTH = 1024
"""Maximum depth of a draft."""

Depth = Annotated[int, Whole(0, MAX_DEPTH)] | Literal["auto"]
Acceptance = Annotated[float, Number(0.01, 0.99)]


@dataclass(eq=False)
class RepeatedToken(Proposer):
    """A chain of the same token for every sequence, whatever its text, so that drafting costs nothing."""

    depth: int
    name: str = "repeated_token"
    drawn: Drawn = "deterministic"
    branches: bool = False
    _chain: Callable[[int], Shape] = field(init=False, repr=False, default_factory=lambda: lru_cache(None)(chain))

    @property
    def nodes(self) -> int:
        """Number of nodes below one root."""
        return self.depth

    def propose(self, batch: Batch) -> Draft:
        """Draft the token 0."""
        shape = forest((self._chain(self.depth),) * len(batch.sequences))
        return Draft(shape, torch.zeros(shape.nodes, dtype=torch.long, device=batch.device))


@dataclass(frozen=True)
class AutoDepth:
    """A depth and why it was chosen.

    Args:
        depth: the one taken; 0: no depth is faster than decoding without drafts.
        acceptance: of each level, given the one above it; a prior.
        calibration: the chain, what is expected of it, and the measured costs.
    """

    depth: int
    acceptance: float
    calibration: Calibration

    @property
    def facts(self) -> dict[str, Any]:
        """The depth and why, for the manifest."""
        return {"depth": self.depth, "acceptance": self.acceptance, **self.calibration.facts}


def resolved(
    depth: int | Literal["auto"], target: Target, acceptance: float, batch_size: int, deepest: int = DEEPEST
) -> tuple[int, AutoDepth | None]:
    """Return the depth of a look-up proposer, and why it was chosen where it is "auto".

    The costs of rows are measured once on this machine and cached; all look-up proposers share them.

    Args:
        depth: as the option has it.
        acceptance: of each level, given the one above it.
        deepest: largest depth that is chosen.
    """
    if depth != "auto":
        return depth, None
    calibration = calibrate(
        target,
        lambda choices: RepeatedToken(depth_of(choices)),
        deepest,
        Accuracy([[acceptance]] * deepest, {}),
        batch_size,
        deepest,
        cache=CostCache(default_folder()),
        drafter="chains",
        option="depth",
    )
    chosen = AutoDepth(depth_of(calibration.choices), acceptance, calibration)
    if not chosen.depth:
        log.warning(
            "no depth of a look-up is faster than decoding without drafts on this machine at batch size %d, if each "
            "level is accepted with a probability of %.2g: nothing will be drafted. Set proposer.acceptance to that of "
            "your texts, or proposer.depth=3 (with policy=goodput it is drafted only where that has paid)", batch_size,
            acceptance,
        )  # fmt: skip
    return chosen.depth, chosen
