"""The time that a recommendation may take, and the seconds of a step that is judged with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from spec_lab.core.probabilities import Sampling
from spec_lab.core.roofline import ForwardWork
from spec_lab.core.user_cache import default_folder
from spec_lab.models.target import Target
from spec_lab.propose.calibrate import conditions, visits
from spec_lab.propose.cost_cache import CostCache
from spec_lab.propose.step_costs import VISIT, WARM_UP, StepCosts, measure
from spec_lab.tasks.cost.timing import Fixed

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Draft nodes of a sequence whose step is timed, as far as the time allows."""

FEWEST = 2
"""Sizes without which nothing can be judged: no draft, and one node."""

PASSES = WARM_UP + 3
"""Visits of each size at least: one that shows which sizes fit, the warm-up and two timed ones."""


MIN_GAIN = 1.1
"""The most that drafts on a small KV cache could gain, below which they are not tried."""


def max_gain(work: ForwardWork, batch: int, context: float, budget: int) -> float:
    """Return the most that drafts of the target on a small KV cache can gain, were all their tokens accepted.

    A step that drafts k tokens emits k + 1 in the time of k forwards d on the small cache and one forward t on the
    whole one: (k + 1) t / (k d + t) <= t / d. Bytes and FLOPs bound t / d, whichever of the two limits a forward.

    Args:
        work: of the target's forward.
        batch: sequences decoded together.
        context: positions of a sequence.
        budget: positions of the small cache.
    """
    kv, flops = (sum(getattr(layers, name) for layers in work.attention) for name in ("kv_bytes", "flops"))
    weights, row = float(work.read(batch)), work.row_flops + work.logits_flops
    small = min(context, budget)
    return max((weights + batch * kv * context) / (weights + batch * kv * small),
               (row + flops * context) / (row + flops * small))  # fmt: skip


def why_no_small_cache(work: ForwardWork | None, batch: int, context: float, budget: int) -> str:
    """Return why drafts on a small KV cache cannot pay; empty where they can, and where the work is not known.

    Args:
        work, batch, context, budget: as in ``max_gain``.
    """
    if work is None or (gain := max_gain(work, batch, context, budget)) >= MIN_GAIN:
        return ""
    return (
        f"contexts have at most {context:.0f} tokens, a mean over the prompts: a draft that reads keys and values of "
        f"{budget} tokens could make decoding at most {gain:.2f} times as fast"
    )


class TooSlow(ValueError):
    """A target of which not even two sizes of a step can be timed within the time."""


@dataclass
class TimeLimit:
    """The seconds of a recommendation; a resumed one has those left that were not spent before.

    Args:
        seconds: all of them.
        before: seconds that were spent before this process.
        clock: returns the seconds since any moment.
    """

    seconds: float
    before: float = 0.0
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def spent(self) -> float:
        """Seconds that were spent."""
        return self.before + self.clock() - self.began

    def left(self, share: float = 1.0) -> float:
        """Seconds left until a share of all is spent; negative where more is spent."""
        return share * self.seconds - self.spent


def fixed_costs(
    target: Target,
    batches: Sequence[int],
    seconds: float,
    sampling: Sampling,
    cache: CostCache | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, StepCosts]:
    """Measure the seconds of a step of fixed draft trees, interleaved over their sizes; cached costs cost no time.

    Args:
        target: computes.
        batches: batch sizes; the first must be measured.
        seconds: that all of it may take. The first batch size may take most of them, each further one half of the rest,
            if that is as long as the one before took.
        sampling: of the requests.
        cache: of measured costs; None: the user's.
        clock: returns the seconds since any moment.

    Returns:
        The costs of each batch size that fits.

    Raises:
        TooSlow: the first does not fit.
    """
    cache = CostCache(default_folder()) if cache is None else cache
    costs: dict[int, StepCosts] = {}
    began, took = clock(), 0.0
    for batch in batches:
        left = seconds - (clock() - began)
        share = left * (0.5 if costs else 0.6)
        if costs and share < took:
            break
        sizes = [size for size in SIZES if _fits(target, size, batch)]
        under = conditions(target, "fixed trees", [(size,) for size in sizes], batch, sampling)
        start = clock()
        try:
            costs[batch] = cache.costs(under, sizes, partial(_timed, target, sizes, batch, share, sampling, clock))
        except TooSlow:
            if not costs:
                raise
        took = clock() - start
    return costs


def _timed(
    target: Target, sizes: Sequence[int], batch: int, seconds: float, sampling: Sampling, clock: Callable[[], float]
) -> StepCosts:
    """Time the sizes that fit into the seconds, the computation of the prompts included.

    Raises:
        TooSlow: not even two do.
    """
    start, threads = clock(), torch.get_num_threads() if target.lm.device.type == "cpu" else 1
    fixed = {size: Fixed(size, target.vocabulary) for size in sizes}
    with visits(target, fixed, batch, sampling) as visit:
        room = seconds - (clock() - start)
        spent = VISIT * min(visit(0))
        if spent * FEWEST * PASSES > room:
            raise TooSlow(
                f"a step takes {spent / VISIT:.2g} s at batch size {batch}, and the {max(room, 0.0):.0f} s for "
                f"measuring steps hold fewer than the {FEWEST * VISIT * PASSES} that this takes"
            )
        some = [0]
        for size in sizes[1:]:
            spent += VISIT * min(visit(size))
            if spent * PASSES > room and len(some) >= FEWEST:
                break
            some.append(size)
        least, most = min(3.0, room / PASSES), room / 2
        return measure(visit, {size: size + 1.0 for size in some}, least, threads, longest=most)


def _fits(target: Target, size: int, batch: int) -> bool:
    """Return whether the target's runner computes binary trees of so many nodes for a batch."""
    able = target.lm.capabilities
    if able.rollback is not None and size > 1:  # it takes back chains only
        return False
    return able.leaves is None or batch * max(1, (size + 1) // 2) <= able.leaves
