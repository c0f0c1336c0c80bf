"""Every figure as it is drawn, with awkward data: nothing is clipped, nothing overlaps, ticks show true values."""

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
    assert {name: messages for name, figure in drawn.items() if (messages := faults(figure))} == {}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("values", "arms", "fast"),
    [([1, 2, 4], ["medusa"], 1.1), ([1, 2, 3, 4, 6, 8, 12], TWELVE[:3], 1.0), ([0, 0.5, 1], LONG, 1.0),
     ([1, 4, 16, 64, 256, 1024], ["medusa", "ngram"], 3.0), ([1e-4, 1e-3, 1e-2, 1e-1], ["medusa"], 1.0)],
)  # fmt: skip
def test_the_figures_of_a_sweep(values, arms, fast):
    drawn = drawn_of(drawings(swept(values, arms, fast), ["proposer.depth"]))
    assert {"speedups", "by_proposer.depth"} <= {*drawn}
    assert {name: messages for name, figure in drawn.items() if (messages := faults(figure))} == {}


@pytest.mark.parametrize("prompts", [["p0"], [f"prompt {number}" for number in range(12)], LONG])
def test_the_figure_of_a_distance(prompts):
    rows = [{"prompt": prompt, "tv": {"mean": 0.2, "low": 0.1, "high": 0.3}} for prompt in prompts] + [
        {"prompt": "x", "tv": 0.0}
    ]
    assert faults(figures.distance(rows)) == []
    assert figures.distance([{"prompt": "x", "tv": None}]) is None


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
        assert any(word in fault for fault in faults(figure)), word


# Ticks -------------------------------------------------------------------------------------------------------------
