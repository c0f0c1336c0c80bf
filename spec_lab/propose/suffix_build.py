"""Build a store of text on disk (``suffix_store``), in bounded memory.

1. The tokens are written as they come, and the positions after each token are counted.
2. The positions are distributed over buckets, each a range of last tokens with at most twice ``BUCKET`` positions. A
   last token with more positions than ``BUCKET`` is a bucket alone.
3. Such a bucket is distributed again by the token before the last one, and so on; the others are sorted in memory.

In memory are about 100 bytes for each position of a bucket, a chunk of tokens, and the pages of ``tokens.npy`` that the
operating system keeps, which it takes back when it needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from spec_lab.core.files import file_hash, filling, write_json
from spec_lab.propose.suffix_store import (
    CONTEXT,
    FIRST,
    HASHED,
    ORDER,
    STORE,
    TOKENS,
    order_dtype,
    token_dtype,
    vocabulary_hash,
)

BUCKET = 2**21
"""Positions of a bucket. (Sorting one takes about 100 bytes each.)"""

CHUNK = 2**20
"""Tokens that are written at once, or positions that are distributed."""

TEXTS, CHARACTERS = 256, 2**20
"""Texts that are tokenised at once, fewer where they are long."""


class BuiltStore(NamedTuple):
    """Numbers of documents and tokens of a store that was written, and its size."""

    documents: int
    tokens: int
    size: int
    """In bytes."""


def build(texts: Iterable[str], tokenizer: Any, out: Path) -> BuiltStore:
    """Build a store of texts.

    Args:
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
            encodings: list[list[int]] = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # tokenizers raises plain Exceptions
            raise ValueError(f"a text of the corpus cannot be encoded by the tokenizer ({error})") from error
        return encodings

    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if len(batch) == TEXTS or length >= CHARACTERS:
            yield from encode(batch)
            batch, length = [], 0
    if batch:
        yield from encode(batch)


def build_tokens(documents: Iterable[Sequence[int]], vocabulary: int, tokenizer: str, out: Path) -> BuiltStore:
    """Build a store of documents that are tokens already.

    Args:
        documents: with tokens below ``vocabulary``.
        vocabulary: number of tokens; the separator's id.
        tokenizer: ``vocabulary_hash`` of the tokenizer.
        out: as in ``build``.

    Raises:
        OSError, ValueError: as in ``build``.
    """
    with filling(out) as part:
        with open(part / TOKENS, "wb") as stream:
            total, number, counts = _write_tokens(stream, documents, vocabulary)
        if not counts.sum():
            raise ValueError("the corpus has no text of two tokens or more")
        first = np.concatenate([[0], np.cumsum(counts)])
        with open(part / FIRST, "wb") as stream:
            _write_header(stream, first.dtype, len(first))
            stream.write(first.data)  # unlike np.save, with the cause where it fails
        _write_order(part, counts, vocabulary, total)
        hashes = {name: file_hash(part / name) for name in HASHED}
        write_json(part / STORE, {
            "format": 1, "vocabulary": vocabulary, "tokenizer": tokenizer, "context": CONTEXT, "tokens": total,
            "documents": number, "positions": int(first[-1]), "sha256": hashes,
        })  # fmt: skip
        size = sum(file.stat().st_size for file in part.iterdir())
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


class _Positions(NamedTuple):
    """Positions in a file, after its header. (A memory map would count what it wrote as memory in use.)"""

    stream: BinaryIO
    dtype: np.dtype[Any]
    header: int = 0

    def read(self, low: int, high: int) -> np.ndarray:
        size = self.dtype.itemsize
        self.stream.seek(self.header + low * size)
        return np.frombuffer(self.stream.read((high - low) * size), dtype=self.dtype).astype(np.int64)

    def write(self, low: int, positions: np.ndarray) -> None:
        self.stream.seek(self.header + low * self.dtype.itemsize)
        self.stream.write(positions.astype(self.dtype).tobytes())


class _Sorter(NamedTuple):
    """Sorts the positions of ``order.npy``.

    Args:
        tokens: memory-mapped.
        order, spare: files of positions; the second is for temporary use.
        separator: the id.
    """

    tokens: np.ndarray
    order: _Positions
    spare: _Positions
    separator: int

    def sort(self, low: int, high: int, back: int) -> None:
        """Sort the positions of these ranks, which share ``back`` last tokens and are in the order of the text."""
        if high - low <= 2 * BUCKET:
            self.order.write(low, sorted_positions(self.tokens, self.order.read(low, high), self.separator))
            return
        if back == CONTEXT:
            return
        counts = np.zeros(self.separator + 1, dtype=np.int64)
        for start in range(low, high, CHUNK):
            positions = self.order.read(start, min(start + CHUNK, high))
            self.spare.write(start - low, positions)
            counts += np.bincount(self.tokens[positions - back - 1], minlength=len(counts))

        def parts() -> Iterator[np.ndarray]:
            for start in range(0, high - low, CHUNK):
                yield self.spare.read(start, min(start + CHUNK, high - low))

        self.distribute(parts(), low, counts, back + 1)

    def distribute(self, parts: Iterable[np.ndarray], low: int, counts: np.ndarray, back: int) -> None:
        """Write positions in buckets by the token ``back`` before them, from the rank ``low`` on, and sort each.

        Args:
            parts: of the positions, in the order of the text.
            low: a rank.
            counts: the number of positions by this token.
            back: the positions share all later tokens.
        """
        bucket_of = buckets(counts)
        sizes = np.bincount(bucket_of, weights=counts).astype(np.int64)
        ends = low + np.cumsum(sizes)
        filled = ends - sizes
        for positions in parts:
            bucket = bucket_of[self.tokens[positions - back]]
            positions = positions[np.argsort(bucket, kind="stable")]
            for number, count in enumerate(np.bincount(bucket, minlength=len(sizes)).tolist()):
                if count:
                    self.order.write(int(filled[number]), positions[:count])
                    positions = positions[count:]
            filled += np.bincount(bucket, minlength=len(sizes))
        ended = bucket_of[self.separator] if counts[self.separator] > BUCKET else None  # contexts: nothing more to sort
        for number, (size, end) in enumerate(zip(sizes.tolist(), ends.tolist(), strict=True)):
            if size and number != ended:
                self.sort(end - size, end, back)


def buckets(counts: np.ndarray) -> np.ndarray:
    """Return the bucket of each token: neighbours with at most twice ``BUCKET`` positions, or one with more than it.

    Args:
        counts: positions by token.
    """
    large = counts > BUCKET
    window = (np.cumsum(counts) - counts) // BUCKET
    begins = (window[1:] != window[:-1]) | large[1:] | large[:-1]
    return np.concatenate([[0], np.cumsum(begins)])


def _write_order(folder: Path, counts: np.ndarray, separator: int, total: int) -> None:
    """Write ``order.npy``.

    Args:
        counts: number of positions after each token.
        separator: the id.
        total: number of tokens.
    """
    tokens = np.load(folder / TOKENS, mmap_mode="r", allow_pickle=False)
    dtype = order_dtype(total)
    with open(folder / ORDER, "w+b") as stream, TemporaryFile(dir=folder) as spare:
        _write_header(stream, dtype, int(counts.sum()))
        order = _Positions(stream, dtype, stream.tell())

        def parts() -> Iterator[np.ndarray]:
            for start in range(1, total, CHUNK):
                part = np.asarray(tokens[start - 1 : start + CHUNK])
                yield start + np.flatnonzero((part[:-1] != separator) & (part[1:] != separator))

        sorter = _Sorter(tokens, order, _Positions(spare, dtype), separator)
        sorter.distribute(parts(), 0, np.append(counts, 0), 1)


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
