"""Errors inside parts: the message names the part, the error, and the line of the part's own code."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spec_lab.decode import propose
from spec_lab.draft import Draft, chain, forest
from spec_lab.faults import PartError, Passing, attributed


class Part:
    name = "mine"

    def fails(self):
        return {}["lost"]

    def fails_in_a_library(self):
        return json.loads("{")


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


@pytest.mark.parametrize(
    ("call", "said", "line"),
    [
        (Part.fails, "proposer 'mine' raised KeyError: 'lost' (", 'return {}["lost"]'),
        (Part.fails_in_a_library, "proposer 'mine' raised JSONDecodeError: Expecting", 'return json.loads("{")'),
    ],
)
def test_the_innermost_line_of_the_part_s_own_code_is_named(call, said, line):
    with pytest.raises(PartError) as error, attributed("proposer", Part()):
        call(Part())
    assert str(error.value).startswith(said)
    assert f"({__file__}:{line_of(line)}, in {call.__name__})" in str(error.value)
    assert error.value.__cause__ is not None


def test_an_error_outside_the_part_s_code_has_no_line():
    class Foreign:
        pass

    Foreign.__module__ = "elsewhere.parts"
    with pytest.raises(PartError, match=r"^verifier 'Foreign' raised ValueError$"), attributed("verifier", Foreign()):
        raise ValueError


@pytest.mark.parametrize("token", [-1, 5, 10**6])
def test_a_draft_of_tokens_that_the_target_does_not_have_is_the_proposer_s_fault(token):
    class Beyond:
        name = "beyond"

        def propose(self, batch):
            return Draft(forest((chain(2),)), torch.tensor([0, token]))

    target = SimpleNamespace(vocabulary=5)
    with pytest.raises(PartError, match=f"proposer 'beyond' raised .* the token {token}, but the target has 5 tokens"):
        propose(Beyond(), SimpleNamespace(sequences=[None], target=target, room=lambda: [2]))


@pytest.mark.parametrize("error", [Passing("not the part's"), PartError("said already"), KeyboardInterrupt()])
def test_errors_that_are_not_the_part_s_stay_as_they_are(error):
    with pytest.raises(type(error)) as found, attributed("proposer", Part()):
        raise error
    assert found.value is error
