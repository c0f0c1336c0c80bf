"""What a policy decided, in words."""

import re

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


def numbers(text):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_how_often_each_depth_was_chosen_and_what_a_draft_token_costs():
    found = note(table(*[Limit(0)] * 3), seconds=COSTS)
    assert numbers(found) == [0, 3, 3, 1.9] and "since" in found and "one draft token " in found
    found = note(table(Limit(8), Limit(0), Limit(8), nodes=8, depth=8), seconds=COSTS)
    assert numbers(found) == [8, 2, 3, 0, 1, 8, 8, 2.5] and "since" not in found
    unmeasured = note(table(Limit(2), nodes=2, depth=2), seconds=COSTS)
    assert numbers(unmeasured) == [2, 1, 1, 2], "the costs of a depth that was not measured are not named"


def test_the_most_frequent_decisions_are_shown_and_the_others_counted():
    limits = [Limit(depth) for depth in range(6) for _ in range(depth, 6)]
    assert numbers(note(table(*limits))) == [0, 6, 21, 1, 5, 2, 4, 3, 3, 2, 3, 0]


def test_costs_are_those_of_the_part_that_was_chosen():
    seconds = {"a": {"1": {"0": 1.0, "2": 3.0}}, "b": {"1": {"0": 1.0, "2": 5.0}}}
    assert numbers(note(table(Limit(2, part="a")), seconds=seconds))[-2:] == [2, 3]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"1": {"0": 1.0, "1": 1.5}, "8": {"0": 2.0, "1": 6.0}}, [3, 8]),
        ({"costs": COSTS}, [1.9]),
        ({"a": COSTS, "b": {"1": {"0": 1.0, "1": 2.0}}}, [1.9, 2]),
    ],
)
def test_costs_by_batch_size_and_by_part(seconds, said):
    assert numbers(note(table(Limit(0)), seconds=seconds)) == [0, 1, 1, *said]


def test_thresholds_and_parts():
    stopped = table(Limit(None, 0.4), Limit(None, 0.5), nodes=3, depth=3)
    found = note(stopped, rule="confidence")
    assert numbers(found) == [2, 2, 0.4, 0.5, 3]
    assert numbers(note(table(Limit(2, part="a")))) == [2, 1, 1, 0]
    assert numbers(note(table(Limit(1), nodes=3, depth=1), seconds=COSTS)) == [1, 1, 1, 3, 1, 1.9]
    whole = {"1": {"0": 1.0, "1": 1.5}}
    assert numbers(note(table(Limit(None, 0.4), nodes=3, depth=3), name="gain", seconds=whole)) == [1, 1, 3, 1.5]


def test_an_arm_without_a_policy_has_none():
    assert policy_note(steps({"accepted": 1}), "speculative", {"policy": {"name": "fixed"}}) is None
    assert policy_note(table(Limit(0)), "speculative", {"name": "ngram"}) is None
    assert policy_note(table(Limit(0)), "other", {"policy": {"name": "fixed"}}) is None
