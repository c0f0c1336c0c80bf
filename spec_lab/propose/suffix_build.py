"""Build a store of text on disk (``suffix_store``), in bounded memory.

1. The tokens are written as they come, and the positions after each token are counted.
2. The positions are distributed over buckets, each a range of last tokens with about ``BUCKET`` positions.
3. Each bucket is sorted by itself. A last token with more positions than that is a bucket alone.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from spec_lab.core.files import write_json
from spec_lab.propose.suffix_store import (
    CONTEXT,
    FIRST,
    HASHED,
    ORDER,
    STORE,
    TOKENS,
    file_hash,
    order_dtype,
    token_dtype,
    vocabulary_hash,
)

BUCKET = 2**21
"""Positions of a bucket. (Sorting one takes about 80 bytes each.)"""

CHUNK = 2**20
"""Tokens that are written at once, or positions that are distributed."""

TEXTS = 256
"""Texts that are tokenised at once."""


class BuiltStore(NamedTuple):
    """What was written."""

    documents: int
    tokens: int
    size: int
    """In bytes."""


def build(texts: Iterable[str], tokenizer: Any, out: Path) -> BuiltStore:
    """Build a store of texts.

    Args:
        texts: the documents.
        tokenizer: the target's.
        out: a folder that does not exist, or is empty. On errors nothing is left in it.

    Raises:
        OSError: ``out`` is not empty, or cannot be written.
        ValueError: no text with two tokens; a text that the tokenizer cannot encode; what ``texts`` raises.
    """
    vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    return build_tokens(encoded(texts, tokenizer), vocabulary, vocabulary_hash(tokenizer), out)


def encoded(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of each text, without special tokens at the beginning and the end."""

    def encode(batch: list[str]) -> list[list[int]]:
        try:
            found: list[list[int]] = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # tokenizers raises plain Exceptions
            raise ValueError(f"a text of the corpus cannot be encoded by the tokenizer ({error})") from error
        return found

    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == TEXTS:
            yield from encode(batch)
            batch = []
    if batch:
        yield from encode(batch)


def build_tokens(documents: Iterable[Sequence[int]], vocabulary: int, tokenizer: str, out: Path) -> BuiltStore:
    """Build a store of documents that are tokens already.

    Args:
        documents: with tokens below ``vocabulary``.
        vocabulary: number of tokens; the separator's id.
        tokenizer: ``vocabulary_hash`` of the tokenizer.
        out: as of ``build``.

    Raises:
        OSError, ValueError: as of ``build``.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        what = "is a link" if out.is_symlink() else "is not empty" if out.is_dir() else "is a file"
        raise FileExistsError(f"{out} {what}: name a folder that does not exist, or is empty")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out} cannot be made: {out.parent} is no folder")
    part = out.with_name(f".{out.name[:200]}.{secrets.token_hex(8)}.tmp")
    part.mkdir()
    try:
        with open(part / TOKENS, "wb") as stream:
            total, number, counts = _write_tokens(stream, documents, vocabulary)
        if not counts.sum():
            raise ValueError("the corpus has no text of two tokens or more")
        first = np.concatenate([[0], np.cumsum(counts)])
        np.save(part / FIRST, first)
        _write_order(part, first, vocabulary, total)
        hashes = {name: file_hash(part / name) for name in HASHED}
        write_json(part / STORE, {
            "format": 1, "vocabulary": vocabulary, "tokenizer": tokenizer, "context": CONTEXT, "tokens": total,
            "documents": number, "positions": int(first[-1]), "sha256": hashes,
        })  # fmt: skip
        size = sum(file.stat().st_size for file in part.iterdir())
        part.replace(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return BuiltStore(number, total, size)


def _write_tokens(stream: BinaryIO, documents: Iterable[Sequence[int]], vocabulary: int) -> tuple[int, int, np.ndarray]:
    """Write ``tokens.npy``; return the number of tokens and of documents, and the positions after each token."""
    dtype = token_dtype(vocabulary)
    _write_header(stream, dtype, 0)  # of the same size for every length
    counts = np.zeros(vocabulary, dtype=np.int64)
    total = number = 0
    held: list[int] = [vocabulary]  # the separator before the first document

    def write() -> int:
        chunk = np.array(held, dtype=dtype)
        before = chunk[:-1]
        nonlocal counts
        counts += np.bincount(before[(before != vocabulary) & (chunk[1:] != vocabulary)], minlength=vocabulary)
        stream.write(chunk.tobytes())
        return len(chunk)

    for document in documents:
        if document:
            held += document
            held.append(vocabulary)
            number += 1
        if len(held) > CHUNK:
            total += write()
            held = []
    total += write() if held else 0
    stream.seek(0)
    _write_header(stream, dtype, total)
    return total, number, counts


def _write_header(stream: BinaryIO, dtype: np.dtype[Any], length: int) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    npy.write_array_header_1_0(stream, header)


def _write_order(folder: Path, first: np.ndarray, separator: int, total: int) -> None:
    """Write ``order.npy``: distribute the positions over buckets, and sort each."""
    tokens = np.load(folder / TOKENS, mmap_mode="r", allow_pickle=False)
    order = npy.open_memmap(folder / ORDER, mode="w+", dtype=order_dtype(total), shape=(int(first[-1]),))
    bucket_of = np.unique(first[:-1] // BUCKET, return_inverse=True)[1]  # of each last token
    begins = first[np.unique(bucket_of, return_index=True)[1]]
    filled = begins.copy()
    for start in range(1, total, CHUNK):
        part = np.asarray(tokens[start - 1 : start + CHUNK])
        places = start + np.flatnonzero((part[:-1] != separator) & (part[1:] != separator))
        buckets = bucket_of[part[places - start]]
        places = places[np.argsort(buckets, kind="stable")]
        for bucket, count in enumerate(np.bincount(buckets, minlength=len(begins)).tolist()):
            order[filled[bucket] : filled[bucket] + count] = places[:count]
            filled[bucket] += count
            places = places[count:]
    for low, high in zip(begins.tolist(), [*begins[1:].tolist(), int(first[-1])], strict=True):
        order[low:high] = sorted_positions(tokens, order[low:high].astype(np.int64), separator)
    order.flush()


def sorted_positions(tokens: np.ndarray, positions: np.ndarray, separator: int) -> np.ndarray:
    """Return positions sorted by the up to ``CONTEXT`` reversed tokens before them, then as given.

    Args:
        tokens: ``[n]``, beginning with the separator.
        positions: ``[m]`` int64.
        separator: ends contexts; larger than all tokens.
    """
    bits = separator.bit_length()
    keys: list[np.ndarray] = []  # several tokens in one number
    inside = np.ones(len(positions), dtype=bool)
    for back in range(1, CONTEXT + 1):
        token = tokens[np.maximum(positions - back, 0)].astype(np.uint64)
        inside &= token != separator
        token[~inside] = separator
        if (back - 1) % (64 // bits):
            keys[-1] = keys[-1] << np.uint64(bits) | token
        else:
            keys.append(token)
    return positions[np.lexsort(keys[::-1])]
