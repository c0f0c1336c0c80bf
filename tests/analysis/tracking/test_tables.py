"""The tables of a run on Weights & Biases."""

import json

import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.tracking import tables as shown
from spec_lab.tasks.benchmark import run
from tests.labs import lab, settings


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Tables:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert run(lab(), settings(out), {}) == 0
    return metrics.load(out)


def test_the_table_of_requests_is_bounded(tables):
    few = shown.requests(tables, max_rows=5, max_letters=4)
    assert few["request"].tolist() == [0, 0, 1, 1]  # whole prompts
    assert few["prompt"].iloc[0] == "… sat" and len(few["text"].iloc[0]) == 5 and few["text"].iloc[0].endswith("…")
    assert shown.requests(Tables(tables.forwards, tables.steps, tables.requests.iloc[:0])).empty


def test_the_table_of_steps_holds_the_text_that_each_step_emitted(tables):
    steps = shown.steps(tables)
    assert len(steps) == sum(len(metrics.decode_steps(tables.steps, arm)) for arm in metrics.arms(tables))
    for row in tables.requests.itertuples():
        rows = steps[(steps["request"] == row.request) & (steps["arm"] == row.arm)]
        letters = sum(len(a) + len(b) for a, b in zip(rows["accepted_text"], rows["other_text"], strict=True))
        assert letters == len(row.text) - row.prefill_tokens  # a token is a letter here
        assert sum(len(text) for text in rows["accepted_text"]) <= rows["accepted"].sum()
    assert json.loads(steps["path"].iloc[0]) == list(metrics.decode_steps(tables.steps, "repeat")["path"].iloc[0])


def test_the_table_of_steps_is_bounded_and_shows_drafted_tokens_where_they_are_recorded(tables):
    drafted = tables.steps.assign(
        draft_tokens=[[1, 2]] * len(tables.steps), draft_q=[[0.123456, float("nan")]] * len(tables.steps)
    )
    all_steps = shown.steps(Tables(tables.forwards, drafted, tables.requests))
    first = int((all_steps["request"] == 0).sum())
    few = shown.steps(Tables(tables.forwards, drafted, tables.requests), max_rows=first + 1)
    assert few["request"].unique().tolist() == [0] and len(few) == first
    assert (few["draft_tokens"].iloc[0], few["draft_q"].iloc[0]) == ("[1, 2]", "[0.1235, null]")
    empty = shown.steps(Tables(tables.forwards, tables.steps.iloc[:0], tables.requests))
    assert isinstance(empty, pd.DataFrame) and empty.empty
