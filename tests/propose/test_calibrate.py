"""Timing the steps of draft trees."""

from spec_lab.core.probabilities import Sampling
from spec_lab.propose.calibrate import visits
from tests.labs import Repeat
from tests.runners.replays import slow_target


def test_captures_are_no_seconds_of_a_step(monkeypatch):
    target = slow_target()
    prepare, captured = target.lm.prepare, target.lm.graphs.captured

    def forgetful(*given):
        captured.clear()
        return prepare(*given)

    monkeypatch.setattr(target.lm, "prepare", forgetful)
    with visits(target, {2: Repeat(2)}, 1, Sampling()) as visit:
        assert all(0 < seconds < 1000 for seconds in visit(2)) and captured
