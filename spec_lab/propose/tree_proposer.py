"""Base class of proposers with a plan of trees: a drafter computes logits of rows, the plan draws tokens from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.inference import inference
from spec_lab.core.probabilities import Sampling
from spec_lab.decode.proposer import Proposer, Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.propose.device_levels import DeviceLevels
from spec_lab.propose.expansion import Computed, Expand
from spec_lab.propose.tree_plan import Grown, TreePlan


class Forwards(NamedTuple):
    """Forwards of a drafter in one step.

    Args:
        roots: logits at the roots of the trees that are drafted, in order.
        expand: computes further rows.
        finish: receives what was drafted; None where nobody needs it.
        drop: gives back what was computed, at the end and after an error; None where that stays.
        predict: as in ``Draft``.
    """

    roots: Computed
    expand: Expand
    finish: Callable[[Grown], None] | None = None
    drop: Callable[[], None] | None = None
    predict: Callable[[Draft], Tensor] | None = None


class TreeProposer(Proposer):
    """A drafter and the plan of its trees.

    A drafter says below which sequences it can draft (``levels``), computes the roots of their trees (``begin``), and
    from then on the rows that the plan expands. Everything else about a tree is the plan's.

    Args:
        plan: the trees, and how their tokens are drawn.
        name, requires, sha256: see ``Proposer``.
    """

    name: str
    drawn: Drawn
    nodes: int
    branches: bool
    requires: Requires
    sha256: str | None
    lenient = False  # whether a row without a distribution ends its path instead of its sequence

    def __init__(self, plan: TreePlan, name: str, requires: Requires, sha256: str | None) -> None:
        self.plan, self.name, self.requires, self.sha256 = plan, name, requires, sha256
        self.drawn, self.tree, self.nodes, self.branches = plan.drawn, plan.tree, plan.nodes, plan.branches

    @property
    def why_not_stopped(self) -> str:
        """See ``TreePlan.why_not_stopped``."""
        return self.plan.why_not_stopped

    @property
    def why_not_admitted(self) -> str:
        """See ``TreePlan.why_not_admitted``."""
        return self.plan.why_not_admitted

    def check_sampling(self, sampling: Sampling) -> None:
        """See ``TreePlan.check_sampling``."""
        self.plan.check_sampling(sampling)

    def levels(self, sequence: SequenceState, room: int) -> int:
        """Return the most levels below a sequence, of which the plan drafts as many as it has; 0 or less: none.

        Args:
            sequence: with its state.
            room: as in ``Batch.room``.
        """
        return room

    @abstractmethod
    def begin(self, batch: Batch, depths: Sequence[int]) -> Forwards:
        """Compute the roots of the trees with a depth above 0, of which there is one at least.

        Args:
            batch: the sequences ``[B]``.
            depths: ``[B]`` levels below each.
        """

    def draft_ahead(self, batch: Batch, depths: Sequence[int], levels: DeviceLevels) -> Draft | None:
        """Draft a forest of known shape without a copy to the host; None where the drafter looks at tokens.

        Args:
            batch, depths: as in ``begin``.
        """
        return None

    @inference
    def propose(self, batch: Batch) -> Draft:
        """Draft below every sequence below which the drafter can."""
        levels = [self.levels(sequence, room) for room, sequence in zip(batch.room(), batch.sequences, strict=True)]
        depths = [max(0, min(level, self.plan.depth)) for level in levels]
        if not any(depths):
            return self.plan.draft(batch, depths, None, None).draft
        if batch.deferred and not self.lenient:
            ahead = self.plan.levels_ahead(batch, depths)
            draft = None if ahead is None else self.draft_ahead(batch, depths, ahead)
            if draft is not None:
                return draft
        forwards = self.begin(batch, depths)
        try:
            forced = (
                levels if self.forced_nodes and batch.draft_masks is not None and batch.draft_masks.forces else None
            )
            grown = self.plan.draft(batch, depths, forwards.roots, forwards.expand, self.lenient, forced)
            if forwards.finish is not None:
                forwards.finish(grown)
        finally:
            if forwards.drop is not None:
                forwards.drop()
        draft = grown.draft if forwards.predict is None else replace(grown.draft, predict=forwards.predict)
        return replace(draft, broken={}) if self.lenient and draft.broken else draft
