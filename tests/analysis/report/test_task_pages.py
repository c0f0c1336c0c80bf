"""The pages about runs of every task but the benchmark, and about comparisons, from files written by hand."""

import copy
import importlib
import json
import os
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import report
from spec_lab.analysis.compare import as_frame, compare
from spec_lab.core.files import Unreadable
from spec_lab.results import run_state
from spec_lab.results.run_figures import figure_rows
from tests.analysis.report.parsed import HOSTILE, Parsed, cells
from tests.analysis.test_compare import write as write_run

TEST = {"name": "joint distribution of four tokens", "samples": 500, "p_value": 0.5, "detectable": 0.1}
VALUE = {"mean": 1.25, "low": 1.0, "high": 1.5}
TIMES = {"mean": 0.1, "p50": 0.08, "p90": 0.2, "p99": 0.3}
WINDOWS = [{"first": n, "last": n, "tau_pooled": VALUE, "draft_token_rate": VALUE} for n in (1, 2)]
TRAIN, CERTIFY, COST, VERIFIERS, DISTANCE, SERVE, CHECK, ONLINE = (
    "spec_lab.tasks.train.train", "spec_lab.tasks.certify.task.certify", "spec_lab.tasks.cost.measure",
    "spec_lab.tasks.verifier_study.study_verifiers", "spec_lab.tasks.constraint_distance.task.measure",
    "spec_lab.tasks.serve.serve", "spec_lab.tasks.check_drafter.check", "spec_lab.tasks.train_online.train_online",
)  # fmt: skip
PAIR = {
    "proposer": HOSTILE, "drawn": "iid", "verifier": "token", "declared_lossless": True, "certified": None,
    "result": "FAILS", "failed": HOSTILE, "sampled_tv": 0.1,
    "sampled": [TEST, TEST | {"name": "mode", "p_value": 1e-9}],
    "exact": {"instances": 3, "worst_tv": 0.25, "worst_instance": "toy", "own_target_tv": None, "failure": "toy",
              "drafts": "proposer", "missing": ["too many"]},
}  # fmt: skip
MASKS = {"rows": 9, "different": 1, "texts": 2, "refused_prompts": 1, "refusal": "no", "failed": "one mask differs",
         "first": {"text": HOSTILE, "request": "p1"}}  # fmt: skip
SUMMARIES = {
    TRAIN: {"drafter": HOSTILE, "sha256": "ab12", "texts": 32, "steps": 40, "parameters": 1_500_000, "temperature": 1.0,
            "accepted": [0.625, 0.5], "agreed": [0.75, 0.25], "estimated_length": 0.94, "measured_length": 0.91},
    CERTIFY: {"complete": True, "certified": False, "failed": [HOSTILE], "pairs": [PAIR], "left_out": ["one"],
              "alpha": 1e-6, "power": 0.999, "control": TEST | {"p_value": 1e-30}, "constraint": {"masks": MASKS},
              "convergence": {"sizes": [100, 1000], "expected": [0.3, 0.1], "control": [0.5, 0.5], "pairs": [
                  {"verifier": HOSTILE, "lossless": True, "distances": [0.3, 0.1]}]}},
    COST: {"turns": 2, "steps": 3, "temperature": 0.0, "nodes": [
               {"batch": 1, "context": 64, "nodes": n, "seconds": 0.01 * (1 + n), "low": 0.009, "high": 0.02 * (1 + n)}
               for n in (0, 4)],
           "arms": [{"arm": HOSTILE, "batch": 1, "context": 64, "seconds": 0.002, "low": 0.001, "high": 0.003}],
           "baseline": [{"batch": 1, "context": 64, "roofline_share": {"mean": 0.5}, "memory_bound_steps": 1.0}]},
    VERIFIERS: {"requests": 3, "tokens": 60, "every": 4, "temperature": 1.0, "errors": [HOSTILE],
                "left_out": [{"proposer": "tree", "drawn": "iid", "verifier": "match"}],
                "proposers": {"tree": {"name": "draft_tree", "drawn": "iid", "drafts": 9, "drafted_per_draft": 4.0,
                                       "compared_with": "token", "verifiers": {HOSTILE: {
                                           "lossless": False, "kind": "exact", "expected_accepted": VALUE,
                                           "difference": VALUE, "share_of_bound": VALUE, "share_of_forward": 0.01,
                                           "verify_us": {"median": 30.0, "low": 20.0, "high": 40.0}}}}}},
    DISTANCE: {"temperature": 1.0, "max_new_tokens": 8, "constraint": {"name": "regex"}, "guarantee": {"exact": "all"},
               "prompts": [{"prompt": HOSTILE, "method": "exact", "outputs": 5, "z": 0.5, "tv": 0.125, "kl": 0.25,
                            "local_invalid": 0.1},
                           {"prompt": "p1", "method": "sampled", "sampler": "rejection", "global_samples": 20,
                            "attempts": 40, "z": VALUE, "tv": {"mean": 0.2, "low": 0.1, "high": 0.3}, "kl": None,
                            "local_invalid": 0.0},
                           {"prompt": "p2", "method": "none", "error": HOSTILE}]},
    SERVE: {"arrivals": "all", "temperature": 0.0, "segments": 2, "broken_segments": 1, "max_batch_size": 4,
            "errors": [HOSTILE], "arms": {name: {
                "requests": 4, "tokens": 40, "tokens_per_second": 123.4, "goodput": 1.5, "speedup": VALUE,
                "queue": TIMES, "prefill": TIMES, "ttft": TIMES, "tpot": TIMES} for name in (HOSTILE, "baseline")},
            "drift": {"at": 2, "window": 1, "arms": {HOSTILE: [row | {"requests": 1} for row in WINDOWS]}}},
    CHECK: {"proposer": HOSTILE, "temperature": 0.0, "depth": 2, "tree": True, "texts": 8, "tokens": 99,
            "trained_context": 32, "gain": 1.0, "best": 1, "alike": [],
            "readings": [
                {"changed": {}, "label": "in use", "helps": False, "tau": VALUE, "gain": None, "agreed": [0.5, 0.25],
                 "alpha": [0.375, None]},
                {"changed": {"taps": [1, 3]}, "label": HOSTILE, "helps": True, "tau": {"mean": 2.25, "low": 2.0,
                 "high": 2.5}, "gain": {"mean": 1.0, "low": 0.5, "high": 1.5}, "agreed": [0.875], "alpha": [0.75]},
                {"changed": {"window": 8}, "label": "window", "helps": False, "error": HOSTILE}],
            "by_position": {"used": [{"first": 1, "last": 16, "steps": 77, "tokens": VALUE, "beyond": False}]},
            "by_context": {"used": [{"first": 33, "last": 64, "steps": 66, "tokens": VALUE, "beyond": True}]},
            "calibration": {"used": {"ece": 0.0625, "confidence": 0.5, "agreed": 0.5, "bins": [
                {"confidence": 0.5, "agreed": 0.5, "tokens": 9}]}, "best": None},
            "expected": {"value": 2.4, "by": "reading", "changed": {"taps": [1, 3]}, "whole": True}},
    ONLINE: {"drafter": HOSTILE, "temperature": 1.0, "requests": 4, "round": 2, "change": 2,
             "versions": [{"version": 0, "sha256": "ab12", "texts": 16, "steps": 4, "seconds": 1.5}],
             "arms": {arm: {"tau_pooled": VALUE, "rounds": [row | {"steps": 9} for row in WINDOWS]}
                      for arm in ("frozen", "online")}},
}  # fmt: skip
"""Files that each task leaves."""

SHOWN = {
    TRAIN: ["0.625", "0.250", "0.94", "ab12", "1.50 M"], CERTIFY: ["0.25", "1e-09", "10.00%", "too many", "1e-30"],
    COST: ["5.00", "10.00 [9.00, 20.00]", "2.00 [1.00, 3.00]", "64"],
    VERIFIERS: ["1.25 [1.00, 1.50]", "30 [20, 40]", "1.0%", "lossy", "tree (drawn iid) with match"],
    DISTANCE: ["0.125", "20 of 40", "0.2 [0.1, 0.3]", "10.0%", "exact: all."],
    SERVE: ["123.4", "1.25 [1.00, 1.50]", "300.0", "In 1 of 2 segments", "the workload changes with request 2"],
    CHECK: ["proposer.taps=[1,3]", "2.25 [2.00, 2.50]", "+1.00 [+0.50, +1.50]", "0.875", "beyond the trained context",
            "0.062", "explained by the reading"],
    ONLINE: ["1.25 [1.00, 1.50]", "ab12", "The workload changes with request 2, in round 2"],
}  # fmt: skip
"""Numbers that the page of each task shows."""

FIGURES = {TRAIN: 2, CERTIFY: 2, COST: 1, VERIFIERS: 2, DISTANCE: 1, SERVE: 3, CHECK: 4, ONLINE: 2}


def folder_of(folder: Path, task: str, summary: dict | None = None) -> Path:
    """A run of a task, from its summary."""
    folder.mkdir(exist_ok=True)
    facts = {
        "config": {"name": HOSTILE, "task": {"_target_": task, "rows": 2, "recipe": {"_target_": "x", "layers": 1}}},
        "seed": 0, "weights_sha256": {}, "prompts_sha256": "", "commit": "0" * 40, "versions": {"torch": "2"},
        "machine": {"processor": "one", "cores": 2, "gpus": []}, "threads": 1, "arms": [HOSTILE],
        "proposers": {HOSTILE: {"name": "toy"}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(facts))
    name = "certificate.json" if task == CERTIFY else "summary.json"
    if summary is not None:
        (folder / name).write_text(json.dumps(summary))
    if task == TRAIN:
        (folder / "training").mkdir(exist_ok=True)
        held = {"accepted": [0.5, 0.5], "agreed": [0.5, 0.5], "accepted_length": 0.75, "agreed_length": 0.75}
        line = {"step": 20, "seconds": 60.0, "loss": [2.0, 3.0], "accepted": [0.4, 0.3], "agreed": [0.5, 0.2],
                "texts": 160, "length_at_1": 0.52, "length_greedy": 0.6}  # fmt: skip
        lines = [line, line | {"step": 40, "seconds": 120.0, "held_out": held}]
        (folder / "training" / "learning.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if task == SERVE:
        rows = [{"arm": arm, "segment": segment, "arrival": 0.0, "admitted": 0.1, "first_token": 0.2, "end": 1.0,
                 "tokens": 5, "error": HOSTILE * segment}
                for arm in (HOSTILE, "baseline") for segment in (0, 1)]  # fmt: skip
        pd.DataFrame(rows).to_parquet(folder / "served.parquet")
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tasks")
    return {task: report.write(folder_of(folder / str(number), task, SUMMARIES[task]))
            for number, task in enumerate(SUMMARIES)}  # fmt: skip


@pytest.mark.parametrize(("task", "shown"), [(SERVE, "Verdict: doubtful: 1 segment"), (COST, "Verdict: not recorded.")])
def test_an_older_page_has_the_verdict_that_its_rows_tell(pages, task, shown):
    assert shown in " ".join(Parsed(pages[task]).text.split())


@pytest.mark.one_in(12)
@pytest.mark.parametrize("task", SUMMARIES)
def test_a_task_has_a_page_with_its_numbers_and_figures(pages, task):
    parsed = Parsed(pages[task])
    assert [text for text in SHOWN[task] if text not in parsed.text] == []
    assert pages[task].read_text().count('<figure class="chart"><svg') == FIGURES[task]
    assert {file.suffix for file in (pages[task].parent / "figures").iterdir()} == {".png", ".svg"}
    assert all((pages[task].parent / unquote(link)).is_file() for link in parsed.values("href") if link[0] != "#")


@pytest.mark.parametrize("task", SUMMARIES)
def test_a_sweep_counts_a_finished_task_as_done(task, tmp_path):
    folder = folder_of(tmp_path / "run", task, SUMMARIES[task])
    ended = {"state": "done", "error": "", "code": 0}
    (folder / "ended.json").write_text(json.dumps(ended))
    assert run_state.ended(folder) == ended
    if task == ONLINE:
        assert [(row["arm"], row["tau_pooled"]) for row in figure_rows(folder)] == [("frozen", 1.25), ("online", 1.25)]


def test_a_stream_whose_workload_does_not_change_has_a_page(tmp_path):
    folder = folder_of(tmp_path / "run", ONLINE, SUMMARIES[ONLINE] | {"change": None})
    assert "The workload changes" not in Parsed(report.write(folder)).text


@pytest.mark.parametrize("task", SUMMARIES)
def test_texts_do_not_break_out_of_a_page(pages, task):
    parsed = Parsed(pages[task])
    assert [tag for tag, _ in parsed.tags].count("script") == [tag for tag, _ in parsed.tags].count("style") == 1
    assert not {tag for tag, _ in parsed.tags} & {"img", "iframe", "object", "link"}
    assert not [attributes for _, attributes in parsed.tags if any(name.startswith("on") for name in attributes)]
    assert "</script><script>document.title='owned'</script>" in parsed.text and "{{7*7}}" in parsed.text
    assert not re.search("[\x00\u2028\u202e]", pages[task].read_text(encoding="utf-8"))
    policy = next(attributes["content"] for tag, attributes in parsed.tags if "http-equiv" in attributes)
    assert "default-src 'none'" in policy and "sha256-" in policy and "unsafe-eval" not in policy


@pytest.mark.nightly
@pytest.mark.parametrize("task", SUMMARIES)
def test_files_of_another_shape_are_refused_by_name(task, tmp_path):
    for number, key in enumerate(SUMMARIES[task]):
        wrong = copy.deepcopy(SUMMARIES[task]) | {key: {"of": ["another", "kind"]}}
        folder = folder_of(tmp_path / str(number), task, wrong)
        if (task, key) == (CERTIFY, "constraint"):  # a constraint without "masks": they were not compared
            parsed = Parsed(report.write(folder))
            assert [text for text in SHOWN[task] if text not in parsed.text] == []
            assert MASKS["failed"] not in parsed.text
            continue
        with pytest.raises(Unreadable, match=r"(summary|certificate)\.json is not readable .*run the same command"):
            report.write(folder)
        assert not (folder / "report.html").exists()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("task", SUMMARIES)
def test_a_task_that_has_not_ended_shows_what_is_there_or_says_so(task, tmp_path):
    folder = folder_of(tmp_path / "run", task)
    if task == TRAIN:
        text = Parsed(report.write(folder)).text
        assert "This training has not ended: 40 steps" in text and "training step" in text
        for line in ('{"step": "one"}', "[" * 100_000, '{"step": ' + "1" * 5000 + "}"):
            (folder / "training" / "learning.jsonl").write_text(f"{line}\n")
            with pytest.raises(Unreadable, match="not a learning curve"):
                report.write(folder)
        (folder / "training" / "learning.jsonl").unlink()
    with pytest.raises(ValueError, match=r"has no (summary|certificate)\.json|no line in training"):
        report.write(folder)


def test_a_pipe_in_place_of_a_table_is_refused(tmp_path):
    folder = folder_of(tmp_path / "run", SERVE, SUMMARIES[SERVE])
    (folder / "served.parquet").unlink()
    os.mkfifo(folder / "served.parquet")
    with pytest.raises(Unreadable, match=r"served\.parquet"):
        report.write(folder)


def test_every_bundled_task_that_leaves_files_has_a_page_or_the_rows_of_a_run():
    configs = Path(report.__file__).parents[3] / "conf" / "task"
    tasks = {re.search(r"^_target_: (.+)$", file.read_text(), re.MULTILINE)[1] for file in configs.glob("*.yaml")}
    shown = {"spec_lab.tasks.stream.stream", "spec_lab.tasks.certify.check.check"}  # on the terminal only
    assert tasks - report.RESULTS.keys() == shown | {"spec_lab.tasks.benchmark.run"}
    for name in report.RESULTS:
        module, _, function = name.rpartition(".")
        assert callable(vars(importlib.import_module(module))[function])


# Comparisons ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    tau = 1 + np.random.default_rng(0).gamma(4, 0.5, 24)
    for name, factor in (("a", 1.0), ("b", 1.3)):
        out = write_run(folder / name, factor * tau, arms=("repeat", "other"), config={"seed": HOSTILE * (name == "b")})
        requests = pd.read_parquet(next(out.glob("parts/requests-*")))
        for column, value in (
            ("workload", HOSTILE),
            ("checker", "number"),
            ("correct", requests["request"] % 3 > 0),
            ("kept", True),
        ):
            requests[column] = value
        if name == "b":
            requests["correct"] = True
        requests.to_parquet(next(out.glob("parts/requests-*")))
    comparison = compare([folder / "a", folder / "b"])
    return comparison, report.write_comparison(comparison, folder / "page of <b>.html")


@pytest.mark.nightly
def test_a_comparison_has_a_page_with_the_numbers_of_its_table(compared):
    comparison, page = compared
    frame, parsed = as_frame(comparison), Parsed(page)
    of_arms = cells(page, 3), cells(page, 4)  # a table for each pair of arms
    rows = [row for table in of_arms for row in table]
    assert len(rows) == len(frame) and f"{comparison.tested} tested changes" in parsed.text
    tau = frame[(frame["figure"] == "tau_pooled") & (frame["other_arm"] == "other")].iloc[0]
    shown = next(row for row in of_arms[1] if row["figure"] == "tau")
    assert shown["change"] == f"{tau['change']:+.2f}" and shown["verdict"] == tau["verdict"] == "significant"
    assert shown["[95\u00a0%]"] == f"[{tau['simultaneous_low']:+.2f}, {tau['simultaneous_high']:+.2f}]"
    correct = next(row for row in rows if row["figure"] == "correct")
    assert correct["change"] == "+0.333" and correct["units"] == "24 prompts, paired"
    assert "Bonferroni" in parsed.text
    assert all((page.parent / unquote(link)).is_file() for link in parsed.values("href") if link[0] != "#")
    assert (
        page.read_text().count('<figure class="chart"><svg')
        == frame.query("verdict != 'not tested'")["figure"].nunique()
    )
