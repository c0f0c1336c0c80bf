"""The names of arms: rows keep their keys, and what people read shows the names of the proposers."""

import json
from io import StringIO

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import sweeps
from spec_lab.analysis.names import arm_names, names_in_manifest
from spec_lab.analysis.results.run import written
from spec_lab.tasks.benchmark import run
from tests.labs import Repeat, lab, settings

NAMES = {"speculative": "repeat", "longer": "longer", "baseline": "baseline"}


def ran(folder):
    """A run with two proposers of the same name."""
    run(lab(more_proposers={"longer": Repeat(4)}), settings(folder), {}, Console(file=StringIO()))


@pytest.mark.parametrize(
    ("proposers", "name"),
    [
        ({"speculative": "medusa", "ngram": "ngram", "baseline": "none"}, "medusa"),
        ({"speculative": "medusa", "medusa": "medusa"}, "speculative"),  # the name is taken
        ({"speculative": None}, "speculative"),
    ],
)
def test_the_main_arm_has_its_proposers_name_unless_it_is_taken_or_unknown(proposers, name):
    names = arm_names(proposers)
    assert names.pop("speculative") == name
    assert all(arm == shown for arm, shown in names.items())


def test_a_manifest_names_every_arm_also_those_without_facts():
    manifest = {"arms": ["speculative", "peer", "baseline"], "proposers": {"speculative": {"name": "medusa"}}}
    assert names_in_manifest(manifest) == {"speculative": "medusa", "peer": "peer", "baseline": "baseline"}
    assert names_in_manifest(manifest | {"proposers": {"speculative": {"tree": "0"}}})["speculative"] == "speculative"


def test_rows_and_summary_keep_the_key_and_figures_show_the_name(tmp_path):
    ran(tmp_path)
    tables = metrics.load(tmp_path)
    assert metrics.arms(tables) == [*NAMES] == [*json.loads((tmp_path / "summary.json").read_text())["arms"]]
    drawn = written(tmp_path).draw(["throughput"])["throughput"]
    labels = [label.get_text() for label in drawn.axes[1].get_yticklabels()]
    assert labels == ["repeat", "longer"]


def swept() -> pd.DataFrame:
    rows = [("a", "speculative", "medusa"), ("a", "baseline", "none"), ("b", "speculative", "ngram"),
            ("c", "speculative", "ngram"), ("c", "ngram", "ngram"), ("d", None, np.nan)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["run", "arm", "proposer_name"])
    return table.assign(proposer=["medusa", "medusa", "ngram", "x", "x", "y"], tau_pooled=2.0, speedup=1.5)


def test_the_rows_of_a_sweep_are_named_run_by_run():
    named = sweeps.named(swept())["arm"]
    assert named.tolist()[:-1] == ["medusa", "baseline", "ngram", "speculative", "ngram"]
    assert pd.isna(named.iloc[-1])  # a task without arms
    assert sweeps.compared_arms(swept()) == ["medusa", "ngram", "speculative"]
    without = swept().drop(columns="proposer_name")
    assert sweeps.named(without) is without
