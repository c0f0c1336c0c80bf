"""Metrics on the command line: several at once, refused before anything is read, computed in runs that are done."""

import json

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from spec_lab.cli.build import own_metrics
from spec_lab.cli.config_checks import check_metrics, check_options
from spec_lab.cli.main import conf
from spec_lab.cli.refusals import Refused
from spec_lab.cli.search import figures
from spec_lab.results import sweep
from spec_lab.tasks.lab import Loop
from tests import checkpoints

DISTINCT = "spec_lab.analysis.metrics.texts.distinct"


def composed(*overrides):
    with initialize_config_dir(conf(), version_base="1.3"):
        return compose("config", [*overrides])


def clash(tables, arm):
    return {"tau_pooled": 1.0}


def late(tables, arm):
    return {"first": len(tables.requests["tokens"].iloc[0])}


def of(**functions):
    return OmegaConf.create({"metrics": {name: {"_target_": target} for name, target in functions.items()}})


def test_several_metrics_stand_below_their_names_with_their_options():
    config = composed("metrics=[distinct]", "+metrics@metrics.threes=distinct", "metrics.threes.n=3")
    check_options(config)
    check_metrics(config)
    assert {name: metric.keywords for name, metric in own_metrics(config).items()} == {
        "distinct": {"n": 2}, "threes": {"n": 3}
    }  # fmt: skip
    assert own_metrics(composed()) == {}


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([f"+metrics._target_={DISTINCT}"], r"metrics\._target_=.*# @package metrics\.NAME.* distinct"),
        (["metrics=[distinct]", "task=cost"], r"task=benchmark.*metrics=\[distinct\]"),
        (["metrics=[distinct]", "metrics.distinct.n=0"], r"metrics\.distinct\.n must be .* not 0"),
        (["metrics=[distinct]", "+metrics.distinct.m=1"], r"metrics\.distinct\.m"),
    ],
)
def test_what_cannot_be_computed_is_refused(overrides, why):
    config = composed(*overrides)
    with pytest.raises(Refused, match=why):
        (check_options(config), check_metrics(config))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (f"{__name__}.clash", r"metrics\.mine: tau_pooled"),
        (f"{__name__}.missing", r"metrics\.mine\._target_=.*missing"),
        ("spec_lab.core.roofline.Roofline.of", r"metrics\.mine: "),
    ],
)
def test_functions_are_checked_before_anything_is_decoded(target, why):
    with pytest.raises(Refused, match=why):
        own_metrics(of(mine=target))


def test_a_search_knows_the_values_of_metrics():
    assert "metrics.distinct_2.mean" in figures(of(mine=DISTINCT), "")
    assert "metrics.distinct_2.mean" not in figures(OmegaConf.create(), "")
    assert "metrics.first.mean" in figures(of(late=f"{__name__}.late"), "metrics.first.mean"), "known at the end"


@pytest.mark.nightly
def test_a_run_of_a_sweep_that_is_done_gets_the_values_of_a_metric_that_is_added(quick_cli, tmp_path, monkeypatch):
    options = ["--multirun", *checkpoints.short_runs(tmp_path / "tiny"), "prompts.limit=2", "seed=1"]
    assert quick_cli(*options)[0] == 0
    monkeypatch.setattr(Loop, "decode", lambda *_: pytest.fail("decoded again"))
    code, _, errors = quick_cli(*options, "metrics=distinct")
    (run,) = sweep.runs(tmp_path / "swept")
    assert code == 0 and run.state == "done", errors
    assert "distinct_2" in json.loads((run.folder / "summary.json").read_text())["metrics"]
    assert "done before" in quick_cli(*options, "metrics=distinct")[2]
    code, _, errors = quick_cli(*options, "metrics=distinct", "metrics.distinct.n=2,3")
    assert code == 1 and "metrics.distinct.n cannot be swept" in errors
