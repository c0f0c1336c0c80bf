"""A store of text on disk in which contexts are looked up: memory-mapped, so that it may be larger than memory.

A folder with four files, which ``suffix_build.build`` writes:

- ``tokens.npy`` ``[n]``, uint16 or uint32: the documents, with the separator (the size of the vocabulary) before each
  and at the end.
- ``order.npy`` ``[m]``, uint32 or uint64: the positions that have a context, sorted by the up to ``CONTEXT`` reversed
  tokens before them (which end at a separator), then by position.
- ``first.npy`` ``[vocabulary + 1]``, int64: where the positions after each last token begin in ``order``.
- ``store.json``: ``FACTS``.

Source: REST (2311.08252, section 3.1), whose suffix array is searched from the first token of the context on; here the
search continues with one more preceding token, so that one search finds the matches of every length.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np

from spec_lab.core.files import expect, file_hash, read_json
from spec_lab.core.options import WrongOption, brief
from spec_lab.models.target import Target
from spec_lab.propose.suffix_search import Level, around, levels, until

CONTEXT = 16
"""Number of preceding tokens by which positions are sorted: the longest match."""

TOKENS, ORDER, FIRST, STORE = "tokens.npy", "order.npy", "first.npy", "store.json"
HASHED = (TOKENS, ORDER, FIRST)
EIGHT = Struct("<Q")

FEW = 8
"""Continuations that are read one by one, which is faster for so many."""

CHUNK = 2**22
"""Entries, or bytes, that are checked at once."""

FACTS: dict[str, Any] = {
    "format": {1}, "vocabulary": int, "tokenizer": str, "context": {CONTEXT}, "tokens": int, "documents": int,
    "positions": int, "sha256": dict.fromkeys(HASHED, str),
}  # fmt: skip
"""Fields of ``store.json``; ``tokenizer`` is the hash of its vocabulary, ``sha256`` those of the files."""


@dataclass(eq=False)
class TokenStore:
    """An open store.

    Args:
        tokens, order, first: its arrays, memory-mapped.
        longest: longest match that is looked up, at most ``CONTEXT``.
        facts: what the manifest records.
        sha256: of ``store.json``, which holds the hashes of the arrays.
    """

    tokens: np.ndarray
    order: np.ndarray
    first: np.ndarray
    longest: int
    facts: dict[str, Any]
    sha256: str

    def __post_init__(self) -> None:
        # Single numbers are read faster through memoryviews.
        self._tokens, self._order, self._first = self.tokens.data, self.order.data, self.first.data
        self._bytes = self._tokens.cast("B")  # from the last to the first they compare as reversed tokens do
        self._size = self.tokens.itemsize
        self.end = len(self.first) - 1  # the separator

    @staticmethod
    def open(path: str, target: Target, longest: int = CONTEXT) -> TokenStore:
        """Open a store after reading and checking all of it.

        Args:
            target: whose tokens it must hold.
            longest: longest match that is looked up.

        Raises:
            OSError: a file is missing or cannot be opened.
            ValueError: a damaged store, or one of another tokenizer; names the file and what is wrong.
        """
        if not isinstance(path, str) or not path:
            raise WrongOption(f"store must be the folder of a store, not {brief(path)}")
        folder = Path(path)
        facts = read_json(folder / STORE)
        if facts is None:
            raise FileNotFoundError(f"proposer.store={path} holds no {STORE}: build a store with spec-lab index")
        try:
            expect(facts, FACTS, "")
        except ValueError as error:
            raise ValueError(f"{folder / STORE}: {error}; build the store again with spec-lab index") from error
        if target.tokenizer is None or facts["tokenizer"] != vocabulary_hash(target.tokenizer):
            raise WrongOption(
                f"store={path} was built with another tokenizer than that of target '{target.name}': build "
                f"one with spec-lab index CORPUS OUT --tokenizer {target.name}"
            )
        tokens, order, first = (_array(folder / name, facts["sha256"][name]) for name in HASHED)
        _check(folder, facts, tokens, order, first, target.vocabulary)
        kept = {name: facts[name] for name in ("tokens", "documents", "positions", "vocabulary")}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return TokenStore(tokens, order, first, min(longest, CONTEXT), kept, digest)

    def matches(self, context: Sequence[int], max_matches: int, worth: Callable[[int], bool]) -> Iterator[Level]:
        """As in ``SuffixSource``."""
        separator = self.end
        query = context[: -self.longest - 1 : -1]
        if not query or query[0] >= separator:
            return iter(())
        if max(query) >= separator:
            query = query[: next(at for at, token in enumerate(query) if token >= separator)]
        low, high = self._first[query[0]], self._first[query[0] + 1]
        order, text, size, length = self._order, self._bytes, self._size, len(query)
        wanted = array("I" if size == 4 else "H", query[::-1]).tobytes()[::-1]
        number = int.from_bytes(wanted, "big")
        last = b"\xff" * (2 * size)  # larger than what precedes any position
        point = self._rank(low, high, wanted[size:] + last)

        def match(position: int, max_length: int) -> int:
            have = min(position, length)
            preceding = int.from_bytes(text[(position - have) * size : position * size], "little")
            bits = (preceding ^ number >> 8 * size * (length - have)).bit_length()
            return min(max_length, have - -(-bits // (8 * size)))

        def sample(length: int, first: int, second: int, count: int) -> list[int]:
            start, end = low, high
            if length > 1:
                prefix = wanted[size : length * size]
                start, end = self._rank(low, point, prefix), self._rank(point, high, prefix + last)
            return [order[rank] for rank in around(start, point - first, point + second, end, count)]

        left = match(order[point - 1], length) if point > low else 0
        right = match(order[point], length) if point < high else 0
        if not worth(max(left, right)):
            return iter(())
        before = order[max(low, point - max_matches - 1) : point].tolist()[::-1]
        after = order[point : min(high, point + max_matches + 1)].tolist()
        return levels(before, after, left, right, max_matches, worth, match, sample)

    def _rank(self, low: int, high: int, wanted: bytes) -> int:
        """Return where the positions of a range of one last token end whose bytes before it are smaller."""
        order, text, size, length = self._order, self._bytes, self._size, len(wanted)

        def near(rank: int) -> int:
            end = size * (order[rank] - 1) - 8
            return unpack(text, end)[0] if end >= 0 else from_bytes(text[: end + 8], "little") << -8 * end

        def preceding(rank: int) -> bytes:
            end = size * (order[rank] - 1)
            return text[end - length if end > length else 0 : end].tobytes()[::-1]

        # 1. By the eight bytes before the last token; most contexts end here. 2. By all.
        unpack, from_bytes = EIGHT.unpack_from, int.from_bytes
        number = from_bytes(wanted[:8], "big") << max(0, 64 - 8 * length)
        low += bisect_left(range(low, high), number, key=near)
        if length <= 8 or low == high or near(low) != number:
            return low
        high = low + bisect_right(range(low, high), number, key=near)
        return low + bisect_left(range(low, high), wanted, key=preceding)

    def following(self, places: Sequence[int], offset: int) -> list[int]:
        """As in ``SuffixSource``."""
        tokens = self._tokens
        return [tokens[position + offset] for position in places]

    def continuations(self, places: Sequence[int], count: int) -> list[list[int]]:
        """As in ``SuffixSource``."""
        tokens, separator = self._tokens, self.end
        if len(places) <= FEW:
            return [until(tokens[position : position + count].tolist(), separator) for position in places]
        at = np.minimum(np.array(places)[:, None] + np.arange(count), len(tokens) - 1)
        return [until(row, separator) for row in self.tokens[at].tolist()]


def vocabulary_hash(tokenizer: Any) -> str:
    """Return the SHA-256 over the tokens of a tokenizer and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _array(file: Path, sha256: str) -> np.ndarray:
    """Return the memory-mapped array of a file with this hash."""
    if file_hash(file) != sha256:
        raise ValueError(f"{file} is damaged: its SHA-256 is not that of {STORE}; build the store again")
    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (BadZipFile, EOFError, MemoryError, OSError, OverflowError, SyntaxError, TokenError, ValueError) as error:
        raise ValueError(f"{file} is no array of numbers ({error}); build the store again") from error


def _check(
    folder: Path, facts: dict[str, Any], tokens: np.ndarray, order: np.ndarray, first: np.ndarray, vocabulary: int
) -> None:
    """Check that the arrays are those of a store, and its tokens those of a target."""
    separator, count = facts["vocabulary"], facts["positions"]
    expected = {
        TOKENS: (tokens, (facts["tokens"],), token_dtype(separator)),
        ORDER: (order, (count,), order_dtype(facts["tokens"])),
        FIRST: (first, (separator + 1,), np.dtype(np.int64)),
    }
    for name, (data, shape, dtype) in expected.items():
        if data.shape != shape or data.dtype != dtype:
            raise ValueError(
                f"{folder / name} must have the shape {shape} and the type {dtype}, not {data.shape} and {data.dtype}"
            )
    if not len(tokens) or tokens[0] != separator or tokens[-1] != separator:
        raise ValueError(f"{folder / TOKENS} must begin and end with the separator {separator}")
    if first[0] != 0 or first[-1] != count or (np.diff(first) < 0).any():
        raise ValueError(f"{folder / FIRST} must rise from 0 to {count}")
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        real = part[part != separator]
        if len(real) and real.max() >= min(vocabulary, separator):
            raise ValueError(f"{folder / TOKENS} holds the token {real.max()}, but the target has {vocabulary} tokens")
    for start in range(0, count, CHUNK):
        part = order[start : start + CHUNK]
        if part.min() < 1 or part.max() >= len(tokens):
            raise ValueError(f"{folder / ORDER} holds positions outside of the {len(tokens)} tokens")


def token_dtype(separator: int) -> np.dtype[Any]:
    """Return the type of ``tokens.npy``, which holds the separator too."""
    return np.dtype(np.uint16 if separator < 2**16 else np.uint32)


def order_dtype(tokens: int) -> np.dtype[Any]:
    """Return the type of ``order.npy``."""
    return np.dtype(np.uint32 if tokens < 2**32 else np.uint64)
