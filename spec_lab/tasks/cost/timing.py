"""Time the steps of many arms on the same sequences.

Each arm decodes some steps with its own proposer and verifier; then the sequences are truncated to their prompts for
the next arm. So the prompts are computed once, and all arms read the same KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median

import numpy as np
import torch

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.machine import Usage, other_load
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, forest
from spec_lab.decode.arm import Arm, Memory
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.recording import Recording
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.decode.step import StepInfo, step
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.results.writer import Rows
from spec_lab.tasks.cost.tables import PARTS
from spec_lab.tasks.lab import Loop
from spec_lab.verify import Match


def binary_tree(nodes: int) -> Shape:
    """Return the binary tree of so many nodes: every row has two children until the nodes are used up."""
    return Shape(1, np.arange(nodes, dtype=np.int64) // 2)


@dataclass(frozen=True)
class Fixed(Proposer):
    """Proposes the same tree for every sequence, whatever its text, so that drafting costs nothing.

    Its tokens are those of the first texts that it drafts for, each once, then others: a mixture of experts reads for
    them the experts of tokens that occur in texts.

    Args:
        nodes: number of draft nodes of each sequence.
        vocabulary: V of the target; token ids repeat after V nodes.
    """

    nodes: int
    vocabulary: int
    name: str = "fixed"
    drawn: Drawn = "deterministic"
    _drafts: dict[int, Draft] = field(default_factory=dict, compare=False, repr=False)

    @property
    def branches(self) -> bool:
        """Whether any row has two children."""
        return self.nodes > 1

    def propose(self, batch: Batch) -> Draft:
        """Return the draft for this number of sequences, built at the first call."""
        count = len(batch.sequences)
        if count not in self._drafts:
            of_texts = (token for sequence in batch.sequences for token in sequence.tokens)
            distinct = list(dict.fromkeys([*of_texts, *range(self.vocabulary)]))
            some = list(islice(cycle(distinct), count * self.nodes))
            tokens = torch.tensor(some, dtype=torch.long, device=batch.device)
            self._drafts[count] = Draft(forest((binary_tree(self.nodes),) * count), tokens)
        return self._drafts[count]


def texts(
    target: Target, prompts: Sequence[Sequence[int]], sampling: Sampling, batch: int, context: int
) -> list[Request]:
    """Return ``batch`` requests with prompts of ``context`` tokens and without stop tokens.

    A prompt is cut from all ``prompts`` joined and repeated; each request begins at another offset.
    """
    joined = [token for prompt in prompts for token in prompt]
    starts = [number * len(joined) // batch for number in range(batch)]
    tokens = [tuple(islice(cycle(joined[start:] + joined[:start]), context)) for start in starts]
    return [Request(number, f"text {number}", prompt, sampling, target.context) for number, prompt in enumerate(tokens)]


def room(arms: Mapping[str, Loop], steps: int) -> int:
    """Return the largest number of positions that an arm uses beyond the context, draft nodes included."""
    return (steps + 3) * (max(arm.proposer.nodes for arm in arms.values()) + 1)


def time_arms(arms: Mapping[str, Loop], requests: Sequence[Request], repeat: int, steps: int) -> Rows:
    """Time ``steps`` steps of every arm on the same sequences, one arm after the other.

    Each arm decodes one step before the timed ones and one after them; then the sequences are truncated to their
    prompts.

    Args:
        arms: by name; all of one target, without constraints.
        requests: decoded as one batch; their prompts have the same length and leave ``room`` in the target's context.
        repeat: number of the repeat; it seeds the order of the arms.

    Returns:
        A row for each arm, as in ``tables.COST``.

    Raises:
        ValueError: a verifier does not support how a proposer draws siblings; logits are NaN or infinite.
    """
    target, context = next(iter(arms.values())).target, len(requests[0].tokens)
    lm, memory, start = target.lm, Memory(), Usage.now()
    counting = Recording(experts=any(arm.record.experts for arm in arms.values()))
    parts = {
        name: Arm(target, arm.proposer, arm.verifier, arm.draws, record=counting, memory=memory)
        for name, arm in arms.items()
    }
    reserve = min(context + room(arms, steps), target.context)
    sequences = [SequenceState(request, lm.open(reserve), list(request.tokens)) for request in requests]
    states: dict[str, list] = {name: [arm.proposer.init(request) for request in requests] for name, arm in arms.items()}

    def decode(name: str, count: int, length: int = context) -> list[StepInfo]:
        """Decode ``count`` steps of an arm, with its proposer's states, after truncating the KV cache to ``length``.

        The prompt's tokens beyond ``length`` are computed again.
        """
        for sequence, state in zip(sequences, states[name], strict=True):
            sequence.state = state
            sequence.kv.truncate(length)
            del sequence.tokens[max(length + 1, context) :]
            sequence.spent = 0
            arms[name].proposer.rewind(state, length)
        done = []
        for _ in range(count):
            done.append(step(sequences, parts[name]).slim())
            for sequence, why in done[-1].errors.items():
                raise ValueError(f"request '{sequence.request.name}': {why}; costs cannot be measured")
        lm.clock.synchronise()
        return done

    try:
        step(sequences, Arm(target, Null(), Match(), CounterDraws(0), memory=memory))  # computes the prompts
        first = [sequence.tokens[context] for sequence in sequences]
        for name, arm in arms.items():  # draft models compute the prompts; features are delivered where required
            decode(name, 1, 0 if arm.proposer.requires.hidden else context - 1)
            for sequence, token in zip(sequences, first, strict=True):
                sequence.tokens[context:] = [token]
        rows, facts = [], {"batch": len(requests), "context": context, "turn": repeat}
        for number in np.random.default_rng(repeat).permutation(len(arms)):
            name = list(arms)[number]
            done = decode(name, steps + 2)  # the first is a warm-up; the last only ends the time of the one before
            key = {"id": f"{len(requests)}/{context}/{name}/{repeat}", "arm": name}
            rows.append(key | facts | {"fixed": isinstance(arms[name].proposer, Fixed), **_seconds(done)})
        load = other_load(start, Usage.now())  # an arm's few steps are shorter than the ticks that it is counted in
        return [row | {"other_cores": load} for row in rows]
    finally:
        for name, of_requests in states.items():
            for state in of_requests:
                arms[name].proposer.close(state)
        for sequence in sequences:
            sequence.kv.close()
        lm.capture()


def _seconds(done: Sequence[StepInfo]) -> dict[str, float | None]:
    """Return mean nodes, depth and experts, and the median seconds, of an arm's timed steps: all but the first and the
    last.
    """
    clock, timed = done[0].clock, done[1:-1]
    phases = [info.seconds() for info in timed]
    for seconds, info, after in zip(phases, timed, done[2:], strict=True):
        seconds["between"] = clock.seconds(info.ended, after.began)
        seconds["whole"] = clock.seconds(info.began, after.began) - seconds["capture"]
    nodes = [info.draft.shape.nodes / info.draft.shape.roots for info in timed]
    depths = [float(info.draft.shape.depth.max()) for info in timed]
    read = [float(np.mean(info.experts.read)) for info in timed if info.experts is not None]
    names = (*PARTS, "target_forward", "whole")
    drafted: dict[str, float | None] = {"nodes": sum(nodes) / len(nodes), "depth": sum(depths) / len(depths)}
    drafted["experts"] = sum(read) / len(read) if read else None
    return drafted | {name: median(seconds[name] for seconds in phases) for name in names}
