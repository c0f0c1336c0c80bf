"""Answers of an earlier run: its table and its manifest, which are untrusted input; ``core.tables`` has the bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from spec_lab.core.files import Unreadable, read_json
from spec_lab.core.tables import read_table

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


def is_run(path: str) -> bool:
    """Return whether answers are read from a run, not from a file of conversations."""
    return Path(path).is_dir() or Path(path).suffix == ".parquet"


def run_facts(path: str) -> Mapping[str, Any]:
    """Return the manifest of the run whose answers are read; empty without one, and of a file of conversations.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return (read_json(folder / "manifest.json") or {}) if is_run(path) else {}


def run_answers(path: str, tokenizer: Any, weights: Collection[str]) -> list[tuple[str, Tokens, Tokens]]:
    """Return the answers of a run; those of one conversation, or to one prompt, follow each other.

    Args:
        path: folder of the run, or its table.
        tokenizer, weights: as in ``answers.read_answers``.

    Returns:
        Of each answer the name of its conversation or prompt, its prompt's tokens, and its own.

    Raises:
        OSError: there is no such file.
        ValueError: it is no table of a run; the run's target is another, or its verifier lossy; a prompt that is not
            that of its row.
    """
    file = Path(path) / REQUESTS if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: name the folder of a run that has ended, or its {REQUESTS}")
    _check_weights(file, weights)
    rows = _rows(file)
    arms = [row["arm"] for row in rows]
    arm = "baseline" if "baseline" in arms else next(iter(arms), "")
    _check_lossless(file, arm)
    answers = dict[str, list[tuple[str, Tokens, Tokens]]]()
    for row in sorted(rows, key=lambda row: row["request"]):
        if row["arm"] != arm or row["sequence"] or row["error"] or not row["tokens"]:
            continue
        prompt, name = _prompt_of(row, tokenizer, file), row[CONVERSATION] or row["name"]
        answers.setdefault(name, []).append((name, prompt, tuple(row["tokens"])))
    return [answer for of_name in answers.values() for answer in of_name]


def _check_lossless(file: Path, arm: str) -> None:
    """Refuse an arm whose verifier changes the target's distribution."""
    arms = (read_json(file.parent / "summary.json") or {}).get("arms")
    facts = arms.get(arm) if isinstance(arms, dict) else None
    if isinstance(facts, dict) and facts.get("lossless") is False:
        raise Unreadable(
            f"{file}: the answers of the arm '{arm}' are not distributed as the target's, since its verifier "
            f"({facts.get('verifier')}) is lossy: name a run with baseline=true, or with a lossless verifier"
        )


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's table."""
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
    """Return the tokens of a row's prompt, with the special tokens that the run put before it."""
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
    """Refuse a run of another target than that with one of these SHA-256s of its weights."""
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
