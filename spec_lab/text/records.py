"""Records of files: JSON Lines, also compressed with gzip, and Parquet. Every error names the file and the line or row.

Files are untrusted input. Bounds: a text has at most 10 million characters, a line at most 64 MiB, and a file at most
1 GiB, uncompressed, and 100,000 records unless a limit says how many are read; a file must be a regular file (no pipe
or device).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spec_lab.core.options import Count, WrongOption, accept
from spec_lab.core.tables import check_rows

MAX_CHARACTERS = 10_000_000
"""Maximum length of a prompt, in characters. (A tokenizer needs about 2 s and 250 MB per million.)"""
MAX_LINE = 64 * 2**20
"""Maximum length of a line of a prompts file, in bytes."""
MAX_FILE = 2**30
"""Maximum size of a prompts file, in bytes."""
MAX_RECORDS = 100_000
"""Maximum number of records of a prompts file that is read without a limit, and of blank lines. (A million short
conversations need more than a minute and 750 MB.)
"""
JSON_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
"""The names of JSON for what ``json.loads`` returns."""
BATCH = 8
"""Rows of a Parquet file that are decoded at once; few, since a dictionary's text can be short in the file and long in
every row.
"""


def records(
    path: str, limit: int | None = None, bounded: bool = True, columns: tuple[str, ...] | None = None
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield ("file:line", line, record) of each line that is not blank, up to ``limit`` of them.

    Args:
        path: the file; ``.gz`` is decompressed, and ``.parquet`` is read as a table whose rows are the records.
        limit: number of records, from the first; None yields all, which may be at most ``MAX_RECORDS``.
        bounded: whether a file of more than ``MAX_FILE`` bytes, or of more than ``MAX_RECORDS`` records, is refused.
        columns: those that are read of a Parquet file, where it has them; None reads all.

    Raises:
        OSError: the file does not exist, or is not readable.
        ValueError: a malformed line, a bad limit, a pipe or a device, or a bound exceeded.
    """
    check_limit(limit)
    if not isinstance(path, str) or not path:
        raise WrongOption(f"path must name a file, not {path!r}")
    file = Path(path)
    if not file.is_file():
        kind = "is a directory" if file.is_dir() else "is no regular file"
        kind = kind if file.exists() else "does not exist"
        raise FileNotFoundError(f"prompts file {path} {kind}; set prompts.path to a JSONL file")
    if bounded and (size := file.stat().st_size) > MAX_FILE:
        raise ValueError(f"prompts file {path} has {size} bytes, more than {MAX_FILE}; split it")
    all_records = _rows(path, limit, columns) if file.suffix == ".parquet" else _lines(path, limit, bounded)
    for count, record in enumerate(all_records, start=1):
        if bounded and limit is None and count > MAX_RECORDS:
            raise ValueError(
                f"prompts file {path} has more than {MAX_RECORDS} prompts: set prompts.limit to the number to read"
            )
        yield record


def check_limit(limit: Any) -> None:
    """Refuse a number of prompts that is not a whole number of at least 1, or None.

    Raises:
        ValueError: it is not.
    """
    accept("limit", limit, Count | None)


def _lines(path: str, limit: int | None, bounded: bool) -> Iterator[tuple[str, int, dict[str, Any]]]:
    count = total = blank = 0
    compressed = path.endswith(".gz")
    with gzip.open(path, "rb") if compressed else open(path, "rb") as stream:
        for number in range(1, 2**63):
            try:
                raw = stream.readline(MAX_LINE + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path}:{number}: gzip cannot read it ({error}); download it again") from error
            if not raw or (limit is not None and count == limit):
                return
            total += len(raw)
            if compressed and bounded and total > MAX_FILE:
                raise ValueError(f"prompts file {path} has more than {MAX_FILE} bytes uncompressed; split it")
            if len(raw) > MAX_LINE:
                raise ValueError(f"{path}:{number}: the line is longer than {MAX_LINE} bytes; shorten the prompt")
            if raw.strip():
                count += 1
                where = f"{path}:{number}"
                yield where, number, _object(raw, where)
            else:
                blank += 1
                if bounded and blank > MAX_RECORDS:
                    raise ValueError(f"prompts file {path} has more than {MAX_RECORDS} blank lines; delete them")


def _rows(path: str, limit: int | None, columns: tuple[str, ...] | None) -> Iterator[tuple[str, int, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            meta = file.metadata
            check_rows(meta, Path(path), f"prompts file {path}")
            size = sum(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
            if size > MAX_FILE:
                raise ValueError(f"prompts file {path} has {size} bytes uncompressed, more than {MAX_FILE}; split it")
            held = set(file.schema_arrow.names)
            kept = None if columns is None else [name for name in columns if name in held]
            if columns is not None and not kept:
                raise ValueError(
                    f"prompts file {path} has no column {' or '.join(columns)}; it has {', '.join(sorted(held))[:500]}"
                )
            number = decoded = 0
            for batch in file.iter_batches(BATCH, columns=kept):
                decoded += batch.nbytes
                if decoded > MAX_FILE:
                    raise ValueError(f"prompts file {path} has more than {MAX_FILE} bytes uncompressed; split it")
                for record in batch.to_pylist():
                    if limit is not None and number == limit:
                        return
                    number += 1
                    yield f"{path}, row {number}", number, record
    except (pa.ArrowException, OSError) as error:  # pyarrow raises both for a file that is damaged
        if isinstance(error, PermissionError):
            raise
        raise ValueError(
            f"prompts file {path} is no readable Parquet file ({' '.join(str(error).split())}); download it again"
        ) from error


def _kind(value: Any) -> str:
    """Return JSON's name of a value; of a Parquet file's values that JSON does not know, the type."""
    return JSON_KINDS.get(type(value), type(value).__name__)


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
        raise ValueError(
            f'{where}: a JSON {_kind(record)}, not an object; each line must be one, such as {{"prompt": "..."}}'
        )
    return record


def text_of(record: Mapping[str, Any], key: str, where: str, named: str = "") -> str:
    """Return a field that must be text, not blank, and within ``MAX_CHARACTERS``.

    Args:
        where: the file and line, for messages.
        named: what messages call the field; default its key.

    Raises:
        ValueError: it is not.
    """
    named = named or f"'{key}'"
    if key not in record:
        raise ValueError(f"{where}: the field {named} is missing; it has {', '.join(map(repr, record)) or 'no fields'}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {named} must be text, not {_kind(text)}")
    if not text.strip():
        raise ValueError(f"{where}: {named} is empty; give it some text or delete the line")
    return fitting(text, where, named)


def fitting(text: Any, where: str, named: str) -> str:
    """Return ``text`` unless it is too long, or is not text.

    Raises:
        ValueError: it is.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where}: {named} must be text, not {_kind(text)}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{where}: {named} has {len(text)} characters, more than the {MAX_CHARACTERS} that a prompt may have; "
            "shorten it"
        )
    return unicode_text(text, where, named)


def word(record: Mapping[str, Any], key: str, where: str) -> str:
    """Return a field as text; empty if it is absent or null.

    Raises:
        ValueError: half of a surrogate pair in it.
    """
    value = record.get(key)
    return "" if value is None else unicode_text(str(value), where, f"'{key}'")


def constraint_of(record: Mapping[str, Any], where: str) -> str:
    """Return the field ``constraint`` as text, a JSON object or list as JSON in ASCII; empty if absent or null.

    Raises:
        ValueError: it holds a value that JSON does not have, as Parquet files may.
    """
    constraint = record.get("constraint")
    if constraint is None or isinstance(constraint, str):
        return word(record, "constraint", where)
    try:
        return json.dumps(constraint)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: 'constraint' is no text and no JSON ({' '.join(str(error).split())})") from error


def unicode_text(text: str, where: str, named: str) -> str:
    """Return ``text`` unless JSON's escapes left half of a surrogate pair in it.

    Raises:
        ValueError: they did.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{where}: {named} holds {half}, half of a surrogate pair and no character") from error
    return text
