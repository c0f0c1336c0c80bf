"""Figures: what is drawn from which rows. How they look was looked at."""

import struct

import numpy as np
import pytest

from spec_lab import figures, metrics
from spec_lab.metrics import Tables
from spec_lab.run import run
from tests.labs import Repeat, lab, settings


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(beside={"longer": Repeat(4)}), settings(out), {})
    return metrics.load(out)


def only(tables: Tables, *arms: str) -> Tables:
    return Tables(*(one[one["arm"].isin(arms)] for one in (tables.rounds, tables.steps, tables.requests)))


def test_files_are_images_of_some_size(tables, tmp_path):
    for file in figures.draw(tables, tmp_path):
        head = file.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", head[16:])
        assert width > 800 and height > 300


def test_every_axis_is_labelled(tables):
    for figure in (figures.acceptance(tables), figures.throughput(tables), figures.phases(tables)):
        for axes in figure.axes:
            assert axes.get_xlabel() and axes.get_title()


def test_acceptance_draws_the_metrics(tables):
    survival, conditional = figures.acceptance(tables).axes
    for arm, curve in zip(("speculative", "longer"), survival.lines, strict=True):
        steps = metrics.decode_steps(tables.steps, arm)
        np.testing.assert_allclose(curve.get_ydata(), metrics.survival(steps))
    np.testing.assert_allclose(conditional.lines[1].get_ydata(), metrics.conditional(steps))


def test_phases_stack_up_to_the_decode_time(tables):
    axes = figures.phases(tables).axes[0]
    total = sum(bar.get_width() for bars in axes.containers for bar in bars)
    expected = sum(
        1e3 * metrics.decode_seconds(tables.rounds, arm) / tokens
        for arm, tokens in tables.requests.groupby("arm")["decode_tokens"].sum().items()
    )
    assert total == pytest.approx(expected)


def test_one_arm_alone_has_no_acceptance_and_no_speed_up(tables):
    alone = only(tables, "baseline")
    assert figures.acceptance(alone) is None
    assert len(figures.throughput(alone).axes) == 1
    assert len(figures.throughput(only(tables, "speculative")).axes) == 1


def test_nothing_draws_nothing(tables, tmp_path):
    nothing = only(tables)
    assert figures.acceptance(nothing) is None
    assert figures.phases(nothing) is None
