"""What a policy decided, in words."""

import pytest

from spec_lab.analysis.policy_text import policy_note
from spec_lab.core.limit import Limit
from tests.analysis.metrics.tables import steps

COSTS = {"1": {"0": 0.010, "1": 0.019, "8": 0.025}}
NOTHING = {"accepted": 0, "nodes": 0, "depth": 0, "stop_had_children": False}


def table(*limits, **row):
    return steps(*({**NOTHING, **row, "policy": limit.as_json()} for limit in limits))


def note(given, **facts):
    return policy_note(given, "speculative", {"policy": {"name": "goodput", **facts}})


def test_how_often_each_depth_was_chosen_and_what_a_draft_token_costs():
    found = note(table(*[Limit(0)] * 3), seconds=COSTS)
    assert found == ("goodput, depth 0 in 3 of 3 steps, since a step with one draft token costs 1.9 times one without")
    found = note(table(Limit(2), Limit(0), Limit(2), nodes=2, depth=2), seconds=COSTS)
    assert "depth 2 in 2 of 3 steps, depth 0 in 1, 2 draft tokens a step, since" in found


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"1": {"0": 1.0, "1": 1.5}, "8": {"0": 2.0, "1": 6.0}}, "costs 3 times one without at batch size 8"),
        ({"costs": COSTS}, "one draft token costs 1.9 times"),
        ({"a": COSTS, "b": {"1": {"0": 1.0, "1": 2.0}}}, "one draft token of b costs 2 times"),
    ],
)
def test_costs_by_batch_size_and_by_part(seconds, said):
    assert said in note(table(Limit(0)), seconds=seconds)


def test_thresholds_and_parts():
    stopped = table(Limit(None, 0.4), Limit(None, 0.5), nodes=3, depth=3)
    found = note(stopped, rule="confidence")
    assert "the proposer's depth in 2 of 2 steps, thresholds from 0.4 to 0.5, 3 draft tokens a step" in found
    assert "a, depth 2 in 1 of 1 steps" in note(table(Limit(2, part="a")))
    assert "one level of draft tokens" in note(table(Limit(1), nodes=3, depth=1), seconds=COSTS)


def test_an_arm_without_a_policy_has_none():
    assert policy_note(steps({"accepted": 1}), "speculative", {"policy": {"name": "fixed"}}) is None
    assert policy_note(table(Limit(0)), "speculative", {"name": "ngram"}) is None
    assert policy_note(table(Limit(0)), "other", {"policy": {"name": "fixed"}}) is None
