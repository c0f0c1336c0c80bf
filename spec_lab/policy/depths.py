"""Policies of the depth alone: a fixed one, and transformers' heuristic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import Number, Whole, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.propose.trees import MAX_DEPTH, TreeDepth


@dataclass(frozen=True)
class FixedDepth(Policy):
    """The same depth in every step: a tree without the levels below it.

    Args:
        depth: 0 drafts nothing.
        part_name: of a proposer that chooses one of several, the one that drafts; empty: it chooses itself.
    """

    depth: int
    part_name: str = ""
    name: str = "fixed"
    stop: StopRule | None = None

    @staticmethod
    @checked
    def load(
        target: Target, proposer: Proposer, depth: Annotated[int, Whole(0, MAX_DEPTH)], part: str = ""
    ) -> FixedDepth:
        """Check the options.

        Args:
            depth: levels; 0 drafts nothing.
            part: of proposer=best_of, the part that drafts; empty: it chooses itself.

        Raises:
            ValueError: a wrong one; names it.
        """
        return FixedDepth(depth, part)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {"depth": self.depth, "part": self.part_name}

    @property
    def parts(self) -> tuple[str, ...]:
        """See ``Policy``."""
        return (self.part_name,) if self.part_name else ()

    def decide(self, batch: Batch, states: Sequence[Any]) -> list[Limit]:
        """See ``Policy``."""
        return [Limit(self.depth, part=self.part_name)] * len(states)

    def toy(self) -> FixedDepth:
        """See ``Policy``. Two levels at most: toys have trees of three."""
        return replace(self, depth=min(self.depth, 2))


@dataclass
class Depth:
    """The depth of a sequence's next draft."""

    value: float


@dataclass(frozen=True)
class Heuristic(Policy):
    """Deeper after a draft that was wholly accepted, shallower after another.

    Source: transformers' ``num_assistant_tokens_schedule="heuristic"`` (``AssistedCandidateGenerator``): + 2 and - 1,
    from 5 on, at least 1. A step without a draft says nothing here; transformers counts it as wholly accepted.

    Args:
        start: the first depth.
        up, down: added and subtracted.
        max_depth: the largest depth.
    """

    start: float = 5.0
    up: float = 2.0
    down: float = 1.0
    max_depth: int = 20
    name: str = "heuristic"

    @staticmethod
    @checked
    def load(
        target: Target,
        proposer: Proposer,
        start: Annotated[float, Number(1)] = 5.0,
        up: Annotated[float, Number(0)] = 2.0,
        down: Annotated[float, Number(0)] = 1.0,
        max_depth: TreeDepth = 20,
    ) -> Heuristic:
        """Check the options.

        Args:
            start: first depth; the proposer's own depth is an upper bound (set proposer.depth high enough).
            up: levels added after a draft that was wholly accepted.
            down: levels subtracted after any other draft.
            max_depth: largest depth.

        Raises:
            ValueError: a wrong one; names it.
        """
        if start > max_depth:
            raise WrongOption(f"start must be at most max_depth={max_depth}, not {start}")
        return Heuristic(start, up, down, max_depth)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {"start": self.start, "up": self.up, "down": self.down, "max_depth": self.max_depth}

    def init(self, request: Request) -> Depth:
        """See ``Policy``."""
        return Depth(self.start)

    def decide(self, batch: Batch, states: Sequence[Depth]) -> list[Limit]:
        """See ``Policy``."""
        return [Limit(int(state.value)) for state in states]

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See ``Policy``."""
        for outcome in outcomes:
            if outcome.drafted:
                step = self.up if outcome.accepted >= outcome.drafted else -self.down
                outcome.state.value = min(max(1.0, outcome.state.value + step), float(self.max_depth))

    def toy(self) -> Heuristic:
        """See ``Policy``. It begins with two levels: toys have trees of one to three."""
        return replace(self, start=2.0, max_depth=3)
