"""Write the bundled repetitive prompts: code that is edited, and JSON records that change from turn to turn.

    python -m scripts.zoo.repetitive

Every prompt is made of one of the bundled held-out prompts. An edit is a piece of code, then the first third of the
same piece with one identifier renamed; the model continues the copy. A conversation is a record, twice more with one
number changed, then its beginning once more. So agents that edit files, or answer in JSON, repeat themselves.
"""

from __future__ import annotations

import json
import keyword
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import spec_lab

ZOO = Path(spec_lab.__file__).parent / "zoo"
FILE = ZOO / "workloads" / "repetitive.jsonl"

NAME = re.compile(r"\b[a-z][a-z_]{3,}\b")
NUMBER = re.compile(r"\b\d{2,}\b")


def edited(code: str) -> str | None:
    """Return the code with its most frequent identifier renamed; None where none occurs twice."""
    names = Counter(name for name in NAME.findall(code) if not keyword.iskeyword(name))
    if not names or names.most_common(1)[0][1] < 2:
        return None
    name = names.most_common(1)[0][0]
    return re.sub(rf"\b{name}\b", f"new_{name}", code)


def edits(code: str) -> str | None:
    """Return a prompt in which code is being copied with one name changed."""
    after = edited(code)
    if after is None:
        return None
    lines = after.splitlines(keepends=True)
    return f"{code.rstrip()}\n\n\n{''.join(lines[: max(2, len(lines) // 3)])}"


def turns(record: str) -> str | None:
    """Return a prompt in which a record is repeated with one number changed from turn to turn."""
    number = NUMBER.search(record)
    if number is None:
        return None
    start, end = number.span()
    each = [f"{record[:start]}{int(number[0]) + turn}{record[end:]}".rstrip() for turn in range(4)]
    lines = each[3].splitlines(keepends=True)
    return "\n".join(each[:3]) + "\n" + "".join(lines[: max(2, len(lines) // 4)])


def workload() -> Iterator[dict[str, str]]:
    """Yield the prompts, edits and conversations in turn."""
    made = []
    for kind, make in (("code", edits), ("json", turns)):
        lines = (ZOO / "prompts" / f"{kind}.jsonl").read_text().splitlines()
        arguments_and_texts = [(line, make(line["prompt"])) for line in map(json.loads, lines)]
        made.append([
            {"prompt": text, "workload": make.__name__, "source": line["source"], "id": f"{make.__name__}-{line['id']}"}
            for line, text in arguments_and_texts if text is not None
        ])  # fmt: skip
    for both in zip(*made, strict=False):
        yield from both


def text() -> str:
    """Return the file's text."""
    return "".join(json.dumps(line) + "\n" for line in workload())


if __name__ == "__main__":
    FILE.write_text(text())
