"""Draft models whose tokenizer shares few tokens with the target's: what they draft is translated as text.

Source: string-level exact match (SLEM), algorithm 2 of "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies" (2502.05202), as transformers' universal assisted decoding.

1. The draft model reads the text so far in its own tokens (``Retokenized``), and drafts its likeliest tokens.
2. The bytes of each path are split by the target's tokenizer behind the last tokens of the text so far. If one of its
   tokens ends where that text ends, the tokens after it are drafted. If one would cross that place, as "there" after
   "th", the drafted bytes are split by themselves.
3. The paths are merged into one tree of the target's tokens, which are deterministic drafts: each is accepted if the
   target emits it. The output has the target's distribution whatever the tokenizers do, and a path that the target
   splits otherwise costs acceptance only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from spec_lab.drafters.draft_model.retokenized import ByteEncoder, Retokenized, Tokens
from spec_lab.drafters.draft_model.vocabularies import SameTokens, shared_pairs, tokens_of
from spec_lab.models.target import Target

BEFORE = 8
"""Number of the last tokens of a text behind which drafted bytes are split."""
APART = b"\n"
"""A text that no tokenizer joins with a word after it; those that put a space before a text put it before this one."""


@dataclass(frozen=True, eq=False)
class StringTokens(SameTokens):
    """Translates between the tokens of a target and those of a draft model by their bytes. See ``SameTokens``.

    Args:
        reading: the text of the target's tokens in the draft model's.
        encode: the target's tokens of a text.
        target, draft: the bytes of every token, empty for special ones.
        special: shared special tokens of the draft model, in the target's ids.
    """

    reading: Callable[[list[int]], list[int]]
    encode: Callable[[bytes], list[int]]
    target: Sequence[bytes]
    draft: Sequence[bytes]
    special: Mapping[int, int]

    same = False

    @property
    def facts(self) -> dict[str, Any]:
        """See ``SameTokens``."""
        return {"vocabularies": "strings"}

    def read(self, tokens: list[int]) -> list[int]:
        """See ``SameTokens``."""
        return self.reading(tokens)

    def write(self, text: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Return the target's tokens, after those of a text, of what the draft model drafted below it.

        What follows a special token is left out, as is a character that is not complete.
        """
        end = next((index for index, token in enumerate(drafted) if not self.draft[token]), len(drafted))
        before = b"".join(self.target[token] for token in text[-BEFORE:])
        data = _valid(before, b"".join(self.draft[token] for token in drafted[:end]))
        shared = [self.special[token] for token in drafted[end : end + 1] if token in self.special]
        if not data:
            return shared
        for above in (before, APART, b""):
            tokens = self._after(above, data)
            if tokens:
                return tokens + shared
        return []

    def _after(self, above: bytes, data: bytes) -> list[int]:
        """The tokens of bytes behind others; none if a token is of both."""
        tokens = self.encode(above + data)
        ends = list(accumulate((len(self.target[token]) for token in tokens), initial=0))
        space = ends[-1] - len(above) - len(data)  # the tokenizer may have put one before the whole text
        if len(above) + space not in ends:
            return []
        after = tokens[ends.index(len(above) + space) :]
        return after if b"".join(self.target[token] for token in after) == data else []

    def toy(self, vocabulary: int) -> StringTokens:
        """Two tokenizers that take the longest token that fits, between different texts of two and three letters."""
        target, draft = (_toy_tokens(order, vocabulary) for order in ("abc", "bca"))

        def read(tokens: list[int]) -> list[int]:
            return _longest(draft, b"".join(target[token] for token in tokens))

        return StringTokens(read, lambda data: _longest(target, data), target, draft, {})


def strings(target: Target, draft: Tokens) -> StringTokens:
    """Return the translation between the tokens of a target and of a draft model.

    Raises:
        ValueError: the target has no tokenizer; the tokens of one have no known bytes.
    """
    option = "proposer.vocabularies=strings"
    mine = tokens_of(target, option)
    pairs = shared_pairs(mine, draft, False, option)
    special = {token: other for token, other in pairs if token in mine.special}
    returned = {other: token for token, other in special.items()}
    return StringTokens(Retokenized(mine, draft, special), ByteEncoder(mine), mine.pieces, draft.pieces, returned)


def _valid(above: bytes, data: bytes) -> bytes:
    """Bytes up to the first that is no UTF-8 behind those above, or of a character at the end that is not complete."""
    while True:
        try:
            (above + data).decode()
            return data
        except UnicodeDecodeError as error:
            if error.start >= len(above):
                return data[: error.start - len(above)]
            above = above[error.start + 1 :]


def _toy_tokens(letters: str, vocabulary: int) -> list[bytes]:
    """The letters as tokens, then texts of two and more."""
    longer = [(letters * 2)[start : start + 2 + start // 3].encode() for start in range(vocabulary)]
    return [*(letter.encode() for letter in letters), *longer][:vocabulary]


def _longest(tokens: Sequence[bytes], data: bytes) -> list[int]:
    """Split a text into the longest tokens that fit, from its beginning on; bytes without a token are left out."""
    ids, start = list[int](), 0
    while start < len(data):
        fits = [token for token, piece in enumerate(tokens) if piece and data.startswith(piece, start)]
        best = max(fits, key=lambda token: len(tokens[token]), default=None)
        start += 1 if best is None else len(tokens[best])
        ids += [] if best is None else [best]
    return ids
