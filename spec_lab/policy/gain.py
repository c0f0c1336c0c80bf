"""A policy that drafts on where one more node pays for its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Unpack

from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import Number, Share, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy import toys
from spec_lab.policy.adaptive import check_pair
from spec_lab.policy.costs import DraftCosts, Timing, TimingOptions, draft_costs
from spec_lab.policy.goodput import Scope
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.propose.stop_rules import Gain, described
from spec_lab.propose.trees import MAX_DEPTH


@dataclass
class Rate:
    """Moving sums of emitted tokens and of the predicted seconds of their steps."""

    tokens: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class GainOverCost(Policy):
    """Drafts on below a node where the next one's probability to be accepted pays for its seconds.

    A step's rate is tokens / seconds; one more node of gain g and of c seconds raises it where g > c tokens / seconds.
    The next node's gain is that of the node above it times ``scale``. (Best-first budgets of Sequoia 2402.12374 and
    OPT-Tree 2406.17276, with the threshold that their size stands for.)

    Args:
        costs: measured: levels stand for nothing and for the whole draft (0 and 1).
        nodes: of the whole draft.
        shared: the run's rate.
        scale: the probability with which a draft's likeliest token is accepted.
        memory: weight of the past in each further step.
        scope: whose past the rate is taken from.
    """

    costs: DraftCosts
    nodes: int
    shared: Rate
    scale: float = 0.7
    memory: float = 0.99
    scope: Scope = "run"
    name: str = "gain"
    stop: StopRule | None = Gain()

    @staticmethod
    @checked
    def load(
        target: Target,
        proposer: Proposer,
        scale: Annotated[float, Number(1e-3)] = 0.7,
        memory: Share = 0.99,
        scope: Scope = "run",
        **timing: Unpack[TimingOptions],
    ) -> GainOverCost:
        """Check the options, and measure or read the costs.

        Args:
            scale: probability with which the draft's likeliest token is accepted.
            memory: weight of the past in moving averages, for each further step.
            scope: whose tokens per second count: each request's own, or the run's.

        Raises:
            ValueError: a wrong option; names it.
        """
        check_pair(proposer, "gain", Gain(), ())
        costs = draft_costs(target, proposer, MAX_DEPTH, Timing(**timing), depths=(0,))
        whole_draft = {
            context: {live: {0: of_depth[0], 1: of_depth[MAX_DEPTH]} for live, of_depth in of_live.items()}
            for context, of_live in costs.seconds.items()
        }
        return GainOverCost(DraftCosts(whole_draft), max(1, proposer.nodes), Rate(), scale, memory, scope)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts = {
            **described(self.stop),
            "scale": self.scale,
            "memory": self.memory,
            "scope": self.scope,
            "nodes": self.nodes,
        }
        return {**facts, **self.costs.facts}

    @property
    def shared_store(self) -> str:
        """See ``Policy``."""
        return "tokens per second" if self.scope == "run" else ""

    def forget(self) -> None:
        """See ``Policy``."""
        self.shared.tokens = self.shared.seconds = 0.0

    def toy(self) -> GainOverCost:
        """See ``Policy``. A node must be accepted with a probability of about 0.8 to pay for its seconds."""
        costs = DraftCosts({1: {1: {0: 1.0, 1: 2.0}}})
        return replace(self, scope="request", costs=costs, nodes=toys.DEPTH, shared=Rate(), scale=0.55)

    def toy_of_batch(self) -> GainOverCost:
        """See ``Policy``."""
        return replace(self.toy(), scope="run")

    def init(self, request: Request) -> Rate:
        """See ``Policy``."""
        return Rate()

    def decide(self, batch: Batch, states: Sequence[Rate]) -> list[Limit]:
        """See ``Policy``."""
        contexts = [len(sequence.tokens) for sequence in batch.sequences]
        if self.scope == "request":
            return [
                Limit(threshold=self._threshold(state, 1, context))
                for state, context in zip(states, contexts, strict=True)
            ]
        return [Limit(threshold=self._threshold(self.shared, len(states), max(contexts)))] * len(states)

    def _threshold(self, rate: Rate, live: int, context: int) -> float:
        """Tokens that the seconds of one node are worth."""
        without, whole_draft = self.costs.of(0, live, context), self.costs.of(1, live, context)
        of_node = max(0.0, whole_draft - without) / (self.nodes * live)
        # Begins as if every step emitted two tokens in a step with half a draft.
        tokens, seconds = rate.tokens + 2 * live, rate.seconds + (without + whole_draft) / 2
        return min(1.0, of_node * tokens / seconds / self.scale)

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See ``Policy``."""
        for state in [self.shared] if self.scope == "run" else [outcome.state for outcome in outcomes]:
            state.tokens, state.seconds = state.tokens * self.memory, state.seconds * self.memory
        for outcome in outcomes:
            state = self.shared if self.scope == "run" else outcome.state
            live = outcome.live if self.scope == "run" else 1
            state.tokens += outcome.accepted + 1
            state.seconds += self.costs.of(min(1.0, outcome.nodes / self.nodes), live, outcome.context) / live
