"""Outputs with the drafts of ``my_drafter`` follow the target: every outcome on toy models is enumerated."""

from spec_lab.cli.new_part.drafter.part import MyDrafter, NextState
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.testing import assert_lossless


def untrained(target: Target) -> MyDrafter:
    return MyDrafter(NextState(target.services.hidden_size), target, TreePlan.read(depth=4), None)


def test_outputs_follow_the_target() -> None:
    assert_lossless(proposer=untrained)
