"""Time decoding steps, and forwards over draft trees, of several ways of running one model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft, empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.roofline import Roofline
from spec_lab.core.shape import Shape, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.step_info import StepInfo
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.graphs import Capture
from spec_lab.verify import Token

WARM_UP = 8
"""Steps before the timed ones: kernels are chosen, graphs are captured."""


MIN_SECONDS = 2.0
"""Time that decoding in one of several ways may take, whatever the others took."""


class Row(NamedTuple):
    """One measurement.

    Args:
        shape: of the model.
        way: how steps run.
        batch: sequences.
        context: tokens of each before the step.
        nodes: of each sequence's tree.
        seconds: median of a forward.
        spread: quartiles of a forward.
        share: of the roofline.
        step: median seconds from the preparation of a forward on the host to its end.
        repeats: how many were timed.
    """

    shape: str
    way: str
    batch: int
    context: int
    nodes: int
    seconds: float
    spread: tuple[float, float]
    share: float
    step: float
    repeats: int


@dataclass(eq=False)
class Captures:
    """Counts and times the captures of a target's or a draft model's forwards of fixed shape.

    Args:
        device: of the model.
        capture: what captures.
        count: captures so far.
        seconds: that they took, the forwards before each included.
    """

    device: torch.device
    capture: Capture
    count: int = 0
    seconds: float = 0.0

    @staticmethod
    def of(lm: CausalLM) -> Captures:
        """Count those of this model from now on."""
        captures = Captures(lm.device, lm.graphs.capture)
        lm.graphs.capture = captures
        return captures

    def __call__(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        """See ``runners.graphs.Capture``."""
        clock = Clock(self.device)
        clock.synchronise()
        began = time.perf_counter()
        replay = self.capture(forward)
        clock.synchronise()
        self.count += 1
        self.seconds += time.perf_counter() - began
        return replay


def balanced(nodes: int) -> Shape:
    """A tree in which every row has two children, as long as there are nodes."""
    return Shape(1, np.arange(nodes, dtype=np.int64) // 2)


def random_requests(vocabulary: int, batch: int, prompt: int, new: int) -> list[Request]:
    """Greedy requests with random prompts."""
    generator = np.random.default_rng(0)
    prompts = [tuple(generator.integers(0, vocabulary, prompt).tolist()) for _ in range(batch)]
    return [Request(number, f"r{number}", tokens, Sampling(), new) for number, tokens in enumerate(prompts)]


def decoding(target: Target, batch: int, prompt: int, steps: int, seconds: float = math.inf) -> list[StepInfo]:
    """Steps of greedy autoregressive decoding, those over the prompt and the warm-up left out.

    Args:
        target: decodes.
        batch: sequences.
        prompt: tokens of each prompt.
        steps: most timed steps.
        seconds: how long it may take; at least one step is timed.
    """
    requests, infos = random_requests(target.vocabulary, batch, prompt, steps + WARM_UP), []
    end = time.perf_counter() + seconds
    group = iter(fixed_group(Arm(target, Null(), Token(), CounterDraws(0)), requests))
    with torch.inference_mode(), closing(group):  # the mode once, not in every step
        for info in group:
            infos.append(info)
            if len(infos) > WARM_UP and time.perf_counter() > end:
                break
    target.lm.clock.synchronise()
    return infos[WARM_UP:]


def rows_of(infos: Sequence[StepInfo], nodes: int = 0) -> dict[str, list[int]]:
    """Return what ``Roofline.seconds`` reads of decoding steps."""
    rows = [
        (step, context, pending)
        for step, info in enumerate(infos)
        for context, pending in zip(info.context, info.pending, strict=True)
    ]
    step, context, pending = zip(*rows, strict=True)
    return {"step": list(step), "context": list(context), "pending": list(pending), "nodes": [nodes] * len(rows)}


def autoregressive(
    targets: Mapping[str, Target],
    roofline: Roofline,
    shape: str,
    batch: int,
    prompt: int,
    steps: int,
    repeats: int,
    seconds: float = math.inf,
) -> Iterator[dict[str, Any]]:
    """Decode with each way in turn, and in alternating order, until there are ``repeats`` of each or time is over."""
    spent: dict[str, list[tuple[float, float, float, int]]] = {way: [] for way in targets}  # whole, forward, bound
    order, end = list(targets), time.perf_counter() + seconds
    for number in range(repeats):
        if number and time.perf_counter() > end:
            break
        for way in order:
            infos = decoding(targets[way], batch, prompt, steps, max((end - time.perf_counter()) / 2, MIN_SECONDS))
            parts = [info.seconds() for info in infos]
            read, computed = roofline.seconds(**rows_of(infos))
            bound = float(np.maximum(read, computed).sum())
            whole, forward = (sum(part[name] for part in parts) for name in ("whole", "target_forward"))
            spent[way].append((whole, forward, bound, len(infos)))
        order.reverse()
    for way, repeated in spent.items():
        whole, forward, bound, count = (sum(part) for part in zip(*repeated, strict=True))
        shares = [b / f for _, f, b, _ in repeated]
        yield {
            "shape": shape, "way": way, "batch": batch, "prompt": prompt, "tokens_per_second": batch * count / whole,
            "roofline_share": bound / forward, "of_repeats": [min(shares), max(shares)],
            "overhead": 1 - forward / whole, "steps": int(count), "repeats": len(repeated),
        }  # fmt: skip


def forwards(
    targets: Mapping[str, Target],
    roofline: Roofline,
    shape: str,
    batch: int,
    context: int,
    nodes: Sequence[int],
    repeats: int,
    seconds: float = math.inf,
) -> Iterator[Row]:
    """Time forwards over trees, below sequences that are rewound after each.

    Args:
        targets: the ways, which take turns.
        roofline: of the model.
        shape: its name.
        batch: sequences.
        context: tokens of each.
        nodes: sizes of the trees.
        repeats: most timed forwards of each way and tree.
        seconds: of all of them, about; each is timed three times at least.
    """
    states, end = {}, time.perf_counter() + seconds
    for way, target in targets.items():
        sequences = [target.lm.open(context + max(nodes) + 2) for _ in range(batch)]
        target.lm.forward(sequences, [[1] * context] * batch, empty(batch, target.lm.device))
        for sequence in sequences:
            sequence.accept()
        states[way] = sequences
    for done, count in enumerate(nodes):
        tree, last = forest((balanced(count),) * batch), (end - time.perf_counter()) / (len(nodes) - done)
        last += time.perf_counter()
        spans: dict[str, list[float]] = {way: [] for way in targets}
        steps: dict[str, list[float]] = {way: [] for way in targets}
        for repeat in range(-3, repeats):
            if repeat > 2 and time.perf_counter() > last:
                break
            for way in list(targets)[:: 1 if repeat % 2 else -1]:
                lm, sequences = targets[way].lm, states[way]
                draft = Draft(tree, torch.ones(tree.nodes, dtype=torch.long, device=lm.device))
                lm.clock.synchronise()
                lm.clock.take()
                began = time.perf_counter()
                with torch.inference_mode():
                    lm.run(lm.prepare(sequences, [[2]] * batch, draft))
                lm.clock.synchronise()
                step = time.perf_counter() - began
                forward = sum(
                    lm.clock.seconds(start, stop) for name, start, stop in lm.clock.take() if name == "target_forward"
                )
                for sequence in sequences:
                    sequence.accept()
                    sequence.truncate(context)
                if repeat >= 0:
                    spans[way].append(forward)
                    steps[way].append(step)
        read, computed = roofline.seconds([0] * batch, [context + 1] * batch, [1] * batch, [count] * batch)
        bound = float(np.maximum(read, computed).sum())
        for way, seconds_of_way in spans.items():
            low, high = np.quantile(seconds_of_way, [0.25, 0.75]).tolist()
            middle = median(seconds_of_way)
            yield Row(
                shape,
                way,
                batch,
                context,
                count,
                middle,
                (low, high),
                bound / middle,
                median(steps[way]),
                len(seconds_of_way),
            )
    for sequences in states.values():
        for sequence in sequences:
            sequence.close()
