"""``my_verifier`` keeps the target's distribution: every outcome on toy models is enumerated."""

from spec_lab.cli.new_part.verifier.part import MyVerifier
from spec_lab.testing import assert_lossless


def test_outputs_follow_the_target() -> None:
    assert_lossless(MyVerifier())
