"""A budget of verified rows, shared by all sequences of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Unpack

import numpy as np
from torch import Tensor

from spec_lab.core.draft import DETERMINISTIC, Draft
from spec_lab.core.limit import Limit
from spec_lab.core.options import Count, Whole, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy import toys
from spec_lab.policy.adaptive import check_admission
from spec_lab.policy.admission import largest, survivals
from spec_lab.policy.budget_state import FIRST_WAIT, LONGEST_WAIT, BudgetState, SequenceDraft
from spec_lab.policy.confidence import ConfidenceName, OnlineConfidence, largest_probability, margin
from spec_lab.policy.costs import DraftCosts, Timing, TimingOptions, draft_costs
from spec_lab.policy.depths import RowsOfEach
from spec_lab.policy.goodput import GRAIN, Scope
from spec_lab.policy.policy import DraftOutcome, Policy
from spec_lab.runners.graphs import padded


@dataclass(frozen=True, eq=False)
class BatchBudget(Policy):
    """Verify the Q rows of all drafts of a step that are the likeliest to be accepted.

    The survival of a node is the product of confidences along its path, s = c_1 c_2 .. c_t: the probability that it is
    accepted. B sequences with the Q largest survivals emit B + sum s tokens; Q has the largest (B + sum s) / cost(Q).
    cost(Q) is measured: seconds of a step that drafts everything and verifies Q rows, by batch size and context; a
    staircase where the target pads rows (``target.graphs``). s falls along a path, so the admitted rows are prefixes of
    paths. Where B / seconds of a step without drafts is larger, nothing is drafted; drafts are tried again after waits
    that double.

    Sources: TETRIS (2502.15197), DSpark (2607.05147), vLLM's adaptive verification (#52228, #52992).

    **Exact are rules that grow the admitted forest row by row: the next row, or the end, follows from the tokens of
    admitted rows and from earlier steps.** Proof: let V(x) be the expected value of any function of a sequence's final
    output, given that its draft is x and ends there. Token and block verification are lossless for every length, so V
    is a martingale: V(x) = E[V(x a)] for a drawn from q(. | x). Verdicts of different sequences are independent given
    their drafts, so the product of their V is a martingale in each row that is added, whichever sequence it belongs to;
    a choice that follows from admitted tokens does not change its mean. So outputs of all sequences together have the
    product of the target's distributions. Here:

    - a confidence reads the row that a token is drawn from (its logits, its hidden state), so the survival of a node is
      known before its token is drawn;
    - Q follows from survivals of *earlier* steps: the last draft of each sequence, or of another one before its first;
    - rows are ranked by this step's survivals over all sequences. Whether a row is admitted depends on rows of larger
      survival, which are admitted before it; a sequence's later rows never displace its earlier ones;
    - siblings that were sampled below one parent are admitted together: their survivals count the rank, not the token;
    - which rows there are to choose from follows from admitted rows as well: a node has children, or none, for what is
      known of its own path. Trees of sampled tokens that grow best first are refused (``Proposer.why_not_admitted``):
      whether a row B has children follows from the token drawn at a row A, and children of B that exist can displace A.

    Not exact (a total variation of up to 0.24 and 0.23 with 3 tokens and chains of 2): a survival with the probability
    of the *drawn* token, since a token is then left out because of its value; a Q from *this* step's survivals where
    costs are a staircase, since whether the first row is verified then depends on the second one's survival, and so on
    the token drawn at the first. With costs that grow by the same amount for each row that Q is the first at which one
    more row does not pay, which is exact again.

    Args:
        costs: measured: level 0 is a step without a draft, level k one that drafts everything and verifies k rows of
            each sequence.
        model: of acceptance by margin, with ``confidence`` "margin".
        confidence: "head" (the drafter's own), "margin" or "q" (the largest draft probability of a row).
        pads: whether the target pads rows, so that costs are a staircase.
        start: survivals that are assumed before the first draft; empty: all rows are verified then.
        scope: "request": each sequence has a budget of its own, from its own past.
        shared: what requests share.
    """

    costs: DraftCosts
    model: OnlineConfidence
    confidence: ConfidenceName = "margin"
    pads: bool = False
    start: tuple[float, ...] = ()
    shared: BudgetState = field(init=False)
    _table: dict[tuple[int, int], np.ndarray] = field(init=False, repr=False, default_factory=dict)
    name: str = "batch_budget"
    scope: Scope = "run"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", BudgetState(self.model.fresh()))

    @staticmethod
    @checked
    def load(
        target: Target,
        proposer: Proposer,
        confidence: ConfidenceName | None = None,
        refit_steps: Count | None = None,
        warm_up: Annotated[int, Whole(0)] | None = None,
        scope: Scope = "run",
        **timing: Unpack[TimingOptions],
    ) -> BatchBudget:
        """Check the options, and measure or read the costs.

        Args:
            target: of the run.
            proposer: of the run.
            confidence: probability that a drafted token is accepted: head (the drafter's confidence head), margin (a
                model of the margin of the two largest draft logits, learned in the run) or q (the largest draft
                probability); None: head where the drafter has one, else margin.
            refit_steps: of confidence=margin, steps between two fits of its model (vLLM: 100); None: 16.
            warm_up: of confidence=margin, fits of the first depth's model, each with 50 rows at least, before the model
                is used; every row is verified until then (vLLM: 3); None: 2.
            scope: run: one budget for the batch; request: one for each sequence, from its own past.
            timing: see the class.

        Raises:
            ValueError: a wrong option, or a proposer without confidences; names it.
        """
        chosen: ConfidenceName = confidence or ("head" if proposer.predicts else "margin")
        if chosen == "head" and not proposer.predicts:
            raise WrongOption(f"confidence=head: proposer '{proposer.name}' has no confidence head: set margin or q")
        if chosen != "head" and (proposer.why_not_stopped is None or proposer.why_not_stopped):
            why = proposer.why_not_stopped or (
                f"proposer '{proposer.name}' states no draft distribution while it drafts: choose policy=goodput, or a "
                "proposer that grows trees token by token, such as draft_chain or eagle"
            )
            raise WrongOption(f"confidence={chosen} reads the rows that tokens are drawn from, but {why}")
        check_admission(proposer, "batch_budget")
        for option, value in (("refit_steps", refit_steps), ("warm_up", warm_up)):
            if chosen != "margin" and value is not None:
                raise WrongOption(
                    f"{option}={value} is of the model of confidence=margin, and confidence={chosen} has none: set "
                    f"{option} to null"
                )
        measure = MEASURES[chosen]
        costs = draft_costs(
            target, proposer, max(1, proposer.nodes), Timing(**timing), policy=lambda k: RowsOfEach(k, measure)
        )
        pads = target.lm.facts.get("graphs") is True
        model = OnlineConfidence(16 if refit_steps is None else refit_steps, 2 if warm_up is None else warm_up)
        return BatchBudget(costs, model, chosen, pads, scope=scope)

    @property
    def shared_store(self) -> str:
        """See ``Policy``."""
        return "rows verified in a step, confidences by depth" if self.scope == "run" else ""

    @property
    def measure(self) -> Callable[[Tensor], Tensor] | None:
        """See ``Policy``."""
        return MEASURES[self.confidence]

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        model = {}
        if self.confidence == "margin":
            model = {"refit_steps": self.model.refit_steps, "warm_up": self.model.warm_up}
        return {"confidence": self.confidence, **model, "scope": self.scope, "pads": self.pads, **self.costs.facts}

    def forget(self) -> None:
        """See ``Policy``."""
        object.__setattr__(self, "shared", BudgetState(self.model.fresh()))

    def toy(self) -> BatchBudget:
        """See ``Policy``. Costs are a staircase, a budget is known from the first step on, and each step refits."""
        model = OnlineConfidence(1, 0, fewest=1, first=(1.0, -0.5))
        return replace(self, costs=toys.STAIRCASE, model=model, pads=False, start=(0.9, 0.6, 0.3), scope="request")

    def toy_of_batch(self) -> BatchBudget:
        """See ``Policy``."""
        return replace(self.toy(), scope="run")

    def init(self, request: Request) -> SequenceDraft:
        """See ``Policy``."""
        return SequenceDraft(BudgetState(self.model.fresh()))

    def decide(self, batch: Batch, states: Sequence[SequenceDraft]) -> list[Limit]:
        """Choose the number of rows, from earlier steps only. See ``Policy``."""
        contexts = [len(sequence.tokens) for sequence in batch.sequences]
        if self.scope == "run":
            return [self._decided(self.shared, states, max(contexts))] * len(states)
        return [self._decided(state.alone, [state], at) for state, at in zip(states, contexts, strict=True)]

    def _decided(self, known: BudgetState, states: Sequence[SequenceDraft], context: int) -> Limit:
        """Choose the number of rows of these sequences together, and whether anything is drafted."""
        live, known.rows = len(states), None
        first = np.array(self.start) if known.survival is None else known.survival
        earlier = [first if state.survival is None else state.survival for state in states]
        ready = self.confidence != "margin" or known.model.ready
        if not ready or not all(map(len, earlier)):
            return Limit()
        rows, rate = self.best(earlier, context)
        if rate <= live / self.costs.of(0, live, context):
            known.waited += 1
            if known.waited < known.wait:
                return Limit(0)
            known.wait, rows = min(2 * known.wait, LONGEST_WAIT), max(rows, live)
        else:
            known.wait = FIRST_WAIT
        known.waited, known.rows = 0, rows
        return Limit()

    def best(self, survival: Sequence[np.ndarray], context: int = 0) -> tuple[int, float]:
        """Return Q of the most expected tokens per second, and these; the smallest of equal ones.

        Args:
            survival: ``[B][n]`` of the nodes of each sequence.
            context: of the longest one.
        """
        live, every = len(survival), np.concatenate(survival)
        order = np.argsort(-every, kind="stable")
        tokens = live + np.append(0.0, every[order].cumsum())
        rows = np.arange(len(tokens))
        if self.pads:  # every tree has as many rows as the largest one
            in_tree = np.concatenate([np.argsort(np.argsort(-of_tree, kind="stable")) + 1 for of_tree in survival])
            rows[1:] = live * np.maximum.accumulate(in_tree[order])
        rates = tokens / self._seconds(live, context // GRAIN, int(rows.max()) + 1)[rows]
        best = int(rates.argmax())
        return best, float(rates[best])

    def _seconds(self, live: int, grains: int, count: int) -> np.ndarray:
        """Return ``seconds`` of 0 to at least ``count`` - 1 rows; each computed once for each situation."""
        table = self._table.get((live, grains), np.empty(0))
        if len(table) < count:
            further = range(len(table), max(count, 2 * len(table)))
            table = np.append(table, [self.seconds(rows, live, grains * GRAIN) for rows in further])
            self._table[live, grains] = table
        return table

    @cached_property
    def _too_slow(self) -> bool:
        """Whether no draft is worth its time, so that no step with one was timed (``step_costs.MIN_RATE``)."""
        return any(max(timed) == 0 for of_context in self.costs.seconds.values() for timed in of_context.values())

    def seconds(self, rows: int, live: int, context: int = 0) -> float:
        """Return cost(Q): seconds of a step that drafts everything and verifies ``rows`` rows besides the roots."""
        if self._too_slow:
            return math.inf
        each = rows / live
        if self.pads:  # a graph has as many rows for every sequence
            each = float(padded(1 + math.ceil(each)) - 1)
        first_row = self.costs.of(1, live, context)
        if each >= 1:
            return self.costs.of(each, live, context)
        row = self.costs.of(2, live, context) - first_row  # at most what the first row and the draft cost together
        return first_row - (1 - each) * max(0.0, min(row, first_row - self.costs.of(0, live, context)))

    def admit(self, batch: Batch, states: Sequence[SequenceDraft], draft: Draft) -> np.ndarray | None:
        """Admit the rows of the largest survivals. See ``Policy``."""
        shape = draft.shape
        for state in states:
            state.expanded = np.empty(0, dtype=bool)
        if not shape.nodes:
            return None
        survival, sampled = survivals(self.confidences(batch, states, draft), shape), draft.codes != DETERMINISTIC
        budgets = [(self.shared, shape.trees)]
        if self.scope == "request":
            budgets = [(state.alone, [tree]) for state, tree in zip(states, shape.trees, strict=True)]
        admitted = np.ones(shape.rows, dtype=bool)
        for known, trees in budgets:
            if (count := self.budget(known, [survival[tree[1:]] for tree in trees])) is not None:
                rows = np.concatenate(trees)
                admitted[rows] = largest(shape, sampled, survival, rows, count)
        expanded = np.zeros(shape.rows, dtype=bool)
        expanded[shape.parent[admitted[shape.roots :]]] = True
        first = np.append(np.ones(shape.roots, dtype=bool), shape.rank == 0)
        for state, tree in zip(states, shape.trees, strict=True):
            if len(tree) > 1:
                state.survival = self._of(state).survival = survival[tree[1:]]
                kept = tree[admitted[tree]]
                state.depth, state.first, state.expanded = shape.depth[kept], first[kept], expanded[kept]
                state.measured = kept * np.nan if draft.measured is None else draft.measured[kept]
        return admitted

    def _of(self, state: SequenceDraft) -> BudgetState:
        """Return what a sequence's budget and confidences are learned from."""
        return self.shared if self.scope == "run" else state.alone

    def budget(self, known: BudgetState, survival: Sequence[np.ndarray]) -> int | None:
        """Return the number of rows of this step, which ``decide`` has chosen; None for all.

        Args:
            known: of the sequences that share it.
            survival: of this step, as in ``best``. It must not decide; a mutant overrides this method to let it.
        """
        return known.rows

    def confidences(self, batch: Batch, states: Sequence[SequenceDraft], draft: Draft) -> np.ndarray:  # [M]
        """Return the probability that each node is accepted if its parent is, told from the row of its parent."""
        above = draft.shape.parent
        if self.confidence == "head" and draft.predict is not None:
            (predicted,) = batch.read(draft.predict(draft).double())
            return np.asarray(predicted)
        if draft.measured is None:
            raise ValueError(
                f"confidence={self.confidence} reads the rows that tokens are drawn from, and the draft states nothing "
                "of them: a proposer draws by Batch.measure and states Draft.measured, or says why not in "
                "why_not_admitted"
            )
        level, root, confidence = draft.shape.depth[above], draft.shape.root[above], draft.measured[above]
        if self.confidence != "margin":
            return confidence
        for known, rows in self._nodes(states, root):
            confidence[rows] = known.model(confidence[rows], level[rows])
        return confidence

    def _nodes(self, states: Sequence[SequenceDraft], root: np.ndarray) -> list[tuple[BudgetState, np.ndarray]]:
        """Return for each model the nodes that it is asked about, given the root above each."""
        if self.scope == "run":
            return [(self.shared, np.arange(len(root)))]
        return [(state.alone, np.flatnonzero(root == tree)) for tree, state in enumerate(states)]

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """See ``Policy``. The first child of an accepted row counts if it was verified; below the last row of a
        sequence that ended nothing was rejected.
        """
        drafted = [outcome for outcome in outcomes if outcome.nodes] if self.confidence == "margin" else []
        for outcome in drafted:
            state: SequenceDraft = outcome.state
            path = [0, *(node + 1 for node in outcome.path)]
            reached = zip(path, [*path[1:], None], strict=True)
            for row, below in list(reached)[: -1 if outcome.ended else None]:
                if row < len(state.expanded) and state.expanded[row] and not math.isnan(state.measured[row]):
                    accepted = below is not None and bool(state.first[below])
                    self._of(state).model.learn(int(state.depth[row]), float(state.measured[row]), accepted)
        for model in {id(known := self._of(outcome.state)): known.model for outcome in drafted}.values():
            model.step()


MEASURES: dict[ConfidenceName, Callable[[Tensor], Tensor] | None] = {
    "head": None,
    "margin": margin,
    "q": largest_probability,
}
"""The features of rows that confidences read."""
