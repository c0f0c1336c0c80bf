"""Files are written atomically under unpredictable names, and read without trust in their content."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from spec_lab.core.files import (
    Unreadable,
    expect,
    filling,
    own_folder,
    read_json,
    read_text,
    remove_abandoned,
    replacing,
    write_json,
    write_text,
)

# Writing


def test_writing_replaces_the_file(tmp_path):
    file = tmp_path / "a.txt"
    write_text(file, "one")
    write_text(file, "two")
    assert file.read_text() == "two" and os.listdir(tmp_path) == ["a.txt"]


def test_a_symlink_is_replaced_and_not_followed(tmp_path):
    victim, file = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("mine")
    file.symlink_to(victim)
    write_text(file, "page")
    assert victim.read_text() == "mine" and file.read_text() == "page" and not file.is_symlink()


def test_a_planted_link_under_the_temporary_name_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("spec_lab.core.files.secrets.token_hex", lambda _: "known")
    (tmp_path / ".a.txt.known.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "a.txt", "page")
    assert victim.read_text() == "mine" and not (tmp_path / "a.txt").exists()


def test_an_error_leaves_the_old_file(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})

    def half() -> None:
        with replacing(file) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    with pytest.raises(ValueError):
        write_json(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["a.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from spec_lab.core.files import filling, replacing
with replacing(Path(sys.argv[1])) as stream, filling(Path(sys.argv[2])) as folder, filling(Path(sys.argv[3])) as inside:
    for file in (folder / "half", inside / "half"):
        file.write_text("half")
    stream.write(b"half"); stream.flush()
    print("written", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_by_the_next_write_and_what_others_write_is_not(tmp_path):
    file, new, empty = tmp_path / "a.json", tmp_path / "new", tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable, "-c", KILLED, str(file), str(new), str(empty)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def fill():
        write_json(file, {"a": 1})
        for folder in (new, empty):
            with filling(folder) as part:
                (part / "done").write_text("done")

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"written\n"
        before = sorted(tmp_path.rglob("*"))
        write_json(file, {"a": 0})
        with pytest.raises(FileExistsError, match="not empty"):
            fill()
        assert [part for part in before if not part.exists()] == [], "the other process writes them"
        shutil.rmtree(new)
        process.kill()
        process.wait()
    assert len(list(tmp_path.rglob(".*.tmp"))) == 3
    fill()
    assert sorted(map(str, tmp_path.rglob("*"))) == sorted(map(str, (file, new, new / "done", empty, empty / "done")))
    assert json.loads(file.read_text()) == {"a": 1}


def test_all_temporary_files_of_a_folder_are_removed_on_request_and_the_folder_is_not_listed_otherwise(
    tmp_path, monkeypatch
):
    left = [f".{name}.{'0' * 16}.tmp" for name in ("a.json", "b\n.parquet")]
    others = [".a.json.tmp", "c.json", f"c.{'0' * 16}.tmp"]
    for name in (*left, *others):
        (tmp_path / name).write_text("other")
    remove_abandoned(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    remove_abandoned(tmp_path / "missing")
    monkeypatch.delattr("pathlib.Path.iterdir")
    with replacing(tmp_path / "a.json", tidy=False) as stream:
        stream.write(b"{}")
    assert (tmp_path / "a.json").read_bytes() == b"{}"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_with_what_to_do(tmp_path, number):
    file = tmp_path / "a.txt"
    write_text(file, "before")

    def full() -> None:
        with replacing(file):
            raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=r"space.*a\.txt'") as caught:
        full()
    assert caught.value.errno == number and caught.value.filename == str(file)
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_that_is_a_symlink_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unreadable, match="figures is a symlink"):
        own_folder(tmp_path / "figures")
    assert own_folder(tmp_path / "new").is_dir() and own_folder(tmp_path / "new").is_dir()


# Reading


def test_a_file_that_is_not_regular_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, why in (("pipe", "regular file"), ("zero", "regular file"), (".", "folder")):
        with pytest.raises(Unreadable, match=why):
            read_text(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nowhere")


def test_size_and_encoding_are_bounded(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"12345")
    assert read_text(file, max_bytes=5) == "12345"
    with pytest.raises(Unreadable, match=r"a\.txt .*4 bytes"):
        read_text(file, max_bytes=4)
    file.write_bytes(b"ab\xff")
    with pytest.raises(Unreadable, match="UTF-8: byte 2"):
        read_text(file)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", '"a"', "null", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": 1' + "0" * 30 + "}",
        '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ' + "[" * 64 + "]" * 64 + "}",
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":' * 100_000, "\ufeff{}", "{}\0",
    ],
)  # fmt: skip
def test_json_that_no_run_writes_is_refused_by_name(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(Unreadable, match=r"a\.json .*\(.+\)"):
        read_json(file)


# Shapes


@pytest.mark.parametrize(
    ("value", "shape", "why"),
    [
        (3, str, "^x .*text.* 3$"),
        (True, int, "^x .*whole number.* true$"),
        (1.5, (int, None), "^x .*whole number or null.* 1.5$"),
        ("a", (float, None), '^x .*number or null.* "a"$'),
        ("banana", {"done", "failed"}, '^x .*done, failed.* "banana"$'),
        ([], {"done"}, r"^x .*done.* \[\]$"),
        ({}, [str], "^x .*list.* {}$"),
        (["a", 1], [str], r"^x\[1\] .*text.* 1$"),
        ({"a": {}}, {"a": {"b": int}}, r"^x\.a\.b .*missing"),
        ({"a": 1}, {str: str}, r"^x\.a .*text.* 1$"),
        ({"a": 1}, {"?a": (None, [str])}, r"^x\.a .*list.* 1$"),
        ("a" * 100, int, r"\.\.\.$"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(value, shape, why):
    with pytest.raises(ValueError, match=why):
        expect(value, shape, "x")
