"""Every figure as it is drawn, with awkward data: nothing is clipped, nothing overlaps, ticks show true values."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from spec_lab.analysis import figures
from spec_lab.analysis.figures.palette import DARK_PAGE, GREY, SHADES, VERIFIERS, contrast, dashes, on_dark
from spec_lab.analysis.figures.ticks import number_axis
from tests.analysis.drawn import faults, raster, shown_texts, swept, tables

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
    drawn = figures.run_figures(tables(**CASES[case]), {"medusa": [(0,), (1,), (0, 0)]})
    assert {"throughput", "tokens", "phases", "cost"} <= {*drawn}
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("values", "arms", "fast"),
    [([1, 2, 4], ["medusa"], 1.1), ([1, 2, 3, 4, 6, 8, 12], TWELVE[:3], 1.0), ([0, 0.5, 1], LONG, 1.0),
     ([1, 4, 16, 64, 256, 1024], ["medusa", "ngram"], 3.0), ([1e-4, 1e-3, 1e-2, 1e-1], ["medusa"], 1.0)],
)  # fmt: skip
def test_the_figures_of_a_sweep(values, arms, fast):
    drawn = figures.sweep_figures(swept(values, arms, fast), ["proposer.depth"])
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
    drawn = figures.training_figures(curve(lines, depth))
    assert [*drawn] == ["learning", "held_out"]
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}
    assert [*figures.training_figures(curve(lines, depth, False))] == ["learning"] and figures.training_figures(
        []
    ) == {}


def certificate(pairs: int, samples: int, name: str = "draft_chain") -> dict:
    sizes = np.unique(np.geomspace(min(100, samples), samples, 40).astype(int)).tolist()
    falling = [float(size**-0.5) for size in sizes]
    test = {"name": "joint distribution of four tokens", "samples": samples, "p_value": 0.5, "detectable": 0.01}
    return {
        "pairs": [{"proposer": f"{name}{number}", "drawn": "iid", "verifier": f"verifier{number}",
                   "sampled": [test, test | {"name": "mode", "detectable": 0.2}]} for number in range(pairs)],
        "convergence": {"sizes": sizes, "expected": falling, "control": [0.4] * len(sizes), "pairs": [
            {"verifier": f"{name}{number}", "lossless": number % 2 == 0,
             "distances": [(1 + number / 9) * x for x in falling]}
            for number in range(pairs)]},
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("pairs", "samples", "name"), [(1, 500, "token"), (12, 100_000, "token"), (2, 10_000, LONG[0])]
)
def test_the_figures_of_a_certificate(pairs, samples, name):
    drawn = figures.certificate_figures(certificate(pairs, samples, name))
    assert [*drawn] == ["convergence", "detectable"]
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}
    for axis in (drawn["convergence"].axes[0].xaxis, drawn["convergence"].axes[0].yaxis):  # logarithmic
        low, high = axis.get_view_interval()
        assert sum(low <= float(tick.get_loc()) <= high for tick in axis.get_major_ticks()) >= 2


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
    drawn = figures.verifier_figures(verifiers(names))
    assert {name: found for name, figure in drawn.items() if (found := faults(figure))} == {}
    assert figures.verifier_figures({}) == {}


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


def ticks(values: list[float], log: bool = True) -> list[str]:
    """The texts of the ticks of an axis with these values."""
    figure = plain()
    axes = figure.axes[0]
    axes.clear()
    axes.plot(values, range(len(values)))
    number_axis(axes, values, log=log)
    raster(figure)
    shown = {text.get_text() for text in shown_texts(figure)}
    return [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks() if tick.label1.get_text() in shown]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0, 0.5, 1], ["0", "0.5", "1"]), ([0.5], ["0.5"]), ([0.25, 0.5], ["0.25", "0.5"]), ([1, 2, 4], ["1", "2", "4"]),
     ([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"]),
     ([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])],
)  # fmt: skip
def test_ticks_stand_at_the_values_and_show_them(values, expected):
    assert ticks(values) == expected


def test_an_axis_of_whole_numbers_has_whole_ticks():
    for values in ([*range(1, 101)], [1, 2, 3, 50], [1, 40]):
        assert all(float(text) % 1 == 0 for text in ticks(values, log=False)), values


def test_a_sweep_over_temperatures_shows_one_half():
    table = swept([0, 0.5, 1], ["medusa"]).rename(columns={"proposer.depth": "sampling.temperature"})
    left, right = figures.lines(table, ["sampling.temperature"], "sampling.temperature").axes
    raster(left.figure)
    for axes in (left, right):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.5", "1"]
    options = figures.sweep_figures(table, ["sampling.temperature"])["tau_speedup_sampling.temperature"].axes[0]
    assert [text.get_text().rpartition("=")[2] for text in options.get_legend().get_texts()] == ["0", "0.5", "1"]


# Colours -----------------------------------------------------------------------------------------------------------


def colour_in(figure: Figure, label: str) -> str:
    """The colour of the line or points with this label."""
    for axes in figure.axes:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            if text == label:
                return (handle[0] if isinstance(handle, ErrorbarContainer) else handle).get_color()
    raise AssertionError(f"nothing has the label {label}")


@pytest.mark.nightly
def test_an_arm_has_one_colour_in_all_figures_whatever_stands_beside_it():
    for arm in ("eagle3", "my_proposer", "draft_depth_7"):
        for others in ([], ["medusa"], TWELVE, ["a", "b", "c", "d", "e"]):
            arms = list(dict.fromkeys([arm, *others]))
            run = tables(arms)
            sweep = figures.sweep_figures(swept([1, 2, 4], arms), ["proposer.depth"])
            frame = pd.DataFrame([{"arm": one, "ttft": 0.1, "tpot": 0.1} for one in arms])
            drawn = [figures.acceptance(run), figures.cost(run), figures.latency(frame)]
            if others:
                drawn.append(sweep["tau_speedup_arm"])
            assert {colour_in(figure, arm) for figure in drawn} == {figures.colour(arm)}, (arm, others)


def test_arms_of_one_colour_differ_in_their_dashes():
    names = [f"arm{number}" for number in range(200)]
    styles = [(figures.colour(name), dash) for name, dash in dashes(names).items()]
    assert len(set(styles)) > 150
    same = next(
        other
        for other in names[1:]
        if figures.colour(other) in {figures.colour(one) for one in names[: names.index(other)]}
    )
    first = next(one for one in names if figures.colour(one) == figures.colour(same))
    assert dashes([first, same])[first] != dashes([first, same])[same]


def test_series_are_legible_on_white_and_on_a_dark_page():
    series = [*figures.PROPOSERS.values(), *figures.COLOURS, *VERIFIERS.values(), *SHADES, GREY, figures.BASELINE]
    series += [figures.colour(f"arm{number}") for number in range(200)]
    for one in series:
        assert contrast(one, "#ffffff") >= 3, one
        assert contrast(on_dark(one), DARK_PAGE) >= 4.5, one
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and on_dark("#ffffff") == "#ffffff"
