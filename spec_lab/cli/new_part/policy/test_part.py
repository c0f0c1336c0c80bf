"""``my_policy`` decides from the past, and outputs follow the target whatever it decides."""

from types import SimpleNamespace

from spec_lab.cli.new_part.policy.part import MyPolicy, NextDepth
from spec_lab.policy.policy import DraftOutcome


def outcome(state: NextDepth, accepted: int) -> DraftOutcome:
    return DraftOutcome(state, limit=None, drafted=3, nodes=3, accepted=accepted, live=1)


def test_the_depth_rises_by_one_and_is_halved() -> None:
    policy = MyPolicy(start=4)
    state = policy.init(SimpleNamespace())
    policy.learn([outcome(state, accepted=3)])
    assert [limit.depth for limit in policy.decide(None, [state])] == [5]
    policy.learn([outcome(state, accepted=1)])
    assert [limit.depth for limit in policy.decide(None, [state])] == [2]
