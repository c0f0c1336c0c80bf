"""Figures: what is drawn from which rows. How they look was looked at."""

import re
import struct
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.figures import NodePosition, tree_layout
from spec_lab.analysis.metrics import Tables, frames, sweeps
from spec_lab.cli.build import conf
from spec_lab.tasks.benchmark import run
from tests.analysis.metrics.tables import steps
from tests.labs import Repeat, lab, settings


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(more_proposers={"longer": Repeat(4)}), settings(out), {})
    return metrics.load(out)


def only(tables: Tables, *arms: str) -> Tables:
    return Tables(*(one[one["arm"].isin(arms)] for one in (tables.rounds, tables.steps, tables.requests)))


def size(file) -> tuple[int, int]:
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:])


def swept() -> pd.DataFrame:
    rows = [
        {"run": f"{p}{k}", "arm": arm, "proposer.depth": k, "proposer": p, "tau_pooled": 1 + k / 5, "speedup": k / 2,
         "speedup_low": k / 3, "speedup_high": k, "tau_pooled_low": 1.0, "tau_pooled_high": 2.0}
        for p in ("a", "b") for k in (1, 2, 4) for arm in ("speculative", "baseline")
    ]  # fmt: skip
    return pd.DataFrame(rows)


KEYS = ["proposer", "proposer.depth"]


def test_files_are_images_of_some_size(tables, tmp_path):
    drawn = figures.draw(tables, tmp_path)
    assert [file.name for file in drawn] == ["acceptance.png", "throughput.png", "phases.png"]
    for file in drawn:
        width, height = size(file)
        assert width > 800 and height > 250


@pytest.mark.nightly
def test_papers_get_every_figure_as_png_and_svg(tables, tmp_path):
    drawn = figures.save(figures.run_figures(tables, {"longer": [(0,), (0, 0), (1,)]}), tmp_path)
    names = {"acceptance", "throughput", "phases", "tokens", "cost", "accepted_trees"}
    assert {file.name for file in drawn} == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    assert all(file.read_text().lstrip().startswith("<?xml") for file in drawn if file.suffix == ".svg")


@pytest.mark.nightly
def test_the_same_rows_give_the_same_file(tables, tmp_path):
    once, again = (figures.draw(tables, tmp_path / name, ("svg",)) for name in ("a", "b"))
    assert [one.read_bytes() for one in once] == [one.read_bytes() for one in again]


def test_every_axis_is_labelled(tables):
    for make in (figures.acceptance, figures.throughput, figures.phases, figures.tokens, figures.cost):
        for axes in make(tables).axes:
            assert axes.get_xlabel() and axes.get_title(loc="left")


def test_acceptance_draws_the_metrics(tables):
    survival, conditional = figures.acceptance(tables).axes
    for arm, curve in zip(("speculative", "longer"), survival.lines, strict=True):
        steps = metrics.decode_steps(tables.steps, arm)
        np.testing.assert_allclose(curve.get_ydata(), metrics.survival(steps))
    np.testing.assert_allclose(conditional.lines[1].get_ydata(), metrics.conditional(steps))


def test_phases_stack_up_to_the_decode_time(tables):
    axes = figures.phases(tables).axes[0]
    total = sum(bar.get_width() for bars in axes.containers for bar in bars)
    tables = metrics.of_timed_groups(tables)
    expected = sum(
        1e3 * metrics.decode_seconds(tables.rounds, arm) / tokens
        for arm, tokens in tables.requests.groupby("arm")["decode_tokens"].sum().items()
    )
    assert total == pytest.approx(expected)


def test_token_bars_are_whole(tables):
    axes = figures.tokens(tables).axes[0]
    total = sum(bar.get_width() for bars in axes.containers for bar in bars)
    assert total == pytest.approx(len(metrics.arms(tables)))


def test_a_tree_shows_each_arm_that_drafts(tables):
    shown = figures.accepted_trees(tables, {"longer": [(0,), (1,)]}).axes
    assert [axes.get_label() for axes in shown] == [
        arm
        for arm in ("speculative", "longer")
        if arm == "longer" or len(frames.accepted_tree(metrics.decode_steps(tables.steps, arm)))
    ]


@pytest.mark.parametrize(("depth", "labels"), [(8, 8), (32, 32), (40, 20)])
def test_labels_of_deep_trees_do_not_overlap(depth, labels):
    paths = [[0] * length for length in range(1, depth + 1)] + [[0] * (depth // 2) + [1] * (depth // 2)]
    rows = steps(*({"nodes": depth, "depth": depth, "accepted": len(path), "path": path} for path in paths))
    arm = pd.DataFrame({"arm": ["speculative"]})
    figure = figures.accepted_trees(Tables(arm, rows, arm))
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    chain = [box for box in boxes if box.y0 == max(each.y0 for each in boxes)]
    assert len(chain) == labels
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))


def test_one_arm_alone_has_no_acceptance_and_no_speed_up(tables):
    alone = only(tables, "baseline")
    assert figures.acceptance(alone) is None
    assert figures.accepted_trees(alone) is None
    assert figures.throughput(alone) is figures.throughput(only(tables, "speculative")) is None


def test_nothing_draws_nothing(tables, tmp_path):
    nothing = only(tables)
    assert figures.draw(nothing, tmp_path) == [] and figures.run_figures(nothing) == {}
    assert figures.sweep_figures(pd.DataFrame(columns=["run", "arm"]), []) == {}


def test_a_proposer_has_one_colour_whatever_stands_beside_it():
    many = [f"arm{number}" for number in range(30)]
    colours = figures.colours([*many, "baseline"])
    assert colours["baseline"] == figures.BASELINE
    for arm in ("medusa", "ngram_tree", "arm3", "baseline"):
        alone = figures.colours([arm])[arm]
        assert figures.colours(["draft_chain", arm])[arm] == figures.colours([arm, "draft_tree"])[arm] == alone
    assert figures.colours(["medusa"])["medusa"] == figures.PROPOSERS["medusa"]


ALIKE = [{"draft_chain", "draft_model"}, {"ngram", "ngram_chain"}]
"""Names of one proposer."""


def test_every_bundled_proposer_has_a_colour_of_its_own():
    options = {file.stem for file in Path(conf(), "proposer").glob("*.yaml")} - {"none"}
    assert options | {"draft_reranked", "eagle3"} <= {*figures.PROPOSERS}
    shared = {colour: {name for name, own in figures.PROPOSERS.items() if own == colour}
              for colour in figures.PROPOSERS.values()}  # fmt: skip
    assert [names for names in shared.values() if len(names) > 1] == ALIKE
    assert not {figures.BASELINE, figures.GREY} & {*shared}


@pytest.mark.nightly
def test_names_are_drawn_with_control_characters_visible():
    hidden = "a\u202eb$x$"
    assert figures.short([hidden]) == {hidden: "a<U+202E>b$x$"}
    table = swept().assign(arm=hidden)
    text = figures.svg(figures.sweep_figures(table, KEYS)["speedups"], "f")
    assert "\u202e" not in text


def test_an_svg_for_a_page_is_one_element_with_ids_of_its_own(tables):
    drawn = figures.run_figures(tables)
    for name, figure in drawn.items():
        text = figures.svg(figure, name)
        assert text.startswith("<svg") and text.count("<svg") == 1 and "<!--" not in text and "<style" not in text
        ids = set(re.findall(r'\bid="([^"]*)', text))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= ids
        assert all(one.startswith(f"{name}-") for one in ids)
        assert "speculative" in text  # its text is text


def test_long_names_lose_their_middle_unless_that_tells_them_apart():
    assert figures.short(["x" * 10, "begin" + "-" * 60 + "end"], 20) == {
        "x" * 10: "x" * 10,
        "begin" + "-" * 60 + "end": "begin----…-------end",
    }
    alike = [f"{'a' * 30}{middle}{'b' * 30}" for middle in "xy"]
    assert len(set(figures.short(alike, 20).values())) == 2


def test_siblings_are_laid_out_below_each_other():
    places = tree_layout([(), (1,), (0,), (0, 0), (0, 1), (0, 0, 0)])
    expected = {(): (0, 0), (0,): (1, 0), (0, 0): (2, 0), (0, 0, 0): (3, 0), (0, 1): (2, 1), (1,): (1, 2)}
    assert places == {path: NodePosition(*place) for path, place in expected.items()}


def test_no_two_nodes_share_a_place():
    paths = [(), *((a,) for a in range(4)), *((a, b) for a in range(4) for b in range(3)), (2, 1, 0), (2, 1, 1)]
    assert len(set(tree_layout(paths).values())) == len(paths)


def test_a_sweep_has_a_forest_and_lines(tmp_path):
    names = ["speedups", "tau_speedup_proposer", "tau_speedup_proposer.depth", "by_proposer.depth"]
    drawn = figures.sweep_figures(swept(), KEYS)
    assert list(drawn) == names
    files = figures.save(drawn, tmp_path, ("png",))
    assert [file.name for file in files] == [f"{name}.png" for name in names]
    left, right = figures.lines(swept(), KEYS, "proposer.depth").axes
    assert [line.get_ydata().tolist() for line in left.lines[:2]] == [[1.2, 1.4, 1.8]] * 2
    assert right.lines[0].get_ydata().tolist() == [0.5, 1.0, 2.0]
    assert all(tick == round(tick) for tick in right.get_xticks())  # depths are whole numbers
    assert right.get_ylabel()


def test_points_of_tau_and_speed_up_have_the_colours_of_their_arms():
    table = swept()
    last = (table["proposer"] == "b") & (table["proposer.depth"] == 4) & (table["arm"] != "baseline")
    table.loc[last, "arm"] = "longer"
    axes = figures.tau_and_speedup(table, KEYS, "arm").axes[0]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    colours = figures.colours(["speculative", "longer"])
    assert {line.get_label(): line.get_color() for line in points} == {
        arm: colours[arm] for arm in ("speculative", "longer")
    }
    assert points[1].get_xydata().tolist() == [[1.8, 2.0]]
    by_depth = figures.tau_and_speedup(table, KEYS, "proposer.depth").axes[0].lines
    assert [line.get_label() for line in by_depth if line.get_marker() == "o"] == [
        "proposer.depth=1", "proposer.depth=2", "proposer.depth=4",
    ]  # fmt: skip


def test_lines_of_several_arms_have_the_colours_of_the_arms_and_dashes_of_their_options():
    table = pd.concat([swept(), swept().query("arm != 'baseline'").assign(arm="longer")], ignore_index=True)
    colours = figures.colours(["speculative", "longer"])
    left, right = figures.lines(table, KEYS, "proposer.depth").axes
    drawn = {(line.get_color(), line.get_linestyle()) for line in left.lines}
    assert drawn == {(colours[arm], dash) for arm in ("speculative", "longer") for dash in ("-", "--")}
    assert len(right.get_legend().get_texts()) == 4


def test_a_forest_has_the_colours_of_the_arms():
    table = swept()
    table.loc[0, "arm"] = "slow"
    table.loc[0, ["speedup", "speedup_low"]] = 0.1
    frame, colours = sweeps.over_sweep(table, KEYS), figures.colours(["slow", "speculative"])
    drawn = figures.forest(table, KEYS).axes[0].containers
    assert [one.lines[0].get_color() for one in drawn] == [colours[arm] for arm in frame["arm"]]


@pytest.mark.nightly
def test_a_forest_of_many_runs_draws_the_fastest(tmp_path):
    table = pd.concat([swept()] * 100, ignore_index=True)
    table["proposer.depth"] = range(len(table))
    table["speedup"] = table["speedup_low"] = table["speedup_high"] = table.index.to_numpy() / 100
    axes = figures.forest(table, KEYS).axes[0]
    assert axes.get_title(loc="left") == "Speed-ups: the 40 fastest of 600"
    assert len(axes.get_yticks()) == figures.MAX_ROWS


# Outliers ------------------------------------------------------------------------------------------------------------


def marks(axes, marker: str) -> list[list[float]]:
    return [point for line in axes.lines if line.get_marker() == marker for point in line.get_xydata().tolist()]


def test_an_axis_ends_at_the_largest_value_that_is_no_outlier():
    assert figures.style.axis_end([1.0, 1.5, 2.0, 21.0]) == 2.0
    assert figures.style.axis_end([1.0, 2.0, 3.0, 4.0]) == 4.0, "spread, but no outlier"
    assert figures.style.axis_end([1.0, np.nan, 1.9]) == 1.9
    assert np.isnan(figures.style.axis_end([]))


def test_groups_beyond_the_axis_are_marked_at_its_end_and_counted():
    """Eight groups; in one the baseline was disturbed, so that its ratio is 21."""
    rows = [
        {"group": group, "arm": arm, "request": group, "decode_tokens": 60, "prefill_tokens": 1, "finish": "length",
         "prefill_seconds": 0.0, "decode_seconds": 1.0 if arm == "speculative" else 31.5 if group == 3 else 1.5}
        for group in range(8) for arm in ("speculative", "baseline")
    ]  # fmt: skip
    rounds = pd.DataFrame({"arm": ["speculative", "baseline"], "group": 0})
    left, right = figures.throughput(Tables(rounds, pd.DataFrame(), pd.DataFrame(rows))).axes
    assert len(marks(right, ">")) == 2 and right.get_xlim()[1] < 6, "the ratio of 21, and the end of the interval"
    assert {point[0] for point in marks(right, ">")} == {max(point[0] for point in marks(right, ">"))}
    assert len(marks(right, "o")) == 7
    assert any("1 of 8 beyond" in text.get_text() for text in right.texts)
    assert not marks(left, ">") and not any("beyond" in text.get_text() for text in left.texts)


def test_a_run_of_a_sweep_beyond_the_axis_is_marked_and_counted():
    table = swept()
    table.loc[table["run"] == "b4", ["speedup", "speedup_low", "speedup_high"]] = [40.0, 30.0, 50.0]
    axes = figures.forest(table, KEYS).axes[0]
    assert len(marks(axes, ">")) == 1 and axes.get_xlim()[1] < 10
    assert any("1 of 6 beyond" in text.get_text() for text in axes.texts)
    points = figures.tau_and_speedup(table, KEYS, "proposer").axes[0]
    assert len(marks(points, "^")) == 1 and any("1 of 6 beyond" in text.get_text() for text in points.texts)


def test_a_change_beyond_the_axis_is_marked_and_counted():
    table = pd.DataFrame(
        [{"figure": "speedup_geometric_mean", "label": f"B / A: {factor}", "other_name": "medusa", "relative": True,
          "change": factor, "simultaneous_low": factor / 1.2, "simultaneous_high": 1.2 * factor,
          "verdict": "significant"} for factor in (0.9, 1.0, 1.1, 1.2, 1.3, 30.0)]
    )  # fmt: skip
    axes = figures.changes(table, "speedup_geometric_mean", "speed-up").axes[0]
    assert len(marks(axes, ">")) == 1 and axes.get_xlim()[1] < 3
    assert any("1 of 6 beyond" in text.get_text() for text in axes.texts)
