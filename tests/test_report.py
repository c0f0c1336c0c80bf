"""The table at a run's end: what stands in it, and that it fits a terminal."""

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from spec_lab import report
from spec_lab.run import run
from tests.labs import Repeat, lab, settings


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(beside={"longer": Repeat(5)}), settings(out), {}, Console(file=StringIO()))
    return json.loads((out / "summary.json").read_text())


def shown(summary: dict) -> str:
    console = Console(file=StringIO(), width=80)
    report.show(summary, console)
    return console.file.getvalue()


def row(summary: dict, arm: str) -> list[str]:
    """The arm's first row without its speed-up, whose interval holds spaces."""
    line = next(line for line in shown(summary).splitlines() if line.strip().startswith(f"{arm} "))
    return re.sub(r"\[.*?\]", "", line).split()


def test_tau_before_cuts_stands_beside_the_expected_one(summary):
    arm = summary["arms"]["longer"]
    arm |= {"tau_pooled": 1.25, "tau_pooled_raw": 1.5, "expected_tau": 1.52}
    assert re.search(r"tau +uncut +E tau", shown(summary))
    assert row(summary, "longer")[3:6] == ["1.25", "1.50", "1.52"]


def test_one_sentence_tells_the_prefill_and_the_speed_up_with_it(summary):
    with_prefill = {"mean": 1.5, "low": 1.25, "high": 1.75}
    told = shown(summary | {"prefill_seconds": 0.5, "speedup_with_prefill": with_prefill})
    assert "The prefill took 0.50 s; counted in, the speed-up is 1.50 [1.25, 1.75]." in told
    nothing = {"mean": None, "low": None, "high": None}
    assert "The prefill took 0.50 s.\n" in shown(summary | {"prefill_seconds": 0.5, "speedup_with_prefill": nothing})


def test_groups_are_named_as_left_out_only_where_some_are(summary):
    assert "left out of speeds" not in shown(summary)
    assert "In 1 of 3 groups a request broke" in shown(summary | {"broken_groups": 1})


def test_a_run_of_peers_alone_names_no_proposer(summary):
    assert shown(summary | {"proposer": None, "verifier": None}).startswith("toy, temperature 0")


def test_the_table_fits_a_terminal_of_80_columns(summary):
    for line in shown(summary).splitlines():
        assert len(line.rstrip()) <= 80 and "…" not in line
