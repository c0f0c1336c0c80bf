"""Write the bundled workloads: retrieval, edits of code, agents' loops in JSON, and dialogues.

    python -m scripts.zoo.workloads

They are made of the bundled held-out prompts and of generated records with held-out seeds, so that the bundled models
know this kind of text and have not seen it. Everything follows from ``SEED``.

- retrieval: several passages of documentation, the same ones before each of three prompts, and the beginning of a
  sentence of one of them, which the model continues.
- editing: a piece of code, what is changed in it, and the beginning of the changed piece.
- agentic: the steps of an agent that calls tools, one JSON object per line, with the results in it; the next step has
  begun.
- dialogue: conversations of three turns. The user sends a piece of code or of a record, then twice its first lines with
  one name or number changed; the model continues each.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import spec_lab

from .records import FAMILIES, HELD_OUT_SEED
from .repetitive import NUMBER, edited

ZOO = Path(spec_lab.__file__).parent / "zoo"
FOLDER = ZOO / "workloads"
SEED = 7
COUNT = 30
"""Prompts, or conversations, of each workload."""
PASSAGES, QUESTIONS = 4, 3
"""Passages of a retrieval prompt, and prompts with the same passages."""
STEPS = 4
"""Finished steps of an agent."""

TOOLS = {
    "order": "get_order", "user": "get_user", "sensor": "read_sensor", "geo": "find_place", "log": "read_log",
    "config": "read_config", "book": "find_book", "pipeline": "get_pipeline", "response": "list_members",
}  # fmt: skip
SIGNATURE = re.compile(r"def (\w+)\((.*?)\)", re.DOTALL)
WORD = re.compile(r"\S+\s*")

Line = dict[str, Any]


def bundled(kind: str) -> list[Line]:
    """Return the bundled prompts of a kind of text."""
    return [json.loads(line) for line in (ZOO / "prompts" / f"{kind}.jsonl").read_text().splitlines()]


def retrieval(r: random.Random) -> Iterator[Line]:
    """Yield prompts in groups that share their passages."""
    prose = bundled("prose")
    for group in range(COUNT // QUESTIONS):
        passages = r.sample(prose, PASSAGES)
        prefix = "".join(f"[{number}] {passage['prompt'].strip()}\n\n" for number, passage in enumerate(passages, 1))
        for question, index in enumerate(r.sample(range(PASSAGES), QUESTIONS)):
            words = WORD.findall(passages[index]["prompt"].strip())
            begun = "".join(words[: r.randint(5, 8)]).rstrip()
            text = f"{prefix}Passage [{index + 1}] is: {begun}"
            yield _line(
                "retrieval", f"{group:02d}-{question}", text, ", ".join(passage["source"] for passage in passages)
            )


def editing(r: random.Random) -> Iterator[Line]:
    """Yield edits of code: a name is changed, a parameter is added, or a documentation string is removed."""
    edits: tuple[Callable[[str], tuple[str, str] | None], ...] = (_renamed, _with_parameter, _undocumented)
    code = bundled("code")
    r.shuffle(code)
    edits_made = [
        (example, made) for example in code for change in edits if (made := change(example["prompt"])) is not None
    ]
    r.shuffle(edits_made)
    for number, (example, (what, after)) in enumerate(edits_made[:COUNT]):
        lines = after.splitlines(keepends=True)
        begun = "".join(lines[: max(1, len(lines) // 3)])
        text = f"# before\n{example['prompt'].rstrip()}\n\n\n# after: {what}\n{begun}"
        yield _line("editing", f"{number:02d}", text, example["source"])


def agentic(r: random.Random) -> Iterator[Line]:
    """Yield the steps of agents, each of which works with one kind of record."""
    for number in range(COUNT):
        family = r.choice(FAMILIES)
        tool, key = TOOLS[family.__name__], r.randint(1000, 9000)
        steps = []
        for step in range(1, STEPS + 2):
            result = family(random.Random(HELD_OUT_SEED + key + step), True)
            call = {"step": step, "tool": tool, "arguments": {"id": key + step, "verbose": False}}
            steps.append(json.dumps({**call, "status": "ok", "result": _small(result)}))
        begun = steps[-1][: steps[-1].index('"arguments"')]
        yield _line("agentic", f"{number:02d}", "\n".join([*steps[:-1], begun]).rstrip(), f"records:{family.__name__}")


def dialogue(r: random.Random) -> Iterator[Line]:
    """Yield conversations, of code and of records in turn."""
    code = [(example, again) for example in bundled("code") if (again := _renamed(example["prompt"])) is not None]
    records = [(example, NUMBER.search(example["prompt"])) for example in bundled("json")]
    known = [(example, match) for example, match in records if match is not None]
    r.shuffle(code)
    r.shuffle(known)
    for number in range(COUNT // 2):
        example, (_, after) = code[number]
        begun = _first_lines(example["prompt"])
        turns = [example["prompt"], _first_lines(after), begun]
        yield {**_line("dialogue", f"{2 * number:02d}", "", example["source"]), "turns": turns}
        example, number_match = known[number]
        turns = [example["prompt"]]
        for step in (1, 2):
            before, after = example["prompt"][: number_match.start()], example["prompt"][number_match.end() :]
            text = f"{before}{int(number_match[0]) + step}{after}"
            turns.append(_first_lines(text))
        yield {**_line("dialogue", f"{2 * number + 1:02d}", "", example["source"]), "turns": turns}


def _line(workload: str, name: str, text: str, source: str) -> Line:
    prompt = {"prompt": text} if text else {}
    return {**prompt, "workload": workload, "source": source, "id": f"{workload}-{name}"}


def _renamed(code: str) -> tuple[str, str] | None:
    """Return a description and the code with its most frequent name changed; None where no name occurs twice."""
    after = edited(code)
    return None if after is None else ("one name is changed", after)


def _with_parameter(code: str) -> tuple[str, str] | None:
    """Return a description and the code with one more parameter; None without a function."""
    signature = SIGNATURE.search(code)
    if signature is None or signature[2].rstrip().endswith(","):
        return None
    given = f"{signature[2]}, verbose=False" if signature[2].strip() else "verbose=False"
    return "one parameter is added", f"{code[: signature.start(2)]}{given}{code[signature.end(2) :]}"


def _undocumented(code: str) -> tuple[str, str] | None:
    """Return a description and the code without its first documentation string; None without one."""
    after, count = re.subn(r'^[ ]*"""(?s:.*?)"""\n', "", code, count=1, flags=re.MULTILINE)
    return ("the documentation is removed", after) if count and after.strip() else None


def _first_lines(text: str) -> str:
    """Return the first third of the lines, at least one that is long enough to be continued."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: max(2, len(lines) // 3)]) if len(lines) > 2 else text[: max(40, len(text) // 3)]


def _small(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record's first fields that are no lists or records."""
    plain = {name: value for name, value in record.items() if not isinstance(value, dict | list)}
    return dict(list(plain.items())[:5])


WORKLOADS: dict[str, Callable[[random.Random], Iterator[Line]]] = {
    "retrieval": retrieval, "editing": editing, "agentic": agentic, "dialogue": dialogue,
}  # fmt: skip
"""By name; each has a file and a config of ``prompts``."""


def text(name: str) -> str:
    """Return the text of a workload's file."""
    return "".join(json.dumps(line) + "\n" for line in WORKLOADS[name](random.Random(f"{SEED}/{name}")))


if __name__ == "__main__":
    for workload in WORKLOADS:
        (FOLDER / f"{workload}.jsonl").write_text(text(workload))
