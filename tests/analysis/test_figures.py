"""Figures: what is drawn from which rows. How they look was looked at."""

import re
import struct

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.figures import NodePosition, tree_layout
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.results.sweep import drawings
from spec_lab.results.result import Result, Section
from spec_lab.tasks.benchmark import DRAWN, run
from tests.analysis.drawn import drawn_of, run_figures
from tests.labs import Repeat, lab, settings


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(more_proposers={"longer": Repeat(4)}), settings(out), {})
    return metrics.load(out)


def only(tables: Tables, *arms: str) -> Tables:
    return Tables(*(frame[frame["arm"].isin(arms)] for frame in (tables.forwards, tables.steps, tables.requests)))


def size(file) -> tuple[int, int]:
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:])


def swept() -> pd.DataFrame:
    rows = [
        {"run": f"{p}{k}", "arm": arm, "proposer.depth": k, "proposer": p, "tau_pooled": 1 + k / 5, "speedup": k / 2,
         "speedup_low": k / 3, "speedup_high": k, "tau_pooled_low": 1.0, "tau_pooled_high": 2.0}
        for p in ("a", "b") for k in (1, 2, 4) for arm in ("repeat", "baseline")
    ]  # fmt: skip
    return pd.DataFrame(rows)


KEYS = ["proposer", "proposer.depth"]


def test_files_are_images_of_some_size(tables, tmp_path):
    drawn = figures.save({name: getattr(figures, name)(tables) for name in DRAWN}, tmp_path, ("png",))
    for file in drawn:
        width, height = size(file)
        assert width > 800 and height > 250


@pytest.mark.nightly
def test_the_same_rows_give_the_same_file(tables, tmp_path):
    once, again = (figures.save(run_figures(tables), tmp_path / name, ("svg",)) for name in ("a", "b"))
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


def test_every_axis_is_labelled(tables):
    for make in (figures.acceptance, figures.throughput, figures.phases, figures.tokens, figures.cost):
        for axes in make(tables).axes:
            assert axes.get_xlabel() and axes.get_title(loc="left")


def test_acceptance_draws_the_metrics(tables):
    survival, conditional = figures.acceptance(tables).axes
    for arm, curve in zip(("repeat", "longer"), survival.lines, strict=True):
        steps = metrics.decode_steps(tables.steps, arm)
        np.testing.assert_allclose(curve.get_ydata(), metrics.survival(steps))
    np.testing.assert_allclose(conditional.lines[1].get_ydata(), metrics.conditional(steps))


def test_phases_stack_up_to_the_decode_time(tables):
    axes = figures.phases(tables).axes[0]
    total = sum(bar.get_width() for bars in axes.containers for bar in bars)
    tables = metrics.of_timed_groups(tables)
    expected = sum(
        1e3 * metrics.decode_seconds(tables.forwards, arm) / tokens
        for arm, tokens in tables.requests.groupby("arm")["decode_tokens"].sum().items()
    )
    assert total == pytest.approx(expected)


def test_a_tree_shows_each_arm_that_drafts(tables):
    shown = figures.accepted_trees(tables, {"longer": [(0,), (1,)]}).axes
    assert [axes.get_label() for axes in shown] == [
        arm
        for arm in ("repeat", "longer")
        if arm == "longer" or len(frames.accepted_tree(metrics.decode_steps(tables.steps, arm)))
    ]


def test_a_figure_that_fails_is_left_out_and_named(tmp_path, capsys):
    def fails():
        raise KeyError("no such column")

    def unreadable():
        figure = Figure()
        figure.text(0, 0, "$\\frac$")
        return figure

    makers = {"wrong": fails, "odd": unreadable, "right": Figure}
    files = figures.save(Result("", "", [Section("", figures=makers)]).draw(), tmp_path, ("png",))
    assert [file.name for file in files] == ["right.png"]
    errors = capsys.readouterr().err
    assert "figure 'wrong' raised KeyError: 'no such column'" in errors and "figure 'odd' raised ValueError" in errors


def test_nothing_draws_nothing(tables):
    nothing = only(tables)
    assert run_figures(nothing) == drawn_of(drawings(pd.DataFrame(columns=["run", "arm"]), [])) == {}


def test_a_proposer_has_one_colour_whatever_stands_beside_it():
    many = [f"arm{number}" for number in range(30)]
    colours = figures.colours([*many, "baseline"])
    assert colours["baseline"] == figures.BASELINE
    for arm in ("medusa", "ngram_tree", "arm3", "baseline"):
        alone = figures.colours([arm])[arm]
        assert figures.colours(["draft_chain", arm])[arm] == figures.colours([arm, "draft_tree"])[arm] == alone
    assert figures.colours(["medusa"])["medusa"] == figures.PROPOSERS["medusa"]


def test_an_svg_for_a_page_is_an_element_for_each_panel_with_ids_of_its_own(tables):
    drawn = run_figures(tables)
    for name, figure in drawn.items():
        text = figures.svg(figure, name)
        assert text.startswith("<svg") and "<!--" not in text and "<style" not in text
        panels = len(figure.axes) if name in ("throughput", "acceptance") else text.count("<svg")
        assert text.count("<svg") == panels and text.count('_1"/></svg>') == panels - 1, "the others show parts of it"
        ids = set(re.findall(r'\bid="([^"]*)', text))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= ids
        assert all(element_id.startswith(f"{name}-") for element_id in ids)
        assert "repeat" in text  # its text is text


def test_siblings_are_laid_out_below_each_other():
    places = tree_layout([(), (1,), (0,), (0, 0), (0, 1), (0, 0, 0)])
    expected = {(): (0, 0), (0,): (1, 0), (0, 0): (2, 0), (0, 0, 0): (3, 0), (0, 1): (2, 1), (1,): (1, 2)}
    assert places == {path: NodePosition(*position) for path, position in expected.items()}


def test_a_sweep_has_a_forest_and_lines(tmp_path):
    names = ["speedups", "tau_speedup_proposer", "tau_speedup_proposer.depth", "by_proposer.depth"]
    drawn = drawn_of(drawings(swept(), KEYS))
    assert list(drawn) == names
    files = figures.save(drawn, tmp_path, ("png",))
    assert [file.name for file in files] == [f"{name}.png" for name in names]
    left, right = figures.lines(swept(), KEYS, "proposer.depth").axes
    assert [line.get_ydata().tolist() for line in left.lines[:2]] == [[1.2, 1.4, 1.8]] * 2
    assert right.lines[0].get_ydata().tolist() == [0.5, 1.0, 2.0]
    assert all(tick == round(tick) for tick in right.get_xticks())  # depths are whole numbers
    assert right.get_ylabel()


# Outliers ------------------------------------------------------------------------------------------------------------


def test_an_axis_ends_at_the_largest_value_that_is_no_outlier():
    assert figures.style.axis_end([1.0, 1.5, 2.0, 21.0]) == 2.0
    assert figures.style.axis_end([1.0, 2.0, 3.0, 4.0]) == 4.0, "spread, but no outlier"
    assert figures.style.axis_end([1.0, np.nan, 1.9]) == 1.9
    assert np.isnan(figures.style.axis_end([]))
