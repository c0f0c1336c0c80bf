"""Chat templates: from the messages of a conversation to the text that the model continues.

A template is a program in Jinja that a checkpoint brings. It runs as transformers' ``apply_chat_template`` runs it, and
reads the messages, the tools and its options only; but in a process of its own (``template_sandbox``), whose time and
memory are limited.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from spec_lab.core.limited_process import LimitedProcess, LimitExceeded, ProcessLimits, RequestFailed
from spec_lab.core.options import brief

Message = Mapping[str, Any]
"""A message with its ``role`` and ``content``, and perhaps ``tool_calls``, as transformers' templates read it."""

THINKING = ("enable_thinking", "thinking")
"""Options by which templates switch a model's thinking: Qwen3's and GLM's, and DeepSeek's and Granite's."""

RESERVED = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Names that are arguments of transformers' ``apply_chat_template``, and no options of a template."""

LIMITS = ProcessLimits(cpu_seconds=10.0, memory=2**30, seconds=120.0)
"""Time and memory that a template may use for one prompt, and to be compiled."""

SANDBOX = LimitedProcess("spec_lab.text.template_sandbox")

NO_SYSTEM = "set prompts.system=null, or put it into the first message"


@runtime_checkable
class HasTemplate(Protocol):
    """A tokenizer that can apply chat templates, as transformers' can."""

    name_or_path: str
    """The checkpoint that it was read from, for messages."""
    chat_template: Any
    """Its own template, or several by name; None for none."""

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """Return the template that would be applied."""
        ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """The special tokens' texts by name, such as ``bos_token``."""
        ...


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become text.

    Args:
        source: the template; empty for the tokenizer's own, and for plain text where it has none.
        options: further variables of the template.
        file: the file that ``source`` was read from, for messages.
    """

    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    def of(self, tokenizer: Any, tools: bool = False) -> str:
        """Return the template's text for this tokenizer; empty for plain text.

        Args:
            tools: whether there are tools: a tokenizer may have a template of its own for these.

        Raises:
            ValueError: the tokenizer has several and no default.
        """
        if self.source:
            return self.source
        if not isinstance(tokenizer, HasTemplate) or not tokenizer.chat_template:
            return ""
        try:
            return tokenizer.get_chat_template(None, [{}] if tools else None)
        except ValueError as error:
            known = ", ".join(map(str, tokenizer.chat_template))
            raise ValueError(
                f"the target's tokenizer has several chat templates ({known}) and none of them is its default: save "
                "one to a file, and set prompts.template to that"
            ) from error

    def named(self, tokenizer: Any) -> str:
        """Return the name of the template in messages."""
        if self.source:
            return f"the chat template {self.file} (prompts.template)"
        return f"the chat template of {(isinstance(tokenizer, HasTemplate) and tokenizer.name_or_path) or 'the target'}"


def render(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    tools: Sequence[Any],
    tokenizer: Any,
    where: str,
    prompt: bool = True,
) -> tuple[str, bool]:
    """Return the text that the model continues, and whether a template wrote it.

    Args:
        template: the template; None for plain text: the messages with an empty line before each of the user's.
        tools: JSON schemas.
        where: names the prompt, for messages.
        prompt: whether an answer is asked for; false writes the messages alone, the last of which may be an answer.

    Raises:
        ValueError: the template refuses the messages, or exceeds a limit of time or memory; it does not read the
            system prompt, the tools or an option that are given.
    """
    source = "" if template is None else template.of(tokenizer, bool(tools))
    options = {} if template is None else dict(template.options)
    named = "" if template is None else template.named(tokenizer)
    _check_read(source, options, bool(tools), named, where)
    if template is None or not source:
        if any(message.get("tool_calls") for message in messages):
            raise ValueError(
                f"{where} has tool_calls, which plain text cannot show: use a chat template, or remove them"
            )
        return _plain(messages), False
    special = dict(tokenizer.special_tokens_map) if isinstance(tokenizer, HasTemplate) else {}
    given = {**special, "tools": list(tools) or None, "documents": None, "add_generation_prompt": prompt, **options}
    text = _applied(source, messages, given, named, where)
    if system := next((message for message in messages[:1] if message["role"] in ("system", "developer")), None):
        other = {**system, "content": f"{system['content']} x"}
        if _applied(source, [other, *messages[1:]], given, named, where) == text:
            raise ValueError(
                f"{where} has a system prompt, which has no effect: the chat template does not read it; {NO_SYSTEM}"
            )
    return text, True


def _applied(source: str, messages: Sequence[Message], given: Mapping[str, Any], named: str, where: str) -> str:
    """Return the text that the template writes for messages. Errors as in ``render``."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    normalized = [_with_reasoning(message) for message in present]
    try:
        return SANDBOX.ask({"source": source, "given": {"messages": normalized, **given}}, LIMITS)
    except LimitExceeded as error:
        raise _stopped(error, named, where) from error
    except RequestFailed as error:  # of Jinja, or of whatever the template does
        what = f"; {NO_SYSTEM}" if "system" in str(error).lower() else ""
        raise ValueError(f"{where}: the chat template refuses its messages ({brief(str(error))}){what}") from error


def _stopped(error: LimitExceeded, named: str, where: str) -> ValueError:
    return ValueError(
        f"{where}: {named} is stopped: {error}. Read it, and set prompts.template to a file with one that you trust, "
        "or prompts.template=none for plain text"
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read, as in transformers."""
    thoughts = next((message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


@lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads. Errors as in ``LimitedProcess.ask``."""
    return frozenset(SANDBOX.ask({"source": source}, LIMITS) if source else ())


def thinking_options(source: str) -> list[str]:
    """Return the options of ``THINKING`` that a template reads. Errors as in ``LimitedProcess.ask``."""
    return [name for name in THINKING if name in _variables(source)]


def _check_read(source: str, options: Mapping[str, Any], tools: bool, named: str, where: str) -> None:
    """Refuse tools and options that would have no effect."""
    try:
        known = _variables(source)
    except LimitExceeded as error:
        raise _stopped(error, named, where) from error
    except RequestFailed as error:  # of Jinja's parser
        raise ValueError(f"{where}: the chat template is no template of Jinja ({brief(str(error))})") from error
    why = "the chat template does not read it" if source else "the prompt is plain text, without a chat template"

    def reads(name: str) -> bool:
        return name in known

    if tools and not reads("tools"):
        raise ValueError(f"{where} has tools, which have no effect: {why.replace(' it', ' them')}; remove them")
    thinking = [name for name in THINKING if name in options]
    if thinking and not any(map(reads, thinking)):
        value = str(options[thinking[0]]).lower()
        raise ValueError(f"{where}: prompts.thinking={value} has no effect: {why}; set prompts.thinking=null")
    for name in options:
        if name not in thinking and not reads(name):
            raise ValueError(f"{where}: prompts.options.{name} has no effect: {why}; remove it")


def _plain(messages: Sequence[Message]) -> str:
    """Return the plain text of messages: answers follow what they answer, other messages begin after an empty line."""
    text = ""
    for message in messages:
        text += ("" if not text or message["role"] == "assistant" else "\n\n") + (message.get("content") or "")
    return text


def template_facts(templates: Sequence[tuple[ChatTemplate | None, bool]], tokenizer: Any) -> dict[str, Any]:
    """Return the manifest's facts on templates: their origins, SHA-256s and options.

    Args:
        templates: each with whether there are tools (``ChatTemplate.of``); None for plain text.
    """
    known = [(template, template.of(tokenizer, tools)) for template, tools in templates if template is not None]
    used = [(template, source) for template, source in known if source]
    if not used:
        return {"template": "none"}
    hashes = {hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest() for _, source in used}
    return {
        "template": "file" if any(template.source for template, _ in used) else "checkpoint",
        "template_sha256": ", ".join(sorted(hashes)),
        "options": dict(used[0][0].options),
    }
