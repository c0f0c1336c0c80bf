"""Conversations: how a dataset's questions become prompts for a chat model, and files of conversations.

Files are untrusted input; ``records`` has the bounds. Of a template file they are 1 MiB, of a file of tools 1 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

from spec_lab.core.files import read_text
from spec_lab.core.options import Count, Filled, OneOf, WrongOption, brief
from spec_lab.core.options import checked as check_arguments
from spec_lab.text.chat_template import RESERVED, THINKING, ChatTemplate, Message
from spec_lab.text.checkers import CHECKERS, check_answer
from spec_lab.text.prompts import Prompt, checked
from spec_lab.text.records import constraint_of, fitting, records, text_of, word

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 1000
"""Maximum number of messages of a conversation."""
MAX_TOOLS = 1000
"""Maximum number of tools."""
MAX_DEPTH = 64
"""Maximum nesting of a tool, of a tool call and of a template's options."""
MAX_SMALL = 2**20
"""Maximum size of a file of a template or of tools, in bytes."""


@dataclass(frozen=True)
class Chat:
    """How questions become prompts; made by ``chat_options``.

    Args:
        template: turns messages into text; None for plain text.
        system: the system prompt of conversations that have none of their own; empty for none.
        tools: the tools of conversations that have none of their own.
        turns: maximum number of the user's messages; None for all.
        checker: of answers; empty for none.
    """

    template: ChatTemplate | None = None
    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    turns: int | None = None
    checker: str = ""

    def prompt(
        self,
        name: str,
        turns: Sequence[str],
        workload: str = "",
        source: str = "",
        answer: str | None = None,
        constraint: str = "",
        system: str = "",
        messages: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        where: str = "",
    ) -> Prompt:
        """Return the prompt of a question.

        Args:
            name, workload, source, constraint: as in ``Prompt``.
            turns: the user's messages, at least one; after ``messages`` only those that follow its last.
            answer: what the checker compares with; None: this answer is not checked.
            system: its own system prompt; empty for the common one.
            messages: a recorded conversation that ends with a message to answer, ``turns[0]``; empty for none.
            tools: its own tools; empty for the common ones.
            where: its file and line, for messages.

        Raises:
            ValueError: the checker could compare nothing with the answer.
        """
        kept = tuple(turns[: self.turns])
        system, sent = system or self.system, list(messages)
        if system and not (sent and sent[0]["role"] in ("system", "developer")):
            sent = [{"role": "system", "content": system}, *(sent or [{"role": "user", "content": kept[0]}])]
        check = self.checker if answer is not None and len(kept) == len(turns) else ""
        if check:
            check_answer(check, answer or "", where or f"prompt '{name}'")
        return Prompt(
            name, kept[0], workload, source, constraint, messages=tuple(sent), later=kept[1:],
            tools=tuple(tools) or self.tools, template=self.template, checker=check,
            answer=(answer or "") if check else "",
        )  # fmt: skip

    def all_of(self, by_line: dict[int, Prompt], path: str) -> list[Prompt]:
        """Return the prompts of a file, given by line.

        Raises:
            ValueError: there are none, two have the same name, or the checker has no answer to compare with.
        """
        prompts = checked(by_line, path)
        if self.checker and not any(prompt.checker for prompt in prompts):
            cut = "" if self.turns is None else f", or none to a message within prompts.turns={self.turns}"
            raise WrongOption(
                f"checker={self.checker} has nothing to compare with, since {path} has no answers{cut}: set "
                "checker=null"
            )
        return prompts


class ChatOptions(TypedDict, total=False):
    """Options of every source of conversations.

    Args:
        template: checkpoint: the tokenizer's chat template, plain text if it has none; none: plain text; or a Jinja
            file.
        system: system prompt of conversations without one of their own.
        thinking: true or false: switches thinking in the template; None: the template's default.
        options: further variables of the template, such as {reasoning_effort: low}.
        turns: maximum messages of the user in a conversation, each after the answer to the one before; None: all.
        checker: of answers: exact, contains, number, choice or python_syntax; None: none.
    """

    template: Filled
    system: str | None
    thinking: bool | None
    options: Mapping[str, Any] | None
    turns: Count | None
    checker: Annotated[str, OneOf(CHECKERS)] | None


@check_arguments
def chat_options(tools: str | None = None, **given: Unpack[ChatOptions]) -> Chat:
    """Check the options of conversations, and read the files that they name.

    Args:
        tools: a JSON file with a list of tools, each a JSON schema as transformers' templates read it; None for none.
        given: see ``ChatOptions``.

    Raises:
        ValueError: an invalid option; names it.
        OSError: a file cannot be read.
    """
    template, system = given.get("template", "checkpoint"), given.get("system")
    if system is not None and not system.strip():
        raise WrongOption(f"system must be a text that is not blank, or null for none, not {brief(system)}")
    variables = _options(given.get("options"), given.get("thinking"))
    source = "" if template in ("checkpoint", "none") else _small("prompts.template", template)
    if template not in ("checkpoint", "none") and not source.strip():
        raise WrongOption(f"template={brief(template)} is empty: set template=none for plain text")
    if template == "none" and variables:
        raise WrongOption(
            f"template=none supports no options of a template ({', '.join(variables)}): set template=checkpoint"
        )
    return Chat(
        None if template == "none" else ChatTemplate(source, variables, template if source else ""),
        "" if system is None else fitting(system, "prompts.system", "it"),
        () if tools is None else _tools(_json("prompts.tools", tools), "prompts.tools"),
        given.get("turns"),
        given.get("checker") or "",
    )


def chat(
    path: str,
    limit: Count | None = None,
    tools: str | None = None,
    **given: Unpack[ChatOptions],
) -> list[Prompt]:
    """Read conversations from a file with one JSON object per line.

    Args:
        path: one JSON object per line: prompt, turns or messages; optional id, system, answer and others. The file.
            Each object has ``prompt`` (or ``text``), one message of the user; or ``turns``, a list of them, of which
            each is sent when the model has answered the one before; or ``messages``, a recorded conversation that ends
            with a message to answer: a list of objects with ``role`` and ``content``. Optional are ``id``,
            ``workload``, ``source``, ``constraint``, ``system``, ``tools``, and ``answer``, for the checker.
        limit: number of conversations, from the first; None: all.
        tools: JSON file: a list of tools, for templates that describe them.
        given: see ``ChatOptions``; messages that ``turns`` cuts are not checked, and a checker reads ``answer``.

    Raises:
        OSError: a file does not exist, or is not readable.
        ValueError: an invalid option, a malformed line, fields that contradict each other, an id used twice, no
            conversations at all.
    """
    how = chat_options(tools, **given)
    prompts = {}
    for where, line, record in records(path, limit):
        messages: list[Message] = []
        _check_fields(record, where)
        if record.get("messages") is not None:
            messages = _messages(record["messages"], where)
            texts = [str(messages[-1]["content"])]
        elif record.get("turns") is not None:
            texts = turns_of(record, "turns", where)
        else:
            texts = [
                text_of(record, "prompt" if "prompt" in record else "text", where, "'prompt', 'turns' or 'messages'")
            ]
        prompts[line] = how.prompt(
            word(record, "id", where) or f"{Path(path).stem}-{line}",
            texts,
            word(record, "workload", where),
            word(record, "source", where),
            None if record.get("answer") is None else word(record, "answer", where),
            constraint_of(record, where),
            word(record, "system", where),
            messages,
            () if record.get("tools") is None else _tools(record["tools"], f"{where}: 'tools'"),
            where,
        )
    return how.all_of(prompts, path)


def turns_of(record: Mapping[str, Any], key: str, where: str) -> list[str]:
    """Return the user's messages of a record: a list of at least one text.

    Raises:
        ValueError: it is not; names the file and the line.
    """
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: '{key}' must be a list with at least one message of the user")
    if len(turns) > MAX_MESSAGES:
        raise ValueError(f"{where}: '{key}' has {len(turns)} messages, more than {MAX_MESSAGES}")
    return [text_of({key: turn}, key, where, f"'{key}[{number}]'") for number, turn in enumerate(turns)]


def _check_fields(record: Mapping[str, Any], where: str) -> None:
    """Refuse several of ``messages``, ``turns`` and ``prompt``, and two system prompts."""
    given = [name for name in ("messages", "turns", "prompt", "text") if record.get(name) is not None]
    if len(given) > 1:
        raise ValueError(
            f"{where}: the fields {' and '.join(map(repr, given))} contradict each other: keep one of them"
        )
    first = record["messages"][:1] if isinstance(record.get("messages"), list) else []
    system = any(isinstance(sent, dict) and sent.get("role") in ("system", "developer") for sent in first)
    if system and word(record, "system", where):
        raise ValueError(f"{where}: 'system' and 'messages[0]' are both system prompts: remove one of them")


def check_said(prompt: str | None, chat: bool, messages: Sequence[Any] | None) -> None:
    """Refuse a prompt and messages together, and a chat without a prompt.

    Raises:
        WrongOption: names the option.
    """
    if messages is not None and (prompt is not None or chat):
        other = "prompt" if prompt is not None else "chat=true, which is of a prompt"
        raise WrongOption(f"messages is a conversation of its own: leave it out, or {other}")
    if chat and prompt is None:
        raise WrongOption("chat=true requires a prompt, the message of the user")


def conversation_prompt(name: str, messages: Sequence[Message]) -> Prompt:
    """Return the prompt of a conversation that the checkpoint's chat template writes.

    Args:
        messages: with their ``role`` and ``content``; the last one, of the user or of a tool, is answered.

    Raises:
        ValueError: they are malformed.
    """
    recorded = _messages([dict(message) for message in messages], name)
    return chat_options().prompt(name, [str(recorded[-1]["content"])], messages=recorded)


def conversation_of(record: Mapping[str, Any], where: str) -> tuple[list[Message], tuple[Mapping[str, Any], ...]]:
    """Return the messages of a record, the system prompt ``system`` in front if it has one, and its ``tools``.

    Raises:
        ValueError: they are malformed; names the file and the line.
    """
    _check_fields(record, where)
    messages, system = _recorded(record.get("messages"), where), word(record, "system", where)
    tools = () if record.get("tools") is None else _tools(record["tools"], f"{where}: 'tools'")
    return [{"role": "system", "content": system}, *messages] if system else messages, tools


def _messages(messages: Any, where: str) -> list[Message]:
    """Return a recorded conversation that is to be answered."""
    recorded = _recorded(messages, where)
    last = recorded[-1]
    if last["role"] not in ("user", "tool"):
        raise ValueError(f"{where}: 'messages' must end with a message of the user or of a tool, which is answered")
    text_of(last, "content", where, f"'messages[{len(recorded) - 1}]'.content")
    return recorded


def _recorded(messages: Any, where: str) -> list[Message]:
    """Return a recorded conversation."""
    if not isinstance(messages, list) or not messages or len(messages) > MAX_MESSAGES:
        raise ValueError(f"{where}: 'messages' must be a list of 1 to {MAX_MESSAGES} objects with role and content")
    for number, message in enumerate(messages):
        named = f"'messages[{number}]'"
        if not isinstance(message, dict):
            raise ValueError(f"{where}: {named} must be an object with role and content, not {brief(message)}")
        if (role := message.get("role")) not in ROLES:
            raise ValueError(f"{where}: {named}.role must be one of {', '.join(ROLES)}, not {brief(role)}")
        calls = role == "assistant" and isinstance(message.get("tool_calls"), list)
        if not (calls and message.get("content") is None):
            fitting(message.get("content"), where, f"{named}.content")
        _check_depth(message, f"{where}: {named}")
    return list(messages)


def _options(options: Mapping[str, Any] | None, thinking: bool | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise WrongOption(f"options must map names of the template's variables to values, not {brief(options)}")
    given = dict(options or {})
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
            raise WrongOption(f"options.{name} is no variable of a chat template: choose another name")
        if name in THINKING and thinking is not None:
            raise WrongOption(f"options.{name} and thinking both switch thinking: set only one of them")
    _check_depth(given, "prompts.options")
    return given | ({} if thinking is None else dict.fromkeys(THINKING, thinking))


def _small(option: str, path: Any) -> str:
    try:
        if isinstance(path, str) and Path(path).is_file():
            return read_text(Path(path), MAX_SMALL)
    except OSError as error:
        raise ValueError(f"{option}={brief(path)} cannot be read ({error.strerror})") from error
    raise ValueError(f"{option} must name a file, and there is no file {brief(path)}")


def _json(option: str, path: Any) -> Any:
    try:
        return json.loads(_small(option, path))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ValueError(f"{option}={path} is no JSON that can be read ({' '.join(str(error).split())})") from error


def _tools(tools: Any, named: str) -> tuple[Mapping[str, Any], ...]:
    if tools == []:
        raise ValueError(f"{named} is an empty list: leave it out")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{named} must be a list of JSON schemas of tools, not {brief(tools)}")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"{named} has {len(tools)} tools, more than {MAX_TOOLS}")
    for tool in tools:
        _check_depth(tool, named)
    return tuple(tools)


def _check_depth(value: Any, named: str) -> None:
    """Refuse too deep nesting, values that are not JSON's, and halves of surrogate pairs."""
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{named} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, str):
            fitting(item, named, "a text")
        elif isinstance(item, Mapping):
            left += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list | tuple):
            left += [(inner, depth + 1) for inner in item]
        elif item is not None and not isinstance(item, bool | int | float):
            raise ValueError(f"{named} holds a {type(item).__name__}, which is no value of JSON")
