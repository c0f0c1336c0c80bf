"""Which static tree is fastest: how often heads are right on text, against what steps cost on this machine.

Source: Sequoia's hardware-aware choice (2402.12374, section 4.3): the tree that maximises expected tokens over measured
step time.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import theilslopes

from spec_lab.constrain import AppliedConstraint
from spec_lab.core.machine import cores, processor
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm, Memory
from spec_lab.decode.commit import Committed, Decision, commit
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import step
from spec_lab.decode.study import Capture
from spec_lab.models import ranks
from spec_lab.models.target import Target
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.cost_cache import CostCache
from spec_lab.propose.step_costs import VISIT, StepCosts, measure
from spec_lab.propose.trees import Choices, expected_tokens, grow, parse, write

log = logging.getLogger(__name__)

SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128)
"""Tree sizes that are timed, up to the largest allowed one, which is timed as well."""

LEVEL = 0.98
"""Share of the best rate: the largest tree above it is taken, as tokens are known better than seconds."""

CONTEXT = 200
"""Tokens of context at which steps are timed, where the target has room for so many."""

MAX_ROWS = 2048
"""Rows of one forward that computes the context before steps are timed, so that long contexts fit in memory."""

PROCEDURE = 6
"""Version of how steps are timed: costs of another version are measured again. Raise it with every change."""


@dataclass(frozen=True)
class Calibration:
    """A tree and why it was chosen.

    Args:
        choices: the tree; empty if no tree is faster than decoding without a draft.
        expected_tokens: per step and sequence, on text like that measured on.
        expected_speedup: over decoding without a draft, by the seconds below.
        temperature: of the text on which the heads were measured.
        costs: of a step for each tree size, as timed; the choice is made by ``smoothed`` ones.
    """

    choices: Choices
    expected_tokens: float
    expected_speedup: float
    batch_size: int
    temperature: float
    costs: StepCosts

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the calibration beside the tree. See ``Part``."""
        costs = self.costs
        return {
            "expected_tokens": self.expected_tokens,
            "expected_speedup": self.expected_speedup,
            "batch_size": self.batch_size,
            "temperature": self.temperature,
            "costs": "cached" if costs.cached else "measured",
            "costs_measured": costs.measured,
            "costs_steady": costs.steady,
            "costs_spread": costs.overall_spread,
            "costs_other_load": costs.other_load,
            "step_seconds": costs.seconds,
            "step_spread": costs.spread,
        }


def calibrate(
    target: Target,
    drafting: Callable[[Choices], Proposer],
    depth: int,
    accuracy: Accuracy,
    batch_size: int = 1,
    max_nodes: int = 64,
    *,
    cache: CostCache,
    drafter: str = "",
    again: bool = False,
    timing: Callable[..., StepCosts] | None = None,
    option: str = "tree",
) -> Calibration:
    """The tree with the most expected tokens per second for this batch size on this machine; of trees that come within
    two hundredths of it and are no slower than drafting nothing, the largest.

    The seconds come from the cache where it has them, so that the same command chooses the same tree. A warning is
    logged where they were measured on a machine that was too busy; such measurements are not kept.

    Args:
        drafting: the proposer of a tree.
        depth: of the deepest tree it can draft.
        accuracy: how often it is right.
        max_nodes: largest tree.
        drafter: SHA-256 of the proposer's weights.
        again: measure the costs even if the cache has them.
        timing: times steps; ``time_steps`` unless given.
        option: that is calibrated, for messages: tree or depth.
    """
    most = min(target.vocabulary, *map(len, accuracy.accuracy))
    grown = [path for path, _ in grow(accuracy.value, max_nodes, min(depth, len(accuracy.accuracy)), most)]
    sizes = [*(size for size in SIZES if size < len(grown)), len(grown)]
    trees = {size: parse(grown[:size]) if size else () for size in sizes}
    tokens = {size: expected_tokens(tree, accuracy.value) for size, tree in trees.items()}
    sampling = Sampling(accuracy.temperature)

    def timed() -> StepCosts:
        log.info("Calibrating the draft %s: measuring the seconds of a step for each size", option)
        proposers = {size: drafting(tree) for size, tree in trees.items()}
        return (timing or time_steps)(target, proposers, tokens, batch_size, sampling)

    under = conditions(target, drafter, grown, batch_size, sampling)
    costs = cache.costs(under, sizes, timed, again)
    if not costs.steady:
        log.warning("%s", unsteady(costs, option))
    smooth = smoothed(costs.seconds)
    rates = {size: tokens[size] / smooth[size] for size in smooth}
    best = max(rates, key=lambda size: rates[size])
    if best:
        best = max(size for size, rate in rates.items() if rate >= max(LEVEL * rates[best], rates[0]))
    speedup = tokens[best] / smooth[best] * smooth[0]
    return Calibration(trees[best], tokens[best], speedup, batch_size, accuracy.temperature, costs)


def conditions(
    target: Target,
    drafter: str,
    grown: Sequence[Sequence[int]],
    batch_size: int,
    sampling: Sampling,
    context: int = CONTEXT,
) -> dict[str, Any]:
    """Everything that the costs depend on: other conditions, another entry of the cache.

    Args:
        drafter: SHA-256 of the proposer's weights.
        grown: the nodes of the largest tree, in the order in which trees grow.
        context: tokens of context at which steps are timed.
    """
    return {
        "procedure": PROCEDURE,
        "versions": {"spec-lab": _spec_lab(), "torch": torch.__version__, "python": platform.python_version()},
        "processor": processor(),
        "cores": cores(),
        "ranks": ranks.size(),
        "threads": torch.get_num_threads(),
        "target": target.sha256 or target.name,
        **target.lm.facts,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "context": context_of(target, context),
        "drafter": drafter,
        "trees": sha256(write(tuple(map(tuple, grown))).encode()).hexdigest(),
        "batch_size": batch_size,
        "temperature": sampling.temperature,
    }


def unsteady(costs: StepCosts, option: str = "tree") -> str:
    """Why costs are not trusted, and what to do."""
    why = [f"repeated timings of a step differ by {costs.overall_spread:.0%}"]
    if costs.other_load is not None:
        threads = "1 thread" if costs.threads == 1 else f"{costs.threads} threads"
        why.append(
            f"other processes used {costs.other_load:.1f} of {costs.cores} cores beside the {threads} of this one"
        )
    return (
        f"the machine is too busy to calibrate a {option}: {', and '.join(why)}. The measured costs are used for this "
        f"run and not kept, so the next run may choose another {option}. Run again when the machine is idle, set "
        f"threads= to fewer threads, or name the {option} with proposer.{option}="
    )


def _spec_lab() -> str:
    try:
        return version("spec-lab")
    except PackageNotFoundError:
        return "unknown"


def context_of(target: Target, context: int = CONTEXT) -> int:
    """Return the tokens of context at which steps are timed, where the target has room for so many."""
    return max(1, min(context, target.context - VISIT - 2))


def time_steps(
    target: Target,
    proposers: Mapping[int, Proposer],
    tokens: Mapping[int, float],
    batch_size: int,
    sampling: Sampling,
    seconds: float = 3.0,
) -> StepCosts:
    """Costs of a step with each proposer, after some 200 tokens of context. How they are timed: ``step_costs.measure``.

    Verification is left out: for trees of this size it is some hundredths of a step.

    Args:
        proposers: by the size of their trees, in rising order.
        tokens: expected tokens per step, by size.
        sampling: parameters of the requests; they determine p.
        seconds: of timing at least.
    """
    threads = torch.get_num_threads() if target.lm.device.type == "cpu" else 1
    with visits(target, proposers, batch_size, sampling) as visit:
        return measure(visit, tokens, seconds, threads)


@contextmanager
def visits(
    target: Target,
    proposers: Mapping[int, Proposer],
    batch_size: int,
    sampling: Sampling,
    period: int | None = None,
    context: int = CONTEXT,
) -> Iterator[Callable[[int], list[float]]]:
    """Yield what times ``VISIT`` steps of a size and returns the seconds of all but the first.

    Arguments as in ``time_steps``, and two more. Afterwards nothing is left in the target's KV cache.

    Args:
        period: the random text repeats after so many tokens, so that proposers which look drafts up find some, and the
            proposers, which share their states, have observed all of it. None: it does not repeat, and each has states
            of its own.
        context: tokens of it.
    """
    lm, largest = target.lm, max(proposer.nodes for proposer in proposers.values())
    context = context_of(target, context)
    drawn = np.random.default_rng(0).integers(0, target.vocabulary, min(context, period or context))
    text = np.resize(drawn, context + VISIT).tolist()
    prompt = tuple(text[:context])
    clock, memory, apply = lm.clock, Memory(), commit if period is None else partial(_commit_text, text)
    parts = {
        size: Arm(target, proposer, Capture(), CounterDraws(0), commit=apply, memory=memory)
        for size, proposer in proposers.items()
    }
    sequences: list[SequenceState] = []
    apart = list(proposers) if period is None else list(proposers)[:1]  # those with states of their own
    states: dict[int, list[Any]] = {}  # of these, of each sequence

    def visit(size: int) -> list[float]:
        took = []
        for sequence, state in zip(sequences, states[size if size in states else apart[0]], strict=True):
            sequence.kv.truncate(context - 1)
            del sequence.tokens[context:]
            sequence.state = state
            proposers[size].rewind(state, context - 1)
        for _ in range(VISIT):
            clock.synchronise()
            info = step(sequences, parts[size])
            clock.synchronise()
            took.append(info.seconds()["whole"])
        return took[1:]

    try:
        for number in range(batch_size):
            request = Request(number, "calibration", prompt, sampling, target.context)
            sequences.append(SequenceState(request, lm.open(context + VISIT + largest + 1), list(prompt)))
        chunk = max(1, MAX_ROWS // batch_size)
        for size in apart:
            for sequence in sequences:
                sequence.kv.truncate(0)
                sequence.state = proposers[size].init(sequence.request)
            states[size] = [sequence.state for sequence in sequences]
            for start in range(0, context, chunk):
                step([], parts[size], [(sequence, min(chunk, context - start)) for sequence in sequences])
        yield visit
    finally:
        for size in apart:
            for state in states.get(size, ()):
                proposers[size].close(state)
        for sequence in sequences:
            sequence.kv.close()
        lm.capture()


def _commit_text(
    text: Sequence[int],
    sequences: Sequence[SequenceState],
    decision: Decision,
    applied: AppliedConstraint | None,
    context: int,
) -> list[Committed]:
    """Commit the next token of ``text`` to sequences of which nothing drafted was accepted."""
    following = np.array([text[len(sequence.tokens)] for sequence in sequences])
    return commit(sequences, replace(decision, token=following), applied, context)


def smoothed(costs: Mapping[int, float]) -> dict[int, float]:
    """The costs of drafting on one straight line over tree sizes (Theil-Sen estimator, robust to outliers).

    On a machine that others use, single timings err by more than neighbouring sizes differ; a choice among them would
    be decided by noise. The cost without a draft stays as it was timed, and no smoothed cost is below all timings.
    """
    sizes = [size for size in costs if size]
    if len(sizes) < 3:
        return dict(costs)
    timed = [costs[size] for size in sizes]
    slope, intercept, *_ = theilslopes(timed, sizes)
    if slope < 0:
        slope, intercept = 0.0, median(timed)
    return dict(costs) | {size: max(float(intercept + slope * size), min(timed)) for size in sizes}
