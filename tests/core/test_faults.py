"""Errors in parts: the message names the part, the error, and the line of the part's own code."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spec_lab.core.draft import ComputedOnly, Draft
from spec_lab.core.faults import PartError, Passing, attributed
from spec_lab.core.shape import chain, forest
from spec_lab.decode.step import propose
from spec_lab.verify import Match
from tests import checkpoints


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
    ("call", "message", "line"),
    [
        (Part.fails, "proposer 'mine' raised KeyError: 'lost' (", 'return {}["lost"]'),
        (Part.fails_in_a_library, "proposer 'mine' raised JSONDecodeError: Expecting", 'return json.loads("{")'),
    ],
)
def test_the_innermost_line_of_the_part_s_own_code_is_named(call, message, line):
    with pytest.raises(PartError) as error, attributed("proposer", Part()):
        call(Part())
    assert str(error.value).startswith(message)
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

    parts = SimpleNamespace(proposer=Beyond(), verifier=Match())
    batch = SimpleNamespace(sequences=[None], target=SimpleNamespace(vocabulary=5), room=lambda: [2])
    with pytest.raises(PartError, match=f"proposer 'beyond' .*token {token}.* 5 tokens"):
        propose(parts, batch)


@pytest.mark.parametrize(
    ("parent", "token", "message"),
    [
        ([0], [7], "token 7.* 5 tokens"),
        ([0, 0], [1, -2], "token -2.* 5 tokens"),
        ([4], [1], "earlier row"),
        ([-1], [1], "earlier row"),
        ([0, 1], [1], "1 tokens for 2 rows that are computed only"),
    ],
)
@pytest.mark.parametrize("nodes", [0, 2])
def test_rows_computed_only_that_cannot_be_computed_are_the_proposer_s_fault(parent, token, message, nodes):
    class Beyond:
        name = "beyond"

        def propose(self, batch):
            extra = ComputedOnly(np.array(parent), torch.tensor(token))
            return Draft(forest((chain(nodes),)), torch.zeros(nodes, dtype=torch.long), computed_only=extra)

    parts = SimpleNamespace(proposer=Beyond(), verifier=Match())
    batch = SimpleNamespace(sequences=[None], target=SimpleNamespace(vocabulary=5), room=lambda: [2])
    with pytest.raises(PartError, match=f"proposer 'beyond' .*{message}"):
        propose(parts, batch)


@pytest.mark.parametrize("error", [Passing("not the part's"), PartError("reported already"), KeyboardInterrupt()])
def test_errors_raised_outside_the_part_are_unchanged(error):
    with pytest.raises(type(error)) as caught, attributed("proposer", Part()):
        raise error
    assert caught.value is error


# From the command line


MODULE = """
from spec_lab.decode.proposer import Proposer


class Faulty(Proposer):
    name, drawn, nodes = "faulty", "deterministic", 1

    def __init__(self, target): ...

    def propose(self, batch):
        return self.inner()

    def inner(self):
        return {}["lost"]


class Exits(Faulty):
    name = "exits"

    def inner(self):
        raise SystemExit(0)


class Early(Faulty):
    def __init__(self, target):
        raise SystemExit(0)
"""


@pytest.fixture
def faulty(quick_cli, tmp_path, monkeypatch):
    """The command line with a proposer that raises."""
    (tmp_path / "faulty.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    runs = [run for run in checkpoints.short_runs(tmp_path, checkpoints.TEXTS[:1]) if not run.startswith("proposer")]
    return lambda of, *more: quick_cli(*more, *runs, "~proposer", f"+proposer._target_={of}")


def test_one_message_names_the_part_and_how_to_see_the_traceback(faulty):
    code, _, errors = faulty("faulty.Faulty")
    assert code == 1 and "Traceback" not in errors
    assert "proposer 'faulty' raised KeyError: 'lost'" in errors and "HYDRA_FULL_ERROR=1" in errors


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("Exits", "proposer 'exits' raised SystemExit: 0 (FILE:21, in inner)"),
        ("Early", "proposer._target_=faulty.Early raised SystemExit: 0 (FILE:26, in __init__)"),
    ],
)
def test_a_part_that_ends_the_process_is_an_error(faulty, tmp_path, of, said):
    code, _, errors = faulty(f"faulty.{of}")
    assert code == 1 and said.replace("FILE", str(tmp_path / "faulty.py")) in errors
    assert not list(tmp_path.rglob("summary.json"))
