"""Shares of correct answers."""

import math

import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.text import accuracy_notes


def answers(*rows: dict) -> pd.DataFrame:
    plain = {"arm": "baseline", "sequence": 0, "kept": True, "finish": "stop", "checker": "number", "correct": True}
    return pd.DataFrame([plain | {"group": row["request"]} | row for row in rows])


TABLE = answers(
    *({"request": number, "correct": number < 3} for number in range(4)),
    *({"request": number, "correct": number < 2, "arm": "medusa"} for number in range(4)),
)
THRICE = pd.concat([TABLE.assign(request=TABLE["request"] + n, group=TABLE["group"] + n) for n in (0, 4, 8)])


def test_the_share_and_its_change_from_the_baseline():
    figures = metrics.accuracy(TABLE, "medusa")["number"]
    assert figures["answers"] == 4 and figures["correct"]["mean"] == 0.5 and figures["change"]["mean"] == -0.25
    assert math.isnan(figures["change"]["low"]), "four groups"
    bounds = metrics.accuracy(THRICE, "medusa")["number"]["change"]
    assert bounds["mean"] == -0.25 and -0.75 <= bounds["low"] <= -0.25 <= bounds["high"] <= 0.05
    base = metrics.accuracy(TABLE, "baseline")["number"]
    assert base["correct"]["mean"] == 0.75 and math.isnan(base["change"]["mean"])


def test_the_change_is_paired_by_question():
    """Without question 0, which only the baseline answered, both arms have the same answers."""
    table = THRICE[~((THRICE["arm"] == "medusa") & (THRICE["request"] % 4 == 2))]
    figures = metrics.accuracy(table, "medusa")["number"]
    assert figures["answers"] == 9 and figures["change"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_broken_groups_unkept_sequences_and_unchecked_answers_are_left_out():
    broken = TABLE.assign(finish=["nan", *["stop"] * 7])
    assert metrics.accuracy(broken, "medusa")["number"]["answers"] == 3
    unkept = pd.concat([TABLE, TABLE.iloc[4:5].assign(sequence=1, kept=False, correct=False)], ignore_index=True)
    assert repr(metrics.accuracy(unkept, "medusa")) == repr(metrics.accuracy(TABLE, "medusa"))
    unchecked = TABLE.astype({"correct": object})
    unchecked.loc[4, ["checker", "correct"]] = ["", None]
    assert metrics.accuracy(unchecked, "medusa")["number"]["answers"] == 3


def test_every_checker_has_its_own_figures_and_all_together_those_of_sweeps():
    table = TABLE.assign(checker=["number", "number", "choice", "choice"] * 2)
    share, change, _ = metrics.correct(table, "medusa")
    assert share.mean == 0.5 and change.mean == -0.25
    assert math.isnan(metrics.correct(table, "baseline")[1].mean)
    assert {name: figures["answers"] for name, figures in metrics.accuracy(table, "baseline").items()} == {
        "choice": 2, "number": 2,
    }  # fmt: skip


def test_the_share_of_checked_answers_that_were_cut_stands_beside_that_of_correct_ones():
    table = TABLE.assign(finish=["stop"] * 4 + ["length", "stop", "stop", "stop"])
    assert metrics.accuracy(table, "medusa")["number"]["cut"] == metrics.correct(table, "medusa")[2] == 0.25
    assert metrics.accuracy(table, "baseline")["number"]["cut"] == 0
    (line,) = accuracy_notes({arm: {"accuracy": metrics.accuracy(table, arm)} for arm in ("medusa", "baseline")})
    assert "(-25.0%), 25.0% cut; baseline 75.0%" in line and line.count("% cut") == 1
    assert line.endswith("Answers that max_new_tokens cut may lack what the checker looks for.")


def test_tables_without_checkers_have_none():
    assert metrics.accuracy(TABLE.drop(columns=["checker", "correct"]), "baseline") == {}
    assert metrics.accuracy(TABLE, "other") == {}
    share, change, cut = metrics.correct(TABLE.drop(columns=["checker", "correct"]), "baseline")
    assert math.isnan(share.mean) and math.isnan(change.mean) and math.isnan(cut)


@pytest.mark.parametrize("turns", [1, 2])
def test_the_turns_of_a_conversation_are_one_prompt_of_their_group(requests, turns):
    table = pd.concat([requests.assign(turn=turn + 1) for turn in range(turns)], ignore_index=True)
    longer = table[(table["turn"] == 1) | (table["group"] == 0)]
    assert metrics.short_groups(longer) == set()
    assert metrics.group_speeds(table, "medusa").tolist() == [20.0, 30.0]
