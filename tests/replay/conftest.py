import pytest

from tests.tiny import tiny_target


@pytest.fixture(scope="session")
def target():
    return tiny_target()
