"""Answers that exist already: of an earlier run, or in a file of conversations; from files to token ids.

Training and ``check-drafter`` read them. Files are untrusted input: ``core.tables`` bounds a run's table, and
``text.records`` each line of a file, of which there may be any number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from spec_lab.core.files import Unreadable, read_json
from spec_lab.core.options import WrongOption
from spec_lab.core.tables import read_table
from spec_lab.text.chat_template import ChatTemplate, Message, render
from spec_lab.text.conversations import conversation_of
from spec_lab.text.records import records, word

Tokens = tuple[int, ...]

REQUESTS = "requests.parquet"
"""A run's table of answers, in its folder."""

COLUMNS = {
    "request": pa.int64(), "arm": pa.string(), "sequence": pa.int64(), "name": pa.string(), "prompt": pa.string(),
    "prompt_tokens": pa.int64(), "text": pa.string(), "tokens": pa.list_(pa.uint32()), "error": pa.string(),
}  # fmt: skip
"""Its columns that are read, and what they hold."""

CONVERSATION = "conversation"
"""The column of runs of conversations that names a request's conversation."""


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

    Args:
        answers_from, generate, answers: as in ``tasks.train``.

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
        tokenizer: the target's.
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
        texts = _of_run(file / REQUESTS if file.is_dir() else file, tokenizer, weights)
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


def is_run(path: str) -> bool:
    """Return whether answers are read from a run, not from a file of conversations."""
    return Path(path).is_dir() or Path(path).suffix == ".parquet"


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

    Raises:
        ValueError: there is no answer, or the template does not write one; names it.
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


def run_facts(path: str) -> Mapping[str, Any]:
    """Return the manifest of the run whose answers are read; empty without one, and of a file of conversations.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return (read_json(folder / "manifest.json") or {}) if is_run(path) else {}


def _of_run(file: Path, tokenizer: Any, weights: Collection[str]) -> list[AnsweredText]:
    """Return the answers of a run; those of one conversation, or to one prompt, follow each other.

    Raises:
        OSError: there is no such file.
        ValueError: it is no table of a run; the run's target is another; a prompt that is not that of its row.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: name the folder of a run that has ended, or its {REQUESTS}")
    _check_weights(file, weights)
    rows = _rows(file)
    arms = [row["arm"] for row in rows]
    arm = "baseline" if "baseline" in arms else next(iter(arms), "")
    _check_lossless(file, arm)
    texts = dict[str, list[AnsweredText]]()
    for row in sorted(rows, key=lambda row: row["request"]):
        if row["arm"] != arm or row["sequence"] or row["error"] or not row["tokens"]:
            continue
        prompt, name = _prompt_of(row, tokenizer, file), row[CONVERSATION] or row["name"]
        tokens = (*prompt, *row["tokens"])
        texts.setdefault(name, []).append(AnsweredText(name, tokens, ((len(prompt), len(tokens)),)))
    return [text for of_name in texts.values() for text in of_name]


def _check_lossless(file: Path, arm: str) -> None:
    """Refuse an arm whose verifier changes the target's distribution.

    Raises:
        ValueError: the run's summary says that it does.
    """
    arms = (read_json(file.parent / "summary.json") or {}).get("arms")
    facts = arms.get(arm) if isinstance(arms, dict) else None
    if isinstance(facts, dict) and facts.get("lossless") is False:
        raise Unreadable(
            f"{file}: the answers of the arm '{arm}' are not distributed as the target's, since its verifier "
            f"({facts.get('verifier')}) is lossy: name a run with baseline=true, or with a lossless verifier"
        )


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's table.

    Raises:
        ValueError: it is no such table; a value is missing, or of another type.
    """
    try:
        table = read_table(file, (*COLUMNS, CONVERSATION))
        if CONVERSATION not in table.column_names:
            table = table.append_column(CONVERSATION, pa.nulls(len(table), pa.string()))
        rows: list[dict[str, Any]] = (
            table.select([*COLUMNS, CONVERSATION]).cast(pa.schema({**COLUMNS, CONVERSATION: pa.string()})).to_pylist()
        )
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise Unreadable(f"{file} is no table of a run's answers ({' '.join(str(error).split())})") from error
    for number, row in enumerate(rows):
        missing = [name for name in COLUMNS if row[name] is None] or ["tokens"] * (None in row["tokens"])
        if missing:
            raise Unreadable(f"{file} is no table of a run's answers (row {number + 1} has no {missing[0]})")
    return rows


def _prompt_of(row: Mapping[str, Any], tokenizer: Any, file: Path) -> Tokens:
    """Return the tokens of a row's prompt, with the special tokens that the run put before it.

    Raises:
        ValueError: there are others than in the run.
    """
    for special in (False, True):
        tokens = tuple(tokenizer.encode(row["prompt"], add_special_tokens=special))
        if len(tokens) == row["prompt_tokens"]:
            break
    else:
        raise Unreadable(
            f"{file}: the prompt '{row['name']}' has {len(tokens)} tokens, and had {row['prompt_tokens']} in the run "
            "(another tokenizer, max_prompt_tokens or token_healing): its answers cannot be read"
        )
    if tokenizer.decode(row["tokens"], skip_special_tokens=True).strip() != row["text"].strip():
        raise Unreadable(f"{file}: the answer to '{row['name']}' is of another tokenizer, or was cut at a stop string")
    return tokens


def _check_weights(file: Path, weights: Collection[str]) -> None:
    """Refuse a run of another target than that with one of these SHA-256s of its weights.

    Raises:
        ValueError: it is, or nothing beside the table states its target.
    """
    facts = run_facts(str(file))
    sections = [facts.get(name) for name in ("weights_sha256", "target")]
    hashes, target = (section if isinstance(section, dict) else {} for section in sections)
    known = {sha256 for sha256 in (hashes.get("target"), target.get("source_sha256")) if isinstance(sha256, str)}
    if weights and not known:
        raise Unreadable(
            f"{file}: no manifest.json beside it states the SHA-256 of the target's weights, so that the answers may "
            "be another target's: name the folder of a run, with its manifest.json"
        )
    if weights and not known & {*weights}:
        raise Unreadable(
            f"{file} holds answers of another target (its weights have the SHA-256 {hashes.get('target')}): a "
            "drafter is trained and measured on answers of its own target; name a run of that"
        )
