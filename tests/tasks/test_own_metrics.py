"""The values of a user's own metrics reach every output of a run, and none of them costs the run."""

import json
from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from spec_lab.analysis import report
from spec_lab.analysis.compare import compare
from spec_lab.analysis.results import comparison
from spec_lab.analysis.run_tables import own_figures
from spec_lab.analysis.tracking import Files, headline
from spec_lab.cli.search import result
from spec_lab.results import run_state, sweep
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.lab import Loop
from tests.labs import TEXTS, lab, settings

CONFIG = {"target": {"path": "tiny"}, "max_new_tokens": 12, "metrics": {"mine": {"_target_": "mine.lengths"}}}
NAMES = ("letters", "longest")


class Heard(Files):
    def metrics(self, values):
        self.heard = values


def lengths(tables, arm):
    texts = tables.requests[tables.requests["arm"] == arm].set_index("request")["text"]
    return {"letters": texts.map(len) + texts.index, "longest": int(texts.map(len).max())}


def broken(tables, arm):
    raise RuntimeError("no such thing")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a sweep of one run with nine groups, what its tracker heard, and what was printed."""
    folder, console, tracker = tmp_path_factory.mktemp("sweep"), Console(file=StringIO(), width=200), Heard()
    measured = lab((TEXTS * 4)[:-1], tracker=tracker, metrics={"mine": lengths, "broken": broken})
    sweep.plan(folder, [["a=1"]])
    out = folder / "a=1"
    assert run(measured, settings(out), CONFIG, console) == 0, "an error in a metric fails no run"
    run_state.end(out, ["a=1"], "", 0, 1.0)
    return folder, tracker.heard, console.file.getvalue()


@pytest.fixture(scope="module")
def summary(done):
    return json.loads((done[0] / "a=1" / "summary.json").read_text())


def test_summary_and_table_hold_the_values_of_every_arm(done, summary):
    rows = pd.read_parquet(done[0] / "a=1" / "metrics.parquet").set_index(["arm", "metric", "request"])["value"]
    letters = rows["repeat"]["letters"]
    assert letters.to_dict() == {n: 12 + n for n in range(19)} and rows["baseline"]["longest"].to_dict() == {-1: 12}
    for figures in (summary, *summary["arms"].values()):
        values = figures["metrics"]["letters"]
        assert values["mean"] == letters.mean() and values["low"] < values["mean"] < values["high"]
        assert figures["metrics"]["longest"] == {"mean": 12, "low": None, "high": None}


def test_the_run_says_what_could_not_be_computed(done, summary):
    (failure,) = summary["own_metrics"]["failures"]
    assert failure.startswith("metrics.broken raised RuntimeError: no such thing") and __file__ in failure
    assert "metrics.broken raised RuntimeError" in " ".join(done[2].split())


def test_terminal_and_report_show_the_values(done, summary):
    page = report.write(done[0] / "a=1").read_text()
    shown = f"{summary['metrics']['letters']['mean']:.4g}"
    for text in (done[2], page):
        assert shown in text and all(name in text for name in NAMES)
    assert "no such thing" in page


def test_a_sweep_s_table_and_a_search_find_them(done, summary):
    table = sweep.collect(done[0])
    assert own_figures(table) == [f"metrics.{name}" for name in NAMES]
    row = table.set_index("arm").loc["repeat"]
    assert row["metrics.letters_low"] == summary["metrics"]["letters"]["low"]
    assert result("metrics.letters.mean", done[0] / "a=1") == row["metrics.letters"]
    assert "letters" in report.write(done[0]).read_text()


def test_trackers_hear_them_once_and_weights_and_biases_has_them_by_name(done, summary):
    assert done[1] == {arm: figures["metrics"] for arm, figures in summary["arms"].items()}
    shown = headline.figures(summary)
    assert shown["metrics/letters"] == shown["baseline/metrics/letters"] == summary["metrics"]["letters"]["mean"]
    assert shown["metrics/letters/low"] == summary["metrics"]["letters"]["low"]
    assert not [name for name in shown if name.startswith("own_metrics")]


def test_compare_pairs_them_by_prompt(done, tmp_path):
    def longer(tables, arm):
        return {"letters": lengths(tables, arm)["letters"] * 2, "longest": 5}

    assert run(lab((TEXTS * 4)[:-1], metrics={"mine": longer}), settings(tmp_path / "b"), CONFIG) == 0
    (pair,) = (compared := compare([done[0] / "a=1", tmp_path / "b"])).pairs
    changes = {change.figure: change for change in pair.changes}
    letters, longest = (changes[f"metrics.{name}"] for name in NAMES)
    assert (letters.units, letters.paired, letters.verdict) == ((19, 19), True, "significant")
    assert letters.other == 2 * letters.reference and letters.simultaneous.low > 0
    assert (longest.reference, longest.other, longest.verdict) == (12, 5, "not tested")
    cells = {row[0].text: [cell.text for cell in row] for row in comparison.result(compared).sections[-2].table.rows}
    assert cells["letters"][1:4] == ["21", "42", "+21"]


def test_a_mended_metric_is_computed_from_the_rows_of_the_run(done, monkeypatch):
    monkeypatch.setattr(Loop, "decode", lambda *_: pytest.fail("decoded again"))
    out, made = done[0] / "a=1", lab((TEXTS * 4)[:-1])
    before = json.loads((out / "summary.json").read_text())
    assert run(replace(made, metrics={"broken": lengths}), settings(out), {**CONFIG, "metrics": {}}) == 0
    after = json.loads((out / "summary.json").read_text())
    assert after["metrics"] == before["metrics"] and after["own_metrics"]["failures"] == []
    assert run(made, settings(out), CONFIG) == 0
    assert "metrics" not in json.loads((out / "summary.json").read_text()) and not (out / "metrics.parquet").exists()
