"""Which static tree is fastest: how often heads are right on text, against what rounds cost on this machine.

Source: Sequoia's hardware-aware choice (2402.12374, section 4.3): the tree that maximises expected tokens over measured
step time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from scipy.stats import theilslopes
from torch import Tensor

from spec_lab.batch import Batch, Request, Sequence
from spec_lab.commit import Step, commit
from spec_lab.law import CounterDraws, Sampling, law, law_dtype
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.proposer import Proposer
from spec_lab.propose.trees import Choices, expected_tokens, grow, parse
from spec_lab.target import Target

SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # tree sizes tried
RUN = 6  # rounds of the same size in a row, as in decoding: the first warm up the others
HOPELESS = 0.8  # of the best rate: two sizes in a row below it are the last ones timed
LEVEL = 0.98  # of the best rate: the largest tree above it is taken, as tokens are known better than seconds


@dataclass(frozen=True)
class Calibration:
    """A tree and why it was chosen.

    Args:
        choices: the tree; empty where none pays on this machine.
        expected_tokens: per step and sequence, on text like that measured on.
        expected_speedup: over decoding without a draft, by the seconds below.
        batch_size: sequences decoded together.
        temperature: of the text on which the heads were measured.
        round_seconds: of drafting, the target's forward, its law and the commit, for each tree size, as timed;
            ``smoothed`` gives those that decided.
    """

    choices: Choices
    expected_tokens: float
    expected_speedup: float
    batch_size: int
    temperature: float
    round_seconds: dict[int, float]


def calibrate(
    target: Target,
    drafting: Callable[[Choices], Proposer],
    depth: int,
    accuracy: Accuracy,
    batch_size: int = 1,
    max_nodes: int = 64,
    seconds: float = 5.0,
) -> Calibration:
    """The tree with the most expected tokens per second for this batch size on this machine; of trees that come within
    two hundredths of it and are no slower than drafting nothing, the largest.

    Args:
        target: verifies.
        drafting: the proposer of a tree.
        depth: of the deepest tree it can draft.
        accuracy: how often it is right.
        batch_size: sequences decoded together.
        max_nodes: largest tree.
        seconds: to spend on timing at least.
    """
    ranks = min(target.vocabulary, *map(len, accuracy.accuracy))
    grown = grow(accuracy.value, max_nodes, min(depth, len(accuracy.accuracy)), ranks)
    sizes = [*(size for size in SIZES if size < len(grown)), len(grown)]
    trees = {size: parse([path for path, _ in grown[:size]]) if size else () for size in sizes}
    tokens = {size: expected_tokens(tree, accuracy.value) for size, tree in trees.items()}
    proposers = {size: drafting(tree) for size, tree in trees.items()}
    costs = time_rounds(target, proposers, tokens, batch_size, Sampling(accuracy.temperature), seconds)
    smooth = smoothed(costs)
    rates = {size: tokens[size] / smooth[size] for size in smooth}
    best = max(rates, key=lambda size: rates[size])
    if best:
        best = max(size for size, rate in rates.items() if rate >= max(LEVEL * rates[best], rates[0]))
    speedup = tokens[best] / smooth[best] * smooth[0]
    return Calibration(trees[best], tokens[best], speedup, batch_size, accuracy.temperature, costs)


@torch.inference_mode()
def time_rounds(
    target: Target,
    proposers: Mapping[int, Proposer],
    tokens: Mapping[int, float],
    batch_size: int,
    sampling: Sampling,
    seconds: float,
) -> dict[int, float]:
    """Seconds of a round with each proposer, after some 200 tokens of context.

    They take turns and count with their fastest turn, since other work on the machine only ever adds. Sizes beyond two
    hopeless ones in a row are not timed. The verdict is left out: proposers do not know who decides, and for trees of
    this size it is some hundredths of a round.

    Args:
        target: verifies.
        proposers: by the size of their trees, in rising order.
        tokens: that a round is expected to give, by size.
        batch_size: sequences decoded together.
        sampling: whose law is taken.
        seconds: to spend at least, after three turns of every size, of which the first warms up.
    """
    lm, largest = target.lm, max(one.nodes for one in proposers.values())
    context = max(1, min(200, target.context - RUN - 2))
    prompt = tuple(np.random.default_rng(0).integers(0, target.vocabulary, context).tolist())
    batch = Batch(target, [], CounterDraws(0))
    scratch = torch.empty(
        (largest + 1) * batch_size,
        target.vocabulary,
        dtype=law_dtype(torch.empty(0, dtype=lm.dtype)),
        device=lm.device,
    )
    try:
        for number in range(batch_size):
            request = Request(number, "calibration", prompt, sampling, target.context)
            batch.sequences.append(Sequence(request, lm.cells.open(context + RUN + largest + 1), list(prompt)))

        def turn(proposer: Proposer) -> float:
            took = [_round(batch, proposer, scratch) for _ in range(RUN)]
            batch.marks = []
            for sequence in batch.sequences:
                proposer.close(sequence)
                del sequence.tokens[context + 1 :]
                lm.cells.backtrack(sequence.path, context)
            return median(took[1:])

        best: dict[int, float] = {}
        turn(next((one for one in proposers.values() if one.wants_hidden), proposers[0]))  # it computes the prompt
        for size, proposer in proposers.items():
            turn(proposer)  # warms up
            best[size] = min(turn(proposer), turn(proposer))
            rates = [tokens[smaller] / took for smaller, took in best.items()]
            if len(rates) > 2 and max(rates[-2:]) < HOPELESS * max(rates):
                break
        spent = 0.0
        while spent < seconds:
            for size, took in best.items():
                now = turn(proposers[size])
                best[size] = min(took, now)
                spent += now * RUN
        return best
    finally:
        for sequence in batch.sequences:
            lm.cells.close(sequence.path)
        lm.keep_hidden(False)


def _round(batch: Batch, proposer: Proposer, scratch: Tensor) -> float:
    """A round in which nothing is accepted, as the decode loop would do it; returns its seconds."""
    lm = batch.target.lm
    clock, heads = lm.clock, len(batch.sequences)
    clock.synchronise()
    start = clock.mark()
    lm.keep_hidden(proposer.wants_hidden)
    draft = proposer.propose(batch).cut(batch.room())
    output = lm.forward([one.path for one in batch.sequences], [one.pending for one in batch.sequences], draft)
    logits = scratch[: len(output.logits)].copy_(output.logits)
    token = law(logits, [batch.sequences[0].request.sampling], scratch=scratch)[:heads].argmax(-1).cpu().numpy()
    commit(batch, Step(draft, output.slots, np.arange(heads), token))
    end = clock.mark()
    clock.synchronise()
    return clock.seconds(start, end)


def smoothed(costs: Mapping[int, float]) -> dict[int, float]:
    """The costs of drafting on one straight line over tree sizes (Theil and Sen's, which outliers cannot turn).

    On a machine that others use, single timings err by more than neighbouring sizes differ; a choice among them would
    be a choice among errors. What drafting nothing costs stays as it was timed, and nothing falls below all timings.
    """
    sizes = [size for size in costs if size]
    if len(sizes) < 3:
        return dict(costs)
    timed = [costs[size] for size in sizes]
    slope, intercept, *_ = theilslopes(timed, sizes)
    if slope < 0:
        slope, intercept = 0.0, median(timed)
    return dict(costs) | {size: max(float(intercept + slope * size), min(timed)) for size in sizes}
