"""The target's vocabulary as constraints read it: the bytes of every token, and the tokens that end a text."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

from spec_lab.models.target import Target

MARK = b"\xff"
"""Byte that precedes the text of special tokens in llguidance: a token whose bytes begin with it is special there, and
llguidance does not return its bytes. No UTF-8 text has this byte, but a model may emit its token."""


def _alphabet() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


ALPHABET = _alphabet()
"""The byte of each character in which byte-level BPE spells tokens (GPT-2's table)."""


@runtime_checkable
class FastTokenizer(Protocol):
    """A tokenizer of transformers that is backed by the package tokenizers."""

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the package tokenizers."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token, added ones included."""
        ...


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a target.

    Args:
        size: V, the width of the target's logits; ids beyond the tokenizer's are padding.
        ends: tokens that end a text.
        engine: llguidance's tokenizer.
        marked: the tokens whose bytes the engine does not return (``_marked``).
    """

    size: int
    ends: tuple[int, ...]
    engine: LLTokenizer
    marked: Mapping[int, bytes] = field(default_factory=dict)

    @staticmethod
    def of(target: Target) -> Vocabulary:
        """Return the target's vocabulary.

        Raises:
            ValueError: the target has no fast tokenizer, or one of a kind that llguidance does not support; no token
                that ends a text, or more tokens than logits.
        """
        tokenizer, ends = _fast(target, "constraints require"), sorted(target.ends)
        token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
        if largest >= target.vocabulary:
            raise ValueError(
                f"the tokenizer of the target {target.name} has the token {token!r} with the id {largest}, but the "
                f"model has {target.vocabulary} tokens, from 0, and token masks must fit both: remove the added "
                "tokens that the model does not have from the tokenizer, or resize the model's embeddings to hold "
                "them (transformers' resize_token_embeddings)"
            )
        if not ends:
            raise ValueError(f"the target {target.name} has no eos_token_id, so no constrained text could end")
        try:
            engine = from_tokenizer(tokenizer, n_vocab=target.vocabulary, eos_token=ends)
        except ValueError as error:
            raise ValueError(
                f"the target {target.name} cannot be constrained: its tokenizer has the decoder {_decoder(tokenizer)}, "
                "and the constraint engine llguidance supports ByteLevel and ByteFallback; leave out constraint, "
                "token_healing, banned_strings and min_new_tokens"
            ) from error
        return Vocabulary(target.vocabulary, tuple(ends), engine, _marked(tokenizer))

    @staticmethod
    def plain(tokens: Sequence[bytes], end: int) -> Vocabulary:
        """Return a vocabulary given by its tokens' bytes, for toys and tests; ``end`` is the token that ends a text."""
        from llguidance import TokenizerWrapper

        engine = LLTokenizer(TokenizerWrapper(_Plain(tokens, end)), n_vocab=len(tokens), slices=[])
        marked = {token: data for token, data in enumerate(tokens) if data.startswith(MARK)}
        return Vocabulary(len(tokens), (end,), engine, marked)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text by the tokenizer."""
        return list(self.engine.tokenize_str(text))

    @cached_property
    def bytes(self) -> list[bytes]:
        """The bytes of every token; empty for special tokens and padding."""
        return _bytes(self.engine, self.size, self.ends, self.marked)


def text_bytes(target: Target) -> list[bytes]:
    """Return the bytes of every token of a target, for its text. No constraint engine is built for it.

    Raises:
        ValueError: the target has no fast tokenizer, or as in ``token_bytes``.
    """
    return token_bytes(_fast(target, "text requires"), target.vocabulary, target.ends)


def _fast(target: Target, what: str) -> FastTokenizer:
    if not isinstance(target.tokenizer, FastTokenizer):
        raise ValueError(f"the target {target.name} has no fast tokenizer, which {what} to read its tokens")
    return target.tokenizer


def token_bytes(tokenizer: FastTokenizer, size: int, special: Container[int]) -> list[bytes]:
    """Return the bytes of every token below ``size``; empty for special tokens and padding.

    Args:
        tokenizer: transformers'.
        size: number of tokens; ids beyond the tokenizer's are padding.
        special: tokens without text, besides those that the tokenizer marks as special.

    Raises:
        ValueError: a tokenizer of a kind whose tokens have no bytes of their own, such as WordPiece.
    """
    kinds, words = _decoder(tokenizer), tokenizer.get_vocab()
    if kinds == "Fuse":  # texts are tokens in a row
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        data = [b""] * size
        for word, token in words.items():
            if token < size and token not in special and not (token in added and added[token].special):
                data[token] = word.encode()
        return data
    largest = max(words.values(), default=-1)
    try:
        engine = from_tokenizer(tokenizer, n_vocab=max(size, largest + 1), slices=[])
    except ValueError as error:
        raise ValueError(
            f"the bytes of the tokens are not known: the tokenizer has the decoder {kinds}; supported are ByteLevel, "
            "ByteFallback and Fuse"
        ) from error
    return _bytes(engine, size, special, _marked(tokenizer))


def _decoder(tokenizer: FastTokenizer) -> str:
    """The kind of a tokenizer's decoder; of several in a row all kinds, each once."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return "none"
    made = json.loads(decoder.__getstate__())
    kinds = [part["type"] for part in made.get("decoders", [made])]
    return ", ".join(dict.fromkeys(kinds)) or "none"


def _bytes(engine: LLTokenizer, size: int, special: Container[int], marked: Mapping[int, bytes]) -> list[bytes]:
    """Return the bytes of tokens, as in ``token_bytes``; ``marked`` as in ``_marked``."""
    empty = [token in special or (engine.is_special_token(token) and token not in marked) for token in range(size)]
    return [b"" if empty[token] else marked.get(token) or engine.decode_bytes([token]) for token in range(size)]


def _marked(tokenizer: FastTokenizer) -> dict[int, bytes]:
    """Return the tokens whose bytes begin with ``MARK``, with their bytes."""
    added, kinds = tokenizer.backend_tokenizer.get_added_tokens_decoder(), _decoder(tokenizer)
    special = {token for token, entry in added.items() if entry.special}
    tokens = {word: token for word, token in tokenizer.get_vocab().items() if token not in special}
    if "ByteFallback" in kinds:
        return {tokens["<0xFF>"]: MARK} if "<0xFF>" in tokens else {}
    return {
        token: bytes(ALPHABET[sign] for sign in word)
        for word, token in tokens.items()
        if kinds == "ByteLevel" and word.startswith("ÿ") and {*word} <= ALPHABET.keys()
    }


class _Plain:
    """A tokenizer for llguidance's wrapper that always writes the longest token."""

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [end]

    def __call__(self, text: Any) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        ids, at = [], 0
        while at < len(data):
            fits = [
                t
                for t, token in enumerate(self.tokens)
                if token and t != self.eos_token_id and data.startswith(token, at)
            ]
            if not fits:
                raise ValueError(f"no token is a prefix of the bytes {data[at : at + 4]!r}")
            ids.append(max(fits, key=lambda t: len(self.tokens[t])))
            at += len(self.tokens[ids[-1]])
        return ids
