"""Policies that weigh expected tokens against measured seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Unpack

from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import Number, Share, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy import toys
from spec_lab.policy.adaptive import check_pair
from spec_lab.policy.costs import DraftCosts, Timing, TimingOptions, draft_costs
from spec_lab.policy.levels import FIRST_WAIT, LONGEST_WAIT, REQUEST_WAIT, Levels, expected
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.propose.stop_rules import RuleName, described, rule_of
from spec_lab.propose.trees import TreeDepth

Scope = Literal["request", "run"]
"""Requests that a policy learns from: each from its own past, or from that of all requests of the run."""

SHARE = 0.01
"""Share of the time that drafts deeper than the best depth may take, once the wait between them has grown."""

FURTHER = 1.25
"""Such a draft is as deep as its seconds beyond the best depth are at most this multiple of those of one level: where
the first row costs most, one level alone never pays."""

GRAIN = 128
"""Tokens of context after which a decision is weighed again, since steps take longer."""


@dataclass(frozen=True, eq=False)
class Goodput(Policy):
    """One depth for the whole batch: that of the most expected tokens per second. 0 is a choice as well.

    Source: SmartSpec/TurboSpec (2406.14066, section 4): the maximum over k of the batch's expected tokens over the
    predicted seconds of a step. Here acceptance is estimated for each level, since later levels of a draft are accepted
    less often; a sequence's estimates begin with those of the run and move to its own; and seconds are those measured
    for each depth and context. What was seen long ago counts less, of the levels that are tried.

    Levels below the best depth (all, where drafting nothing is best) are tried again after a wait that doubles each
    time (``Trial``), one level deeper (``FURTHER``): in the whole batch, whose sequences tell more together than the
    first of them; where nothing is drafted, in one sequence, since the drafter must first compute the tokens it has
    not seen. A trial pays if its step emits more tokens per second than the best depth would have. Then one twice as
    deep follows at once, and what was known of deeper levels counts half. A look-up that finds nothing is no trial:
    the next step tries again. All this follows from texts and earlier outcomes, so that drafts stay exact.

    Args:
        costs: measured.
        depth: the largest one considered.
        shared: what the run's sequences have shown.
        prior: acceptance of a level of which nothing is known.
        memory: weight of the past in each further step that tries a level.
        weight: of the run's estimates in a sequence's, and of the prior in the run's, in steps.
        scope: "request": each sequence is decided for alone, from its own past.
        stop: a rule that ends drafts before that depth, at the ``threshold``; None for none. Estimates take it into
            account: they count how often each level is drafted.
        share: of the time that trials may take.
    """

    costs: DraftCosts
    depth: int
    shared: Levels
    prior: float = 0.7
    memory: float = 0.99
    weight: float = 4.0
    scope: Scope = "run"
    name: str = "goodput"
    stop: StopRule | None = None
    threshold: float = 0.0
    share: float = SHARE
    _table: dict[tuple[int, int], list[float]] = field(init=False, repr=False, default_factory=dict)

    @staticmethod
    @checked
    def load(
        target: Target,
        proposer: Proposer,
        depth: TreeDepth,
        prior: Share = 0.7,
        memory: Share = 0.99,
        weight: Annotated[float, Number(0.01)] = 4.0,
        scope: Scope = "run",
        stop: RuleName | None = None,
        threshold: Share | None = None,
        **timing: Unpack[TimingOptions],
    ) -> Goodput:
        """Check the options, and measure or read the costs.

        Args:
            target: of the run.
            proposer: of the run.
            depth: largest depth considered; 0 is always considered.
            prior: acceptance of a level of which nothing is known.
            memory: weight of the past in moving averages, for each further step that tries a level.
            weight: of the run's estimates beside a sequence's own, counted in steps.
            scope: run: one depth for the batch; request: each sequence by its own past.
            timing: see the class.
            stop: a rule that ends drafts earlier: confidence, adaedl or svip; None: none.
            threshold: of the rule in stop.

        Raises:
            ValueError: a wrong option; names it.
        """
        if (stop is None) != (threshold is None):
            raise WrongOption("threshold is that of stop: give both, or neither")
        rule, level = rule_of({"rule": stop}), threshold or 0.0
        check_pair(proposer, "goodput", rule, ())
        costs = draft_costs(target, proposer, depth, Timing(**timing))
        return Goodput(costs, depth, Levels.none(depth), prior, memory, weight, scope, stop=rule, threshold=level)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts = {"depth": self.depth, "prior": self.prior, "memory": self.memory, "weight": self.weight}
        if self.stop is not None:
            facts |= {**described(self.stop), "threshold": self.threshold}
        return {**facts, "scope": self.scope, **self.costs.facts}

    @property
    def shared_store(self) -> str:
        """See ``Policy``."""
        return "acceptance by depth" if self.scope == "run" else ""

    def forget(self) -> None:
        """See ``Policy``."""
        self.shared.clear()

    def toy(self) -> Goodput:
        """See ``Policy``. One rejection outweighs the prior, and the first trial comes one step after a depth was given
        up, so that the depth changes within a toy's few steps.
        """
        return replace(
            self, scope="request", costs=toys.COSTS, depth=toys.DEPTH, shared=Levels.none(toys.DEPTH), prior=0.7,
            weight=0.5, share=0.0375, threshold=0.0 if self.stop is None else toys.threshold(self.stop),
        )  # fmt: skip

    def toy_of_batch(self) -> Goodput:
        """See ``Policy``. The wait for a trial of both requests is that of ``toy`` for one."""
        toy = self.toy()
        return replace(toy, scope="run", share=2 * toy.share)

    def init(self, request: Request) -> Levels:
        """See ``Policy``."""
        self.shared.trial.shorten(REQUEST_WAIT)
        return Levels.none(self.depth)

    def decide(self, batch: Batch, states: Sequence[Levels]) -> list[Limit]:
        """See ``Policy``."""
        contexts = [len(sequence.tokens) for sequence in batch.sequences]
        if self.scope == "request":
            depths = [self._decided(state, [state], context) for state, context in zip(states, contexts, strict=True)]
            return [Limit(max(each), self.threshold) for each in depths]
        depth, tried = self._decided(self.shared, states, max(contexts))
        if depth and tried:  # one sequence is not like the others, and its forward of the drafter hardly costs less
            depth = tried
        limits = [Limit(depth, self.threshold)] * len(states)
        if tried > depth:
            limits[0] = Limit(tried, self.threshold)
        return limits

    def _decided(self, known: Levels, states: Sequence[Levels], context: int) -> tuple[int, int]:
        """Return the best depth for these sequences, and a deeper one where it is to be tried now; 0 for none."""
        trial, situation = known.trial, (len(states), context // GRAIN)
        if trial.depth is None or not trial.current or trial.situation != situation:
            depth = self.best(states, context)
            # Where the number of sequences changed the best depth, what is known of deeper levels is as good as before.
            if trial.depth not in (None, depth) and trial.situation[0] == len(states):
                trial.shorten(FIRST_WAIT)
            trial.depth, trial.current, trial.situation = depth, True, situation
        depth = trial.depth
        deeper = min(self.depth, depth + trial.levels)
        if deeper == depth:
            return depth, 0
        seconds = self._seconds(*situation)
        limit = seconds[depth] + FURTHER * (seconds[deeper] - seconds[depth])
        while deeper < self.depth and seconds[deeper + 1] <= limit:
            deeper += 1
        units = min(trial.wait * len(states), LONGEST_WAIT) if depth else trial.wait
        wait = units * max(0.0, seconds[deeper] / seconds[depth] - 1) / self.share
        return depth, deeper if trial.at_once or trial.waited >= wait else 0

    def _seconds(self, live: int, grains: int) -> list[float]:
        """Return the seconds of a step by depth; computed once for each situation."""
        if (live, grains) not in self._table:
            costs = [self.costs.of(level, live, grains * GRAIN) for level in range(self.depth + 1)]
            self._table[live, grains] = costs
        return self._table[live, grains]

    def best(self, states: Sequence[Levels], context: int = 0) -> int:
        """The depth with the most expected tokens per second for these sequences; the smallest of equal ones."""
        live, run = len(states), self.shared.estimates(self.prior, self.weight)
        seconds = self._seconds(live, context // GRAIN)
        tokens, spent = float(live), seconds[0]
        best, best_rate = 0, tokens / spent
        for depth, (reached, drafted) in enumerate(expected(states, run, self.weight), 1):
            tokens += reached
            spent += max(0.0, seconds[depth] - seconds[depth - 1]) * drafted / live
            if tokens / spent > best_rate * (1 + 1e-9):
                best, best_rate = depth, tokens / spent
        return best

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See ``Policy``."""
        tried = [self._tried(outcome) for outcome in outcomes]
        if self.scope == "request":
            for outcome, levels in zip(outcomes, tried, strict=True):
                self._learn(outcome.state, [outcome], [levels])
            return
        self._learn(self.shared, outcomes, tried)
        for outcome, levels in zip(outcomes, tried, strict=True):
            if levels:
                outcome.state.age(self.memory, range(levels))
                outcome.state.add(outcome, levels)

    def _tried(self, outcome: DraftOutcome) -> int:
        """Return the levels that might be drafted."""
        return self.depth if outcome.limit.depth is None else min(outcome.limit.depth, self.depth)

    def _learn(self, known: Levels, outcomes: Sequence[DraftOutcome], tried: Sequence[int]) -> None:
        """Count the outcomes of a step, whose drafts might have ``tried`` levels, and note whether it was a trial."""
        trial, deepest = known.trial, max(tried)
        trial.waited += 1
        if not deepest:
            return
        known.age(self.memory, range(deepest))
        depth = self.depth if trial.depth is None else trial.depth
        # A rule may end a deeper draft before it is deeper; that is a trial all the same.
        if deepest > depth and (self.stop is not None or any(outcome.drafted > depth for outcome in outcomes)):
            paid = self._paid(outcomes, depth, self._seconds(*trial.situation))
            trial.ended(paid)
            if paid:
                deeper = {id(outcome.state): outcome.state for outcome in outcomes if outcome.accepted > depth}
                for state in {id(known): known, **deeper}.values():
                    state.age(0.5, range(depth, self.depth))
        for outcome, levels in zip(outcomes, tried, strict=True):
            known.add(outcome, levels)
        trial.current = False

    @staticmethod
    def _paid(outcomes: Sequence[DraftOutcome], depth: int, seconds: Sequence[float]) -> bool:
        """Return whether a step emitted more tokens per second than the same drafts cut at a depth would have.

        Args:
            outcomes: of the step. A draft of fewer levels than others have costs as much less.
            depth: at which drafts would have been cut.
            seconds: ``[D + 1]`` of a step of these sequences, by the levels of each.
        """
        deepest = len(seconds) - 1  # forced tokens of a constraint may make a draft deeper
        tokens = sum(outcome.accepted + 1 for outcome in outcomes)
        spent = sum(seconds[min(outcome.drafted, deepest)] for outcome in outcomes)
        fewer_tokens = sum(min(outcome.accepted, depth) + 1 for outcome in outcomes)
        less_spent = sum(seconds[min(outcome.drafted, depth)] for outcome in outcomes)
        return tokens > fewer_tokens and tokens * less_spent > fewer_tokens * spent
