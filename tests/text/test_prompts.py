"""Prompts: supported files, and refusals."""

import json
import os
from pathlib import Path

import pytest

from spec_lab.text import conversations, records
from spec_lab.text import prompts as text


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_jsonl_reads_every_field_and_fills_in_what_is_missing(tmp_path):
    lines = [
        {"id": "a", "prompt": "def f(", "workload": "code", "source": "mod.py"},
        {"text": "Once"},
        {"id": 7, "prompt": "x"},
    ]
    path = write(tmp_path, "\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert text.jsonl(path) == [
        text.Prompt("a", "def f(", "code", "mod.py"),
        text.Prompt("prompts-3", "Once"),
        text.Prompt("7", "x"),
    ]
    assert [p.name for p in text.jsonl(path, limit=2)] == ["a", "prompts-3"]


def test_limit_leaves_later_lines_unread(tmp_path):
    assert len(text.jsonl(write(tmp_path, '{"prompt": "x"}\nbroken'), limit=1)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts"),
        ("\n \n", "no prompts"),
        ('{"prompt": "x"}\n{"prompt": ', "prompts.jsonl:2: ... JSON"),
        ("[1]", "prompts.jsonl:1: ... array ... object"),
        ('{"id": "a"}', "prompts.jsonl:1: ... 'prompt' ... 'id'"),
        ('\n{"prompt": " "}', "prompts.jsonl:2: ... 'prompt' ... empty"),
        ('{"prompt": 3}', "'prompt' ... number"),
        (
            '{"id": 1, "prompt": "x"}\n\n{"id": "1", "prompt": "y"}',
            "prompts.jsonl:3: ... id '1' ... line 1",
        ),
        (
            '{"id": "prompts-2", "prompt": "x"}\n{"prompt": "y"}',
            "prompts.jsonl:2: ... id 'prompts-2' ... line 1",
        ),
        (b'{"prompt": "\xff"}', "prompts.jsonl:1: ... UTF-8"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=".") as caught:
        text.jsonl(write(tmp_path, content))
    assert all(fact in str(caught.value) for fact in message.split(" ... "))


class Letters:
    """A tokenizer with one token per letter."""

    def encode(self, words: str) -> list[int]:
        return [ord(letter) for letter in words]


def test_encode_names_the_prompt_that_does_not_fit():
    assert text.encode([text.Prompt("a", "xyz")], Letters(), context=4) == [(120, 121, 122)]
    with pytest.raises(ValueError, match=r"prompt 'a' .*4 tokens .*context"):
        text.encode([text.Prompt("a", "wxyz")], Letters(), context=4)
    with pytest.raises(ValueError, match=r"prompt 'b' .*no tokens"):
        text.encode([text.Prompt("b", "")], Letters(), context=4)


def test_digest_depends_on_names_texts_and_order():
    prompt, two = text.Prompt("a", "x"), text.Prompt("b", "y")
    digests = {text.digest(p) for p in ([prompt, two], [two, prompt], [prompt], [text.Prompt("c", "x"), two])}
    assert len(digests) == 4


@pytest.mark.parametrize("field", ["prompt", "id", "source"])
def test_half_a_character_is_refused_with_file_and_line(tmp_path, field):
    path = write(
        tmp_path, json.dumps({"prompt": "a \U0001f600"}) + "\n" + json.dumps({"prompt": "b", field: "c \ud83d"})
    )
    with pytest.raises(ValueError, match=rf":2: '{field}'.* \\ud83d"):
        text.jsonl(path)


def test_the_prompts_of_a_folder_are_interleaved_deterministically(tmp_path):
    for kind in ("a", "b"):
        lines = [json.dumps({"id": f"p{number}", "prompt": f"{kind} {number}"}) for number in range(6)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines))
    mixture = text.mixed(str(tmp_path))
    assert mixture == text.mixed(str(tmp_path)) and text.mixed(str(tmp_path), 5) == mixture[:5]
    assert {prompt.name for prompt in mixture} == {f"{kind}-p{number}" for kind in "ab" for number in range(6)}
    kinds = [prompt.workload for prompt in mixture]
    assert sorted(kinds) != kinds and set(kinds) == {"a", "b"}


def test_of_a_prompt_that_is_too_long_the_middle_is_left_out():
    class Letters:
        def encode(self, words):
            return [ord(letter) for letter in words]

    def cut(words, longest):
        return "".join(map(chr, text.encode([text.Prompt("p", words)], Letters(), 100, longest)[0]))

    assert cut("abcdef", 6) == "abcdef" and cut("abcdef", None) == "abcdef"
    assert cut("abcdef", 4) == "abef" and cut("abcdef", 3) == "abf" and cut("abcdef", 1) == "a"


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "x", "constraint": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "id": "\\udfff"}',
        b"\0\0\0\0",
        b"\xff\xfe{",
        b'{"prompt": NaN}',
        b'"just text"',
        b"{}",
    ],
)
def test_hostile_lines_are_refused_with_file_and_line(tmp_path, line):
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: "):
        text.jsonl(write(tmp_path, b'{"prompt": "x"}\n' + line))


def test_a_prompt_has_a_bounded_length(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_CHARACTERS", 10)
    assert text.jsonl(write(tmp_path, '{"prompt": "0123456789"}'))
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: .*11 characters.*\b10\b"):
        text.jsonl(write(tmp_path, '{"prompt": "0123456789x"}'))
    with pytest.raises(ValueError, match="prompt 'a': .*11 characters"):
        text.encode([text.Prompt("a", "0123456789x")], Letters(), context=100)


def test_lines_and_files_have_a_bounded_length(tmp_path, monkeypatch):
    path = write(tmp_path, '{"prompt": "x"}\n{"prompt": "' + "y" * 100 + '"}\n')
    monkeypatch.setattr(records, "MAX_LINE", 50)
    assert len(text.jsonl(path, limit=1)) == 1
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: .*50 bytes"):
        text.jsonl(path)
    monkeypatch.setattr(records, "MAX_FILE", 100)
    with pytest.raises(ValueError, match=r"prompts\.jsonl .*131 bytes.*\b100\b"):
        text.jsonl(path)


def test_the_number_of_prompts_is_bounded_unless_it_is_given(tmp_path, monkeypatch):
    path = write(tmp_path, '{"prompt": "x"}\n' * 5)
    monkeypatch.setattr(records, "MAX_RECORDS", 4)
    assert len(text.jsonl(path, limit=4)) == 4 and len(text.jsonl(path, limit=9)) == 5
    with pytest.raises(ValueError, match=r"prompts\.jsonl has more than 4 prompts: set prompts\.limit"):
        text.jsonl(path)
    assert len(list(text.texts(write(tmp_path, '{"text": "x"}\n' * 5)))) == 5
    with pytest.raises(ValueError, match=r"prompts\.jsonl has more than 4 blank lines"):
        text.jsonl(write(tmp_path, "\n" * 5 + '{"prompt": "x"}\n'))
    monkeypatch.setattr(text, "MAX_RECORDS", 6)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n' * 3)
    (tmp_path / "prompts.jsonl").unlink()
    assert len(text.mixed(str(tmp_path), limit=2)) == 2
    monkeypatch.setattr(text, "MAX_RECORDS", 5)
    with pytest.raises(ValueError, match="has more than 5 prompts: move some"):
        text.mixed(str(tmp_path), limit=2)


def test_a_huge_file_without_a_line_break_is_refused(tmp_path, monkeypatch):
    def hole(size: int) -> str:
        path = write(tmp_path, "")
        os.truncate(path, size)
        return path

    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: .*67108864 bytes"):
        text.jsonl(hole(2**30))
    monkeypatch.setattr(records, "open", lambda *_: pytest.fail("it was opened"), raising=False)
    with pytest.raises(ValueError, match=r"prompts\.jsonl .*1099511627776 bytes"):
        text.jsonl(hole(2**40))


@pytest.mark.parametrize("read", [text.jsonl, conversations.chat])
def test_pipes_and_devices_are_refused_unread(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", "/dev/zero"):
        with pytest.raises(OSError, match="regular file"):
            read(str(path))
    with pytest.raises(OSError, match="regular file"):
        text.mixed(str(tmp_path))


def test_a_folder_without_prompts_and_a_folder_in_place_of_a_file_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.jsonl file.*prompts\.path"):
        text.mixed(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="is a directory"):
        text.jsonl(str(tmp_path))
