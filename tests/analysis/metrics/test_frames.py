"""Frames: what the figures draw, checked on tables written by hand and against the metrics of a small run."""

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables, frames, sweeps
from spec_lab.analysis.metrics.frames import TextSpan as Span
from spec_lab.tasks.benchmark import run
from tests.labs import Repeat, lab, settings


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(more_proposers={"longer": Repeat(4)}), settings(out), {})
    return metrics.load(out)


def step(path=(), **changes) -> dict:
    """One decode step that accepted ``path`` and emitted one token more, in a chain of 3."""
    accepted = len(path)
    plain = {
        "group": 0, "arm": "repeat", "request": 0, "sequence": 0, "parent_sequence": -1, "forward": 1,
        "prefill": False, "finish": "", "nodes": 3, "depth": 3, "path": list(path), "stop_had_children": accepted < 3,
        "accepted": accepted, "emitted": accepted + 1, "accepted_kept": accepted, "emitted_kept": accepted + 1,
        "forced_accepted": 0, "forced_emitted": 0, "forced_accepted_kept": 0, "forced_emitted_kept": 0,
        "taken_back": 0, "context": 0,
    }  # fmt: skip
    return plain | changes


def output(text: str, ends, steps, *more, prompt_tokens=10) -> Tables:
    """Tables of one request: its row, and those of other sequences."""
    plain = {"group": 0, "arm": "repeat", "request": 0, "sequence": 0, "parent_sequence": -1, "text": text,
             "tokens": list(range(len(ends))), "ends": list(ends), "prompt_tokens": prompt_tokens}  # fmt: skip
    return Tables(pd.DataFrame(), pd.DataFrame(steps), pd.DataFrame([plain, *(plain | request for request in more)]))


# Of a run ------------------------------------------------------------------------------------------------------------


def test_depths_carry_survival_and_conditional_of_drafting_arms_only(tables):
    frame = frames.by_depth(tables)
    assert set(frame["arm"]) == {"repeat", "longer"}
    for (arm, kind), rows in frame.groupby(["arm", "kind"]):
        curve = getattr(metrics, kind)(metrics.decode_steps(tables.steps, arm))
        np.testing.assert_allclose(rows["value"], curve)
        assert list(rows["depth"]) == list(range(1, len(curve) + 1))


def test_phases_add_up_to_the_decode_time(tables):
    tables = metrics.of_timed_groups(tables)
    frame = frames.time_by_phase(tables)
    for arm, rows in frame.groupby("arm"):
        tokens = tables.requests[tables.requests["arm"] == arm]["decode_tokens"].sum()
        assert rows["ms_per_token"].sum() * tokens == pytest.approx(1e3 * metrics.decode_seconds(tables.forwards, arm))
        assert rows["share"].sum() == pytest.approx(1)


def test_cost_is_the_median_by_nodes_of_each_sequence():
    def one(nodes, live, target, prefill=False):
        return {"arm": "repeat", "live": live, "nodes": nodes, "target": target, "prefill": prefill}

    forwards = pd.DataFrame(
        [one(8, 2, 0.001), one(8, 2, 0.003), one(7, 2, 0.008), one(4, 1, 0.002), one(0, 2, 9.0, prefill=True)]
    )
    requests = pd.DataFrame({"arm": ["repeat"]})
    frame = frames.cost_of_nodes(Tables(forwards, pd.DataFrame(), requests))
    assert frame[["live", "nodes", "forwards"]].to_numpy().tolist() == [[1, 4, 1], [2, 4, 3]]  # 7 / 2 is 4, rounded
    np.testing.assert_allclose(frame["ms"], [2.0, 3.0])
    np.testing.assert_allclose(frame["low"], [2.0, 2.0])


def test_a_node_is_accepted_by_every_step_whose_path_goes_through_it():
    steps = pd.DataFrame([step([0, 1]), step([0]), step([0, 0, 0]), step([])])
    frame = frames.accepted_tree(steps, drafted=[(0,), (1,)]).set_index("path")
    assert frame["accepted"].to_dict() == {(): 4, (0,): 3, (1,): 0, (0, 0): 1, (0, 1): 1, (0, 0, 0): 1}
    assert frame["ended"].to_dict() == {(): 1, (0,): 1, (1,): 0, (0, 0): 0, (0, 1): 1, (0, 0, 0): 1}
    assert frame["share"].to_dict()[(0,)] == 0.75


def test_of_a_large_tree_the_likeliest_nodes_are_kept_with_their_parents():
    steps = pd.DataFrame([step([0, 0])] * 3 + [step([1])] * 2 + [step([2])])
    frame = frames.accepted_tree(steps, max_nodes=3)
    assert list(frame["path"]) == [(), (0,), (1,), (0, 0)]


def test_nothing_gives_empty_frames_with_their_columns(tables):
    nothing = Tables(tables.forwards.iloc[:0], tables.steps.iloc[:0], tables.requests.iloc[:0])
    for make in (frames.throughput, frames.speedups, frames.by_depth, frames.tokens_per_step, frames.time_by_phase):
        assert len(make(nothing)) == 0
        assert "arm" in make(nothing)
    assert len(frames.cost_of_nodes(nothing)) == 0


# Spans ---------------------------------------------------------------------------------------------------------------


def test_spans_tell_accepted_from_the_one_after_them():
    steps = [step([], prefill=True, forward=0, context=10), step([0, 0], context=11)]
    assert frames.spans(output("ABCD", [1, 2, 3, 4], steps), 0, "repeat") == [
        Span("A", "prefill", 0), Span("BC", "accepted", 1), Span("D", "bonus", 1),
    ]  # fmt: skip


def test_spans_know_forced_tokens_before_within_and_after_a_step():
    steps = [
        step([0], context=12, forced_accepted_kept=1, forced_emitted_kept=1),  # two were forced before it
        step([0], forward=2, context=14, emitted_kept=4, forced_emitted_kept=2),  # two are appended to it
    ]
    assert frames.spans(output("abCDEFgh", range(1, 9), steps), 0, "repeat") == [
        Span("ab", "forced", -1), Span("C", "forced", 1), Span("D", "bonus", 1), Span("E", "accepted", 2),
        Span("F", "bonus", 2), Span("gh", "forced", 2),
    ]  # fmt: skip


def test_spans_forget_what_was_taken_back():
    steps = [
        step([0, 0], context=10, taken_back=2, emitted_kept=4, forced_emitted_kept=1),  # A B C - - + f: A f
        step([0], forward=2, context=12),
    ]
    assert frames.spans(output("AfGH", [1, 2, 3, 4], steps), 0, "repeat") == [
        Span("A", "accepted", 1), Span("f", "forced", 1), Span("G", "accepted", 2), Span("H", "bonus", 2),
    ]  # fmt: skip


def test_a_fork_begins_with_what_it_shares():
    steps = [step([0], context=10), step([], forward=2, context=12), step([0], forward=2, sequence=1, context=12)]
    fork = {"sequence": 1, "parent_sequence": 0, "text": "ABxy", "tokens": [0, 1, 2, 3], "ends": [1, 2, 3, 4]}
    given = output("ABC", [1, 2, 3], steps, fork)
    assert frames.spans(given, 0, "repeat", 1) == [
        Span("A", "accepted", 1), Span("B", "bonus", 1), Span("x", "accepted", 2), Span("y", "bonus", 2),
    ]  # fmt: skip


def test_letters_of_several_tokens_belong_to_the_one_that_completes_them():
    steps = [step([0, 0], context=10)]  # a letter of two tokens, then one more token, and an end that settles late
    assert frames.spans(output("éZ!", [0, 1, 2], steps), 0, "repeat") == [
        Span("é", "accepted", 1), Span("Z!", "bonus", 1),
    ]  # fmt: skip


def test_spans_of_a_real_run_are_its_texts(tables):
    for row in tables.requests.to_dict("records"):
        pieces = frames.spans(tables, row["request"], row["arm"])
        assert "".join(piece.text for piece in pieces) == row["text"]
        info = tables.steps[(tables.steps["request"] == row["request"]) & (tables.steps["arm"] == row["arm"])]
        accepted = sum(len(piece.text) for piece in pieces if piece.kind == "accepted")
        assert accepted == info["accepted_kept"].sum()  # one letter a token


# Of a sweep ----------------------------------------------------------------------------------------------------------


def swept(*rows: dict) -> pd.DataFrame:
    plain = {"run": "r", "arm": "repeat", "tau_pooled": 2.0, "speedup": 1.5}
    return pd.DataFrame([plain | row for row in rows])


def test_what_varies_is_named_and_the_fastest_comes_first():
    table = swept(
        {"proposer": "a", "proposer.depth": 2, "threads": 1, "speedup": 1.1},
        {"proposer": "a", "proposer.depth": 4, "threads": 1, "speedup": 1.7},
        {"proposer": "b", "threads": 1, "speedup": np.nan},
        {"arm": "baseline", "proposer": "b", "threads": 1},
    )
    keys = ["proposer", "proposer.depth", "threads"]
    assert sweeps.varied(table, keys) == ["proposer", "proposer.depth"]
    assert list(sweeps.over_sweep(table, keys)["label"]) == ["proposer=a, depth=4", "proposer=a, depth=2", "proposer=b"]


def test_a_line_for_each_setting_and_seeds_are_one_point():
    table = swept(
        {"k": 1, "p": "a", "seed": 0, "speedup": 2.0, "speedup_low": 1.7, "speedup_high": 2.3},
        {"k": 1, "p": "a", "seed": 1, "speedup": 2.0, "speedup_low": 1.5, "speedup_high": 2.7},
        {"k": 2, "p": "a", "seed": 0, "speedup": 3.0, "speedup_low": 2.5, "speedup_high": 3.5},
        {"k": 1, "p": "b", "seed": 0}, {"k": "null", "p": "a", "seed": 0}, {"k": 3, "arm": "baseline", "p": "a"},
    )  # fmt: skip
    assert sweeps.numeric(table, ["k", "p", "seed"]) == ["k"]
    frame = sweeps.by_option(table, ["k", "p", "seed"], "k", ["speedup"])
    assert frame[["line", "x", "value", "runs"]].to_numpy().tolist() == [["p=a", 1.0, 2.0, 2], ["p=a", 2.0, 3.0, 1]]
    np.testing.assert_allclose(frame["low"], [1.6, 2.5])  # of seeds that agree, not narrower than their own
    np.testing.assert_allclose(frame["high"], [2.5, 3.5])
