"""Tiny targets, as the tests of proposers have."""

from tests.propose.conftest import *  # noqa: F403
