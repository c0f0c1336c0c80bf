"""The table at a run's end: what stands in it, and that it fits a terminal."""

import copy
import json
import re
from io import StringIO

import pytest
from rich.console import Console

from spec_lab.analysis import show
from spec_lab.tasks.benchmark import run
from tests.labs import Repeat, lab, settings


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(more_proposers={"longer": Repeat(5)}), settings(out), {}, Console(file=StringIO()))
    return json.loads((out / "summary.json").read_text())


def shown(summary: dict) -> str:
    console = Console(file=StringIO(), width=80)
    show.show(summary, console)
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


def test_ratios_to_peers_fit_a_terminal(summary):
    ratio = {"mean": 1.234, "low": 1.101, "high": 1.361}
    peers = ("assisted", "bare", "generate", "lookup")
    compared = {peer: dict.fromkeys(("speculative", "baseline"), ratio) for peer in peers}
    console = Console(file=StringIO(), width=100)
    show.show(summary | {"against": compared}, console)
    lines = console.file.getvalue().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Times the tokens/s of"))
    head, first = next(line for line in lines[start:] if "bare" in line), lines[start + 4]
    assert head.split() == ["arm", *peers]
    assert first.split() == ["speculative", *["1.23", "[1.10,", "1.36]"] * 4]
    assert max(map(len, (line.rstrip() for line in lines[start : start + 6]))) <= 100
    assert "Times the tokens/s of" not in shown(summary)


def test_a_short_last_group_is_named_as_left_out_of_the_speed_ups(summary):
    said = "The last group has fewer prompts than the others"
    assert summary["short_groups"] == 1 and said in shown(summary)
    assert said not in shown(summary | {"short_groups": 0})


def test_at_temperature_0_every_arm_whose_outputs_differ_is_named(summary):
    assert "All outputs are identical to the baseline's." in shown(summary)
    summary = copy.deepcopy(summary)
    summary["arms"]["longer"]["identical_outputs"] = 0.985
    told = shown(summary)
    assert "identical to the baseline's: longer 98.5% of the prompts; every other arm 100 %." in " ".join(told.split())
    summary["arms"]["speculative"]["identical_outputs"] = 0.5
    told = " ".join(shown(summary).split())
    assert "identical to the baseline's: speculative 50.0%, longer 98.5% of the prompts." in told
    assert "identical to" not in shown(summary | {"temperature": 1.0})


@pytest.mark.parametrize(("steady", "now", "busy"), [(False, True, True), (True, True, False), (False, False, True)])
def test_the_line_of_a_tree_says_whether_it_was_calibrated_on_a_busy_machine(steady, now, busy):
    facts = {
        "tree": "0 0.0", "nodes": 2, "expected_tokens": 1.5, "costs": "measured",
        "costs_measured": "2026-01-02T12:00:00+00:00", "costs_steady": steady,
    }  # fmt: skip
    (line,) = show.chosen_trees({"speculative": facts if now else {}}, {"speculative": facts})
    assert ("busy machine" in line) is busy
    assert "proposer.tree='0 0.0'" in line
