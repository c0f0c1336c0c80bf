"""Answers that exist already: of an earlier run, or in a file of conversations; from files to token ids.

Training and ``check-drafter`` read them. Files are untrusted input: ``text.records`` bounds each line of a file, of
which there may be any number, and ``text.run_answers`` checks a run's table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_lab.core.files import Unreadable
from spec_lab.core.options import WrongOption
from spec_lab.text.chat_template import ChatTemplate, Message, render
from spec_lab.text.conversations import conversation_of
from spec_lab.text.records import records, word
from spec_lab.text.run_answers import Tokens, is_run, run_answers


@dataclass(frozen=True)
class AnsweredText:
    """A conversation, or the part of one that its chat template writes as one text, with the model's answers.

    Args:
        name: of the conversation, or of the run's prompt; texts of one conversation have the same.
        tokens: prompts, answers and what a chat template writes between them.
        answers: where each answer begins in ``tokens``, and where it ends, its end-of-text token included.
    """

    name: str
    tokens: Tokens
    answers: tuple[tuple[int, int], ...]

    def each(self) -> Iterator[tuple[Tokens, Tokens]]:
        """Yield each answer's prompt, of all tokens before it, and its own tokens."""
        for begin, end in self.answers:
            yield self.tokens[:begin], self.tokens[begin:end]

    def cut(self, answered: int, whole: int) -> AnsweredText:
        """Return the text up to so many tokens of answers, and so many tokens in all.

        Args:
            answered: maximum tokens of all answers together.
            whole: maximum tokens.
        """
        kept, end = list[tuple[int, int]](), 0
        for begin, last in self.answers:
            end = min(last, whole, begin + answered)
            if end <= begin:
                break
            kept.append((begin, end))
            answered -= end - begin
        return replace(self, tokens=self.tokens[: kept[-1][1] if kept else 0], answers=tuple(kept))


def check_source(answers_from: str | None = None, generate: str | None = None, answers: int = 1) -> None:
    """Refuse options that name answers and ask for others, or a file that does not exist. Needs no target.

    Raises:
        WrongOption: names the option.
    """
    if answers_from is not None and (answers > 1 or generate is not None):
        other = "generate" if generate is not None else f"answers={answers}"
        raise WrongOption(f"answers_from names answers that exist already: leave {other} out, which asks for new")
    if answers_from is not None and not Path(answers_from).exists():
        raise WrongOption(
            f"answers_from={answers_from} does not exist: name the folder of an earlier run, or a file of JSON lines "
            "with messages"
        )
    if generate not in (None, "gguf") and not (generate.endswith(".gguf") and Path(generate).is_file()):
        raise WrongOption(
            f"generate={generate} names no GGUF file: set it to one of the target, to gguf where the target is one, or "
            "to null, so that the target answers itself"
        )


def read_answers(
    path: str,
    tokenizer: Any,
    ends: Collection[int],
    template: ChatTemplate | None = None,
    weights: Collection[str] = (),
) -> list[AnsweredText]:
    """Read answers of an earlier run, or conversations with answers.

    Args:
        path: folder of a run, or its requests.parquet: the answers of its arm "baseline", else of its first arm. Or a
            file with one JSON object per line: ``messages``, of which those with the role assistant are the answers;
            optional are ``id``, ``system``, ``tools``, and ``complete``, which is false where the last answer was cut,
            so that it has no end.
        ends: the target's end-of-text tokens.
        template: writes the messages of a file of conversations; None: plain text.
        weights: SHA-256s of the target's weights; a run's answers must be of one of these. Empty: of any.

    Raises:
        OSError: there is no such file.
        ValueError: an unreadable file; a run of another target, or whose prompts were cut; a conversation without an
            answer, or of which the template does not show an answer; no answers at all.
    """
    file = Path(path)
    if is_run(path):
        texts = [
            AnsweredText(name, (*prompt, *answer), ((len(prompt), len(prompt) + len(answer)),))
            for name, prompt, answer in run_answers(path, tokenizer, weights)
        ]
    else:
        texts, lines = [], dict[str, int]()
        for where, line, record in records(path, bounded=False):
            messages, tools = conversation_of(record, where)
            name = word(record, "id", where) or f"{file.stem}-{line}"
            if lines.setdefault(name, line) != line:
                raise Unreadable(f"{where}: the id '{name}' is also that of line {lines[name]}; ids must be unique")
            pieces = _pieces(messages, tools, template, tokenizer, where)
            texts += _texts(name, pieces, tokenizer, ends, record.get("complete") is not False, where)
    if not texts:
        raise Unreadable(f"{path} holds no answers")
    return texts


@dataclass(frozen=True)
class _Piece:
    """An answer: the text before it, whether a template wrote that, and the text of the answer with what follows."""

    before: str
    templated: bool
    answer: str
    content: str


def _pieces(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate | None,
    tokenizer: Any,
    where: str,
) -> list[_Piece]:
    """Return the answers of a conversation, as a template writes them.

    What the model writes after its prompt is what the template writes after it. Where the template writes the prompt
    otherwise once there is an answer (an empty thought, or earlier thoughts that it removes), it is the answer's
    content with what follows it.
    """
    pieces = []
    for number, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        if message["role"] != "assistant" or not (content or message.get("tool_calls")):
            continue
        if not number:
            raise Unreadable(f"{where}: 'messages' begins with an answer: put what it answers before it")
        before, templated = render(template, messages[:number], tools, tokenizer, where)
        after, _ = render(template, messages[: number + 1], tools, tokenizer, where, prompt=False)
        if after.startswith(before):
            answer = after[len(before) :]
        elif content and content in after:
            answer = after[after.rindex(content) :]
        else:
            raise Unreadable(
                f"{where}: the chat template does not write 'messages[{number}]' as it is: set prompts.template to "
                "one that does, or remove the conversation"
            )
        pieces.append(_Piece(before, templated, answer, content))
    if not pieces:
        raise Unreadable(f"{where}: 'messages' has no message of the role assistant, which would be the answer")
    return pieces


def _texts(
    name: str, pieces: Sequence[_Piece], tokenizer: Any, ends: Collection[int], complete: bool, where: str
) -> list[AnsweredText]:
    """Return the texts of a conversation: one, if each answer's prompt begins with the text of the answer before."""
    texts, written, tokens = list[AnsweredText](), "", list[int]()
    answers = list[tuple[int, int]]()
    for piece in pieces:
        if answers and not piece.before.startswith(written):
            texts.append(AnsweredText(name, tuple(tokens), tuple(answers)))
            written, tokens, answers = "", [], []
        special = not piece.templated and not tokens
        tokens += tokenizer.encode(piece.before[len(written) :], add_special_tokens=special)
        answer = tokenizer.encode(piece.answer, add_special_tokens=False)
        if not tokens or not answer:
            raise Unreadable(f"{where}: an answer or its prompt has no tokens")
        end = next((number + 1 for number, token in enumerate(answer) if token in ends), len(answer))
        if not complete and piece is pieces[-1]:
            if not piece.content or piece.content not in piece.answer:
                raise Unreadable(
                    f"{where}: 'complete' is false, but the chat template does not write the last answer as it is, so "
                    "that its end is not known: remove 'complete', or the conversation"
                )
            cut = piece.answer[: piece.answer.index(piece.content) + len(piece.content)]
            end = len(tokenizer.encode(cut, add_special_tokens=False))
        answers.append((len(tokens), len(tokens) + end))
        tokens += answer
        written = piece.before + piece.answer
    texts.append(AnsweredText(name, tuple(tokens), tuple(answers)))
    return texts
