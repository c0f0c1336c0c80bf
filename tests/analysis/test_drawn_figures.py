"""Every figure as it is drawn, with awkward data: nothing is clipped, nothing overlaps, ticks show true values."""

import pandas as pd
import pytest
from matplotlib.figure import Figure

from spec_lab.analysis import figures
from spec_lab.analysis.results.sweep import drawings
from tests.analysis.drawn import drawn_of, faults, run_figures, swept, tables

LONG = ["a_proposer_with_a_rather_long_name_" * 2 + end for end in "ab"]
TWELVE = [f"draft_depth_{number}" for number in range(12)]
CASES = {
    "one arm": {"arms": ["medusa"]},
    "twelve arms": {"arms": TWELVE},
    "long names": {"arms": LONG},
    "wide letters": {"arms": ["W" * 32, "M" * 31 + "é"]},
    "one prompt": {"arms": ["medusa", "ngram"], "groups": 1},
    "nothing accepted": {"arms": ["medusa", "ngram"], "accepts": False},
    "nothing drafted": {"arms": ["medusa"], "drafts": False},
    "a huge range": {"arms": ["medusa", "ngram", "draft_chain", "suffix"], "fast": 40.0},
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", CASES)
def test_the_figures_of_a_run(case):
    drawn = run_figures(tables(**CASES[case]), {"medusa": [(0,), (1,), (0, 0)]})
    assert {"throughput", "tokens", "phases", "cost"} <= {*drawn}
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("values", "arms", "fast"),
    [([1, 2, 4], ["medusa"], 1.1), ([1, 2, 3, 4, 6, 8, 12], TWELVE[:3], 1.0), ([0, 0.5, 1], LONG, 1.0),
     ([1, 4, 16, 64, 256, 1024], ["medusa", "ngram"], 3.0), ([1e-4, 1e-3, 1e-2, 1e-1], ["medusa"], 1.0)],
)  # fmt: skip
def test_the_figures_of_a_sweep(values, arms, fast):
    drawn = drawn_of(drawings(swept(values, arms, fast), ["proposer.depth"]))
    assert {"speedups", "by_proposer.depth"} <= {*drawn}
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}


def curve(lines: int, depth: int, measured: bool = True) -> list[dict]:
    own = {"accepted": [0.5 / (1 + k) for k in range(depth)], "agreed": [0.6 / (1 + k) for k in range(depth)]}
    held = {**own, "accepted_length": 1.0, "agreed_length": 1.2}
    return [
        {"step": 20 * (1 + n), "seconds": 60.0 * n, "loss": [3.0 - n / 10 + k for k in range(depth)], **own}
        | ({"held_out": {**held, "accepted_length": 1 + n / 10}} if measured else {})
        for n in range(lines)
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("lines", "depth"), [(1, 1), (2, 4), (30, 16)])
def test_the_figures_of_a_training(lines, depth):
    drawn = {"learning": figures.learning(curve(lines, depth)), "held_out": figures.held_out(curve(lines, depth))}
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}
    assert figures.held_out(curve(lines, depth, False)) is figures.learning([]) is None


def changes(rows: int, name: str = "medusa") -> pd.DataFrame:
    return pd.DataFrame(
        [{"figure": "tau_pooled", "label": f"B / A: {name}{number}", "other_name": name, "relative": False,
          "change": 0.1 * number - 0.2, "simultaneous_low": 0.1 * number - 0.5, "simultaneous_high": 0.1 * number,
          "verdict": "significant" if number > 4 else "not significant"} for number in range(rows)]
    )  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("rows", "name"), [(1, "medusa"), (60, "medusa"), (2, LONG[0])])
def test_the_figure_of_a_comparison(rows, name):
    figure = figures.changes(changes(rows, name), "tau_pooled", "tau")
    assert faults(figure) == []
    assert len(figure.axes[0].get_yticks()) == min(rows, figures.MAX_CHANGES)
    assert figures.changes(changes(rows), "speedup", "speed-up") is None


def verifiers(names: list[str]) -> dict:
    value = {"mean": 1.2, "low": 1.0, "high": 1.4}
    one = {"lossless": True, "kind": "exact", "expected_accepted": value, "share_of_bound": value,
           "verify_us": {"median": 30.0, "low": 20.0, "high": 90.0}, "share_of_forward": 0.01}  # fmt: skip
    arms = {"drawn": "iid", "drafted_per_draft": 4.0, "verifiers": {"token": one, "lenient": one | {"lossless": False}}}
    return {name: dict(arms) for name in names}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("names", [["medusa"], TWELVE, LONG])
def test_the_figures_of_a_verifier_study(names):
    drawn = {name: figures.verifier_panels(verifiers(names), name) for name in ("accepted", "time")}
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}
    assert figures.verifier_panels({}, "time") is None


@pytest.mark.parametrize("prompts", [["p0"], [f"prompt {number}" for number in range(12)], LONG])
def test_the_figure_of_a_distance(prompts):
    rows = [{"prompt": one, "tv": {"mean": 0.2, "low": 0.1, "high": 0.3}} for one in prompts] + [
        {"prompt": "x", "tv": 0.0}
    ]
    assert faults(figures.distance(rows)) == []
    assert figures.distance([{"prompt": "x", "tv": None}]) is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("batches", "contexts", "nodes"), [([1], [64], [0]), ([1, 2, 4, 8], [64, 320, 1024], [0, 1, 64])]
)
def test_the_figure_of_step_costs(batches, contexts, nodes):
    rows = [{"batch": b, "context": c, "nodes": n, "seconds": 0.01 * (1 + n), "low": 0.009, "high": 0.02 * (1 + n)}
            for b in batches for c in contexts for n in nodes]  # fmt: skip
    assert faults(figures.step_costs(rows)) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arms", [["medusa"], TWELVE, LONG])
def test_the_figure_of_latencies(arms):
    frame = pd.DataFrame([{"arm": arm, "ttft": 0.1 * n, "tpot": 0.01 * n} for arm in arms for n in range(1, 5)])
    assert faults(figures.latency(frame)) == []


# What finds faults -----------------------------------------------------------------------------------------------


def plain() -> Figure:
    figure = Figure(figsize=(3, 2), layout="constrained")
    figure.add_subplot().set(xlabel="x, tokens", title="a title")
    figure.axes[0].plot([0, 0.5, 1], [0, 0.5, 1], label="a line")
    return figure


def test_a_fault_is_found():
    assert faults(plain()) == []
    clipped, overlapping, covered, unlabelled = plain(), plain(), plain(), plain()
    clipped.text(0.9, 0.5, "much too long for the figure")
    overlapping.axes[0].set_xticks([0.5, 0.52], ["some", "others"])
    covered.axes[0].legend(loc="center")
    unlabelled.axes[0].set_xlabel("")
    for figure, word in ((clipped, "leaves"), (overlapping, "overlap"), (covered, "legend"), (unlabelled, "no label")):
        assert any(word in one for one in faults(figure)), word


# Ticks -------------------------------------------------------------------------------------------------------------


# Colours -----------------------------------------------------------------------------------------------------------
