"""In each step one of several proposers drafts for a sequence: the one that promises most tokens for its time.

Choosing by what was known before anything was drawn is exact (SAM-Decoding 2411.10666 and SuffixDecoding 2411.04975
choose between a suffix match and a model by the match's score). A part that can tell the expected accepted tokens of
its next draft is asked (``Proposer.scores``); of others it is the moving average of what was accepted in their drafts.

Where the chosen part drafts nothing, as a look-up without a match, the next one drafts in the same step. That is exact
as well: whether a draft is empty follows from the past, since no part drops a token that it has sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from spec_lab.core.draft import Draft
from spec_lab.core.options import Number, Share, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation, Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.hybrid import Hybrid, PartStates, check_parts, join, note
from spec_lab.propose.trees import Choices
from spec_lab.runners.runner import DraftRunner

RECOVERY = 0.01
"""In a step in which another part drafts, an expectation below ``start`` moves this share of the way back to it, so
that a part that was bad for some time is tried again."""


@dataclass
class Record:
    """Accepted tokens of a sequence's parts so far.

    Args:
        accepted: for each part the moving average of accepted tokens in steps in which it drafted.
        chosen: the part that drafted in this step, or the first one that was asked where none drafted anything; None
            where nothing is to be learned.
    """

    accepted: list[float]
    chosen: int | None = None


@dataclass(frozen=True, eq=False)
class BestOf(Hybrid):
    """Lets the part draft that promises most: the maximum of (1 + expected accepted tokens) / (1 + cost).

    Where it drafts nothing, the one that promises most of the others does, and so on. Of the parts that sample only the
    first is asked in a step: a second one would draw with the same random numbers. Where nothing was drafted, the part
    that was asked first has 0 accepted tokens.

    Args:
        parts: the proposers.
        costs: for each, seconds that a step with its draft takes in addition, relative to an autoregressive step.
        start: accepted tokens that a part without scores is expected to have before it has drafted.
        memory: weight of the past in the moving average, from 0 to 1.
    """

    parts: Mapping[str, Proposer]
    costs: tuple[float, ...]
    start: float
    memory: float
    name: str = "best_of"

    @staticmethod
    @checked
    def load(
        target: Target,
        parts: Mapping[str, Proposer],
        costs: Mapping[str, Annotated[float, Number(0)]] | None = None,
        start: Annotated[float, Number(0)] = 2.0,
        memory: Share = 0.8,
    ) -> BestOf:
        """Return the hybrid of proposers that are loaded already.

        Args:
            target: of all of them.
            parts: by name; the first of several equally good ones drafts.
            costs: extra time of a step with a part's draft, in autoregressive steps, as {heads: 0.3}; None: 0.
            start: accepted tokens that a part is expected to have before it has drafted.
            memory: weight of the past in the moving average of a part's accepted tokens.

        Raises:
            ValueError: fewer than two parts, a part drawn "gumbel", costs that are no mapping, a cost of no part, a
                number out of range.
        """
        check_parts(parts)
        given = dict(costs or {})
        if unknown := given.keys() - parts.keys():
            raise WrongOption(f"costs names {', '.join(sorted(unknown))}, but the parts are {', '.join(parts)}")
        return BestOf(dict(parts), tuple(float(given.get(name, 0.0)) for name in parts), start, memory)

    @property
    def part_names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self.parts)

    @property
    def nodes(self) -> int:
        """Most rows that a part adds below one root."""
        return max(part.nodes for part in self.proposers)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        costs = dict(zip(self.parts, self.costs, strict=True))
        return {"costs": costs, "start": self.start, "memory": self.memory, "parts": self.part_facts}

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> BestOf:
        """See ``Proposer``."""
        return replace(self, parts=self.toy_parts(target, draft, tree))

    def init(self, request: Request, record: Any = None) -> PartStates:
        """See ``Proposer``."""
        return super().init(request, Record([self.start] * len(self.costs)))

    def observe(self, observed: Sequence[Observation]) -> None:
        """Learn how many tokens of the part that drafted were accepted; then let the parts observe."""
        for observation in observed:
            state: PartStates = observation.sequence.state
            record: Record = state.own
            if record.chosen is not None:
                for part, before in enumerate(record.accepted):
                    if part != record.chosen:
                        record.accepted[part] = before + RECOVERY * max(0.0, self.start - before)
                before = record.accepted[record.chosen]
                record.accepted[record.chosen] = self.memory * before + (1 - self.memory) * len(observation.accepted)
        super().observe(observed)
        for observation in observed:  # what is observed next may be a part of a prompt
            observation.sequence.state.nodes, observation.sequence.state.own.chosen = {}, None

    def fork(self, state: PartStates, record: Any = None) -> PartStates:
        """See ``Proposer``."""
        return super().fork(state, replace(state.own, accepted=list(state.own.accepted)))

    def propose(self, batch: Batch) -> Draft:
        """Choose a part for each sequence, and let each draft for its own; then the next where nothing is drafted."""
        asked, room = self._asked(batch), batch.room()
        for tree, sequence in enumerate(batch.sequences):
            sequence.state.own.chosen = asked[tree][0] if room[tree] > 0 else None
        drafts, parts, owners = list[Draft](), list[int](), list[list[int]]()
        left = list(range(len(asked)))
        for rank in range(len(self.proposers)):
            empty = []
            for n, part in enumerate(self.proposers):
                trees = [tree for tree in left if asked[tree][rank : rank + 1] == [n]]
                if not trees:
                    continue
                draft = part.propose(self.view(batch, n, trees))
                for place_of, (tree, nodes) in enumerate(zip(trees, draft.acceptable_nodes.tolist(), strict=True)):
                    if nodes and room[tree] > 0:
                        batch.sequences[tree].state.own.chosen = n
                    elif not nodes and room[tree] > 0 and place_of not in draft.broken:
                        empty.append(tree)
                drafts.append(draft)
                parts.append(n)
                owners.append(trees)
            left = empty
        joined, numbers = join(batch, drafts, owners)
        note(batch, joined, parts, owners, numbers)
        return drafts[0] if len(drafts) == 1 else joined

    def _asked(self, batch: Batch) -> list[list[int]]:
        """For each sequence the parts that are asked in order until one drafts; the one that a policy names."""
        expected = [[sequence.state.own.accepted[n] for sequence in batch.sequences] for n in range(len(self.costs))]
        for n, part in enumerate(self.proposers):
            if (scores := part.scores(self.view(batch, n))) is not None:
                expected[n] = list(scores)
        orders = []
        for tree in range(len(batch.sequences)):
            if batch.limits and (named := batch.limits[tree].part):
                orders.append([self.part_names.index(named)])
                continue
            promises = [(1 + accepted[tree]) / (1 + cost) for accepted, cost in zip(expected, self.costs, strict=True)]
            order = sorted(range(len(promises)), key=promises.__getitem__, reverse=True)  # stable
            samples = [n for n in order if self.proposers[n].draws != {"deterministic"}]
            orders.append([n for n in order if n not in samples[1:]])
        return orders
