"""Figures along the text, on tables small enough to compute by hand."""

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.ranges import doubled, in_ranges
from tests.analysis.metrics.tables import steps


def along(rows: list[dict], **columns) -> dict:
    """Ranges of steps of eight requests, a group each, whose prompts have 10 tokens; columns of the requests."""
    table = steps(*({**row, "request": request} for request in range(8) for row in rows))
    requests = pd.DataFrame({"arm": "medusa", "request": range(8), "sequence": 0, "prompt_tokens": 10, **columns})
    return metrics.along_text(metrics.Tables(pd.DataFrame(), table, requests), "medusa")


def test_tau_and_acceptance_are_those_of_the_steps_that_begin_in_a_range():
    ranges = along([
        {"accepted": 3, "context": 11}, {"accepted": 1, "context": 26}, {"accepted": 2, "context": 27},
        {"accepted": 0, "context": 43, "expected_accepted": 0.25},
    ])  # fmt: skip
    position, context = ranges["by_position"], ranges["by_context"]
    assert [(row["first"], row["last"], row["steps"]) for row in position] == [(1, 16, 16), (17, 32, 8), (33, 33, 8)]
    assert [row["tau_pooled"]["mean"] for row in position] == [3.0, 3.0, 1.0]
    assert [row["draft_token_rate"]["mean"] for row in position] == pytest.approx([4 / 6, 2 / 3, 0])
    assert position[2]["expected_tau"] == {"mean": 1.25, "low": 1.25, "high": 1.25}, "the eight groups are alike"
    assert [(row["first"], row["last"], row["steps"]) for row in context] == [(1, 16, 8), (17, 32, 16), (33, 43, 8)]
    assert ranges["by_turn"] == []


def test_turns_are_ranges_of_their_own():
    turns = along([{"accepted": 2}], turn=[1, 2] * 4)["by_turn"]
    assert [(row["first"], row["last"], row["steps"]) for row in turns] == [(1, 1, 4), (2, 2, 4)]
    assert np.isnan(turns[0]["tau_pooled"]["low"]), "four groups have no interval"


def test_an_arm_without_drafts_has_no_ranges():
    assert not any(along([{"accepted": 0, "nodes": 0, "depth": 0, "context": 40}], turn=1).values())


def test_tokens_taken_back_before_the_first_one_count_in_the_first_range():
    terms = {"tau": (np.array([2.0, 1.0]), np.ones(2))}
    assert [row["steps"] for row in in_ranges(np.array([0, 5]), doubled(5), terms, [0, 1])] == [2]
    assert doubled(33, also=[20, 64]) == [16, 20, 32, 64]
