"""The tables at a run's end: their columns and figures, and that they fit a terminal."""

import copy
import json
from io import StringIO

import pytest
from rich.console import Console

from spec_lab.analysis import show
from spec_lab.tasks.benchmark import run
from tests.labs import Repeat, lab, settings

COLUMNS = ["tokens/s", "speed-up [95 %]", "tau", "acceptance rate", "TTFT ms", "TPOT ms"]
MORE_COLUMNS = ["untruncated tau", "expected tau", "nodes per step", "overhead", "repeated 8-grams"]


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(more_proposers={"longer": Repeat(5)}), settings(out), {}, Console(file=StringIO()))
    return json.loads((out / "summary.json").read_text())


def shown(summary: dict, width: int = 80, verbose: bool = False) -> str:
    console = Console(file=StringIO(), width=width)
    show.show(summary, console, verbose)
    return console.file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def row(summary: dict, arm: str, width: int = 80) -> str:
    return next(line for line in shown(summary, width).splitlines() if line.strip().startswith(f"{arm} "))


@pytest.mark.nightly
def test_an_arm_has_its_figures_under_their_standard_names(summary):
    summary = copy.deepcopy(summary)
    summary["arms"]["longer"] |= {
        "tokens_per_second": 123.45, "speedup": {"mean": 1.5, "low": 1.25, "high": 1.75}, "tau_pooled": 2.25,
        "draft_token_rate": 0.456, "time_to_first_token": 0.0123, "time_per_output_token": 0.00456,
        "tau_pooled_raw": 2.5, "expected_tau": 2.52, "nodes_per_step": 5.0, "overhead": 0.125,
        "repeated_8gram_share": 0.25,
    }  # fmt: skip
    plain = "123.5 1.50 [1.25, 1.75] 2.25 45.6% 12.3 4.56"
    assert words(row(summary, "longer")) == f"longer {plain}"
    assert words(row(summary, "longer", 200)) == f"longer {plain} 2.50 2.52 5.0 12.5% 25.0%"
    head = next(line for line in shown(summary, 200).splitlines() if "tokens/s" in line)
    assert words(head) == " ".join(["arm", *COLUMNS, *MORE_COLUMNS])


@pytest.mark.nightly
def test_verbose_adds_columns_and_a_wide_terminal_too(summary):
    assert "untruncated" not in shown(summary) and "conditional" not in shown(summary)
    for text in (shown(summary, verbose=True), shown(summary, show.WIDE)):
        assert "untruncated" in text and "conditional" in text


@pytest.mark.parametrize("verbose", [False, True])
def test_the_tables_fit_a_terminal_of_80_columns(summary, verbose):
    for line in shown(summary, verbose=verbose).splitlines():
        assert len(line.rstrip()) <= 80 and "…" not in line


def test_deep_drafts_are_cut_to_the_width_of_the_terminal(summary):
    summary = copy.deepcopy(summary)
    summary["arms"]["longer"] |= {"survival": [0.5] * 64, "conditional": [0.5] * 64}
    assert all(len(line.rstrip()) <= 80 for line in shown(summary).splitlines())


def test_phases_of_many_arms_are_split_into_tables_that_fit_the_terminal(summary):
    summary = copy.deepcopy(summary)
    names = [f"draft_model_{number:02}" for number in range(12)]
    summary["arms"] |= dict.fromkeys(names, summary["arms"]["longer"])
    lines = shown(summary).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Decode time by phase"))
    heads = [line.split() for line in lines[first:] if line.strip().startswith("phase ")]
    assert len(heads) > 1 and [arm for head in heads for arm in head[1:]] == [
        "repeat", "longer", "baseline", *names,
    ]  # fmt: skip
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_a_summary_without_latencies_is_shown(summary):
    old = copy.deepcopy(summary)
    for arm in old["arms"].values():
        del arm["time_to_first_token"], arm["time_per_output_token"]
    assert "longer" in shown(old)


def test_the_speed_up_with_the_prefill_is_shown_where_there_is_one(summary):
    with_prefill = {"mean": 1.5, "low": 1.25, "high": 1.75}
    text = shown(summary | {"prefill_seconds": 0.5, "speedup_with_prefill": with_prefill})
    assert "0.50 s" in text and "1.50 [1.25, 1.75]" in text
    nothing = {"mean": None, "low": None, "high": None}
    assert "0.50 s.\n" in shown(summary | {"prefill_seconds": 0.5, "speedup_with_prefill": nothing})


def test_broken_groups_are_counted_only_where_there_are_some(summary):
    assert "broke" not in shown(summary)
    assert "1 of 3 groups" in shown(summary | {"broken_groups": 1})


def test_a_run_of_peers_alone_names_no_proposer(summary):
    assert "\ntoy: temperature 0" in shown(summary | {"proposer": None, "verifier": None})


def test_speed_ups_over_peers_fit_a_terminal(summary):
    speedup = {"mean": 1.234, "low": 1.101, "high": 1.361}
    peers = ("assisted", "bare", "generate", "lookup")
    compared = {peer: dict.fromkeys(("longer", "baseline"), speedup) for peer in peers}
    lines = shown(summary | {"against": compared}, 100).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Speed-up over peers"))
    head = next(line for line in lines[start:] if "bare" in line)
    assert head.split() == ["arm", *peers]
    assert lines[start + 4].split() == ["longer", *["1.23", "[1.10,", "1.36]"] * 4]
    assert "peers" not in shown(summary)


def test_what_a_policy_decided_is_printed_under_the_arm_s_name(summary):
    summary = copy.deepcopy(summary)
    summary["arms"]["longer"]["decisions"] = "goodput, depth 0 in 7 of 7 steps"
    assert "Policy of longer: goodput, depth 0 in 7 of 7 steps." in words(shown(summary))


def test_a_short_last_group_is_reported(summary):
    assert summary["short_groups"] == 1 and "The last group has fewer prompts" in words(shown(summary))
    assert "The last group" not in shown(summary | {"short_groups": 0})


def test_at_temperature_0_every_arm_with_other_outputs_than_the_baseline_is_named(summary):
    assert "identical" in shown(summary)
    summary = copy.deepcopy(summary)
    summary["arms"]["longer"]["identical_outputs"] = 0.985
    assert "longer 98.5%" in words(shown(summary))
    main = next(iter(summary["arms"]))
    summary["arms"][main]["identical_outputs"] = 0.5
    assert f"{summary['arms'][main]['proposer']} 50.0%, longer 98.5%" in words(shown(summary))
    assert "identical" not in shown(summary | {"temperature": 1.0})
    assert "logits of the two tokens" not in shown(summary)
    summary["output_margins"] = {"longer": {"outputs": 2, "median": 0.0123, "largest": 0.5}}
    assert "tokens differ by longer 0.012 (0.5): median (largest)" in words(shown(summary))


def test_arms_are_reported_as_lossless_lossy_failed_or_not_certified(summary):
    summary = copy.deepcopy(summary)
    assert "Lossless, certified by enumeration" in words(shown(summary))
    arm = summary["arms"]["longer"]
    arm |= {"certified": None, "certificate": {"missing": ["too deep"]}}
    assert "not certified: longer" in words(shown(summary)) and "too deep" in shown(summary)
    arm |= {"certificate": {"failure": "TV 0.5", "missing": []}}
    assert "NOT lossless: longer" in words(shown(summary)) and "TV 0.5" in shown(summary)
    arm |= {"lossless": False, "verifier": "relaxed"}
    assert "lossy: longer; verifier 'relaxed'" in words(shown(summary))


@pytest.mark.parametrize(("steady", "now", "busy"), [(False, True, True), (True, True, False), (False, False, True)])
def test_the_line_of_a_tree_says_whether_it_was_calibrated_on_a_busy_machine(steady, now, busy):
    facts = {
        "tree": "0 0.0", "nodes": 2, "expected_tokens": 1.5, "costs": "measured",
        "costs_measured": "2026-01-02T12:00:00+00:00", "costs_steady": steady,
    }  # fmt: skip
    (line,) = show.chosen_trees({"medusa": facts if now else {}}, {"medusa": facts})
    assert ("busy machine" in line) is busy
    assert "proposer.tree='0 0.0'" in line


def test_the_line_of_a_tree_names_the_proposer():
    facts = {"name": "medusa", "tree": "0", "nodes": 1, "expected_tokens": 1.5, "costs_measured": "now"}
    assert show.chosen_trees({}, {"speculative": facts})[0].startswith("medusa: ")


def test_the_trees_of_a_hybrid_s_parts_are_options_of_its_parts():
    facts = {"tree": "0", "nodes": 1, "expected_tokens": 1.5, "costs": "cached", "costs_measured": "now"}
    hybrid = {"name": "union", "parts": {"heads": facts, "suffix": {"name": "ngram"}}}
    lines = show.chosen_trees({}, {"speculative": hybrid, "b": hybrid})
    assert [line.partition(":")[0] for line in lines] == ["union.parts.heads", "b.parts.heads"]
    assert [line.partition("with ")[2] for line in lines] == [
        "proposer.parts.heads.tree='0'",
        "arms.b.parts.heads.tree='0'",
    ]


def test_the_trees_of_further_arms_are_options_of_their_own():
    facts = {"tree": "0", "nodes": 1, "expected_tokens": 1.5, "costs": "cached", "costs_measured": "now"}
    lines = show.chosen_trees({"a": facts, "b": facts}, {"a": facts, "b": facts})
    assert [line.partition("with ")[2] for line in lines] == ["proposer.tree='0'", "arms.b.tree='0'"]
