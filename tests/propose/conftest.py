"""A tiny target, and its greedy output."""

import pytest

from tests.propose.lab import PROMPTS, plain_greedy
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def truth(target):
    return [plain_greedy(target.lm.model, prompt, 20) for prompt in PROMPTS]
