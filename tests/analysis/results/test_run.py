"""The tables at a run's end: their columns and figures, and that they fit a terminal."""

import copy
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from spec_lab.analysis.console import show
from spec_lab.analysis.results.run import written
from spec_lab.tasks.benchmark import run
from tests.labs import Repeat, lab, settings

COLUMNS = ["tokens/s", "speed-up [95 %]", "tau", "acceptance rate", "TTFT ms", "TPOT ms"]


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(lab(more_proposers={"longer": Repeat(5)}), settings(out), {}, Console(file=StringIO()))
    return json.loads((out / "summary.json").read_text()) | {"folder": str(out)}


def shown(summary: dict, width: int = 80, verbose: bool = False) -> str:
    """Return the printed text of a run with this summary."""
    console, folder = Console(file=StringIO(), width=width), Path(summary["folder"])
    (folder / "summary.json").write_text(json.dumps(summary))
    show(written(folder), console, verbose)
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
    assert words(row(summary, "longer", 200)).startswith(f"longer {plain}")
    assert "2.50 2.52 5.0 12.5% 25.0%" in words(shown(summary, 240))
    head = next(line for line in shown(summary).splitlines() if "TTFT" in line)
    assert words(head).startswith(" ".join(["arm", *COLUMNS]))


@pytest.mark.parametrize("verbose", [False, True])
def test_the_tables_fit_a_terminal_of_80_columns(summary, verbose):
    for line in shown(summary, verbose=verbose).splitlines():
        assert len(line.rstrip()) <= 80 and "…" not in line


def test_the_speed_up_with_the_prefill_is_shown_where_there_is_one(summary):
    with_prefill = {"mean": 1.5, "low": 1.25, "high": 1.75}
    summary, main = copy.deepcopy(summary), next(iter(summary["arms"]))
    summary["arms"][main] |= {"prefill_seconds": 0.5, "speedup_with_prefill": with_prefill}
    text = shown(summary, verbose=True)
    assert "0.50 s" in text and "1.50 [1.25, 1.75]" in text
    nothing = {"mean": None, "low": None, "high": None}
    summary["arms"][main]["speedup_with_prefill"] = nothing
    assert "0.50 s.\n" in shown(summary, verbose=True)


def test_at_temperature_0_every_arm_with_other_outputs_than_the_baseline_is_named(summary):
    assert "identical" in shown(summary)
    summary = copy.deepcopy(summary)
    summary["arms"]["longer"]["identical_outputs"] = 0.8
    assert "longer 4 of 5." in words(shown(summary))
    main = next(iter(summary["arms"]))
    summary["arms"][main]["identical_outputs"] = 0.4
    assert f"{summary['arms'][main]['proposer']} 2 of 5, longer 4 of 5." in words(shown(summary))
    assert "identical" not in shown(summary | {"temperature": 1.0})
    summary["output_margins"] = {"longer": {"outputs": 2, "median": 0.0123, "largest": 0.5}}
    assert "longer 4 of 5; the others first differ at tokens whose logits are within 0.5," in words(shown(summary))
    assert "tokens differ by longer 0.012 (0.5): median (largest)" in words(shown(summary, verbose=True))
    summary["arms"][main]["lossless"] = False
    assert "2 of 5 (lossy verifier), longer 4 of 5; the others of longer first differ" in words(shown(summary))
    summary["arms"]["longer"]["lossless"] = False
    assert "longer 4 of 5 (lossy verifier)." in words(shown(summary))


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
    arm["certificate"] |= {"worst_tv": 0.1234, "worst_instance": "one step", "instances": 6}
    assert "total variation up to 0.12 on 6 toy models (one step)" in words(shown(summary))
