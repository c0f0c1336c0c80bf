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
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.propose.stop_rules import Gain, RuleName, described, rule_of
from spec_lab.propose.trees import MAX_DEPTH, TreeDepth

Scope = Literal["request", "run"]
"""Requests that a policy learns from: each from its own past, or from that of all requests of the run."""

SHARE = 0.01
"""Share of the time that drafts deeper than the best depth may take, once the wait between them has grown."""

FIRST_WAIT, REQUEST_WAIT, LONGEST_WAIT = 1 / 8, 1 / 2, 4.0
"""Waits before such a draft, in units of the wait that ``SHARE`` allows: the first one of a run and after the best
depth has changed, the longest one after a request begins, and the longest one. Each wait is twice the one before."""

FURTHER = 1.25
"""Such a draft is as deep as its seconds beyond the best depth are at most this multiple of those of one level: where
the first row costs most, one level alone never pays."""

GRAIN = 128
"""Tokens of context after which a decision is weighed again, since steps take longer."""


@dataclass
class Trial:
    """When the next draft deeper than the best depth is tried, and what was decided last.

    Args:
        depth: the best one, as decided last; None: nothing was decided.
        current: whether nothing was learned since.
        situation: sequences and context (in units of ``GRAIN``) of that decision.
        waited: steps since the last trial.
        wait: steps to the next, in units of the wait that ``SHARE`` allows.
        at_once: whether the next one does not wait, since the last one paid.
        levels: below the best depth that are tried: doubled after each trial that paid.
    """

    depth: int | None = None
    current: bool = False
    situation: tuple[int, int] = (0, 0)
    waited: int = 0
    wait: float = FIRST_WAIT
    at_once: bool = False
    levels: int = 1

    def ended(self, paid: bool) -> None:
        """Wait for twice as long; or try twice as many levels at once, if the trial paid."""
        self.waited, self.at_once = 0, paid
        if paid:
            self.levels *= 2
        else:
            self.wait, self.levels = min(2 * self.wait, LONGEST_WAIT), 1

    def shorten(self, wait: float) -> None:
        """Decide again, and wait no longer than this."""
        self.current, self.wait = False, min(self.wait, wait)


@dataclass
class Levels:
    """Moving averages of what becomes of each level that may be drafted.

    Args:
        trials, hits: ``[D]`` steps whose path had reached the level above, and those in which it reached this one.
        begun, drawn: ``[D]`` steps that had drafted the level above, and those that drafted this one.
        trial: of a depth beyond the best one.
    """

    trials: list[float]
    hits: list[float]
    begun: list[float]
    drawn: list[float]
    trial: Trial = field(default_factory=Trial)

    @staticmethod
    def none(depth: int) -> Levels:
        """Nothing known."""
        return Levels([0.0] * depth, [0.0] * depth, [0.0] * depth, [0.0] * depth)

    def clear(self) -> None:
        """Know nothing again."""
        self.age(0.0, range(len(self.trials)))
        self.trial = Trial()

    def age(self, memory: float, levels: range) -> None:
        """Let what is known of some levels count less."""
        for counts in (self.trials, self.hits, self.begun, self.drawn):
            for level in levels:
                counts[level] *= memory

    def add(self, outcome: DraftOutcome) -> None:
        """Count an outcome."""
        for level in range(
            len(self.trials) if outcome.limit.depth is None else min(outcome.limit.depth, len(self.trials))
        ):
            if outcome.accepted >= level:
                self.trials[level] += 1
                self.hits[level] += outcome.accepted > level
            if outcome.drafted >= level:
                self.begun[level] += 1
                self.drawn[level] += outcome.drafted > level

    def estimates(self, prior: Sequence[tuple[float, float]], weight: float) -> list[tuple[float, float]]:
        """For each level the probabilities that a path goes on to it, and that it is drafted.

        Args:
            prior: for each level; a single one: the first level's, and each further level starts from the one above.
            weight: of the prior, in steps.
        """
        estimates: list[tuple[float, float]] = []
        for level, (trials, hits, begun, drawn) in enumerate(
            zip(self.trials, self.hits, self.begun, self.drawn, strict=True)
        ):
            reach, draft = prior[level] if len(prior) > 1 else (estimates[-1] if estimates else prior[0])
            estimates.append(((hits + weight * reach) / (trials + weight), (drawn + weight * draft) / (begun + weight)))
        return estimates


@dataclass(frozen=True, eq=False)
class Goodput(Policy):
    """One depth for the whole batch: that of the most expected tokens per second. 0 is a choice as well.

    Source: SmartSpec/TurboSpec (2406.14066, section 4): the maximum over k of the batch's expected tokens over the
    predicted seconds of a step. Here acceptance is estimated for each level, since later levels of a draft are accepted
    less often; a sequence's estimates begin with those of the run and move to its own; and seconds are those measured
    for each depth and context. What was seen long ago counts less, of the levels that are tried.

    Levels below the best depth (all, where drafting nothing is best) are tried again after a wait that doubles each
    time (``Trial``), one level deeper (``FURTHER``), in one sequence. A trial pays if it emits more tokens per second
    than the best depth can. Then one twice as deep follows at once, and what was known of deeper levels counts half. A
    look-up that finds nothing is no trial: the next step tries again. All this follows from texts and outcomes, so that
    drafts stay exact.

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
        """See ``Policy``. One rejection outweighs the prior, so that the depth changes within a toy's few steps."""
        return replace(
            self, scope="request", costs=toys.COSTS, depth=toys.DEPTH, shared=Levels.none(toys.DEPTH), prior=0.7,
            weight=0.5, threshold=0.0 if self.stop is None else toys.threshold(self.stop),
        )  # fmt: skip

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
        limits = [Limit(depth, self.threshold)] * len(states)
        if tried > depth:
            limits[0] = Limit(tried, self.threshold)
        return limits

    def _decided(self, known: Levels, states: Sequence[Levels], context: int) -> tuple[int, int]:
        """Return the best depth for these sequences, and a deeper one where it is to be tried now; 0 for none."""
        trial, situation = known.trial, (len(states), context // GRAIN)
        if trial.depth is None or not trial.current or trial.situation != situation:
            depth = self.best(states, context)
            if trial.depth not in (None, depth):
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
        wait = trial.wait * max(0.0, seconds[deeper] / seconds[depth] - 1) / SHARE
        return depth, deeper if trial.at_once or trial.waited >= wait else 0

    def _seconds(self, live: int, grains: int) -> list[float]:
        """Return the seconds of a step by depth; computed once for each situation."""
        if (live, grains) not in self._table:
            costs = [self.costs.of(level, live, grains * GRAIN) for level in range(self.depth + 1)]
            self._table[live, grains] = costs
        return self._table[live, grains]

    def best(self, states: Sequence[Levels], context: int = 0) -> int:
        """The depth with the most expected tokens per second for these sequences; the smallest of equal ones."""
        run = self.shared.estimates([(self.prior, 1.0)], self.weight)
        live, best, best_rate = len(states), 0, 0.0
        seconds = self._seconds(live, context // GRAIN)
        each = [state.estimates(run, self.weight) for state in states]
        paths, drafts = [1.0] * live, [1.0] * live
        tokens, spent = float(live), seconds[0]
        for depth in range(self.depth + 1):
            if depth:
                paths = [path * levels[depth - 1][0] for path, levels in zip(paths, each, strict=True)]
                drafts = [draft * levels[depth - 1][1] for draft, levels in zip(drafts, each, strict=True)]
                tokens += sum(paths)
                spent += max(0.0, seconds[depth] - seconds[depth - 1]) * sum(drafts) / live
            if tokens / spent > best_rate * (1 + 1e-9):
                best, best_rate = depth, tokens / spent
        return best

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See ``Policy``."""
        if self.scope == "request":
            for outcome in outcomes:
                self._learn(outcome.state, [outcome])
            return
        self._learn(self.shared, outcomes)
        for outcome in outcomes:
            if tried := self._tried(outcome):
                outcome.state.age(self.memory, range(tried))
                outcome.state.add(outcome)

    def _tried(self, outcome: DraftOutcome) -> int:
        """Return the levels that might be drafted."""
        return self.depth if outcome.limit.depth is None else min(outcome.limit.depth, self.depth)

    def _learn(self, known: Levels, outcomes: Sequence[DraftOutcome]) -> None:
        """Count the outcomes of a step, and note whether it was a trial."""
        trial = known.trial
        trial.waited += 1
        tried = max(map(self._tried, outcomes))
        if not tried:
            return
        known.age(self.memory, range(tried))
        for outcome in outcomes:
            depth = self.depth if trial.depth is None else trial.depth
            # A rule may end a deeper draft before it is deeper; that is a trial all the same.
            if self._tried(outcome) > depth and (outcome.drafted > depth or self.stop is not None):
                seconds = self._seconds(*trial.situation)
                paid = (outcome.accepted + 1) * seconds[depth] > (depth + 1) * seconds[max(depth, outcome.drafted)]
                paid = paid and outcome.accepted > depth
                trial.ended(paid)
                if paid:
                    for levels in {id(known): known, id(outcome.state): outcome.state}.values():
                        levels.age(0.5, range(depth, self.depth))
            known.add(outcome)
        trial.current = False


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
