"""Edits of files, as JSON: what an input of a fuzzer changes in a folder of valid files, and strategies for them.

An edit is a list of its kind, the file, and arguments:

    ["set", file, [key, 0, ...], value]         a part of a JSON, JSON Lines, safetensors (header) or Parquet file
    ["drop", file, [key, ...]]                  the same, removed
    ["nest", file, [key, ...], depth]           the same, inside so many lists
    ["splice", file, share, removed, hex]       bytes at a share of its length are removed, others inserted
    ["text", file, text, times]                 the whole content; lone surrogates are written as invalid UTF-8
    ["gzip", file, text, times]                 the same, compressed
    ["node", file, "link" | "pipe" | "folder" | "nothing", target of the link]
"""

import gzip
import json
import os
import shutil
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

DOCUMENTS = (".json", ".jsonl", ".safetensors", ".parquet")
OUTSIDE = "../outside"
"""A folder next to the one that a command is given; nothing may change in it."""

ODD = [
    None, True, False, 0, 1, -1, 2, 7, 61, 62, 10**9, -(10**9), 2**31, 2**62, 2**63, 2**64, 10**30, 10**400, 0.5, 1e308,
    -0.0, float("nan"), float("inf"), -1e300, "", "x", "32", "None", "nan", "\0", "é\u2028", "a" * 10_000, "../x",
    "/etc", "/dev/zero", f"{OUTSIDE}/mine", "someone/kernel", "os.system", "\x1b[31mred", "\x07", "\ud800", "\u202eabc",
    "語" * 300, "<b>x</b>", "1/0", "${oc.env:HOME}", "{{ 1 }}", [], [1], [[]], [None], ["a"] * 5000,
    ["a", 1], {}, {"a": 1}, {"": None}, {"mean": "x", "low": [], "high": None}, {"a": {"b": [1]}},
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
CHARACTERS = st.characters() | st.sampled_from("\0\x1b\x7f\u200b\u202e\u2066\ufeff\ud800\udfff\U0001f600")
VALUES = (
    st.sampled_from(ODD)
    | SCALARS
    | st.text(CHARACTERS, max_size=40)
    | st.integers(-(2**70), 2**70)
    | st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8)
)
TEXTS = st.sampled_from(
    [("", 1), ("{", 1), ("[]", 1), ("null", 1), ("\ud800", 1), ("[", 200_000), ('{"a":', 100_000), ("9", 9000),
     ("\n", 10**6), ("\0", 1000), ("a", 3 * 10**7), ('{"prompt": "a"}\n', 10**5)]
)  # fmt: skip
BOMBS = st.sampled_from(
    [("\0", 2 * 10**9), ("a" * 1000, 10**6), ("[" * 1000, 1000), ("\n", 10**9), ('{"prompt": "a"}\n', 10**5),
     ('{"prompt": "a"}\n', 10**6)]
)  # fmt: skip


def read(file: Path) -> Any:
    """The document in a file."""
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    if file.suffix == ".safetensors":
        content = file.read_bytes()
        return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    return pq.read_table(file).to_pydict() if file.suffix == ".parquet" else json.loads(file.read_text())


def write(file: Path, value: Any) -> None:
    """Put another document into a file."""
    if file.suffix == ".jsonl" and isinstance(value, list):
        file.write_text("".join(json.dumps(item) + "\n" for item in value))
    elif file.suffix == ".safetensors":
        content, header = file.read_bytes(), json.dumps(value).encode()
        weights = content[8 + struct.unpack("<Q", content[:8])[0] :]
        file.write_bytes(struct.pack("<Q", len(header)) + header + weights)
    elif file.suffix == ".parquet" and isinstance(value, dict):
        length = max((len(column) for column in value.values() if isinstance(column, list)), default=0)
        pq.write_table(pa.table({str(name): _column(column, length) for name, column in value.items()}), file)
    else:
        file.write_text(json.dumps(value))


def _column(values: Any, length: int) -> pa.Array:
    """A column of the length of others, in its own type, or as text."""
    values = (values if isinstance(values, list) and values else [values])[:length]
    values = values + [values[-1] if values else None] * (length - len(values))
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return pa.array([ascii(value) for value in values])


@cache
def places(file: Path) -> tuple[tuple[Any, ...], ...]:
    """The paths of the parts of a document; of a long list those of the first and the last ones."""
    steps, left = [], [((), read(file))]
    while left:
        path, value = left.pop()
        steps.append(path)
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
        left += [
            ((*path, key), value[key]) for key in (*keys[:60], *keys[60:][-1:])[: 3 if isinstance(value, list) else 61]
        ]
    return tuple(reversed(steps))


@st.composite
def edits(draw: Any, folder: Path, files: str, keys: tuple[str, ...] = (), most: int = 3) -> list[list[Any]]:
    """Edits of the files that a pattern finds in a folder; ``keys`` are names that readers look for."""
    paths = sorted(path for path in folder.glob(files) if path.is_file())
    choices = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, most]))):
        file = draw(st.sampled_from(paths))
        name, kind = str(file.relative_to(folder)), draw(st.integers(0, 19))
        if kind < 14 and file.suffix in DOCUMENTS:
            path = list(draw(st.sampled_from(places(file))))
            if kind == 0:
                choices.append(["nest", name, path, draw(st.sampled_from([1, 3, 40, 400]))])
            elif kind < 3 and path:
                choices.append(["drop", name, path])
            else:
                path += [draw(st.sampled_from(keys) | st.text(max_size=10))] if keys and kind < 6 else []
                choices.append(["set", name, path, draw(VALUES)])
        elif kind == 18:
            choices.append(["text", name, *draw(TEXTS)])
        elif kind == 19:
            target = draw(st.sampled_from([f"{OUTSIDE}/mine", OUTSIDE, "/dev/zero", "/dev/stdin", name]))
            choices.append(["node", name, draw(st.sampled_from(["link", "pipe", "folder", "nothing"])), target])
        else:
            removed, inserted = draw(st.sampled_from([0, 1, 4, 100, 10**9])), draw(st.binary(max_size=12))
            choices.append(["splice", name, draw(st.floats(0, 1)), removed, inserted.hex()])
    return choices


def apply(edit: list[Any], folder: Path) -> None:
    """Carry out an edit; one that does not fit what earlier ones have left there does nothing."""
    kind, name, *more = edit
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "node":
        _replace(file, more[0], os.path.join(folder, more[1]))
    elif kind in ("text", "gzip"):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            return  # a pipe would block
        text, times = more[0].encode("utf-8", "surrogatepass"), more[1]
        once = min(times, max(1, 10**7 // max(1, len(text))))
        part, rest = text * once, text * (times % once)
        if kind == "gzip":  # a file of many members
            part, rest = gzip.compress(part), gzip.compress(rest)
        with file.open("wb") as stream:
            stream.writelines([*[part] * (times // once), rest])
    elif file.is_file() and not file.is_symlink():
        if kind == "splice":
            content, (share, removed, inserted) = file.read_bytes(), more
            at = int(share * len(content))
            file.write_bytes(content[:at] + bytes.fromhex(inserted) + content[at + removed :])
        else:
            with suppress(ValueError, LookupError, TypeError, RecursionError, struct.error, pa.ArrowException):
                write(file, _changed(read(file), kind, *more))


def _changed(value: Any, kind: str, path: list[Any], *more: Any) -> Any:
    """A document with a part set, dropped or nested."""
    whole = inner = {"": value}
    *above, last = "", *path
    for key in above:
        inner = inner[key]
    if kind == "drop":
        del inner[last]
    elif kind == "set":
        inner[last] = more[0]
    else:
        for _ in range(more[0]):
            inner[last] = [inner[last]]
    return whole[""]


def _replace(file: Path, kind: str, target: str) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    if kind == "link":
        file.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
