"""Rounds of many arms below the same texts: the project's loop, rewound after every arm.

Nothing is imitated. One group is decoded; between two of its rounds its proposer and verifier are exchanged, and after
each arm its sequences go back to where they began. So the prompt is computed once, and all arms meet the same cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice
from statistics import median

import numpy as np
import torch

from spec_lab.core.draft import Draft, Drawn, Shape, forest
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.batch import Batch, Request, SequenceState
from spec_lab.engine.step import Group, Round
from spec_lab.models.target import Target
from spec_lab.propose import branches
from spec_lab.results import writer
from spec_lab.tasks.cost.tables import PARTS
from spec_lab.tasks.lab import Loop
from spec_lab.verify import check_pair


@lru_cache(maxsize=256)
def bush(nodes: int) -> Shape:
    """The tree of so many nodes in which every row has two children, as long as there are any."""
    return Shape(1, np.arange(nodes, dtype=np.int64) // 2)


@dataclass(frozen=True)
class Fixed:
    """Drafts the same nodes below every sequence, whatever its text: what is left to time is what nodes cost.

    Args:
        nodes: below each sequence.
        vocabulary: of the target; more nodes than that would repeat a sibling.
    """

    nodes: int
    vocabulary: int
    name: str = "fixed"
    drawn: Drawn = "point"
    wants_hidden: bool = False
    _drafts: dict[int, Draft] = field(default_factory=dict, compare=False, repr=False)

    @property
    def branches(self) -> bool:
        """Whether any row has two children."""
        return self.nodes > 1

    def propose(self, batch: Batch) -> Draft:
        """The same draft as ever for so many sequences."""
        heads = len(batch.sequences)
        if heads not in self._drafts:
            tokens = torch.arange(heads * self.nodes, device=batch.device) % self.vocabulary
            self._drafts[heads] = Draft(forest((bush(self.nodes),) * heads), tokens)
        return self._drafts[heads]

    def close(self, sequence: SequenceState) -> None:
        """Nothing is held for a sequence."""


def texts(
    target: Target, prompts: Sequence[Sequence[int]], sampling: Sampling, batch: int, context: int
) -> list[Request]:
    """Requests that begin with ``context`` tokens: the prompts joined, over and over, each from a place of its own.

    They never stop by themselves.
    """
    joined = [token for prompt in prompts for token in prompt]
    starts = [number * len(joined) // batch for number in range(batch)]
    tokens = [tuple(islice(cycle(joined[start:] + joined[:start]), context)) for start in starts]
    return [Request(number, f"text {number}", own, sampling, target.context) for number, own in enumerate(tokens)]


def room(arms: Mapping[str, Loop], rounds: int) -> int:
    """Tokens that an arm may add to a sequence, and the drafts below the last of them."""
    return (rounds + 3) * (max(arm.proposer.nodes for arm in arms.values()) + 1)


def take_turns(arms: Mapping[str, Loop], requests: Sequence[Request], turn: int, rounds: int) -> writer.Rows:
    """Time every arm's rounds below the same texts, one arm after the other.

    Every arm decodes ``rounds`` rounds, after two that warm up; then the sequences go back to the end of their prompts.

    Args:
        arms: by name; all of one target, without constraints.
        requests: decoded as one batch; each with as many tokens, leaving the context the ``room``.
        turn: its number; the arms' order is shuffled from turn to turn.
        rounds: timed.

    Returns:
        A row for each arm, as in ``tables.COST``.

    Raises:
        ValueError: a proposer whose way of drawing the verifier cannot judge; logits that are NaN or infinite.
    """
    for arm in arms.values():
        check_pair(arm.proposer.name, arm.proposer.drawn, arm.verifier, branches(arm.proposer))
    first = next((arm for arm in arms.values() if arm.proposer.wants_hidden), next(iter(arms.values())))
    group = Group(first.target, first.proposer, first.verifier, requests, CounterDraws(first.seed))
    decoding, context, clock = iter(group), len(requests[0].tokens), first.target.lm.clock
    states: dict[str, list] = {}

    def decode(name: str, count: int) -> list[Round]:
        """So many rounds of an arm, with what its proposer carries, from the end of the prompts on."""
        group.proposer, group.verifier = arms[name].proposer, arms[name].verifier
        for live, state in zip(group.sequences, states.get(name, [None] * len(requests)), strict=True):
            live.state = state
        done = []
        try:
            for _ in range(count):
                done.append(writer.slim(next(decoding)))
                if group.errors:
                    raise ValueError(f"{next(iter(group.errors.values()))}; costs cannot be measured")
        finally:
            states[name] = [live.state for live in group.sequences]
        clock.synchronise()
        _rewind(group, context)
        return done

    try:
        next(decoding)  # computes the prompts
        for live in group.sequences:
            group.proposer.close(live)
        _rewind(group, context)
        for name in arms:
            decode(name, 1)  # a draft computes its prompts
        rows, facts = [], {"batch": len(requests), "context": context, "turn": turn}
        for place in np.random.default_rng(turn).permutation(len(arms)):
            name = list(arms)[place]
            done = decode(name, rounds + 2)  # the first warms up, the last ends the one before
            key = {"id": f"{len(requests)}/{context}/{name}/{turn}", "arm": name}
            rows.append(key | facts | {"fixed": isinstance(arms[name].proposer, Fixed), **_seconds(group, done)})
        return rows
    finally:
        for name, own in states.items():
            for live, state in zip(group.sequences, own, strict=True):
                live.state = state
                arms[name].proposer.close(live)
        decoding.close()  # type: ignore[attr-defined]
        first.target.lm.keep_hidden(False)


def _rewind(group: Group, context: int) -> None:
    """Back to the prompt computed and one token pending."""
    for live in group.sequences:
        del live.tokens[context + 1 :]
        group.target.lm.cells.backtrack(live.path, context)
        live.spent = 0


def _seconds(group: Group, done: Sequence[Round]) -> dict[str, float]:
    """Nodes and seconds of an arm's timed rounds: all but the first and the last."""
    clock, timed = group.target.lm.clock, done[1:-1]
    phases = [one.seconds(clock) for one in timed]
    for own, one, after in zip(phases, timed, done[2:], strict=True):
        own["between"] = clock.seconds(one.marks[-1], after.marks[0])
        own["whole"] = clock.seconds(one.marks[0], after.marks[0])
    nodes = [one.draft.shape.nodes / one.draft.shape.roots for one in timed]
    names = (*PARTS, "target_forward", "whole")
    return {"nodes": sum(nodes) / len(nodes)} | {name: median(own[name] for own in phases) for name in names}
