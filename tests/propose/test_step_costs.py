"""How steps are timed: their order, what counts, and when a measurement is trusted. No test reads a clock."""

import pytest

from spec_lab.core.machine import Usage
from spec_lab.propose.step_costs import BLOCKS, PASSES, VISIT, WARM_UP, StepCosts, measure

TRUE = {0: 0.010, 1: 0.012, 2: 0.013, 4: 0.015}  # seconds
TOKENS = {0: 1.0, 1: 1.5, 2: 1.8, 4: 2.2}
IDLE = Usage(0.0, None, 0.0)


class Machine:
    """Times visits: the true costs, plus what other processes add to the n-th visit."""

    def __init__(self, added=lambda visit: 0.0, true=TRUE):
        self.added, self.true, self.visited = added, true, []

    def __call__(self, size):
        self.visited.append(size)
        return [self.true[size] + self.added(len(self.visited))] * (VISIT - 1)


def timed(machine, tokens=TOKENS, **options):
    return measure(machine, tokens, **{"seconds": 0.0, "usage": lambda: IDLE} | options)


def test_sizes_alternate_in_both_directions():
    machine = Machine()
    timing = timed(machine)
    rising = list(TRUE)
    assert machine.visited == rising * WARM_UP + (rising + rising[::-1]) * (PASSES // 2)
    assert timing.seconds == pytest.approx(TRUE)
    assert timing.spread == dict.fromkeys(TRUE, 0.0)
    assert timing.steps == PASSES * (VISIT - 1)
    assert timing.steady


def test_disturbed_steps_do_not_count():
    timing = timed(Machine(lambda visit: 0.5 * (visit % 3 == 0)))
    assert timing.seconds == pytest.approx(TRUE)
    assert timing.steady


def test_sizes_above_the_largest_fast_enough_one_are_not_timed():
    true = {0: 0.010, 1: 0.011, 2: 0.090, 3: 0.090, 4: 0.012, 5: 0.090, 6: 0.090}
    timing = timed(Machine(true=true), dict.fromkeys(true, 1.0))
    assert list(timing.seconds) == [0, 1, 2, 3, 4]


def test_an_unsteady_measurement_is_extended_and_then_not_trusted():
    timing = timed(Machine(lambda visit: 0.005 * ((visit - 1) // len(TRUE) % 2)))  # load in every other pass
    assert not timing.steady
    assert timing.overall_spread > 0.3
    assert timing.steps == BLOCKS * PASSES * (VISIT - 1), "bounded"


def test_a_measurement_becomes_steady_when_the_load_ends():
    loud = (WARM_UP + PASSES) * len(TRUE)
    timing = timed(Machine(lambda visit: 0.005 * ((visit - 1) // len(TRUE) % 2) if visit <= loud else 0.0))
    assert timing.steady
    assert timing.seconds == pytest.approx(TRUE)
    assert timing.steps == 2 * PASSES * (VISIT - 1)


def test_timing_on_a_slow_machine_is_bounded():
    slow = Machine(lambda visit: 20.0 * (visit - 1 + visit % 5))
    timing = timed(slow, seconds=3.0)
    assert timing.steps == 2 * (VISIT - 1)


@pytest.mark.parametrize(
    ("spread", "steady"),
    [
        ({0: 0.01, 1: 0.02, 2: 0.01, 4: 0.0, 8: 0.03}, True),
        ({0: 0.01, 1: 0.02, 2: 0.90, 4: 0.0, 8: 0.03}, True),  # one size: the line over all sizes does not follow it
        ({0: 0.01, 1: 0.30, 2: 0.90, 4: 0.0, 8: 0.03}, False),
        ({0: 0.40, 1: 0.02, 2: 0.01, 4: 0.0, 8: 0.03}, False),  # the cost of drafting nothing is not smoothed
    ],
)
def test_spreads_decide_whether_costs_are_trusted(spread, steady):
    assert StepCosts(dict.fromkeys(spread, 1.0), spread, 9).steady is steady
