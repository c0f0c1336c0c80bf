"""``count_experts`` in a run: columns, figures, the roofline, and what is refused."""

import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.core.roofline import Roofline
from spec_lab.models.target import Target
from spec_lab.policy.costs import timed_batches
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.tasks.benchmark import run
from tests.labs import TEXTS, Letters, lab, settings
from tests.tiny import CONTEXT, tiny_mixture

CONFIG = {"target": {"path": "tiny"}, "count_experts": True}


def mixture(**changes) -> Target:
    return Target(CausalLM(tiny_mixture(), **changes), Letters(), "mixture", CONTEXT, "", 0.0)


@pytest.fixture(scope="module")
def target():
    return mixture()


def test_a_run_records_the_experts_of_each_forward_and_its_roofline_reads_them(target, tmp_path):
    laboratory = replace(lab(TEXTS[:2]), target=target)
    out, console = tmp_path / "out", Console(file=StringIO(), width=150)
    assert run(laboratory, settings(out, count_experts=True, max_new_tokens=6), CONFIG, console) == 0
    tables, summary = metrics.load(out), json.loads((out / "summary.json").read_text())
    read = np.stack(tables.forwards["experts"])
    assert read.shape == (len(tables.forwards), 2) and (read >= 2).all() and (read <= 8).all()
    figures = summary["arms"]["repeat"]["experts"]
    assert figures["read"] - figures["accepted"] == pytest.approx(figures["rejected_only"])
    assert summary["arms"]["baseline"]["experts"]["rejected"] == 0 < figures["rejected"]
    roofline = Roofline.of(summary["roofline"])
    assert roofline.work.experts.per_row == 2
    steps = metrics.step_bounds(tables, "repeat", roofline)
    decoded = tables.forwards[(tables.forwards["arm"] == "repeat") & ~tables.forwards["prefill"]]
    beyond = roofline.work.experts.beyond_one_row(metrics.experts.per_layer(decoded))
    assert (steps["memory"] * roofline.limits.bandwidth > roofline.work.weight_bytes + beyond).all()


def test_a_target_without_routers_or_in_fixed_shapes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="count_experts=true: model type 'llama' has no layers with experts"):
        lab().arms(settings(tmp_path, count_experts=True))
    with pytest.raises(ValueError, match="count_experts=true: its forwards have fixed shapes"):
        replace(lab(), target=mixture(fixed=True)).arms(settings(tmp_path, count_experts=True))


def test_costs_of_a_mixture_of_experts_are_timed_at_batches_between(target):
    assert timed_batches(lab().target, 16) == [1, 16]
    assert timed_batches(target, 16) == [1, 2, 4, 8, 16] and timed_batches(target, 6) == [1, 2, 4, 6]
    assert timed_batches(target, 1) == [1]
