"""Costs of steps: timing, predictions by hand-made numbers, and the study."""

import io
import json
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.projection import measured_forwards
from spec_lab.analysis.projection.costs import measured
from spec_lab.cli.commands import command
from spec_lab.core.grid import Grid
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.sequence import Batch
from spec_lab.propose import Null
from spec_lab.tasks.benchmark import run
from spec_lab.tasks.cost import Cost, load, measure, predict, predicted_and_measured, predicted_speedups
from spec_lab.tasks.cost.predict import forwards, without_drift
from spec_lab.tasks.cost.summary import median_of_others, verdict
from spec_lab.tasks.cost.tables import COST, NEWER, PARTS
from spec_lab.tasks.cost.timing import Fixed, binary_tree, room, texts, time_arms
from spec_lab.tasks.lab import Loop
from spec_lab.verify import Token
from tests.labs import Repeat, lab, settings
from tests.propose.lab import draft_model
from tests.tiny import tiny_target

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


# Timing ------------------------------------------------------------------------------------------------------------


def arms_of(target, **proposers):
    return {name: Loop(target, proposer, Token(), CounterDraws(0)) for name, proposer in proposers.items()}


def test_a_fixed_tree_has_two_children_per_row_and_the_requested_nodes():
    assert binary_tree(5).parent.tolist() == [0, 0, 1, 1, 2]
    assert binary_tree(64).nodes == 64 and binary_tree(64).depth.max() == 6
    target = tiny_target()
    requests = texts(target, PROMPTS, Sampling(), 3, 4)
    draft = Fixed(2, target.vocabulary).propose(Batch(target, requests, CounterDraws(0)))
    assert draft.shape.roots == 3 and draft.shape.nodes == 6
    assert len({tuple(pair) for pair in draft.token.view(3, 2).tolist()}) == 3  # no two siblings are the same token


def test_texts_are_the_prompts_joined_and_repeated_each_from_a_place_of_its_own():
    first, two = texts(tiny_target(), PROMPTS, Sampling(), 2, 10)
    assert first.tokens == (1, 2, 3, 4, 5, 6, 7, 8, 1, 2)
    assert two.tokens == (5, 6, 7, 8, 1, 2, 3, 4, 5, 6)
    assert not first.stop and (first.id, two.id) == (0, 1)


def test_every_arm_is_timed_from_the_same_state_and_all_cells_are_freed():
    target = tiny_target()
    drafting, places = draft_model("1x1", "iid"), []

    class Watched(Repeat):
        def propose(self, batch):
            places.append([len(sequence.kv) for sequence in batch.sequences])
            return super().propose(batch)

    arms = arms_of(target, fixed=Fixed(3, target.vocabulary), draft=drafting, watched=Watched(), none=Null())
    rows = time_arms(arms, texts(target, PROMPTS, Sampling(1.0), 2, 12), repeat=4, steps=2)
    assert {row["arm"]: row["nodes"] for row in rows} == {"fixed": 3, "draft": 2, "watched": 2, "none": 0}
    assert places[0] == [11, 11], "it observes the end of the prompts"
    assert places[1] == [12, 12], "as every arm begins"
    assert len(places) == 1 + 4 and all(min(now) > 12 for now in places[2:])
    assert {row["turn"] for row in rows} == {4} and {row["batch"] for row in rows} == {2}
    for cells in (target.lm.cells, drafting.lm.cells):
        assert cells.references.sum() == 0


def test_the_phases_of_a_step_are_no_longer_than_the_step():
    target = tiny_target()
    rows = time_arms(arms_of(target, none=Null()), texts(target, PROMPTS, Sampling(), 1, 8), 0, 1)
    (row,) = rows
    assert set(row) == set(COST) | set(NEWER)
    assert 0 < sum(row[part] for part in PARTS) <= row["whole"] * 1.001  # of one step, so medians are its values
    assert row["target_forward"] <= row["target"]


def test_nan_logits_are_refused_and_all_cells_are_freed(monkeypatch):
    target, drafting = tiny_target(), draft_model("1x1", "iid")
    plain, calls = type(target.lm).run, []

    def breaking(self, *arguments):
        output = plain(self, *arguments)
        calls.append(self is target.lm)
        if sum(calls) == 5:
            output.logits[:] = float("nan")
        return output

    monkeypatch.setattr(type(target.lm), "run", breaking)
    arms = arms_of(target, draft=drafting, none=Null())
    with pytest.raises(ValueError, match="costs"):
        time_arms(arms, texts(target, PROMPTS, Sampling(), 2, 8), 0, 2)
    for cells in (target.lm.cells, drafting.lm.cells):
        assert cells.references.sum() == 0


# The task ----------------------------------------------------------------------------------------------------------

SMALL = dict(nodes=[2, 5], batches=[1, 2], contexts=[8, 16], repeats=2, steps=1)


@pytest.mark.nightly
def test_measure_leaves_a_full_grid_of_rows_a_summary_and_a_figure(tmp_path):
    out = tmp_path / "out"
    assert measure(lab(), settings(out), {}, quiet(), **SMALL) == 0
    frame = load(out)
    assert list(frame.columns) == [*COST, *NEWER] and not (out / "parts").exists()
    assert set(frame["arm"]) == {"nodes 0", "nodes 2", "nodes 5", "repeat", "baseline"}
    assert len(frame) == 5 * 2 * 2 * 2 and frame["id"].is_unique
    assert (frame.loc[frame["fixed"], "nodes"] == frame.loc[frame["fixed"], "arm"].str[6:].astype(int)).all()
    summary = json.loads((out / "summary.json").read_text())
    t = {(row["batch"], row["context"], row["nodes"]): row for row in summary["nodes"]}
    rows = frame[(frame["arm"] == "nodes 5") & (frame["batch"] == 2) & (frame["context"] == 8)]
    assert t[2, 8, 5.0]["seconds"] == pytest.approx(
        rows[["target", "probabilities", "commit", "between"]].sum(axis=1).median()
    )
    assert {arm["arm"] for arm in summary["arms"]} == {"repeat", "baseline"}
    assert (out / "figures" / "cost.png").stat().st_size > 10_000
    even = without_drift(frame).loc[rows.index]
    median = even[["target", "probabilities", "commit", "between"]].sum(axis=1).median()
    assert float(Cost.of(frame).nodes(nodes=5, batch=2, context=8)) == pytest.approx(median)


def costs(slow: int | None = None, load: float = 0.0) -> pd.DataFrame:
    """Three repeats of two arms at six places, with 2 % of noise; one measurement may take three times as long."""
    noise, rows = np.random.default_rng(0), []
    for number, (repeat, batch, context) in enumerate(product(range(3), (1, 2), (8, 16, 32))):
        for arm in ("nodes 0", "chain"):
            whole = 0.01 * batch * noise.lognormal(0.0, 0.02) * (3 if number == slow else 1)
            rows.append(dict(turn=repeat, batch=batch, context=context, arm=arm, whole=whole, other_cores=load))
    return pd.DataFrame(rows)


def test_a_verdict_names_a_measurement_that_was_disturbed_and_load_by_other_processes():
    manifest = {"threads": 2, "machine": {"cores": 2}, "config": {}}
    assert verdict(costs(), manifest) == metrics.TimingVerdict("reliable")
    disturbed, loaded = verdict(costs(slow=4), manifest), verdict(costs(load=1.0), manifest)
    assert disturbed.word != "reliable" and disturbed.kinds == ("outliers",)
    assert "measurement 4" in disturbed.reasons[0]
    assert loaded.word == "not reliable" and loaded.kinds == ("load",)
    older = verdict(costs().drop(columns="other_cores"), manifest)
    assert older.word == "reliable" and older.kinds == ("unchecked",)


def test_a_repeat_is_compared_with_the_others_of_its_place():
    """The median of three values is one of them: a third of the measurements would seem to have no noise at all."""
    frame = pd.DataFrame([
        dict(turn=turn, batch=1, context=context, arm="chain", whole=whole, other_cores=0.0)
        for context in range(8) for turn, whole in enumerate((1.0, 1.2, 1.5))
    ])  # fmt: skip
    usual = frame.groupby("context")["whole"].transform(median_of_others)
    assert usual[:3].tolist() == pytest.approx([1.35, 1.25, 1.1])
    assert median_of_others(pd.Series([2.0])).tolist() == [2.0]


@pytest.mark.nightly
def test_a_stopped_measurement_is_resumed(tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []

    def watched(arms, requests, repeat, steps):
        seen.append((repeat, len(requests), len(requests[0].tokens)))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return time_arms(arms, requests, repeat, steps)

    monkeypatch.setattr("spec_lab.tasks.cost.task.time_arms", watched)
    assert measure(lab(), settings(out), {}, quiet(), **SMALL) == 130
    assert len(load(out)) == 3 * 5 and not (out / "summary.json").exists()
    assert measure(lab(), settings(out), {}, quiet(), **SMALL) == 0
    assert seen == [(0, 1, 8), (0, 1, 16), (0, 2, 8), *[(0, 2, 16)] * 2, *((1, b, c) for b in (1, 2) for c in (8, 16))]


def test_the_reserved_cells_hold_every_node_accepted_in_every_step():
    target = tiny_target()
    arms = arms_of(target, four=Repeat(4), none=Null())
    assert room(arms, steps=2) == 5 * 5  # warming up, two timed, one that ends the second; then a draft


# Prediction --------------------------------------------------------------------------------------------------------

AXES = {"batch": (1.0, 2.0), "context": (0.0, 100.0)}


def by_hand() -> Cost:
    """t = 10 + nodes x batch + context / 10 milliseconds; drafting takes 5 milliseconds, the baseline's verifying 1."""
    nodes, batch, context = np.meshgrid([0.0, 4.0], [1.0, 2.0], [0.0, 100.0], indexing="ij")
    t = Grid({"nodes": (0.0, 4.0)} | AXES, 1e-3 * (10 + nodes * batch + context / 10))
    grids = {"draft": Grid(AXES, np.full((2, 2), 5e-3)), "baseline": Grid(AXES, np.full((2, 2), 1e-3))}
    return Cost(t, grids)


def test_costs_are_linear_between_what_was_measured_and_refused_beyond():
    cost = by_hand()
    assert float(cost.nodes(nodes=2, batch=1, context=50)) == pytest.approx(17e-3)
    assert cost.nodes(nodes=[0, 4], batch=2, context=0) == pytest.approx([10e-3, 18e-3])
    assert float(cost.step("draft", 3, 1.5, 10)) == pytest.approx(5e-3 + 10e-3 + 4.5e-3 + 1e-3)
    with pytest.raises(ValueError, match="context .*0 to 100.* 50 to 101"):
        cost.nodes(nodes=0, batch=1, context=[50, 101])
    with pytest.raises(ValueError, match="arm 'medusa' .*draft, baseline"):
        cost.step("medusa", 0, 1, 0)


def test_a_machine_that_is_slower_in_some_repeats_leaves_speed_ups_unchanged():
    """Two arms lack the fastest repeat: their medians are those of slower ones than the baseline's."""
    rows = []
    arms = {"nodes 0": (0, 0.0), "nodes 4": (4, 0.0), "baseline": (0, 0.0), "draft": (4, 5.0)}
    for turn, slow in enumerate((1.0, 1.3, 2.0)):
        for batch, context in product((1, 2), (0, 100)):
            for arm, (nodes, propose) in arms.items():
                seconds = {"target": 10 + nodes * batch + context / 10, "propose": propose}
                parts = dict.fromkeys(PARTS, 0.0) | {name: 1e-3 * slow * share for name, share in seconds.items()}
                case = {"turn": turn, "batch": batch, "context": context}
                rows.append({"arm": arm, "fixed": arm.startswith("nodes"), "nodes": float(nodes)} | case | parts)
    frame = pd.DataFrame(rows)
    lacking = frame[~((frame["turn"] == 0) & frame["arm"].isin(["nodes 4", "draft"]))]
    for table, (batch, context) in product((frame, lacking), ((1, 0), (2, 100), (1, 50))):
        t = 10 + context / 10
        expected = 3 * t / (t + 4 * batch + 5)
        assert predict(Cost.of(table), "draft", 3.0, 4, batch, context) == pytest.approx(expected)


def test_costs_are_written_as_a_table_of_forwards():
    """In whole seconds: a step takes 10 + nodes x batch, verifying 1, a chain of 4 and a lookup 8."""
    rows = []
    arms = {"nodes 0": (0, 0, 0), "nodes 4": (4, 2, 1), "baseline": (0, 0, 0), "draft": (4, 4, 8), "words": (3, 3, 8)}
    for batch, (arm, (nodes, depth, propose)) in product((1, 2), arms.items()):
        seconds = {"target": 8.0 + nodes * batch, "between": 2.0, "verify": 1.0, "propose": float(propose)}
        case = {"turn": 0, "batch": batch, "context": 64, "nodes": float(nodes), "depth": float(depth)}
        rows.append({"arm": arm, "fixed": arm.startswith("nodes")} | case | dict.fromkeys(PARTS, 0.0) | seconds)
    table = forwards(pd.DataFrame(rows), {"draft": ("mine", "draft_chain"), "words": ("ngram", "ngram")})
    assert list(table) == ["model", "tokens", "batch", "context", "seconds", "proposer"]
    assert set(table.itertuples(index=False, name=None)) == {
        *(("target", 1 + nodes, batch, 64, 11 + nodes * batch, "") for nodes in (0, 4) for batch in (1, 2)),
        *(
            ("mine", tokens, batch, 64, 8 / 4, "draft_chain") for tokens in (1, 5) for batch in (1, 2)
        ),  # each of four passes
        *(("ngram", tokens, batch, 64, 8, "ngram") for tokens in (1, 5) for batch in (1, 2)),
    }


def test_the_written_table_is_read_by_project(tmp_path):
    class Ngram(Repeat):
        name = "ngram"

    out, laboratory = tmp_path / "cost", lab(proposer=Ngram(2))
    few = dict(nodes=[0, 1, 2], batches=[1, 2], contexts=[8], repeats=1, steps=1)
    assert measure(laboratory, settings(out), {}, quiet(), **few) == 0
    tables = measured_forwards(out)
    assert set(tables) == set(measured(out / "forwards.csv")) == {"target", "ngram"}
    assert tables["target"].grid.axes == {"tokens": (1, 2, 3), "batch": (1, 2), "context": (8,)}
    assert run(laboratory, settings(tmp_path / "run"), {}, quiet()) == 0
    for costs in (out, out / "forwards.csv"):
        assert command(["project", str(tmp_path / "run"), "--costs", str(costs)], quiet()) == 0
        cells = pd.read_csv(tmp_path / "run" / "projection" / "projection.csv")
        assert set(cells["batch"]) == {1, 2} and (cells["speedup"] > 0).all()


def test_a_speed_up_is_tau_times_the_ratio_of_seconds():
    cost = by_hand()
    assert predict(cost, "draft", tau=3.0, nodes=4, batch=1, context=0) == pytest.approx(3 * 11 / 19)
    assert predict(cost, "draft", tau=3.0, nodes=4, batch=2, context=100) == pytest.approx(3 * 21 / 33)
    assert predict(cost, "baseline", tau=1.0, nodes=0, batch=2, context=40) == pytest.approx(1.0)


def test_where_verifying_is_free_the_prediction_is_the_theorem_of_leviathan_et_al():
    """(1 - a^(g + 1)) / ((1 - a) (g c + 1)), for g drafted tokens that are each accepted with probability a."""
    a, g, c, forward = 0.7, 4, 0.05, 8e-3
    flat = Grid({"nodes": (0.0, 8.0)} | AXES, np.full((2, 2, 2), forward))
    grids = {"draft": Grid(AXES, np.full((2, 2), g * c * forward)), "baseline": Grid(AXES, np.zeros((2, 2)))}
    tau = sum(a**k for k in range(g + 1))
    theorem = (1 - a ** (g + 1)) / ((1 - a) * (g * c + 1))
    assert predict(Cost(flat, grids), "draft", tau, g, 1, 50) == pytest.approx(theorem)


def run_by_hand() -> Tables:
    """One group of two prompts. The draft: a prefill, two steps of both, then one of the second alone, of whose three
    expected tokens one is cut. The baseline: three steps of both.
    """
    usual = dict(group=0, prefill=False, finish="", expected_emitted=1.0, emitted=1, emitted_kept=1, nodes=0)
    steps = []
    for arm in ("draft", "baseline"):
        for request in (0, 1):
            steps.append(usual | dict(arm=arm, request=request, forward=0, prefill=True, context=1))
            for number in (1, 2, 3):
                steps.append(usual | dict(arm=arm, request=request, forward=number, context=10 * number))
    steps = [s for s in steps if (s["arm"], s["request"], s["forward"]) != ("draft", 0, 3)]
    for step in steps:
        if step["arm"] == "draft" and not step["prefill"]:
            step |= dict(nodes=4, expected_emitted=2.5, emitted=2, emitted_kept=2)
    last = next(s for s in steps if (s["arm"], s["request"], s["forward"]) == ("draft", 1, 3))
    last |= dict(expected_emitted=3.0, emitted=4, emitted_kept=3)
    usual = dict(group=0, finish="length", prefill_tokens=1, prefill_seconds=1.0)
    requests = [
        usual | dict(arm=arm, request=request, decode_tokens=tokens, decode_seconds=seconds)
        for arm, request, tokens, seconds in (
            ("draft", 0, 4, 0.04), ("draft", 1, 7, 0.08), ("baseline", 0, 3, 0.05), ("baseline", 1, 3, 0.05)
        )
    ]  # fmt: skip
    return Tables(pd.DataFrame(), pd.DataFrame(steps), pd.DataFrame(requests))


def test_a_run_is_predicted_step_by_step_from_live_requests_and_their_lengths():
    tokens = 4 * 2.5 + (3.0 - 1)
    drafted = (5 + 10 + 8 + 1) + (5 + 10 + 8 + 2) + (5 + 10 + 4 + 3)
    plain = (1 + 10 + 1) + (1 + 10 + 2) + (1 + 10 + 3)
    (speedup,) = predicted_speedups(by_hand(), run_by_hand(), "draft")
    assert speedup == pytest.approx(tokens / drafted / (6 / plain))


def test_the_run_s_own_seconds_do_not_matter():
    run = run_by_hand()
    times = np.where(run.requests["arm"] == "draft", 7.0, 1.0)
    slower = replace(run, requests=run.requests.assign(decode_seconds=run.requests["decode_seconds"] * times))
    assert predicted_speedups(by_hand(), slower, "draft").equals(predicted_speedups(by_hand(), run, "draft"))
    (before,), (after,) = (predicted_and_measured(by_hand(), tables, "draft")["measured"] for tables in (run, slower))
    assert after == pytest.approx(before / 7)  # so the test would detect a prediction that reads them


def test_what_is_predicted_and_what_is_measured_are_the_same_groups():
    """One of three groups ended with its prefill, and one has no step to predict from."""
    recorded = run_by_hand()
    three = [[table.assign(group=number) for table in (recorded.steps, recorded.requests)] for number in range(3)]
    three[1][1] = three[1][1].assign(decode_seconds=0.0)
    three[2][0] = three[2][0].iloc[:0]
    steps, requests = (pd.concat(tables, ignore_index=True) for tables in zip(*three, strict=True))
    both = predicted_and_measured(by_hand(), Tables(pd.DataFrame(), steps, requests), "draft")
    assert list(both.index) == [0]
    assert both["measured"].tolist() == pytest.approx([(11 / 0.08) / (6 / 0.05)])
    assert both["predicted"].tolist() == predicted_speedups(by_hand(), recorded, "draft").tolist()


def test_costs_with_a_hole_are_refused(tmp_path):
    measure(lab(), settings(tmp_path / "out"), {}, quiet(), **SMALL)
    frame = load(tmp_path / "out")
    frame = frame[(frame["arm"] != "nodes 5") | (frame["batch"] != 2)]
    with pytest.raises(ValueError, match="not the whole grid"):
        Cost.of(frame)
