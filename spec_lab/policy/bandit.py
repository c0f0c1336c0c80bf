"""Bandits: whole configurations compete, and those that brought most tokens per second are chosen more often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from scipy.special import log_ndtr

from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import Number, Share, Whole, WrongOption, checked
from spec_lab.core.randomness import Draws, Key, Purpose
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy import toys
from spec_lab.policy.adaptive import check_pair
from spec_lab.policy.costs import DraftCosts, Timing, TimingOptions, draft_costs
from spec_lab.policy.goodput import Scope
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.propose.stop_rules import RuleName, described, rule_of
from spec_lab.propose.trees import MAX_DEPTH

Rule = Literal["ucb", "thompson"]

MAX_ARMS = 64


@dataclass
class Rewards:
    """Rewards that each configuration has brought, or would have brought.

    Args:
        steps: ``[A]`` observed steps.
        tokens, cost: ``[A]`` sums of emitted tokens and of predicted seconds, relative to a step without a draft.
        tokens2, cost2, product: ``[A]`` sums of their squares and of tokens times cost.
    """

    steps: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray
    tokens2: np.ndarray
    cost2: np.ndarray
    product: np.ndarray

    @staticmethod
    def none(arms: int) -> Rewards:
        """Nothing known."""
        return Rewards(*(np.zeros(arms) for _ in range(6)))

    def age(self, memory: float) -> None:
        """Let what is known count less; 0 forgets it."""
        for sums in (self.steps, self.tokens, self.cost, self.tokens2, self.cost2, self.product):
            sums *= memory

    def add(self, arm: int, tokens: int, cost: float) -> None:
        """Count a step of a configuration."""
        self.steps[arm] += 1
        self.tokens[arm] += tokens
        self.cost[arm] += cost
        self.tokens2[arm] += tokens**2
        self.cost2[arm] += cost**2
        self.product[arm] += tokens * cost

    @property
    def speedup(self) -> np.ndarray:  # [A]
        """Tokens over cost. Every configuration must have a step."""
        return self.tokens / self.cost

    @property
    def deviation(self) -> np.ndarray:  # [A]
        """Standard deviation of a step's reward: of tokens - speedup x cost, over the mean cost (ratio estimator)."""
        rate = self.speedup
        squares = self.tokens2 - 2 * rate * self.product + rate**2 * self.cost2
        return np.sqrt(np.maximum(squares / self.steps, 0.0)) / (self.cost / self.steps)


@dataclass(frozen=True, eq=False)
class Bandit(Policy):
    """Chooses a configuration in each step: for every sequence from its own past, or one for all from the run's past.

    Source: BanditSpec (2505.15141): UCB takes the largest mean + sqrt(c ln t / n) with n the steps of that
    configuration. (The official code divides by the steps of all of them, which explores nothing.) Thompson sampling
    takes the largest draw from normal distributions around the means. The reward is the speed-up: tokens over predicted
    seconds, relative to steps without a draft. A step also tells what every smaller depth would have brought with the
    same threshold and part: its draft is the same down to that depth (side observations, Caron et al., 1210.4839).
    Configurations without an observation are chosen first, the deepest before the others.

    Args:
        arms: the configurations, ``[A]``.
        costs: measured, by part.
        shared: what the run's requests have brought.
        rule: "ucb" or "thompson".
        stop: the rule whose thresholds the configurations name; None for none.
        exploration: the root of c, in units of speed-up; of Thompson sampling the least standard deviation of a reward.
        memory: weight of the past in each further step.
        scope: whose past decides.
    """

    arms: tuple[Limit, ...]
    costs: Mapping[str, DraftCosts]
    shared: Rewards
    rule: Rule = "ucb"
    stop: StopRule | None = None
    exploration: float = 0.5
    memory: float = 1.0
    scope: Scope = "run"
    name: str = "bandit"

    @staticmethod
    @checked
    def load(
        target: Target,
        proposer: Proposer,
        depths: Sequence[Annotated[int, Whole(0, MAX_DEPTH)]],
        thresholds: Sequence[Share] = (),
        rule: Rule = "ucb",
        stop: RuleName | None = None,
        parts: Sequence[str] = (),
        exploration: Annotated[float, Number(0)] = 0.5,
        memory: Share = 1.0,
        scope: Scope = "run",
        **timing: Unpack[TimingOptions],
    ) -> Bandit:
        """Check the options, and measure or read the costs.

        Args:
            target: of the run.
            proposer: of the run.
            depths: the configurations are all combinations of depths, thresholds and parts.
            thresholds: of the rule in stop.
            parts: of proposer=best_of, the parts that compete.
            stop: confidence, adaedl or svip.
            rule: ucb or thompson.
            exploration: weight of what is not known, in units of speed-up: the root of BanditSpec's c.
            memory: weight of the past in each further step.
            scope: whose past decides: each request's own, or the run's.
            timing: see the class.

        Raises:
            ValueError: a wrong option; names it.
        """
        if bool(thresholds) != (stop is not None):
            raise WrongOption("thresholds are those of stop: give both, or neither")
        arms = tuple(Limit(*limit) for limit in product(depths, thresholds or [0.0], parts or [""]))
        if not 2 <= len(arms) <= MAX_ARMS:
            raise WrongOption(f"depths, thresholds and parts: 2 to {MAX_ARMS} combinations, not {len(arms)}")
        if len(set(arms)) < len(arms):
            raise WrongOption("depths, thresholds and parts must not name one configuration twice")
        clock, rule_to_stop = Timing(**timing), rule_of({"rule": stop})
        check_pair(proposer, "bandit", rule_to_stop, list(parts))
        costs = {part: draft_costs(target, proposer, max(depths), clock, part) for part in parts or [""]}
        return Bandit(arms, costs, Rewards.none(len(arms)), rule, rule_to_stop, exploration, memory, scope)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts = {"bandit": self.rule, "exploration": self.exploration, "memory": self.memory, "scope": self.scope}
        costs = {part or "costs": cost.facts["seconds"] for part, cost in self.costs.items()}
        return {**facts, **described(self.stop), "arms": [arm.as_json() for arm in self.arms], "seconds": costs}

    @property
    def parts(self) -> tuple[str, ...]:
        """See ``Policy``."""
        return tuple(dict.fromkeys(arm.part for arm in self.arms if arm.part))

    @property
    def shared_store(self) -> str:
        """See ``Policy``."""
        return "tokens per second of each configuration" if self.scope == "run" else ""

    def forget(self) -> None:
        """See ``Policy``."""
        self.shared.age(0.0)

    def toy(self) -> Bandit:
        """See ``Policy``. Of its configurations the shallowest and the deepest ones, so that there are few outcomes."""
        depths = sorted({_depth(arm) for arm in self.arms})
        arms = toys.limits([arm for arm in self.arms if _depth(arm) in (depths[0], depths[-1])], self.stop)
        costs = dict.fromkeys(self.costs, toys.COSTS)
        return replace(self, scope="request", arms=arms, costs=costs, shared=Rewards.none(len(arms)))

    def toy_of_batch(self) -> Bandit:
        """See ``Policy``."""
        return replace(self.toy(), scope="run")

    def init(self, request: Request) -> Rewards:
        """See ``Policy``."""
        return Rewards.none(len(self.arms))

    def decide(self, batch: Batch, states: Sequence[Rewards]) -> list[Limit]:
        """See ``Policy``."""
        keys = [Key(*sequence.key, Purpose.POLICY) for sequence in batch.sequences]
        if self.scope == "run":  # one for the batch: its steps take as long as the deepest draft
            return [self._choose(self.shared, batch.draws, keys[0])] * len(keys)
        return [self._choose(known, batch.draws, key) for known, key in zip(states, keys, strict=True)]

    def _choose(self, known: Rewards, draws: Draws, key: Key) -> Limit:
        unknown = [arm for arm, steps in zip(self.arms, known.steps, strict=True) if not steps]
        if unknown:
            return max(unknown, key=_depth)
        if self.rule == "ucb":
            time = max(_steps(self.arms, known.steps), math.e)
            index = known.speedup + self.exploration * np.sqrt(math.log(time) / known.steps)
            return self.arms[int(index.argmax())]
        spread = np.maximum(known.deviation, self.exploration) / np.sqrt(known.steps)
        weights = torch.from_numpy(largest(known.speedup, spread))
        return self.arms[int(draws.pick(weights[None], [key])[0])]

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See ``Policy``."""
        run = self.scope == "run"
        if self.memory < 1:
            for state in [self.shared] if run else [outcome.state for outcome in outcomes]:
                state.age(self.memory)
        for outcome in outcomes:
            costs, of_step = self.costs[outcome.limit.part], (outcome.live if run else 1, outcome.context)
            for index, arm in enumerate(self.arms):
                if replace(arm, depth=outcome.limit.depth) == outcome.limit and _depth(arm) <= _depth(outcome.limit):
                    cost = costs.of(min(outcome.drafted, _depth(arm)), *of_step) / costs.of(0, *of_step)
                    known = self.shared if run else outcome.state
                    known.add(index, min(outcome.accepted, _depth(arm)) + 1, cost)


def largest(mean: np.ndarray, spread: np.ndarray) -> np.ndarray:  # [A] -> [A]
    """Return for each of independent normal variables the probability that it is the largest.

    That of variable i is the integral over x of its density times the other variables' probabilities to be below x.
    """
    # The largest is nowhere else, but with a probability of 1e-9.
    x = np.linspace((mean - 6 * spread).max(), (mean + 6 * spread).max(), 301)[:, None]
    z = (x - mean) / spread
    below = log_ndtr(z)
    log_density = below.sum(1, keepdims=True) - below - z**2 / 2 - np.log(spread)
    weights = np.exp(log_density - log_density.max()).sum(0)
    return np.asarray(weights / weights.sum())


def _depth(arm: Limit) -> int:
    return arm.depth or 0  # the configurations of a bandit name their depth


def _steps(arms: Sequence[Limit], steps: np.ndarray) -> float:
    """The steps of all configurations: with the same threshold and part, the smallest depth has observed every one."""
    largest: dict[Limit, float] = {}
    for arm, count in zip(arms, steps, strict=True):
        group = replace(arm, depth=None)
        largest[group] = max(largest.get(group, 0.0), float(count))
    return sum(largest.values())
