"""The tables of a sweep at 80 columns: every row on one line, and rows told apart."""

import io

import pandas as pd
from rich.console import Console

from spec_lab.cli.sweep_tables import print_results, print_sweep
from spec_lab.results import run_names, run_state, sweep


def swept(folder, jobs, monkeypatch, arms=("medusa",), without=(), **more) -> list[str]:
    """Return the printed lines of a sweep of these runs, all of them done; without some figures."""
    sweep.plan(folder, jobs)
    rows = []
    for number, (job, run_folder) in enumerate(zip(jobs, sweep.folders(folder, jobs), strict=True)):
        run_folder.mkdir()
        run_state.end(run_folder, job, "", 0, 1.0)
        options = {run_names.key(each): sweep._value(each.partition("=")[2]) for each in job}
        rows += [{"run": run_folder.name, "arm": arm, "proposer_name": "medusa", "speedup": 1.5, "speedup_low": 1.25,
                  "speedup_high": 1.75, "tokens_per_second": 1234.5, "tau_pooled": 2.5 + number, "expected_tau": 2.25,
                  **options, **more} for arm in (*arms, "baseline")]  # fmt: skip
    monkeypatch.setattr(sweep, "collect", lambda _: pd.DataFrame(rows).drop(columns=list(without)))
    console = Console(file=io.StringIO(), width=80)
    print_results(folder, console)
    return console.file.getvalue().splitlines()


def test_each_varied_option_has_a_column_and_each_run_a_line(tmp_path, monkeypatch):
    jobs = [[f"arms.chain.depth={depth}", f"prompts={text}", "max_new_tokens=24", f"sampling.temperature={heat}"]
            for depth, text, heat in ((1, "code", 0.5), (12, "json", 1))]  # fmt: skip
    lines = swept(tmp_path, jobs, monkeypatch, arms=("medusa", "ngram"))
    table = [line.split() for line in lines if line.strip("─ ")]
    assert " ".join(table[0]) == "depth prompts temperature arm speed-up [95 %] tokens/s tau expected tau"
    assert [row[:4] for row in table[1:5]] == [
        ["1", "code", "0.5", "medusa"], ["1", "code", "0.5", "ngram"], ["12", "json", "1", "medusa"],
        ["12", "json", "1", "ngram"],
    ]  # fmt: skip
    assert all(row[4:7] == ["1.50", "[1.25,", "1.75]"] for row in table[1:5]) and max(map(len, lines)) <= 80


def test_runs_whose_times_cannot_be_trusted_are_named_above_the_table(tmp_path, monkeypatch):
    lines = swept(tmp_path, [["seed=1"], ["seed=2"]], monkeypatch, verdict="doubtful", verdict_reasons="4 groups; load")
    heading = next(index for index, line in enumerate(lines) if "speed-up" in line)
    said = lines[:heading]
    assert any("2 doubtful" in line for line in said)
    assert [line for line in said if "seed=" in line] == [f"seed={n}: doubtful: 4 groups; load" for n in (1, 2)]


def test_the_state_of_each_run_is_on_one_line(tmp_path):
    jobs = [[f"arms.draft_chain.confidence=0.{n}", "max_new_tokens=24", "prompts=code"] for n in range(1, 4)]
    sweep.plan(tmp_path, jobs)
    console = Console(file=io.StringIO(), width=80)
    print_sweep(tmp_path, console, every=True)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[:2] for line in lines if "pending" in line and "confidence" in line] == [
        [f"confidence=0.{n}", "pending"] for n in range(1, 4)
    ]
