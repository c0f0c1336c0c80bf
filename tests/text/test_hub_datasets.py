"""Any dataset by its column: local files and folders, a stand-in for the hub."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from spec_lab.text import hub_datasets
from spec_lab.text.hub_datasets import load

MESSAGES = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"},
]  # fmt: skip
ROWS = [
    {"q": "first?", "a": "1", "m": MESSAGES, "t": ["x", "y"]},
    {"q": "second?", "a": "2", "m": MESSAGES, "t": ["z"]},
]


def write(file, rows=ROWS):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("name", ["rows.jsonl", "data/test-00000-of-00001.parquet"])
def test_a_column_of_the_only_file_of_a_folder(tmp_path, name):
    write(tmp_path / name)
    (tmp_path / "loader.py").write_text("raise SystemExit('it was run')")
    prompts = load(str(tmp_path), "q", answer="a", checker="number", limit=2)
    assert [(prompt.text, prompt.answer, prompt.source) for prompt in prompts] == [
        ("first?", "1", tmp_path.name), ("second?", "2", tmp_path.name),
    ]  # fmt: skip
    assert [prompt.text for prompt in load(str(tmp_path / name), "q", every=2)] == ["first?"]


def test_messages_and_turns_are_conversations(tmp_path):
    file = write(tmp_path / "rows.parquet")
    prompt = load(file, "m", limit=1)[0]
    assert [dict(message) for message in prompt.messages] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"},
    ]  # fmt: skip
    assert prompt.later == ("two",)
    assert [(prompt.text, prompt.later) for prompt in load(file, "t")] == [("x", ("y",)), ("z", ())]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one dataset; returns what was downloaded."""
    folder, downloaded = tmp_path / "hub", list[tuple]()
    write(folder / "main" / "train.parquet")
    write(folder / "main" / "test.parquet", ROWS[1:])
    sizes = {"README.md": 10, "loader.py": 10, "main/train.parquet": 2**31, "main/test.parquet": 1000}

    def info(name, *, revision, files_metadata, timeout):
        if name != "some/data":
            raise RuntimeError("404")
        return SimpleNamespace(
            sha="c0ffee", siblings=[SimpleNamespace(rfilename=file, size=size) for file, size in sizes.items()]
        )

    def download(name, file, *, repo_type, revision):
        downloaded.append((name, file, repo_type, revision))
        return str(folder / file)

    monkeypatch.setattr(hub_datasets, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub_datasets, "HfApi", lambda: SimpleNamespace(dataset_info=info))
    monkeypatch.setattr(hub_datasets, "hf_hub_download", download)
    return downloaded


def test_a_file_of_the_hub_is_downloaded_at_the_listed_commit(hub):
    (prompt,) = load("some/data", "q", file="main/test.parquet")
    assert (prompt.text, prompt.source) == ("second?", "some/data")
    assert hub == [("some/data", "main/test.parquet", "dataset", "c0ffee")]


@pytest.mark.parametrize(
    ("path", "options", "error", "says"),
    [
        ("some/data", {}, ValueError, r"file must name a file of some/data.*main/test\.parquet, main/train\.parquet"),
        ("some/data", {"file": "loader.py"}, ValueError, "file must name a file"),
        ("some/data", {"file": "../test.parquet"}, ValueError, "file must name a file"),
        ("some/data", {"file": "main/train.parquet"}, ValueError, "2147483648 bytes, more than"),
        ("some/other", {}, OSError, "some/other cannot be fetched .*404.*HF_TOKEN"),
        ("no hub name", {}, OSError, "OWNER/NAME"),
    ],
)
def test_what_the_hub_does_not_offer_is_refused_before_a_download(hub, path, options, error, says):
    with pytest.raises(error, match=says):
        load(path, "q", **options)
    assert hub == []


def test_offline_the_file_must_be_named(monkeypatch):
    monkeypatch.setattr(hub_datasets, "is_offline_mode", lambda: True)
    with pytest.raises(ValueError, match="file must be named"):
        load("some/data", "q")


@pytest.mark.parametrize(
    ("rows", "column", "says"),
    [
        (ROWS, "question", "question.*; it has .*q"),
        ([{"q": ""}], "q", "'q' is empty"),
        ([{"q": 3}], "q", "'q' must be text"),
        ([{"q": [{"from": "human", "value": "a"}]}], "q", r"'q\[0\]' must have role and content"),
        ([{"q": [{"role": "assistant", "content": "a"}]}], "q", "no message whose role is user"),
        ([{"q": [*MESSAGES, {"role": "tool", "content": "a"}]}], "q", r"rows.*1.*'q\[4\]' has the role 'tool'"),
        ([{"q": [MESSAGES[0], *MESSAGES]}], "q", r"rows.*1.*'q\[1\]' is a system prompt"),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_without_a_prompt_are_refused(tmp_path, rows, column, says, ending):
    with pytest.raises(ValueError, match=says):
        load(write(tmp_path / f"rows.{ending}", rows), column)


@pytest.mark.parametrize("options", [{"revision": "main"}, {"file": "rows.jsonl"}])
def test_options_of_the_hub_are_refused_for_a_file(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        load(write(tmp_path / "rows.jsonl"), "q", **options)


def test_a_folder_of_too_many_files_is_not_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_datasets, "MAX_ENTRIES", 1)
    write(tmp_path / "a.jsonl")
    assert len(load(str(tmp_path), "q")) == 2
    write(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="holds more than 1 files and folders"):
        load(str(tmp_path), "q", file="a.jsonl")
