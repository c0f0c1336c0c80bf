"""Tokens by their bytes, and a target's text in the tokens of a draft model with another tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from spec_lab.constrain.vocabulary import token_bytes

PIECE = re.compile(rb"(?s).{256,1024}?(?<!\s)(?= )|.{1024}[\x80-\xbf]{0,3}")
"""A piece of a text that is tokenized by itself: it ends before a space that follows another character, which most
tokenizers never join into one token, or, without a space in 1024 bytes, at the end of a character."""

KEPT = 8192
"""Pieces whose tokens are kept. All texts of a batch of 64 with 16 kB each have as many pieces."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a model.

    Args:
        tokenizer: transformers'.
        size: the width of the model's logits; ids beyond the tokenizer's are padding.
        ends: the tokens that end a text.
        name: of the model, for messages.
    """

    tokenizer: Any
    size: int
    ends: frozenset[int]
    name: str

    @cached_property
    def names(self) -> dict[int, str]:
        """Every token that the model has, as its tokenizer writes it."""
        return {number: token for token, number in self.tokenizer.get_vocab().items() if number < self.size}

    @cached_property
    def own(self) -> dict[str, int]:
        """The tokens of the tokenizer's own vocabulary, without added ones."""
        added = self.tokenizer.get_added_vocab()
        return {token: number for token, number in self.tokenizer.get_vocab().items() if token not in added}

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that are no text."""
        added = self.tokenizer.added_tokens_decoder.items()
        marked = {number for number, token in added if token.special}
        return frozenset(marked | set(self.tokenizer.all_special_ids) | self.ends)

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of every token; empty for special tokens and padding.

        Raises:
            ValueError: as in ``token_bytes``.
        """
        return token_bytes(self.tokenizer, self.size, self.special)

    def spell(self, text: str) -> bytes:
        """The bytes of the tokens of a text."""
        return b"".join(self.pieces[token] for token in self.encode(text) if token < self.size)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those that the tokenizer puts around it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def begins_with_space(self) -> bool:
        """Whether the tokenizer puts a space before a text that has none, as sentencepiece does."""
        return self.spell("a").startswith(b" ")

    @property
    def prefix(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        text, whole = self.encode("a"), list(self.tokenizer("a")["input_ids"])
        return next((whole[:n] for n in range(len(whole)) if whole[n : n + len(text)] == text), [])

    def by_meaning(self, text: Callable[[int], Hashable]) -> dict[Hashable, int]:
        """The token of each meaning: of special tokens their text and role, of others what ``text`` returns.

        Of several tokens with the same bytes it is the one that the tokenizer prefers: no byte fallback.
        """
        by_meaning: dict[Hashable, int] = {}
        begin, unknown = self.tokenizer.bos_token_id, self.tokenizer.unk_token_id
        fallback = re.compile("<0x[0-9A-F]{2}>")
        for token in sorted(
            self.names, key=lambda token_id: (fallback.fullmatch(self.names[token_id]) is not None, token_id)
        ):
            if token in self.special:
                role = token == begin, token in self.ends, token == unknown
                by_meaning.setdefault((self.names[token], role), token)
            elif meaning := text(token):
                by_meaning.setdefault(meaning, token)
        return by_meaning


class ByteEncoder:
    """Tokenizes bytes: text as the tokenizer splits it, bytes that are no UTF-8 as tokens of one byte, if it has any.

    Args:
        tokens: of the tokenizer.

    Raises:
        ValueError: the tokens have no known bytes.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.spaced = tokens.begins_with_space
        self.single = {data[0]: token for data, token in tokens.by_meaning(tokens.pieces.__getitem__).items()
                       if isinstance(data, bytes) and len(data) == 1}  # fmt: skip
        self.backend = copy(tokens.tokenizer.backend_tokenizer)
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True  # the text "</s>", spelled by ordinary tokens, ends nothing

    def __call__(self, data: bytes) -> list[int]:
        """Return the tokens of a text; a tokenizer that puts a space before a text gets it without its first one."""
        ids: list[int] = []
        for part in re.split("([\udc80-\udcff])", data.decode("utf-8", "surrogateescape")):
            if "\udc80" <= part[:1] <= "\udcff":
                ids += [self.single[byte] for byte in part.encode("utf-8", "surrogateescape") if byte in self.single]
            elif text := part.removeprefix(" ") if self.spaced else part:
                ids += self.backend.encode(text, add_special_tokens=False).ids
        return ids


class Retokenized:
    """Tokens that a draft model reads: the text of the target's tokens, as the draft model's own tokenizer splits it.

    1. It begins with the tokens that the draft model's tokenizer puts before a text; the target's own beginning, and
       the space that its tokenizer puts before a text, are left out.
    2. Special tokens separate texts. One that both share is read as such, others are left out.
    3. A text is split into pieces (``PIECE``), of which each is tokenized by itself. So in each step
       only the last piece of a long text is tokenized anew, and earlier tokens never change.
    4. Bytes that are no UTF-8, of an unfinished character at the end above all, are read as the draft model's tokens of
       one byte, and left out if it has none.

    Args:
        special: shared special tokens of the target, in the draft model's ids.

    Raises:
        ValueError: the tokens of one have no known bytes.
    """

    def __init__(self, target: Tokens, draft: Tokens, special: Mapping[int, int]) -> None:
        self.pieces, self.special, self.shared = target.pieces, target.special, special
        self.begin, self.target_spaced = target.tokenizer.bos_token_id, target.begins_with_space
        self.prefix = draft.prefix
        self._tokens = lru_cache(KEPT)(ByteEncoder(draft))

    def __call__(self, tokens: list[int]) -> list[int]:
        """See ``SameTokens.read``."""
        ids = list(self.prefix)
        start = int(bool(tokens) and tokens[0] == self.begin)
        spaced = self.target_spaced
        while start < len(tokens):
            end = next((n for n in range(start, len(tokens)) if tokens[n] in self.special), len(tokens))
            data = b"".join([self.pieces[token] for token in tokens[start:end]])
            if data:
                data, spaced = data.removeprefix(b" ") if spaced else data, False
            at = 0
            while piece := PIECE.match(data, at):
                ids += self._tokens(piece[0])
                at = piece.end()
            ids += self._tokens(data[at:])
            if end < len(tokens) and tokens[end] in self.shared:
                ids.append(self.shared[tokens[end]])
            start = end + 1
        return ids
