"""Sweeps: planned runs, the status of each run, the command line, and the table of results."""

import json
import math
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spec_lab.analysis.text import losslessness
from spec_lab.cli.commands import command
from spec_lab.core.files import write_json
from spec_lab.results import run_names, run_state, sweep, writer
from spec_lab.results.table_parts import TableParts
from spec_lab.results.writer import load
from spec_lab.tasks.lab import Loop
from tests import checkpoints

# Names -------------------------------------------------------------------------------------------------------------

KEYS = st.from_regex(r"\A[a-z][a-z_]{0,9}(\.[a-z_]{1,9}){0,2}\Z").filter(
    lambda key: key.partition(".")[0] not in run_names.UNIDENTIFYING
)
VALUES = st.text(st.characters(exclude_categories=["C"], exclude_characters=","), max_size=80)
OVERRIDES = st.dictionaries(KEYS, VALUES, max_size=4).map(
    lambda options: [f"{key}={value}" for key, value in options.items()]
)


@given(OVERRIDES, st.randoms(use_true_random=False))
@example(["task.prompt=" + "語" * 200], None)
@example(["prompts.path=../../etc/passwd"], None)
def test_a_name_is_one_safe_folder_whatever_the_overrides_and_their_order(overrides, shuffler):
    name = run_names.folder_name(overrides)
    assert not set(name) & set("/\\\0 \n'\"$*?")
    assert name not in ("", ".", "..")
    assert len(name.encode()) <= 255, "more than file systems take"
    if shuffler:
        shuffler.shuffle(overrides)
    assert run_names.folder_name(overrides) == name


@given(OVERRIDES, OVERRIDES)
@example(["a=x/y"], ["a=x_y"])
@example(["a=x y"], ["a=x/y"])
@example(["a=" + "1" * 200], ["a=" + "1" * 201])
@example(["a=1"], [])
def test_other_overrides_have_another_name(some, others):
    assert (run_names.folder_name(some) == run_names.folder_name(others)) == (sorted(some) == sorted(others))


def test_a_name_is_readable_where_it_can_be():
    assert run_names.folder_name(["seed=1", "proposer=medusa"]) == "proposer=medusa,seed=1"
    assert run_names.folder_name([]) == "default"
    assert run_names.folder_name(["+experiment=peers"]) == "experiment=peers"


def test_output_dir_does_not_identify_a_run():
    places = ["output_dir=there", "tracker=wandb", "tracker.mode=offline", "+tracker.notes=x", "retry=true"]
    overrides = [*places, "seed=1"]
    assert run_names.identifying(overrides) == ("seed=1",)
    assert run_names.folder_name(overrides) == run_names.folder_name(["seed=1"]) == "seed=1"
    assert run_names.identifying(["outer=1", "retry_twice=1"]) == ("outer=1", "retry_twice=1")


def test_labels_omit_options_that_all_runs_share():
    asked = {"a": ("seed=1", "warmup=0"), "b": ("seed=2", "warmup=0"), "c": ("warmup=0",)}
    assert sweep.labels(asked) == {"a": "seed=1", "b": "seed=2", "c": "c"}
    assert sweep.labels({"a": ("seed=1",)}) == {"a": "a"}


# Planned runs ------------------------------------------------------------------------------------------------------


def test_plans_add_up_in_order_and_each_run_is_once(tmp_path):
    sweep.plan(tmp_path / "new", [["seed=2", "output_dir=a"], ["seed=1"]])
    sweep.plan(tmp_path / "new", [["seed=3"], ["seed=2", "retry=true"]])
    swept_runs = sweep.runs(tmp_path / "new")
    assert [run.overrides for run in swept_runs] == [("seed=2",), ("seed=1",), ("seed=3",)]
    assert [run.folder for run in swept_runs] == [tmp_path / "new" / f"seed={seed}" for seed in (2, 1, 3)]
    assert {run.state for run in swept_runs} == {"pending"}
    assert sweep.which_run(swept_runs[1].folder) == "2 of 3, seed=1"


def test_a_new_run_is_named_by_what_varies_and_keeps_its_name(tmp_path):
    few = [["proposer=ngram", f"proposer.depth={depth}"] for depth in (2, 4)]
    sweep.plan(tmp_path, few)
    assert sweep.folders(tmp_path, few) == [tmp_path / "proposer.depth=2", tmp_path / "proposer.depth=4"]
    more = [["proposer=sam", "proposer.depth=2"], ["proposer=ngram", "proposer.depth=2"]]
    sweep.plan(tmp_path, more)
    assert sweep.folders(tmp_path, more) == [tmp_path / "proposer.depth=2,proposer=sam", tmp_path / "proposer.depth=2"]
    alike = [["proposer.depth=2"]]  # without a proposer: another run, whose name is taken
    before = sweep.folders(tmp_path, alike)
    sweep.plan(tmp_path, alike)
    assert sweep.folders(tmp_path, alike) == before and before[0].name.startswith("proposer.depth=2-")
    assert len({*sweep.folders(tmp_path, [*few, *more, *alike])}) == 4


def test_runs_of_a_sweep_whose_list_is_lost_keep_their_folders(tmp_path):
    jobs = [["proposer.depth=2", "seed=1"], ["proposer.depth=4", "seed=1"]]
    sweep.plan(tmp_path, jobs)
    named = sweep.folders(tmp_path, jobs)
    for run_folder, job in zip(named, jobs, strict=True):
        run_folder.mkdir()
        run_state.end(run_folder, job, "", 0, 1.0)
    (tmp_path / "sweep.json").unlink()
    sweep.plan(tmp_path, [*jobs, ["proposer.depth=4", "seed=2"]])
    assert sweep.folders(tmp_path, jobs) == named


def test_concurrent_plans_lose_nothing(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: sweep.plan(tmp_path, [[f"seed={seed}"]]), range(24)))
    assert {run.overrides for run in sweep.runs(tmp_path)} == {(f"seed={seed}",) for seed in range(24)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": 3}', '{"runs": [{"folder": "a"}]}'])
def test_an_invalid_list_of_runs_is_named(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    for call in (lambda: sweep.runs(tmp_path), lambda: sweep.plan(tmp_path, [["seed=1"]])):
        with pytest.raises(ValueError, match=r"sweep\.json "):
            call()


def test_a_folder_that_is_not_a_sweep_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere .*--multirun"):
        sweep.runs(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no sweep"):
        sweep.collect(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert run_state.is_run(tmp_path)
    with pytest.raises(ValueError, match="single run"):
        sweep.runs(tmp_path)


# Status of a run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path):
    """A sweep of one run whose folder exists and is empty."""
    sweep.plan(tmp_path, [["seed=1"]])
    (tmp_path / "seed=1").mkdir()
    return tmp_path / "seed=1"


def stands(folder: Path) -> run_state.RunState:
    (run,) = sweep.runs(folder.parent)
    assert run.folder == folder
    return run


def parts(folder: Path, *groups: int) -> None:
    """Rows of finished groups, as a running run writes them."""
    for group in groups:
        empty = {"double": 0.0, "int64": 0, "bool": False, "string": ""}
        row = {
            name: empty.get(str(kind), []) for name, (kind, _) in writer.SCHEMAS["requests"].items()
        }  # fmt: skip
        writer.Recorder(folder).write(group, [], [], [row | {"id": f"{group}/a/0", "group": group, "arm": "a"}])


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_running_while_a_process_holds_it_and_pending_after_a_kill(run_folder):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_folder / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        assert stands(run_folder).state == "running"
        with (
            pytest.raises(run_state.Locked, match="locked by another process"),
            run_state.holding(run_folder, patience=0.05),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert (run_folder / ".lock").exists(), "it is left behind, and stale"
        assert stands(run_folder).state == "pending"
        with run_state.holding(run_folder, patience=0.0):
            assert stands(run_folder).state == "running"
    finally:
        holder.kill()
        holder.communicate()
    assert not (run_folder / ".lock").exists()


def test_a_run_is_held_by_one_process_at_a_time(run_folder):
    inside, most = 0, []

    def work(_):
        nonlocal inside
        with run_state.holding(run_folder, patience=30):
            inside += 1
            most.append(inside)
            time.sleep(0.002)
            inside -= 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))
    assert most == [1] * 12


def test_a_stopped_run_is_pending_with_its_finished_groups(run_folder):
    (run_folder / "manifest.json").write_text(json.dumps({"groups": 5, "overrides": ["seed=1"]}))
    assert stands(run_folder) == run_state.RunState(run_folder, ("seed=1",), "pending", 0, 5)
    parts(run_folder, 0, 1)
    assert stands(run_folder).groups == 2
    writer.Recorder(run_folder).gather()
    parts(run_folder, 1, 2)  # killed while it removed the gathered parts
    assert stands(run_folder).groups == 3


def test_the_status_of_a_finished_run_has_exit_code_and_seconds(run_folder):
    (run_folder / "manifest.json").write_text(json.dumps({"groups": 5}))
    run_state.end(run_folder, ["seed=1", "output_dir=x"], "abc", 3, 1.23456)
    assert stands(run_folder) == run_state.RunState(run_folder, ("seed=1",), "done", 5, 5, code=3, seconds=1.235)
    assert run_state.ended(run_folder)["config_sha256"] == "abc"


def test_a_failed_run_keeps_its_error_and_traceback(run_folder):
    parts(run_folder, 0)
    try:
        raise OSError("no room")
    except OSError as error:
        run_state.fail(run_folder, ["seed=1"], error, "no room left", 2.0)
    run = stands(run_folder)
    assert (run.state, run.error, run.groups, run.seconds) == ("failed", "no room left", 1, 2.0)
    assert (
        "Traceback" in run_state.ended(run_folder)["traceback"]
        and "OSError: no room" in run_state.ended(run_folder)["traceback"]
    )
    run_state.begin(run_folder)
    assert stands(run_folder).state == "pending"
    run_state.begin(run_folder)


def test_a_run_that_ends_during_a_status_is_not_pending(run_folder, monkeypatch):
    running = run_state._running

    def just_then(folder):
        state = running(folder)
        run_state.end(folder, [], "abc", 0, 1.0)
        return state

    monkeypatch.setattr(run_state, "_running", just_then)
    assert stands(run_folder).state == "done"


def test_the_failure_of_a_cluster_job_is_read_from_files_of_earlier_versions_too(run_folder):
    run_state.fail_job(run_folder, "slurm", "TIMEOUT")
    assert (stands(run_folder).state, stands(run_folder).error) == ("pending", "slurm: TIMEOUT")
    (run_folder / "queued.json").write_text(json.dumps({"engine": "ray", "job": "7", "lost": "cancelled"}))
    assert (stands(run_folder).state, stands(run_folder).error) == ("pending", "ray job 7: cancelled")
    run_state.begin(run_folder)
    assert (stands(run_folder).state, stands(run_folder).error) == ("pending", "ray job 7")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "done"}'])
def test_an_invalid_status_file_is_named(run_folder, text):
    (run_folder / "ended.json").write_text(text)
    (run,) = sweep.runs(run_folder.parent)
    assert run.state == "failed"
    assert "ended.json does not record how the run ended" in run.error or "ended.json is not readable" in run.error


def test_unplanned_runs_are_found_too(run_folder):
    lone, other = run_folder.parent / "mine", run_folder.parent / "trial"
    for folder in (lone, other, run_folder.parent / "figures"):
        folder.mkdir()
    (lone / "manifest.json").write_text(json.dumps({"groups": 2, "overrides": None}))  # made without --multirun
    run_state.fail(other, ["seed=9"], ValueError("x"), "x", 1.0)
    assert [(run.folder, run.overrides, run.state) for run in sweep.runs(run_folder.parent)] == [
        (run_folder, ("seed=1",), "pending"),
        (lone, (), "pending"),
        (other, ("seed=9",), "failed"),
    ]


def test_rows_read_while_the_next_group_is_written_are_whole(tmp_path, monkeypatch):
    """A visible request has all its steps and forwards."""
    recorder, read = writer.Recorder(tmp_path), TableParts._read

    def write(group: int) -> None:
        rows = {}
        for name, columns in writer.SCHEMAS.items():
            empty = {"double": 0.0, "int64": 0, "bool": False, "string": ""}
            row = {column: empty.get(str(kind), []) for column, (kind, _) in columns.items()}
            rows[name] = [row | {"id": f"{group}/a/0", "group": group, "arm": "a"}]
        recorder.write(group, rows["forwards"], rows["steps"], rows["requests"])

    for group in range(3):
        write(group)

    def meanwhile(self, file):
        content = read(self, file)
        if len(list(tmp_path.glob("parts/requests-*"))) < 6:
            write(len(list(tmp_path.glob("parts/requests-*"))))
        return content

    monkeypatch.setattr(TableParts, "_read", meanwhile)
    tables = load(tmp_path)
    assert {0, 1, 2} <= set(tables.requests["group"])
    assert set(tables.requests["group"]) == set(tables.steps["group"]) == set(tables.forwards["group"])


def test_rows_read_while_they_are_gathered_are_complete(tmp_path, monkeypatch):
    parts(tmp_path, 0, 1, 2)
    listed = TableParts._files

    def gathered(self, name):
        listing = listed(self, name)
        monkeypatch.setattr(TableParts, "_files", listed)
        self.gather()
        return listing

    monkeypatch.setattr(TableParts, "_files", gathered)
    assert set(load(tmp_path).requests["group"]) == {0, 1, 2}


# The table ---------------------------------------------------------------------------------------------------------


def finished(folder: Path, summary: dict, seconds: float = 2.0) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"groups": 2, "commit": "c0ffee"}))
    (folder / "summary.json").write_text(json.dumps(summary))
    run_state.end(folder, [], "abc", 0, seconds)


ARM = {
    "proposer": "ngram", "verifier": "token", "lossless": True, "tokens": 12, "tau_pooled": 2.5, "drawn": ["x"],
    "speedup": {"mean": 1.5, "low": 1.25, "high": 1.75}, "survival": [0.5, 0.25], "conditional": [0.5, None],
    "phase_seconds": {"probabilities": 0.25, "verify": 0.125}, "finish": {"length": 3},
    "intervals": {"tau_pooled": {"low": 2.0, "high": 3.0}},
}  # fmt: skip


def test_the_table_has_a_row_for_each_arm_of_each_run_that_is_done(tmp_path):
    sweep.plan(tmp_path, [["seed=1", "proposer=ngram"], ["seed=2", "sampling.temperature=0.5"], ["seed=3"]])
    names = [run.folder.name for run in sweep.runs(tmp_path)]
    plain = {"proposer": "none", "speedup": {"mean": None, "low": None, "high": None}}
    shared = {"experiment": "toy", "temperature": 0.0, "groups": 2, "errors": []}
    finished(tmp_path / names[0], shared | ARM | {"arms": {"medusa": ARM, "baseline": plain}})
    finished(tmp_path / names[1], shared | ARM | {"arms": {"medusa": ARM}}, seconds=3.0)
    table = sweep.collect(tmp_path)
    assert list(zip(table["run"], table["arm"], strict=True)) == [
        (names[0], "medusa"),
        (names[0], "baseline"),
        (names[1], "medusa"),
    ]
    assert table["seed"].tolist() == [1, 1, 2]
    assert pd.api.types.is_integer_dtype(table["seed"])
    assert table["sampling.temperature"].isna().tolist() == [True, True, False]
    assert table["sampling.temperature"][2] == 0.5
    assert table["proposer"].tolist()[:2] == ["ngram", "ngram"] and pd.isna(table["proposer"][2])
    assert table["proposer_name"].tolist() == ["ngram", "none", "ngram"]
    first = table.iloc[0]
    expected = {
        "verifier_name": "token", "experiment": "toy", "groups": 2, "tokens": 12, "tau_pooled": 2.5,
        "tau_pooled_low": 2.0, "tau_pooled_high": 3.0, "speedup": 1.5, "speedup_low": 1.25, "speedup_high": 1.75,
        "survival@1": 0.5, "survival@2": 0.25, "conditional@1": 0.5, "phase_probabilities": 0.25, "phase_verify": 0.125,
        "commit": "c0ffee", "job_seconds": 2.0, "code": 0,
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    assert bool(first["lossless"]) and math.isnan(first["conditional@2"])
    assert not {"errors", "finish", "phase_seconds", "survival", "drawn", "arms"} & set(table)
    assert table["job_seconds"].tolist() == [2.0, 2.0, 3.0]


def test_a_run_whose_pair_was_refuted_says_so(tmp_path, capsys):
    sweep.plan(tmp_path, [["verifier=mine"], ["verifier=token"], ["verifier=synthetic"]])
    failure = {"failure": "token 0 has 0.8, not 0.6", "missing": []}
    certificates = (
        {"verifier": "mine", "certified": None, "certificate": failure},
        {"certified": "quick", "certificate": {"failure": None}},
        {"verifier": "synthetic", "invalid_text": True, "lossless": False, "certificate": None},
    )
    for run, facts in zip(sweep.runs(tmp_path), certificates, strict=True):
        finished(run.folder, {"arms": {"ngram": ARM | facts}})
    table = sweep.collect(tmp_path)
    assert table["refuted"].fillna("").tolist() == [failure["failure"], "", ""]
    words = [losslessness(row)[0] for row in table.to_dict("records")]
    assert words == ["NOT lossless", "lossless", "INVALID TEXT"]
    said = "verifier=mine: NOT lossless: ngram; verifier 'mine' is declared lossless, but: token 0 has 0.8, not 0.6"
    for verbose in ([], ["--verbose"]):
        assert command(["collect", *verbose, str(tmp_path)]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.count("NOT lossless") == 1 and said in printed


def test_a_summary_without_arms_is_one_row(tmp_path):
    sweep.plan(tmp_path, [["seed=1"]])
    finished(tmp_path / "seed=1", {"experiment": "cost", "arms": [1, 2], "passed": 3})
    (row,) = sweep.collect(tmp_path).to_dict("records")
    assert (row["experiment"], row["passed"], row["seed"], row["arm"]) == ("cost", 3, 1, None)
    (tmp_path / "seed=1" / "summary.json").rename(tmp_path / "seed=1" / "certificate.json")
    assert sweep.collect(tmp_path)["passed"].tolist() == [3]


def test_options_that_are_numbers_in_some_runs_only_can_be_written_and_read(tmp_path, capsys):
    values = ["null", "3", "'x'", "0.5"]
    sweep.plan(tmp_path, [[f"sampling.top_k={value}"] for value in values])
    for run in sweep.runs(tmp_path):
        finished(run.folder, {"experiment": "toy", "arms": {"medusa": ARM}})
    assert command(["collect", str(tmp_path)]) == 0, capsys.readouterr().err
    assert len(pd.read_parquet(tmp_path / "table.parquet")["sampling.top_k"]) == 4
    assert len(pd.read_csv(tmp_path / "table.csv")) == 4


@pytest.mark.parametrize("option", ["constraint", "target", "proposer", "verifier"])
def test_overrides_of_the_command_line_are_not_overwritten_by_a_part_s_facts(tmp_path, option):
    sweep.plan(tmp_path, [[f"{option}=asked"]])
    summary = {"experiment": "toy", "constraint": "own name", "target": "own name", "arms": {"medusa": ARM}}
    finished(tmp_path / f"{option}=asked", summary)
    assert sweep.collect(tmp_path)[option].tolist() == ["asked"]


# The command line --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Overrides that name a tiny checkpoint and its prompts, and keep runs short."""
    return checkpoints.short_runs(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cli(quick_cli):
    return quick_cli


def states(folder: Path) -> dict[str, tuple[str, int]]:
    """The state of each seed's run, and its number of finished groups."""
    seeds = [next(override for override in run.overrides if override.startswith("seed")) for run in sweep.runs(folder)]
    return {seed[5:]: (run.state, run.groups) for seed, run in zip(seeds, sweep.runs(folder), strict=True)}


def files(folder: Path) -> dict[Path, int]:
    """Modification times of all files of the runs."""
    return {file: file.stat().st_mtime_ns for file in folder.glob("*/**/*") if file.is_file()}


@pytest.fixture
def decoded(monkeypatch):
    """The requests decoded from here on; at those of ``decoded.stop`` Ctrl-C is pressed."""

    class Decoded(list):
        stop = ()

    seen, plain = Decoded(), Loop.decode

    def decode(self, requests):
        if requests[0].id in seen.stop:
            raise KeyboardInterrupt
        seen.append(requests[0].id)
        return plain(self, requests)

    monkeypatch.setattr(Loop, "decode", decode)
    return seen


@pytest.mark.nightly
def test_finished_runs_are_skipped_and_new_ones_are_added(cli, tiny, tmp_path, decoded):
    some = ["--multirun", *tiny, "prompts.limit=2"]
    code, output, errors = cli(*some, "seed=1,2")
    assert code == 0, errors
    assert "1 of 2, seed=1: done in " in errors and "2 of 2, seed=2: done in " in errors
    assert "swept: 2 done" in output
    assert decoded == [0, 1, 0, 1]
    before = files(tmp_path / "swept")
    code, output, errors = cli(*some, "seed=2,1,3")
    assert code == 0, errors
    assert "1 of 3, seed=1: done before" in errors and "3 of 3, seed=3: done in" in errors
    assert decoded == [0, 1, 0, 1, 0, 1], "only the new one's"
    after = files(tmp_path / "swept")
    assert len(before) >= 2 * 6 and all(after[file] == moment for file, moment in before.items())
    assert states(tmp_path / "swept") == {"1": ("done", 2), "2": ("done", 2), "3": ("done", 2)}


@pytest.mark.nightly
def test_a_run_that_was_done_with_another_configuration_is_refused_in_one_line(cli, tiny, tmp_path):
    some = ["--multirun", *tiny, "prompts.limit=1", "seed=1,2"]
    assert cli(*some)[0] == 0
    (first, _) = sweep.folders(tmp_path / "swept", [run.overrides for run in sweep.runs(tmp_path / "swept")])
    for name, fact in (("ended.json", "config_sha256"), ("manifest.json", "prompts_sha256")):
        write_json(first / name, json.loads((first / name).read_text()) | {fact: "00"})
    before = files(first)
    code, _, errors = cli(*some)
    assert code == 1 and files(first) == before
    (refusal,) = errors.splitlines()
    assert "already holds another run (prompts_sha256: " in refusal


@pytest.mark.nightly
def test_an_interrupted_sweep_is_resumed_from_its_finished_groups(cli, tiny, tmp_path, decoded):
    some = ["--multirun", *tiny, "prompts.limit=3", "seed=1,2"]
    decoded.stop = (2,)
    code, _, errors = cli(*some)
    assert code == 130
    assert "2 finished groups of 3" in errors and "output_dir=swept" in errors
    assert "Traceback" not in errors
    assert states(tmp_path / "swept") == {"1": ("pending", 2), "2": ("pending", 0)}
    (first, _) = sweep.runs(tmp_path / "swept")
    before = load(first.folder).requests
    decoded.stop = ()
    decoded.clear()
    code, output, errors = cli(*some)
    assert code == 0, errors
    assert decoded == [2, 0, 1, 2]
    after = load(first.folder).requests
    pd.testing.assert_frame_equal(after[after["group"] < 2], before)
    assert after["group"].tolist() == [0, 1, 2]
    assert "swept: 2 done" in output


@pytest.mark.nightly
def test_a_failed_run_leaves_the_others_alone_and_is_retried_on_request_only(cli, tiny, tmp_path, decoded):
    good = next(option for option in tiny if option.startswith("prompts.path=")).partition("=")[2]
    some = ["--multirun", *tiny, "prompts.limit=2", f"prompts.path=later.jsonl,{good}"]
    code, output, errors = cli(*some)
    assert code == 1
    assert "later.jsonl" in errors
    assert "1 done, 1 failed" in output
    assert "retry=true" in output
    assert decoded == [0, 1]
    failed, done = sweep.runs(tmp_path / "swept")
    assert (failed.state, done.state) == ("failed", "done")
    note = json.loads((failed.folder / "ended.json").read_text())
    assert note["traceback"].startswith("Traceback") or "\nTraceback" in note["traceback"]
    assert "FileNotFoundError" in note["traceback"] and "prompts.py" in note["traceback"]
    assert note["error"] == failed.error and "later.jsonl" in failed.error and "\n" not in failed.error

    checkpoints.prompts(tmp_path / "later.jsonl")
    code, _, errors = cli(*some)
    assert code == 1, "it did not go well yet"
    assert failed.error in errors and "retry=true" in errors
    assert decoded == [0, 1]

    code, output, errors = cli(*some, "retry=true")
    assert code == 0, errors
    assert decoded == [0, 1, 0, 1], "what is done is not done again"
    assert {run.state for run in sweep.runs(tmp_path / "swept")} == {"done"}
    assert cli(*some)[0] == 0
    assert decoded == [0, 1, 0, 1]


@pytest.mark.nightly
def test_state_and_collect_list_all_runs(cli, tiny, tmp_path, decoded):
    """The sweep has a finished run, a failed one, a stopped one and one that another process holds."""
    decoded.stop = (1,)
    code, *_ = cli("--multirun", *tiny, "prompts.limit=1,'${oc.env:NOTHING}',2,3")
    assert code == 130
    done, *_, never = sweep.runs(tmp_path / "swept")
    never.folder.mkdir(exist_ok=True)
    with run_state.holding(never.folder):
        code, output, errors = cli("state", "swept")
    assert code == 0, errors
    (table, _, summed) = output.partition("swept: ")
    told = {words[0]: words[1:] for line in table.splitlines() if (words := line.split())}
    assert told["limit=1"][:2] == ["done", "1/1"]
    assert told["limit='${oc.env:NOTHING}'"][:2] == ["failed", "0/?"]
    assert "'NOTHING' not found" in output
    assert told["limit=2"] == ["pending", "1/2"]
    assert told["limit=3"][:1] == ["running"]
    assert summed.startswith("1 done, 1 running, 1 failed, 1 pending")
    assert "The same command resumes" in summed

    code, output, errors = cli("collect", "swept")
    assert code == 0, errors
    assert "1 runs, 1 rows: " in output and "; 3 runs are not done" in output
    table = pd.read_parquet(tmp_path / "swept" / "table.parquet")
    assert table["prompts.limit"].tolist() == [1]
    assert table["proposer_name"].tolist() == ["ngram"]
    assert pd.read_csv(tmp_path / "swept" / "table.csv")["run"].tolist() == [done.folder.name]
    assert "tokens/s" not in output

    code, output, errors = cli("collect", "swept", "-v")
    assert code == 0, errors
    assert {"tokens/s", "expected", "TTFT", "acceptance"} <= {*output.split()}


@pytest.fixture
def experiment(tmp_path):
    """Write an experiment file; returns the overrides that choose it."""

    def write(*lines: str) -> list[str]:
        (tmp_path / "mine" / "experiment").mkdir(parents=True, exist_ok=True)
        file = tmp_path / "mine" / "experiment" / "mine.yaml"
        file.write_text("\n".join(["# @package _global_", *lines]) + "\n")
        return [f"hydra.searchpath=[file://{tmp_path / 'mine'}]", "+experiment=mine"]

    return write


def test_an_invalid_choice_is_refused_before_anything_runs(cli, tiny, tmp_path, decoded):
    some = [option for option in tiny if not option.startswith("proposer")]
    code, _, errors = cli("--multirun", *some, "prompts.limit=1", "proposer=ngram,ngrm")
    assert code == 1
    assert "proposer=ngrm is not an option of conf/proposer" in errors
    assert not decoded and not sweep.is_sweep(tmp_path / "swept")  # nothing to wait for


@pytest.mark.nightly
def test_a_run_with_damaged_files_has_failed_and_is_rebuilt_from_its_rows_on_request(cli, tiny, tmp_path, decoded):
    some = ["--multirun", *tiny, "prompts.limit=2", "seed=1,2"]
    assert cli(*some)[0] == 0
    first, second = (run.folder for run in sweep.runs(tmp_path / "swept"))
    was = json.loads((first / "summary.json").read_text())
    assert was["memory"]["peak_bytes"]
    (first / "summary.json").write_text('{"half')
    (second / "ended.json").write_text("")
    assert states(tmp_path / "swept") == {"1": ("failed", 2), "2": ("failed", 2)}
    decoded.clear()
    code, output, errors = cli(*some)
    assert code == 1 and "swept: 2 failed" in output and "summary.json is not readable" in errors
    code, output, errors = cli(*some, "retry=true")
    assert code == 0 and "swept: 2 done" in output, errors
    was["memory"] |= {"before_bytes": None, "peak_bytes": None}  # nothing was decoded
    assert not decoded and json.loads((first / "summary.json").read_text()) == was


@pytest.mark.one_in(4)
@pytest.mark.parametrize("option", ["output_dir=a,b", "tracker=files,wandb", "retry=true,false"])
def test_output_dir_cannot_be_swept(cli, tiny, tmp_path, decoded, option):
    code, _, errors = cli("--multirun", *tiny, "prompts.limit=1", option)
    assert code == 1 and not decoded
    assert f"{option.partition('=')[0]} cannot be swept" in errors


def test_runs_on_other_code_or_prompts_are_distinguished(tmp_path):
    sweep.plan(tmp_path, [["seed=1"], ["seed=2"], ["prompts=b", "seed=1"]])
    for run, commit, prompts in zip(sweep.runs(tmp_path), "xyx", "ppq", strict=True):
        run.folder.mkdir()
        facts = {"commit": commit, "prompts_sha256": prompts, "threads": 1, "machine": {"processor": "z"}}
        (run.folder / "manifest.json").write_text(json.dumps(facts))
        run_state.end(run.folder, run.overrides, "abc", 0, 1.0)
    assert sweep.mixed(sweep.runs(tmp_path)) == {"commit": ["x", "y"]}
