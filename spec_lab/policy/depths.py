"""Policies of the depth alone: a fixed one, transformers' heuristic, and whole drafts cut after some rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import Count, Number, Whole, WrongOption, accept, checked
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
        per_batch_size: depths by the number of sequences from which on they hold, in place of ``depth``
            (vLLM's ``num_speculative_tokens_per_batch_size``). The number is known before anything is drawn.
    """

    depth: int
    part_name: str = ""
    per_batch_size: Mapping[int, int] = field(default_factory=dict)
    name: str = "fixed"
    stop: StopRule | None = None

    @staticmethod
    @checked
    def load(
        target: Target,
        proposer: Proposer,
        depth: Annotated[int, Whole(0, MAX_DEPTH)],
        part: str = "",
        per_batch_size: Mapping[int, Annotated[int, Whole(0, MAX_DEPTH)]] | None = None,
    ) -> FixedDepth:
        """Check the options.

        Args:
            depth: levels; 0 drafts nothing.
            part: of proposer=best_of, the part that drafts; empty: it chooses itself.
            per_batch_size: depths by the number of sequences decoded together, such as {4:3,16:1}: 3 levels from 4
                sequences on, 1 from 16 on, fewer have depth; None: depth for all.

        Raises:
            ValueError: a wrong one; names it.
        """
        table = per_batch_size or {}
        for size in table:
            accept("per_batch_size: a number of sequences", size, Count)
        return FixedDepth(depth, part, dict(sorted(table.items())))

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts: dict[str, Any] = {"depth": self.depth, "part": self.part_name}
        if self.per_batch_size:
            facts["per_batch_size"] = {str(size): depth for size, depth in self.per_batch_size.items()}
        return facts

    @property
    def shared_store(self) -> str:
        """See ``Policy``."""
        return "the number of sequences" if self.per_batch_size else ""

    @property
    def parts(self) -> tuple[str, ...]:
        """See ``Policy``."""
        return (self.part_name,) if self.part_name else ()

    def decide(self, batch: Batch, states: Sequence[Any]) -> list[Limit]:
        """See ``Policy``."""
        sizes = [size for size in self.per_batch_size if size <= len(states)]
        depth = self.per_batch_size[max(sizes)] if sizes else self.depth
        return [Limit(depth, part=self.part_name)] * len(states)

    def toy(self) -> FixedDepth:
        """See ``Policy``. Two levels at most: toys have trees of three."""
        return replace(self, depth=min(self.depth, 2), per_batch_size={})

    def toy_of_batch(self) -> FixedDepth:
        """See ``Policy``. One level less where two sequences are decoded together."""
        toy = self.toy()
        return replace(toy, per_batch_size={2: max(0, toy.depth - 1)}) if self.per_batch_size else toy


@dataclass(frozen=True)
class RowsOfEach(Policy):
    """Draft everything, and verify the first rows of each tree: what costs are measured with.

    Args:
        rows: nodes of each tree that are verified.
        measure: see ``Policy``.
    """

    rows: int
    measure: Callable[[Tensor], Tensor] | None = None
    name: str = "rows_of_each"

    def decide(self, batch: Batch, states: Sequence[Any]) -> list[Limit]:
        """See ``Policy``."""
        return [Limit(depth=None if self.rows else 0)] * len(states)

    def admit(self, batch: Batch, states: Sequence[Any], draft: Draft) -> np.ndarray:
        """See ``Policy``."""
        return draft.shape.places < self.rows


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
