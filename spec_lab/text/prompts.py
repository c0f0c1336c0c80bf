"""Prompts: from files to token ids. Every error names the file and the line, or the prompt.

Files are untrusted input. Bounds: a prompt has at most 10 million characters, a line of a file at most 64 MiB, and a
file at most 1 GiB; a file must be a regular file (no pipe or device).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from spec_lab.core.options import whole

MAX_CHARACTERS = 10_000_000
"""Maximum length of a prompt, in characters. (A tokenizer needs about 2 s and 250 MB per million.)"""
MAX_LINE = 64 * 2**20
"""Maximum length of a line of a prompts file, in bytes."""
MAX_FILE = 2**30
"""Maximum size of a prompts file, in bytes."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        name: unique in its file; the given id, or the file's stem and the line's number.
        text: the text that the model continues.
        workload: the kind of text, such as "code"; empty if unknown.
        source: where it comes from; empty if unknown.
        constraint: the prompt's own pattern, schema or grammar (``PerRequestSource``); empty for none.
    """

    name: str
    text: str
    workload: str = ""
    source: str = ""
    constraint: str = ""


def jsonl(path: str, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a file with one JSON object per line.

    Args:
        path: the file, a regular file of at most 1 GiB, in lines of at most 64 MiB. Each object has ``prompt`` (or
            ``text``, at most 10 million characters) and optionally ``id``, ``workload``, ``source`` and
            ``constraint`` (text, or a JSON schema as an object); null means absent.
        limit: number of prompts to read, from the first; None reads all.

    Raises:
        OSError: the file does not exist, or is not readable.
        ValueError: a malformed line, a missing or empty prompt, an id used twice, no prompts at all, a bad limit, a
            pipe or a device, or a bound exceeded.
    """
    prompts = {}
    for where, line, record in _records(path, limit):
        key = "prompt" if "prompt" in record else "text"
        text = _text(record, key, where, "'prompt' (or 'text')")
        name = _word(record, "id", where) or f"{Path(path).stem}-{line}"
        workload, source = _word(record, "workload", where), _word(record, "source", where)
        own = record.get("constraint")
        own = json.dumps(own) if isinstance(own, dict | list) else _word(record, "constraint", where)  # ASCII
        prompts[line] = Prompt(name, text, workload, source, own)
    return _checked(prompts, path)


def texts(path: str) -> Iterator[str]:
    """Yield the field ``text`` of each line of a JSONL file of any size, one line in memory at a time.

    Raises:
        OSError, ValueError: as of ``jsonl``; a line without ``text``.
    """
    for where, _, record in _records(path, None, bounded=False):
        yield _text(record, "text", where, "'text'")


def spec_bench(path: str, limit: int | None = None) -> list[Prompt]:
    """Read Spec-Bench's question file: ``question_id``, ``category`` and ``turns``, whose first is the prompt.

    Arguments and errors as in ``jsonl``.
    """
    prompts = {}
    for where, line, record in _records(path, limit):
        turns = record.get("turns")
        if not isinstance(turns, list) or not turns:
            raise ValueError(
                f"{where}: 'turns' must be a list with at least one turn; is this Spec-Bench's question file?"
            )
        text = _text({"turns": turns[0]}, "turns", where, "the first of 'turns'")
        name = _word(record, "question_id", where) or f"{Path(path).stem}-{line}"
        prompts[line] = Prompt(name, text, _word(record, "category", where), "Spec-Bench")
    return _checked(prompts, path)


def mixed(path: str, limit: int | None = None) -> list[Prompt]:
    """Read every ``.jsonl`` file of a folder; the prompts are shuffled in one fixed order.

    Args:
        path: the folder. The workload defaults to the file's stem, which also precedes names that two files share.
        limit: number of prompts to return, from the first; None returns all.

    Raises:
        OSError, ValueError: no such folder, or no such file in it; otherwise as ``jsonl``.
    """
    if limit is not None:
        whole("prompts.limit", limit, otherwise=", or null for all")
    files = sorted(Path(path).glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"prompts folder {path} holds no .jsonl file; set prompts.path")
    read = [(file.stem, one) for file in files for one in jsonl(str(file))]
    times = Counter(one.name for _, one in read)
    found = [
        replace(one, name=one.name if times[one.name] == 1 else f"{stem}-{one.name}", workload=one.workload or stem)
        for stem, one in read
    ]
    Random(0).shuffle(found)
    return found[:limit]


def encode(
    prompts: Sequence[Prompt], tokenizer: Any, context: int, longest: int | None = None
) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt.

    Args:
        prompts: the texts.
        tokenizer: the target's.
        context: maximum number of tokens of a sequence.
        longest: maximum number of tokens of a prompt. The middle of a longer one is removed, as LongBench (2308.14508)
            does; None removes nothing.

    Raises:
        ValueError: a prompt that is not text, has more than 10 million characters or no tokens, or fills the
            ``context``; names the prompt.
    """
    encoded = []
    for prompt in prompts:
        _fitting(prompt.text, f"prompt '{prompt.name}'", "its text")
        try:
            tokens = tuple(tokenizer.encode(prompt.text))
        except Exception as error:  # tokenizers raises plain Exceptions, such as for a character it cannot encode
            raise ValueError(f"prompt '{prompt.name}' cannot be encoded by the target's tokenizer ({error})") from error
        if longest is not None and len(tokens) > longest:
            tokens = tokens[: longest - longest // 2] + tokens[len(tokens) - longest // 2 :]
        if not tokens:
            raise ValueError(f"prompt '{prompt.name}' has no tokens; give it some text")
        if len(tokens) >= context:
            raise ValueError(
                f"prompt '{prompt.name}' has {len(tokens)} tokens and the context holds {context}, "
                "one of them for the output: shorten it, set max_prompt_tokens, or choose a target with more context"
            )
        encoded.append(tokens)
    return encoded


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 over the prompts' names, texts and constraints, in order."""
    state = hashlib.sha256()
    for prompt in prompts:
        own = [prompt.constraint] if prompt.constraint else []
        state.update(json.dumps([prompt.name, prompt.text, *own]).encode())
    return state.hexdigest()


def _records(path: str, limit: int | None, bounded: bool = True) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield ("file:line", line, object) of each line that is not blank, up to ``limit`` of them.

    Args:
        path, limit: of ``jsonl``.
        bounded: whether a file larger than ``MAX_FILE`` is refused.
    """
    if limit is not None:
        whole("prompts.limit", limit, otherwise=", or null for all")
    if not isinstance(path, str) or not path:
        raise ValueError(f"prompts.path must name a file, not {path!r}")
    if not Path(path).is_file():
        kind = "is a directory" if Path(path).is_dir() else "is no regular file"
        kind = kind if Path(path).exists() else "does not exist"
        raise FileNotFoundError(f"prompts file {path} {kind}; set prompts.path to a JSONL file")
    if bounded and (size := Path(path).stat().st_size) > MAX_FILE:
        raise ValueError(f"prompts file {path} has {size} bytes, more than {MAX_FILE}; split it")
    count = 0
    with open(path, "rb") as stream:
        for number, raw in enumerate(iter(lambda: stream.readline(MAX_LINE + 1), b""), start=1):
            if limit is not None and count == limit:
                return
            if len(raw) > MAX_LINE:
                raise ValueError(f"{path}:{number}: the line is longer than {MAX_LINE} bytes; shorten the prompt")
            if raw.strip():
                count += 1
                where = f"{path}:{number}"
                yield where, number, _object(raw, where)


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(raw)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not a JSON object ({error.msg} at column {error.colno}); each line must be one JSON object"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{where}: not a JSON object that can be read ({why})") from error
    if not isinstance(record, dict):
        raise ValueError(f'{where}: a JSON {type(record).__name__}, not an object; write {{"prompt": "..."}}')
    return record


def _text(record: dict[str, Any], key: str, where: str, named: str) -> str:
    if key not in record:
        raise ValueError(f"{where}: the field {named} is missing; it has {', '.join(map(repr, record)) or 'no fields'}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {named} must be text, not {type(text).__name__}")
    if not text.strip():
        raise ValueError(f"{where}: {named} is empty; give it some text or delete the line")
    return _fitting(text, where, named)


def _fitting(text: Any, where: str, named: str) -> str:
    """Return ``text`` unless it is too long, or is not text."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: {named} must be text, not {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{where}: {named} has {len(text)} characters, more than the {MAX_CHARACTERS} that a prompt may have; "
            "shorten it"
        )
    return _whole(text, where, named)


def _word(record: dict[str, Any], key: str, where: str) -> str:
    """Return a field as text; empty if it is absent or null."""
    value = record.get(key)
    return "" if value is None else _whole(str(value), where, f"'{key}'")


def _whole(text: str, where: str, named: str) -> str:
    """Return ``text`` unless JSON's escapes left half of a surrogate pair in it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{where}: {named} holds {half}, half of a surrogate pair and no character") from error
    return text


def _checked(prompts: dict[int, Prompt], path: str) -> list[Prompt]:
    """Return the prompts, given by line, if there are any and their names are unique."""
    if not prompts:
        raise ValueError(f"{path}: the file holds no prompts; each line must be one JSON object")
    seen: dict[str, int] = {}
    for line, prompt in prompts.items():
        if prompt.name in seen:
            raise ValueError(
                f"{path}:{line}: the id '{prompt.name}' is also that of line {seen[prompt.name]}; ids must be unique"
            )
        seen[prompt.name] = line
    return list(prompts.values())
