"""Outputs under ``my_constraint`` have the masked distribution: every outcome on toy models is enumerated."""

from spec_lab.cli.new_part.constraint.part import MyConstraint
from spec_lab.testing import assert_lossless


def test_outputs_have_the_masked_distribution() -> None:
    assert_lossless(constraint=MyConstraint)
