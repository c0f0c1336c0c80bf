"""The target of the tests of steps, and its greedy texts."""

import pytest

from tests.decode.foretold import NEW
from tests.propose.lab import PROMPTS, plain_greedy
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def truth(target):
    return [plain_greedy(target.lm.model, prompt, NEW) for prompt in PROMPTS]
