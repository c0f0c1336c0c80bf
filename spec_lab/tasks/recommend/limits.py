"""The time that a recommendation may take, and the seconds of a step that is judged with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from spec_lab.core.probabilities import Sampling
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
    target: Target, batches: Mapping[int, float], sampling: Sampling, cache: CostCache | None = None
) -> dict[int, StepCosts]:
    """Measure the seconds of a step of fixed draft trees, interleaved over their sizes; cached costs cost no time.

    Args:
        target: computes.
        batches: the seconds that the measurement of each batch size may take; the first must be measured.
        sampling: of the requests.
        cache: of measured costs; None: the user's.

    Returns:
        The costs of each batch size that fits into its seconds.

    Raises:
        TooSlow: the first does not fit.
    """
    cache = CostCache(default_folder()) if cache is None else cache
    threads = torch.get_num_threads() if target.lm.device.type == "cpu" else 1
    costs: dict[int, StepCosts] = {}
    for batch, seconds in batches.items():
        fixed = {size: Fixed(size, target.vocabulary) for size in SIZES if _fits(target, size, batch)}

        def timed(batch: int = batch, seconds: float = seconds, fixed: Mapping[int, Fixed] = fixed) -> StepCosts:
            with visits(target, fixed, batch, sampling) as visit:
                sizes, spent = [0], VISIT * min(visit(0))
                if spent * FEWEST * PASSES > seconds:
                    raise TooSlow(
                        f"a step takes {spent / VISIT:.2g} s at batch size {batch}, and the {seconds:.0f} s for "
                        f"measuring steps hold fewer than the {FEWEST * VISIT * PASSES} steps that this takes"
                    )
                for size in list(fixed)[1:]:
                    spent += VISIT * min(visit(size))
                    if spent * PASSES > seconds and len(sizes) >= FEWEST:
                        break
                    sizes.append(size)
                least, most = min(3.0, seconds / PASSES), seconds / 2
                return measure(visit, {size: size + 1.0 for size in sizes}, least, threads, longest=most)

        under = conditions(target, "fixed trees", [(size,) for size in fixed], batch, sampling)
        try:
            costs[batch] = cache.costs(under, list(fixed), timed)
        except TooSlow:
            if not costs:
                raise
    return costs


def _fits(target: Target, size: int, batch: int) -> bool:
    """Return whether the target's runner computes binary trees of so many nodes for a batch."""
    able = target.lm.capabilities
    if able.rollback is not None and size > 1:  # it takes back chains only
        return False
    return able.leaves is None or batch * max(1, (size + 1) // 2) <= able.leaves
