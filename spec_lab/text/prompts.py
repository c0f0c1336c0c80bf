"""Prompts: from files to token ids. Every error names the file and the line, or the prompt.

Files are untrusted input; ``records`` has the bounds.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from spec_lab.core.options import Count
from spec_lab.text.chat_template import ChatTemplate, Message, render
from spec_lab.text.records import MAX_RECORDS, check_limit, constraint_of, fitting, records, text_of, word


@dataclass(frozen=True)
class Prompt:
    """One prompt, or a conversation of several.

    Args:
        name: unique in its file; the given id, or the file's stem and the line's number.
        text: the text that the model continues; of a conversation, the message that it answers first.
        workload: the kind of text, such as "code"; empty if unknown.
        source: where it comes from; empty if unknown.
        constraint: the prompt's own pattern, schema or grammar (``Constraint.source``); empty for none.
        messages: a recorded conversation, ``text`` in its last message; empty: one message of the user, ``text``.
        later: the user's later messages; each is sent when the message before it has been answered.
        tools: JSON schemas of the tools that a chat template describes.
        template: turns messages into text; None: their plain text.
        checker: of its last answer (``checkers.CHECKERS``); empty for none.
        answer: what the checker compares with.
    """

    name: str
    text: str
    workload: str = ""
    source: str = ""
    constraint: str = ""
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template: ChatTemplate | None = None
    checker: str = ""
    answer: str = ""

    @property
    def turns(self) -> int:
        """Number of the model's answers."""
        return 1 + len(self.later)

    def conversation(self, answers: Sequence[str] = ()) -> list[Message]:
        """Return the messages up to the next message of the user, given the model's answers so far."""
        messages = list(self.messages) or [{"role": "user", "content": self.text}]
        for answer, message in zip(answers, self.later, strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": message}]
        return messages


def jsonl(path: str, limit: Count | None = None) -> list[Prompt]:
    """Read prompts from a file with one JSON object per line.

    Args:
        path: one JSON object per line: prompt (or text); optional id, workload, source, constraint. The file, a
            regular file of at most 1 GiB, in lines of at most 64 MiB. Each object has ``prompt`` (or ``text``, at most
            10 million characters) and optionally ``id``, ``workload``, ``source`` and ``constraint`` (text, or a JSON
            schema as an object); null means absent.
        limit: number of prompts, from the first; None: all.

    Raises:
        OSError: the file does not exist, or is not readable.
        ValueError: a malformed line, a missing or empty prompt, an id used twice, no prompts at all, a bad limit, a
            pipe or a device, or a bound exceeded.
    """
    prompts = {}
    for where, line, record in records(path, limit):
        key = "prompt" if "prompt" in record else "text"
        text = text_of(record, key, where, "'prompt' (or 'text')")
        name = word(record, "id", where) or f"{Path(path).stem}-{line}"
        workload, source = word(record, "workload", where), word(record, "source", where)
        prompts[line] = Prompt(name, text, workload, source, constraint_of(record, where))
    return checked(prompts, path)


def texts(path: str) -> Iterator[str]:
    """Yield the field ``text`` of each line of a JSONL file of any size, one line in memory at a time.

    Raises:
        OSError, ValueError: as in ``jsonl``; a line without ``text``.
    """
    for where, _, record in records(path, bounded=False):
        yield text_of(record, "text", where)


def mixed(path: str, limit: Count | None = None) -> list[Prompt]:
    """Read every ``.jsonl`` file of a folder; the prompts are shuffled in one fixed order.

    Args:
        path: a folder: all prompts of its .jsonl files, mixed.
        limit: number of prompts, from the first; None: all.

    Raises:
        OSError, ValueError: no such folder, or no such file in it; more than 100,000 prompts in all; otherwise as
            ``jsonl``.
    """
    check_limit(limit)
    files = sorted(Path(path).glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"prompts folder {path} holds no .jsonl file; set prompts.path")
    read: list[tuple[str, Prompt]] = []
    for file in files:
        read += [(file.stem, prompt) for prompt in jsonl(str(file))]
        if len(read) > MAX_RECORDS:  # all are read before they are shuffled, whatever the limit
            raise ValueError(
                f"prompts folder {path} has more than {MAX_RECORDS} prompts: move some of its files elsewhere"
            )
    times = Counter(prompt.name for _, prompt in read)
    prompts = []
    for stem, prompt in read:
        name = prompt.name if times[prompt.name] == 1 else f"{stem}-{prompt.name}"
        prompts.append(replace(prompt, name=name, workload=prompt.workload or stem))
    Random(0).shuffle(prompts)
    return prompts[:limit]


def encode(
    prompts: Sequence[Prompt], tokenizer: Any, context: int, longest: int | None = None
) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt. Arguments and errors as in ``encode_turn``."""
    return [encode_turn(prompt, tokenizer, context, longest)[1] for prompt in prompts]


def encode_turn(
    prompt: Prompt, tokenizer: Any, context: int, longest: int | None = None, answers: Sequence[str] = ()
) -> tuple[str, tuple[int, ...]]:
    """Return the text that the model continues, and its token ids.

    Args:
        context: maximum number of tokens of a sequence.
        longest: maximum number of tokens of a prompt. The middle of a longer one is removed, as LongBench (2308.14508)
            does; None removes nothing.
        answers: the model's answers so far; the text ends after the user's message that follows the last of them.

    Raises:
        ValueError: a prompt that is not text, has more than 10 million characters or no tokens, or fills the
            ``context``; messages that its template refuses; names the prompt.
    """
    where = f"prompt '{prompt.name}'"
    fitting(prompt.text, where, "its text")
    text, templated = render(prompt.template, prompt.conversation(answers), prompt.tools, tokenizer, where)
    fitting(text, where, "its text")
    try:  # a template writes special tokens itself
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False) if templated else tokenizer.encode(text))
    except Exception as error:  # tokenizers raises plain Exceptions, such as for a character it cannot encode
        raise ValueError(f"{where} cannot be encoded by the target's tokenizer ({error})") from error
    if longest is not None and len(tokens) > longest:
        tokens = tokens[: longest - longest // 2] + tokens[len(tokens) - longest // 2 :]
    if not tokens:
        raise ValueError(f"{where} has no tokens; give it some text")
    if len(tokens) >= context:
        raise ValueError(
            f"{where} has {len(tokens)} tokens and the context holds {context}, "
            "one of them for the output: shorten it, set max_prompt_tokens, or choose a target with more context"
        )
    return text, tokens


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 over the prompts' names, texts, constraints and everything else that they are made of, in
    order, before any template is applied.
    """
    state = hashlib.sha256()
    for prompt in prompts:
        parts: list[Any] = [prompt.constraint] if prompt.constraint else []
        template = None if prompt.template is None else [prompt.template.source, dict(prompt.template.options)]
        more = {
            "messages": prompt.messages, "later": prompt.later, "tools": prompt.tools, "template": template,
            "checker": prompt.checker, "answer": prompt.answer,
        }  # fmt: skip
        if more := {name: value for name, value in more.items() if value}:
            parts.append(more)
        state.update(json.dumps([prompt.name, prompt.text, *parts], sort_keys=True).encode())
    return state.hexdigest()


def checked(prompts: dict[int, Prompt], path: str) -> list[Prompt]:
    """Return the prompts, given by line, if there are any and their names are unique.

    Raises:
        ValueError: there are none, or two prompts have the same name.
    """
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


def check_one_turn(prompts: Sequence[Prompt], task: str) -> None:
    """Refuse conversations of several turns, for a task that decodes first turns only.

    Raises:
        ValueError: there is one.
    """
    if several := next((prompt.name for prompt in prompts if prompt.later), None):
        raise ValueError(
            f"{task} decodes one answer for each prompt, and '{several}' has several turns: set prompts.turns=1"
        )
