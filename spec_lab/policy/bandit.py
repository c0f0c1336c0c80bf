"""Bandits: whole configurations compete, and those that brought most tokens per second are chosen more often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Unpack

import numpy as np

from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import brief, number, one_of, share, whole
from spec_lab.engine.proposer import Proposer
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy.adaptive import check_pair
from spec_lab.policy.costs import DraftCosts, Timing, TimingOptions, draft_costs
from spec_lab.policy.goodput import Scope
from spec_lab.policy.policy import DraftOutcome
from spec_lab.propose.stop_rules import described, rule_of
from spec_lab.propose.trees import MOST_DEPTH

Rule = Literal["ucb", "thompson"]

MOST_ARMS = 64


@dataclass
class Pulls:
    """What each configuration has brought.

    Args:
        steps: ``[A]`` steps in which it drafted.
        tokens, cost: ``[A]`` emitted tokens and predicted seconds, relative to those of a step without a draft.
        squares: ``[A]`` of the speed-ups tokens / cost of single steps.
    """

    steps: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray
    squares: np.ndarray

    @staticmethod
    def none(arms: int) -> Pulls:
        """Nothing known."""
        return Pulls(*(np.zeros(arms) for _ in range(4)))

    def age(self, memory: float) -> None:
        """Let what is known count less; 0 forgets it."""
        for own in (self.steps, self.tokens, self.cost, self.squares):
            own *= memory


@dataclass(frozen=True, eq=False)
class Bandit:
    """Chooses a configuration for each sequence and step.

    Source: BanditSpec (2505.15141): UCB takes the largest mean + c sqrt(ln t / n) with n the steps of that
    configuration. (The official code divides by the steps of all of them, which explores nothing.) Thompson sampling
    takes the largest draw from a normal distribution of each mean. The reward is the speed-up of a step: its tokens
    over its predicted seconds, relative to a step without a draft.

    Args:
        arms: the configurations, ``[A]``.
        costs: measured, by part.
        shared: what the run's requests have brought.
        rule: "ucb" or "thompson".
        stop: the rule whose thresholds the configurations name; None for none.
        exploration: c, in units of speed-up; of Thompson sampling the standard deviation of a single reward at least.
        memory: weight of the past in each further step.
        scope: whose past decides.
    """

    arms: tuple[Limit, ...]
    costs: Mapping[str, DraftCosts]
    shared: Pulls
    rule: Rule = "ucb"
    stop: StopRule | None = None
    exploration: float = 0.5
    memory: float = 1.0
    scope: Scope = "run"
    name: str = "bandit"

    @staticmethod
    def load(
        target: Target,
        proposer: Proposer,
        depths: Sequence[int],
        thresholds: Sequence[float] = (),
        rule: Rule = "ucb",
        stop: str | None = None,
        parts: Sequence[str] = (),
        exploration: float = 0.5,
        memory: float = 1.0,
        scope: Scope = "run",
        **timing: Unpack[TimingOptions],
    ) -> Bandit:
        """Check the options, and measure or read the costs.

        Args:
            target, proposer: of the run.
            depths, thresholds, parts: the configurations are all their combinations; without thresholds or parts of
                depths alone.
            stop: name of the rule that the thresholds are for.
            rule, exploration, memory, scope, timing: see the class.

        Raises:
            ValueError: a wrong option; names it.
        """
        one_of("policy.rule", rule, ("ucb", "thompson"))
        one_of("policy.scope", scope, ("request", "run"))
        given = [whole("policy.depths", one, 0, most=MOST_DEPTH) for one in _list("policy.depths", depths)]
        levels = [share("policy.thresholds", one) for one in _list("policy.thresholds", thresholds)]
        names = [str(one) for one in _list("policy.parts", parts)]
        if bool(levels) != (stop is not None):
            raise ValueError("policy.thresholds are those of policy.stop: give both, or neither")
        if stop is not None:
            one_of("policy.stop", stop, ("confidence", "adaedl", "svip"))
        arms = tuple(Limit(*one) for one in product(given, levels or [0.0], names or [""]))
        if not 2 <= len(arms) <= MOST_ARMS:
            raise ValueError(f"policy.depths, thresholds and parts: 2 to {MOST_ARMS} combinations, not {len(arms)}")
        if len(set(arms)) < len(arms):
            raise ValueError("policy.depths, thresholds and parts must not name one configuration twice")
        own = number("policy.exploration", exploration, 0.0), share("policy.memory", memory)
        clock, rule_to_stop = Timing(**timing), rule_of({"rule": stop})
        check_pair(proposer, "bandit", rule_to_stop, names)
        costs = {part: draft_costs(target, proposer, max(given), clock, part) for part in names or [""]}
        return Bandit(arms, costs, Pulls.none(len(arms)), rule, rule_to_stop, *own, scope)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        own = {"bandit": self.rule, "exploration": self.exploration, "memory": self.memory, "scope": self.scope}
        costs = {part or "costs": one.facts["seconds"] for part, one in self.costs.items()}
        return {**own, **described(self.stop), "arms": [one.as_json() for one in self.arms], "seconds": costs}

    @property
    def parts(self) -> tuple[str, ...]:
        """See ``Policy``."""
        return tuple(dict.fromkeys(one.part for one in self.arms if one.part))

    @property
    def shared_store(self) -> str:
        """See ``LearnsAcrossRequests``."""
        return "tokens per second of each configuration" if self.scope == "run" else ""

    def forget(self) -> None:
        """See ``LearnsAcrossRequests``."""
        self.shared.age(0.0)

    def alone(self) -> Bandit:
        """See ``Policy``."""
        return replace(self, scope="request", shared=Pulls.none(len(self.arms)))

    def init(self, request: Request) -> Pulls:
        """See ``Policy``."""
        return Pulls.none(len(self.arms))

    def decide(self, batch: Batch, states: Sequence[Pulls]) -> list[Limit]:
        """See ``Policy``. Sequences of one batch that share a past choose different configurations not yet tried."""
        limits, tried = [], np.zeros(len(self.arms))
        for sequence, one in zip(batch.sequences, states, strict=True):
            known = self.shared if self.scope == "run" else one
            steps = known.steps + tried if self.scope == "run" else known.steps
            chosen = self._choose(known, steps, sequence.key)
            tried[chosen] += 1
            limits.append(self.arms[chosen])
        return limits

    def _choose(self, known: Pulls, steps: np.ndarray, key: tuple[int, int, int]) -> int:
        untried = np.flatnonzero(steps <= 0)
        if len(untried):
            return int(untried[0])
        seen = np.maximum(known.steps, 1e-9)
        mean = np.where(known.steps > 0, known.tokens / np.maximum(known.cost, 1e-9), 1.0)
        if self.rule == "ucb":
            total = max(float(steps.sum()), math.e)
            return int(np.argmax(mean + self.exploration * np.sqrt(math.log(total) / steps)))
        spread = np.sqrt(np.maximum(known.squares / seen - mean**2, self.exploration**2) / steps)
        noise = np.random.default_rng([number % 2**63 for number in key]).standard_normal(len(mean))
        return int(np.argmax(mean + spread * noise))

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See ``Policy``."""
        if self.memory < 1:
            for own in [self.shared] if self.scope == "run" else [one.state for one in outcomes]:
                own.age(self.memory)
        for one in outcomes:
            own, arm = self.shared if self.scope == "run" else one.state, self.arms.index(one.limit)
            costs, live = self.costs[one.limit.part], one.live if self.scope == "run" else 1
            cost, tokens = costs.of(one.drafted, live) / costs.of(0, live), one.accepted + 1
            own.steps[arm] += 1
            own.tokens[arm] += tokens
            own.cost[arm] += cost
            own.squares[arm] += (tokens / cost) ** 2


def _list(name: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list, not {brief(value)}")
    return list(value)
