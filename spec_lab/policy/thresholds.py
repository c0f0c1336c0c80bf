"""Policies that stop drafts by their probabilities: fixed thresholds, and ones that follow the acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import Number, Share, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy import toys
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.propose.stop_rules import AdaEdl, Confidence, RuleName, Svip, described
from spec_lab.propose.trees import TreeDepth

GOAL, STEP, KEEP, MEMORY = 0.9, 0.01, 0.9, 0.5
"""Constants of the controller: the acceptance it aims at, the step of the threshold, and the weights of the past."""


@dataclass
class Controlled:
    """A sequence's threshold, and the moving average of its acceptance (None before the first draft)."""

    threshold: float
    acceptance: float | None = None


@dataclass(frozen=True)
class Threshold(Policy):
    """A rule with a threshold, which a controller may move so that nine of ten drafted tokens are accepted.

    Sources: the rules, see ``propose.stop_rules``; the controller Draft&Verify (2309.08168, equation 4), which AdaEDL
    (2410.18351) takes over: m <- 0.5 m + 0.5 accepted / drafted; the threshold moves a tenth of the way to itself
    + 0.01 where m < 0.9, else - 0.01.

    Args:
        stop: the rule.
        threshold: at which it stops; with a controller the first one.
        adapt: whether the controller moves it.
        depth: the largest depth; None: the proposer's.
    """

    stop: StopRule
    threshold: float
    adapt: bool = False
    depth: int | None = None
    name: str = "threshold"

    @staticmethod
    @checked
    def load(
        target: Target,
        proposer: Proposer,
        rule: RuleName,
        threshold: Share,
        adapt: bool = False,
        depth: TreeDepth | None = None,
        factor: Annotated[float, Number(0)] | None = None,
    ) -> Threshold:
        """Check the options.

        Args:
            target: of the run.
            proposer: of the run.
            rule: confidence, adaedl or svip.
            threshold: the draft stops where the likeliest token's draft probability (confidence) or the bound of the
                acceptance probability (adaedl) is smaller, or after a token where the term (svip) is larger.
            adapt: whether a controller moves the threshold until nine of ten drafted tokens are accepted.
            depth: largest depth; None: the proposer's.
            factor: of the entropy (in nats) in the bound of adaedl or the term of svip; None: the paper's.

        Raises:
            ValueError: a wrong option; names it.
        """
        if rule == "confidence" and factor is not None:
            raise WrongOption("factor is a factor of the entropy, which rule=confidence does not compute")
        if adapt and rule == "svip":
            raise WrongOption("adapt: the controller raises thresholds to draft less, which a higher one of rule=svip "
                              "does not do: set adapt=false, or rule=adaedl")  # fmt: skip
        given = () if factor is None else (factor,)
        made = Confidence() if rule == "confidence" else AdaEdl(*given) if rule == "adaedl" else Svip(*given)
        return Threshold(made, threshold, adapt, depth, rule)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {**described(self.stop), "threshold": self.threshold, "adapt": self.adapt, "depth": self.depth}

    def init(self, request: Request) -> Controlled:
        """See ``Policy``."""
        return Controlled(self.threshold)

    def decide(self, batch: Batch, states: Sequence[Controlled]) -> list[Limit]:
        """See ``Policy``."""
        return [Limit(self.depth, state.threshold) for state in states]

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Move the thresholds. Where nothing was drafted they fall, so that drafting begins again."""
        if not self.adapt:
            return
        for outcome in outcomes:
            state: Controlled = outcome.state
            if outcome.drafted:
                rate = outcome.accepted / outcome.drafted
                state.acceptance = rate if state.acceptance is None else MEMORY * state.acceptance + (1 - MEMORY) * rate
            more = outcome.drafted and state.acceptance is not None and state.acceptance < GOAL
            aim = state.threshold + (STEP if more else -STEP)
            state.threshold = min(max(0.0, KEEP * state.threshold + (1 - KEEP) * aim), 1.0)

    def toy(self) -> Threshold:
        """See ``Policy``. At a threshold that the draft distributions of toys are on both sides of."""
        return replace(self, threshold=toys.threshold(self.stop), depth=None)
