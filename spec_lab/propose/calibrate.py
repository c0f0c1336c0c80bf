"""Which static tree is fastest: how often heads are right on text, against what verifying costs on this machine.

Source: Sequoia's hardware-aware choice (2402.12374, section 4.3): the tree that maximises expected tokens over measured
step time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spec_lab.cells import Path as Cells
from spec_lab.draft import Draft, empty, forest
from spec_lab.draft import tree as shape_of
from spec_lab.law import Sampling, law, law_dtype
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.heads import Heads
from spec_lab.propose.trees import Choices, Ranks, fastest, grow, parse
from spec_lab.target import Target

SIZES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # tree sizes timed
RUN = 3  # of the same size in a row
HOPELESS = 0.7  # of the best rate: sizes beyond the last one above it are not timed further


@dataclass(frozen=True)
class Calibration:
    """A tree and why it was chosen.

    Args:
        choices: the tree.
        expected_tokens: per step and sequence, on text like that measured on.
        expected_speedup: over decoding without a draft, by the seconds below.
        batch_size: sequences verified together.
        temperature: of the text on which the heads were measured.
        heads_seconds: of the call of the first k heads, for each k.
        verify_seconds: of the target's forward and law for each tree size timed.
    """

    choices: Choices
    expected_tokens: float
    expected_speedup: float
    batch_size: int
    temperature: float
    heads_seconds: dict[int, float]
    verify_seconds: dict[int, float]


def calibrate(
    target: Target, heads: Heads, accuracy: Accuracy, batch_size: int = 1, max_nodes: int = 64, seconds: float = 1.0
) -> Calibration:
    """The tree with the most expected tokens per second for this batch size on this machine.

    Args:
        target: verifies.
        heads: draft; the tree is no deeper than there are heads.
        accuracy: how often they are right.
        batch_size: sequences verified together.
        max_nodes: largest tree.
        seconds: to spend on timing, roughly.
    """
    deepest = min(len(heads), len(accuracy.accuracy))
    ranks = min(target.vocabulary, *map(len, accuracy.accuracy))
    grown = [grow(accuracy.value, max_nodes, depth, ranks) for depth in range(1, deepest + 1)]
    verify, draft = time_sizes(target, heads.first(deepest), grown[-1], batch_size, seconds)
    sizes, costs = np.array(list(verify)), np.array(list(verify.values()))

    def step(nodes: int, depth: int) -> float:
        return float(np.interp(nodes, sizes, costs)) + draft[depth]

    best = Calibration((), 1.0, 0.0, batch_size, accuracy.temperature, draft, verify)
    for depth, nodes in enumerate(grown, start=1):
        choices, tokens = fastest(nodes[: int(sizes[-1])], partial(step, depth=depth))
        speedup = tokens / step(len(choices), depth) * float(costs[0])
        if speedup > best.expected_speedup:
            best = Calibration(choices, tokens, speedup, batch_size, accuracy.temperature, draft, verify)
    return best


@torch.inference_mode()
def time_sizes(
    target: Target, heads: Heads, grown: Sequence[tuple[Ranks, float]], batch_size: int, seconds: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of verifying the first n nodes ``grown`` below each sequence, for some n, and of calling k heads.

    Everything takes turns and counts with its fastest turn, since other work on the machine only ever adds; and what
    is smaller costs no more than what is larger. Sizes too large to win are given up after two turns.

    Args:
        target: verifies, after some 200 tokens of context.
        heads: all that a tree may use.
        grown: nodes with their values, as ``trees.grow`` gives them.
        batch_size: sequences verified together.
        seconds: to spend, roughly.
    """
    lm, paths = target.lm, [path for path, _ in grown]
    tokens = 1.0 + np.cumsum([0.0] + [value for _, value in grown])  # by size
    context = max(1, min(200, target.context - len(heads) - 2))
    noise = np.random.default_rng(0)
    lm.keep_hidden(True)
    cells = [lm.cells.open(context + 1 + len(paths)) for _ in range(batch_size)]
    try:
        prompt = noise.integers(0, target.vocabulary, context).tolist()
        lm.forward(cells, [prompt] * batch_size, empty(batch_size, lm.device))
        rows, dtype = (len(paths) + 1) * batch_size, law_dtype(torch.empty(0, dtype=lm.dtype))
        memory = torch.empty(rows, target.vocabulary, dtype=dtype, device=lm.device)
        verify: dict[int, Callable[[], float]] = {}
        for size in [*(size for size in SIZES if size < len(paths)), len(paths)]:
            shape = forest((shape_of(parse(paths[:size])),) * batch_size)
            token = torch.from_numpy(noise.integers(0, target.vocabulary, shape.nodes)).to(lm.device)
            verify[size] = _verification(target, cells, Draft(shape, token), memory)
        hidden = torch.stack([lm.cells.last_hidden(path) for path in cells])
        draft = {count: _drafting(target, heads.first(count), hidden) for count in range(1, len(heads) + 1)}
        return _take_turns(verify, draft, tokens, seconds)
    finally:
        for path in cells:
            lm.cells.close(path)
        lm.keep_hidden(False)


Turns = dict[int, Callable[[], float]]
"""By size, what does it once and returns the seconds it took."""


def _take_turns(
    verify: Turns, draft: Turns, tokens: np.ndarray, seconds: float
) -> tuple[dict[int, float], dict[int, float]]:
    """The fastest turn of each, within about ``seconds``, at least two turns after a warm-up."""
    for turn in (*verify.values(), *draft.values()):
        turn()
    verified, drafted = dict.fromkeys(verify, np.inf), dict.fromkeys(draft, np.inf)
    spent, done = 0.0, 0
    while done < 2 or spent < seconds:
        for best, turns in ((verified, verify), (drafted, draft)):
            for size in best:
                took = [turns[size]() for _ in range(RUN)]  # in a row, as in decoding: the first warms up the others
                best[size] = min(best[size], *took)
                spent += sum(took)
        done += 1
        if done == 2:
            rates = {size: tokens[size] / (took + drafted[max(drafted)]) for size, took in verified.items()}
            last = max(size for size, rate in rates.items() if rate >= HOPELESS * max(rates.values()))
            verified = {size: took for size, took in verified.items() if size <= max(last, 1)}
    return _monotone(verified), _monotone(drafted)


def _monotone(costs: dict[int, float]) -> dict[int, float]:
    """Each cost lowered to the least cost of anything larger."""
    least = np.minimum.accumulate(np.array(list(costs.values()))[::-1])[::-1]
    return dict(zip(costs, least.tolist(), strict=True))


def _verification(target: Target, cells: Sequence[Cells], draft: Draft, memory: Tensor) -> Callable[[], float]:
    lm, pending = target.lm, [[0]] * draft.shape.heads
    held: list[np.ndarray] = []

    def verify() -> None:
        output = lm.forward(cells, pending, draft)
        law(output.logits, [Sampling()], scratch=memory)
        held[:] = output.slots

    def turn() -> float:
        took = _timed(target, verify)
        for path, slots in zip(cells, held, strict=True):
            lm.cells.drop(path, slots)
            lm.cells.backtrack(path, len(path) - 1)
        return took

    return turn


def _drafting(target: Target, heads: Heads, hidden: Tensor) -> Callable[[], float]:
    token = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return lambda: _timed(target, lambda: heads(hidden, token))


def _timed(target: Target, work: Callable[[], object]) -> float:
    clock = target.lm.clock
    clock.synchronise()
    start = clock.mark()
    work()
    end = clock.mark()
    clock.synchronise()
    return clock.seconds(start, end)
