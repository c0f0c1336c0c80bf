"""Costs of a step, by its context, the number of sequences and the levels that are drafted: measured and cached."""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypedDict

import torch

from spec_lab.core.faults import attributed
from spec_lab.core.options import Count, Filled, Temperature, check_fields
from spec_lab.core.probabilities import Sampling
from spec_lab.core.user_cache import default_folder
from spec_lab.decode.proposer import Proposer
from spec_lab.models.target import Target
from spec_lab.policy.adaptive import Adaptive
from spec_lab.policy.depths import FixedDepth
from spec_lab.policy.policy import Policy
from spec_lab.propose.calibrate import conditions, context_of, visits
from spec_lab.propose.cost_cache import CostCache
from spec_lab.propose.step_costs import StepCosts, measure
from spec_lab.propose.stop_rules import Confidence

log = logging.getLogger(__name__)

DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Depths that are timed, up to the largest that a policy considers, which is timed as well."""

CONTEXTS = (128, 1024)
"""Tokens of context at which steps are timed."""

PERIOD = 24
"""Tokens after which the text repeats on which steps are timed, so that look-ups find drafts."""

MEASURED = ("costs", "expected_", "step_")
"""How the names of facts begin that ``propose.calibrate`` measures."""


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of a step.

    Args:
        seconds: by the tokens of context, by the number of sequences, by the levels drafted for each; 0 levels are a
            step without a draft.
    """

    seconds: Mapping[int, Mapping[int, Mapping[int, float]]]

    @property
    def batches(self) -> list[int]:
        """Numbers of sequences of which steps were timed at every context."""
        return sorted(set[int].intersection(*map(set, self.seconds.values())))

    def of(self, levels: float, live: int = 1, context: int = 0) -> float:
        """Seconds with ``live`` sequences of this context, interpolated between what was timed; beyond it the last
        slope goes on.
        """

        def at(seconds: Mapping[int, float]) -> float:
            return _line(seconds, levels)

        def together(by_live: Mapping[int, Mapping[int, float]]) -> float:
            return _line({number: at(seconds) for number, seconds in by_live.items()}, live)

        return _line({length: together(by_live) for length, by_live in self.seconds.items()}, context)

    @property
    def facts(self) -> dict[str, Any]:
        """Seconds by context, numbers of sequences and of levels, as values that JSON can hold."""
        return {
            "seconds": {
                str(context): {str(live): {str(k): v for k, v in seconds.items()} for live, seconds in by_live.items()}
                for context, by_live in self.seconds.items()
            }
        }


def _line(values: Mapping[int, float], at: float) -> float:
    """Piecewise linear interpolation, which goes on with the last slope."""
    places = sorted(values)
    if len(places) == 1 or at <= places[0]:
        return values[places[0]]
    right = min(bisect_left(places, at), len(places) - 1)
    last, before = places[right], places[right - 1]
    slope = (values[last] - values[before]) / (last - before)
    return values[last] + (max(0.0, slope) if at > last else slope) * (at - last)


@dataclass(frozen=True)
class Timing:
    """How costs are measured.

    Args:
        batch_size: most sequences of a step; a single one is timed as well.
        contexts: tokens of context at which steps are timed, as far as the target has room for them.
        temperature: of the requests.
        recalibrate: measure costs even if the cache has them.
        cache: folder of the measured costs; None: the user's.
    """

    batch_size: Count = 1
    temperature: Temperature | None = 0.0
    recalibrate: bool = False
    cache: Filled | None = None
    contexts: Sequence[Count] = CONTEXTS

    def __post_init__(self) -> None:
        check_fields(self)


class TimingOptions(TypedDict, total=False):
    """The options of ``Timing``.

    Args:
        batch_size: sequences decoded together, for the measured cost of steps.
        temperature: the target's, for the measured cost of steps.
        recalibrate: measure the cost of steps again, even if it is cached.
        cache: folder of measured costs; None: $SPEC_LAB_CACHE, else the user's cache folder.
        contexts: tokens of context at which steps are timed, rising; between and beyond them costs follow lines.
    """

    batch_size: Count
    temperature: Temperature | None
    recalibrate: bool
    cache: Filled | None
    contexts: Sequence[Count]


def without_costs(facts: Any) -> Any:
    """Return a proposer's facts without what was measured when its tree was chosen, which differs from day to day."""
    if isinstance(facts, Mapping):
        return {name: without_costs(described) for name, described in facts.items() if not name.startswith(MEASURED)}
    return facts


def drafter_of(proposer: Proposer) -> dict[str, Any]:
    """Return what tells a proposer's drafts from another's, as part of the key of cached costs."""
    facts = {"name": proposer.name, "sha256": proposer.sha256, "drawn": proposer.drawn, "nodes": proposer.nodes}
    return facts | {"facts": without_costs(proposer.facts)}


def timed_batches(target: Target, most: int) -> list[int]:
    """Return the numbers of sequences of which steps are timed: one, the most, and of a mixture of experts powers
    of two between, since the experts that a step reads do not grow linearly with its rows.
    """
    work = target.lm.work
    between = [] if work is None or work.experts is None else [1 << power for power in range(1, most.bit_length())]
    return sorted({1, *(count for count in between if count < most), most})


def draft_costs(
    target: Target,
    proposer: Proposer,
    depth: int,
    timing: Timing,
    part: str = "",
    depths: Sequence[int] = DEPTHS,
    policy: Callable[[int], Policy] | None = None,
) -> DraftCosts:
    """Measure steps of a proposer that drafts no, one, two, ... ``depth`` levels.

    Depths that would be too slow even if everything were accepted are not timed (``step_costs.MIN_RATE``).

    Args:
        target: verifies.
        proposer: drafts; what its requests share is forgotten afterwards.
        depth: the largest one timed.
        timing: how.
        part: that drafts, of a proposer that chooses one of several.
        depths: that are timed, besides the largest one.
        policy: whose steps are timed, by what stands in place of a depth; None: drafts of that depth.
    """
    sizes = [*(k for k in depths if k < depth), depth]
    sampling = Sampling(timing.temperature or 0.0)
    stop = None if proposer.why_not_stopped is None else Confidence()  # at the threshold 0: never
    parts = {proposer.name: proposer}
    policies = {k: FixedDepth(k, part, stop=stop) if policy is None else policy(k) for k in sizes}
    limited: dict[int, Proposer] = {k: Adaptive(parts, policies[k]) for k in sizes}
    drafter = drafter_of(proposer) | {"part": part}
    if policy is not None:
        drafter["policy"] = policies[depth].name
    cache = CostCache(default_folder() if timing.cache is None else Path(timing.cache))
    whole = policy is not None  # the draft is whole whatever its rows, so that all sizes are timed if one is worth it
    expected = {k: (depth if whole and k else k) + 1.0 for k in sizes}
    seconds: dict[int, dict[int, Mapping[int, float]]] = {}
    contexts = sorted({context_of(target, context) for context in timing.contexts})
    for context, live in product(contexts, timed_batches(target, timing.batch_size)):
        under = conditions(
            target, json.dumps(drafter, sort_keys=True, default=str), [(k,) for k in sizes], live, sampling, context
        )

        def timed(live: int = live, context: int = context) -> StepCosts:
            log.info(
                "Measuring the seconds of a step for %d to %d drafted levels, batch %d, context %d",
                0, depth, live, context,
            )  # fmt: skip
            threads = torch.get_num_threads() if target.lm.device.type == "cpu" else 1
            with visits(target, limited, live, sampling, PERIOD, context) as visit:
                return measure(visit, expected, threads=threads)

        costs = cache.costs({**under, "period": PERIOD}, sizes, timed, timing.recalibrate)
        if not costs.steady:
            log.warning(
                "the machine is too busy to measure what drafts cost (repeated timings of a step differ by %.0f %%): "
                "the measured costs are used for this run and not kept", 100 * costs.overall_spread,
            )  # fmt: skip
        seconds.setdefault(context, {})[live] = costs.seconds
    with attributed("proposer", proposer):
        proposer.forget()
    return DraftCosts(seconds)
