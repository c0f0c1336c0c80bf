"""What a constraint must know of a tokenizer: the bytes of every token, and which tokens end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

from spec_lab.models.target import Target


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a target.

    Args:
        size: V, the width of the target's logits; ids beyond the tokenizer's are padding.
        ends: tokens that end a text.
        engine: the tokenizer as llguidance wants it.
    """

    size: int
    ends: tuple[int, ...]
    engine: LLTokenizer

    @staticmethod
    def of(target: Target) -> Vocabulary:
        """The target's vocabulary.

        Raises:
            ValueError: a target without a fast tokenizer or without a token that ends a text; more tokens than logits.
        """
        tokenizer, ends = target.tokenizer, sorted(target.ends)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(
                f"the target {target.name} has no fast tokenizer, which constraints need to read its tokens"
            )
        token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
        if largest >= target.vocabulary:
            raise ValueError(
                f"the tokenizer of the target {target.name} has the token {token!r} with the id {largest}, but the "
                f"model has {target.vocabulary} tokens, from 0, and a token mask must fit both: remove the added "
                "tokens that the model does not have from the tokenizer, or resize the model's embeddings to hold "
                "them (transformers' resize_token_embeddings)"
            )
        if not ends:
            raise ValueError(f"the target {target.name} names no token that ends a text, so no grammar could finish")
        engine = from_tokenizer(tokenizer, n_vocab=target.vocabulary, eos_token=ends)
        return Vocabulary(target.vocabulary, tuple(ends), engine)

    @staticmethod
    def plain(tokens: Sequence[bytes], end: int) -> Vocabulary:
        """A vocabulary given by its tokens' bytes, for toys and tests; ``end`` is the token that ends a text."""
        from llguidance import TokenizerWrapper

        engine = LLTokenizer(TokenizerWrapper(_Plain(tokens, end)), n_vocab=len(tokens), slices=[])
        return Vocabulary(len(tokens), (end,), engine)

    def encode(self, text: str) -> list[int]:
        """The text's tokens, as the tokenizer writes them."""
        return list(self.engine.tokenize_str(text))

    @cached_property
    def bytes(self) -> list[bytes]:
        """The bytes of every token; none of special ones and padding."""
        engine = self.engine
        special = [engine.is_special_token(token) or token in self.ends for token in range(self.size)]
        return [b"" if special[token] else engine.decode_bytes([token]) for token in range(self.size)]


class _Plain:
    """What llguidance's wrapper asks of a tokenizer."""

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [end]

    def __call__(self, text: Any) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        found, at = [], 0
        while at < len(data):
            fits = [
                t for t, one in enumerate(self.tokens) if one and t != self.eos_token_id and data.startswith(one, at)
            ]
            if not fits:
                raise ValueError(f"no token begins the bytes {data[at : at + 4]!r}")
            found.append(max(fits, key=lambda t: len(self.tokens[t])))
            at += len(self.tokens[found[-1]])
        return found
