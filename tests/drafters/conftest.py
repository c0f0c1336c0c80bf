"""The tiny target of the tests of proposers."""

from tests.propose.conftest import *  # noqa
