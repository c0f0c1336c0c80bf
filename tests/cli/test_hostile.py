"""Untrusted run folders: nothing outside is touched, and one bad file does not affect the other runs."""

import errno
import json
import os
import shutil

import pandas as pd
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from spec_lab.cli.commands import command
from spec_lab.results import run_state, sweep
from spec_lab.results.writer import Recorder, load
from spec_lab.tasks.benchmark import run
from tests.labs import TEXTS, lab, settings


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of three runs that are done."""
    folder = tmp_path_factory.mktemp("sweep") / "swept"
    sweep.plan(folder, [[f"seed={seed}"] for seed in (1, 2, 3)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_lab.tasks.benchmark.in_short", lambda *_: {"certified": None})
        for each_run in sweep.runs(folder):
            options = settings(each_run.folder, overrides=each_run.overrides, max_new_tokens=4)
            assert run(lab(TEXTS[:2]), options, {"name": "toy"}) == 0
            run_state.end(each_run.folder, each_run.overrides, "abc", 0, 1.0)
    return folder


@pytest.fixture
def given(swept, tmp_path):
    """A copy of it, and a file and a folder of the user next to it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    return shutil.copytree(swept, tmp_path / "swept")


@pytest.fixture
def call(capsys):
    def carry_out(*arguments) -> tuple[int, str, str]:
        code = command([str(argument) for argument in arguments], Console(markup=False, width=200))
        return code, *capsys.readouterr()

    return carry_out


def mine(given) -> list[tuple[str, str]]:
    return [(path.name, path.read_text()) for path in sorted((given.parent / "mine").iterdir())]


def link(file, given, to="file") -> None:
    file.symlink_to(given.parent / "mine" / to)


# Symlinks


def test_a_pipe_that_nothing_reads_is_refused_as_a_table(given, call):
    pipe = given.parent / "pipe"
    os.mkfifo(pipe)
    arguments = ("compare", given / "seed=1", given / "seed=2", "--csv", pipe)
    code, _, errors = call(*arguments)
    assert code == 1 and f"{pipe}: a pipe that no process reads" in errors
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert call(*arguments)[0] == 0 and os.read(reader, 100).startswith(b"reference,other,")
    os.close(reader)


@pytest.mark.parametrize("of", [".", "seed=1"])
def test_figures_are_not_drawn_through_a_link(given, call, of):
    link(given / of / "figures", given, ".")
    code, _, errors = call("report", given / of)
    assert code == 1 and "figures is a symlink; remove it" in errors
    assert mine(given) == [("file", "mine")] and not (given / of / "report.html").exists()


def test_parts_are_neither_written_nor_removed_through_a_link(given):
    out = given / "seed=1"
    (out / "requests.parquet").rename(given.parent / "mine" / "requests-000000.parquet")
    link(out / "parts", given, ".")
    for act in (lambda: load(out), Recorder(out).gather, lambda: Recorder(out).write(1, [{"group": 1}], [], [])):
        with pytest.raises(ValueError, match="parts is a symlink"):
            act()
    assert {path.name for path in (given.parent / "mine").iterdir()} == {"file", "requests-000000.parquet"}


def test_a_lock_that_is_not_a_regular_file_is_refused_and_the_other_runs_are_read(given, call):
    link(given / "seed=1" / ".lock", given)
    (given / "seed=2" / ".lock").mkdir()
    with pytest.raises(OSError, match="regular file"), run_state.holding(given / "seed=1"):
        pass
    assert [bool(each_run.unreadable) for each_run in sweep.runs(given)] == [True, True, False]
    assert mine(given) == [("file", "mine")]


# One bad file

DEEP = '{"a":' * 100_000
SPOILT = [
    ("summary.json", DEEP), ("summary.json", "{"), ("summary.json", '{"speedup": "fast"}'),
    ("summary.json", '{"arms": {"a": [1]}}'), ("summary.json", '{"arms": {"a": {"intervals": [1]}}}'),
    ("summary.json", '{"survival": 3}'), ("summary.json", '{"speedup": NaN}'),
    ("ended.json", '{"state": "banana", "error": "", "code": 0}'), ("ended.json", "[]"),
    ("ended.json", '{"state": "done", "error": "", "code": 0, "seconds": "x"}'),
    ("ended.json", '{"state": "failed", "error": 3, "code": 0}'),
    ("ended.json", '{"state": [], "error": "", "code": 0}'),
    ("manifest.json", DEEP), ("manifest.json", "[]"), ("manifest.json", '{"machine": 3}'),
    ("manifest.json", '{"machine": {"gpus": "none"}}'), ("queued.json", DEEP), ("queued.json", '{"engine": 3}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), SPOILT)
@pytest.mark.each_value
def test_a_bad_file_is_named_and_the_other_runs_are_read(given, call, name, text):
    (given / "seed=2" / name).write_text(text)
    if name == "queued.json":
        (given / "seed=2" / "ended.json").unlink()
    code, output, errors = call("state", given)
    assert code == 1 and "2 done" in output
    assert "unreadable: " in errors and f"seed=2/{name}" in errors
    code, output, errors = call("collect", given)
    assert code == 1 and "2 runs, 4 rows" in output and f"seed=2/{name}" in errors
    assert set(pd.read_parquet(given / "table.parquet")["run"]) == {"seed=1", "seed=3"}
    code, output, errors = call("compare", given)
    assert code == 1 and "Compared" in output and f"seed=2/{name}" in errors


def test_a_pipe_does_not_block(given, call):
    for file in (given / "seed=2" / "summary.json", given / "seed=3" / "requests.parquet"):
        file.unlink()
        os.mkfifo(file)
    code, _, errors = call("state", given)
    assert code == 1 and "seed=2/summary.json" in errors and "regular file" in errors
    code, _, errors = call("compare", given / "seed=1", given / "seed=3")
    assert code == 1 and "seed=3/requests.parquet" in errors and "regular file" in errors


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda table: table.drop_columns(["arm"]), "no column arm"),
        (lambda table: table.rename_columns([f"x{name}" for name in table.column_names]), "no column id"),
        (lambda table: table.set_column(1, "group", [["a"] * len(table)]), "is not a readable table"),
        (lambda table: table.set_column(1, "group", [[None] * len(table)]), "rows without a value"),
    ],
)
def test_a_table_with_something_else_in_it_is_named(given, call, spoil, why):
    file = given / "seed=2" / "steps.parquet"
    pq.write_table(spoil(pq.read_table(file)), file)
    code, _, errors = call("report", given / "seed=2")
    assert code == 1 and "seed=2/steps.parquet is not a readable table" in errors and why in errors
    code, output, errors = call("compare", given)
    assert code == 1 and "seed=2/steps.parquet" in errors and "Compared" in output


@pytest.mark.parametrize("name", ["forwards", "steps", "requests"])
def test_a_small_table_of_millions_of_rows_is_refused_by_its_footer(given, call, name, monkeypatch):
    monkeypatch.setattr("spec_lab.core.tables.ALWAYS_READ", 100_000)  # so that the test's table may be small
    file = given / "seed=2" / f"{name}.parquet"
    row = pq.read_table(file).slice(0, 1)
    pq.write_table(row.take([0] * 200_000), file)
    rows = f"it has 200000 rows in {file.stat().st_size} bytes, and at most {file.stat().st_size} are read"
    code, _, errors = call("report", given / "seed=2")
    assert code == 1 and f"seed=2/{name}.parquet is not a readable table ({rows})" in errors


@pytest.mark.parametrize("name", ["../mine", "/etc", "..", "", "a\x1b[31mb", "a/b", "a\0", "a" * 300])
def test_a_name_that_is_not_a_run_s_folder_is_refused(given, call, name):
    (given / "sweep.json").write_text(json.dumps({"runs": [{"folder": name, "overrides": []}]}))
    for what in ("state", "collect", "report"):
        code, output, errors = call(what, given)
        assert code == 1 and "sweep.json is not a list of runs" in errors and "\x1b" not in output + errors


def test_control_characters_reach_no_terminal(given, call):
    run_state.fail(given / "seed=2", ["seed=2"], ValueError("x"), "\x1b[2J\x07gone", 1.0)
    (given / "sweep.json").write_text(
        json.dumps({"runs": [{"folder": f"seed={n}", "overrides": [f"seed={n}\x1b]0;t\x07"]} for n in (1, 2)]})
    )
    for what in ("state", "collect", "compare"):
        _, output, errors = call(what, given)
        assert not set(output + errors) & {"\x1b", "\x07"}


# A full disk


def test_a_full_disk_keeps_finished_groups_and_the_error_names_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("spec_lab.tasks.benchmark.in_short", lambda *_: {"certified": None})
    write = pq.write_table

    def full(table, stream):
        if full.left == 0:
            stream.write(b"PAR1")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        full.left -= 1
        write(table, stream)

    full.left = 4  # the first group's three tables, and one of the second's
    with monkeypatch.context() as patch:
        patch.setattr("spec_lab.results.table_parts.pq.write_table", full)
        with pytest.raises(OSError, match=r"space.*steps-000001\.parquet"):
            run(lab(TEXTS[:2]), settings(tmp_path, batch_size=1), {"name": "toy"})
    assert Recorder(tmp_path).finished() == {0}
    assert not list(tmp_path.rglob(".*"))
    assert run(lab(TEXTS[:2]), settings(tmp_path, batch_size=1), {"name": "toy"}) == 0
    assert Recorder(tmp_path).finished() == {0, 1}
