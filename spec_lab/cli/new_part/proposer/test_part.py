"""Outputs with the drafts of ``my_proposer`` follow the target: every outcome on toy models is enumerated."""

from spec_lab.cli.new_part.proposer.part import MyProposer
from spec_lab.testing import assert_lossless


def test_outputs_follow_the_target() -> None:
    assert_lossless(proposer=MyProposer)
