"""KV caches of earlier requests, whose cells are copied to later requests that begin with the same tokens.

Prefix caching (vLLM's automatic prefix caching, SGLang's RadixAttention 2312.07104). Here a request gets a copy. In
``CausalLM`` it has cells of its own, so that attention reads one stream of cells for each request; in llama.cpp it
shares the cells. What happens to one changes no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from spec_lab.core.options import whole
from spec_lab.decode.proposer import Proposer
from spec_lab.models.target import Target
from spec_lab.runners.runner import ABILITIES, KVSequence, Runner

MIN_TOKENS = 16
"""Fewest tokens that are copied: fewer are computed as fast."""

BLOCK = 256
"""A kept text counts as a multiple of so many tokens, since the memory of a KV cache is allocated in blocks."""

MAX_TOKENS = 2**31 - 1


@dataclass(eq=False)
class Kept:
    """A text whose KV cache is kept.

    Args:
        tokens: its tokens, all computed.
        kv: the KV cache.
    """

    tokens: list[int]
    kv: KVSequence

    @property
    def size(self) -> int:
        """Number of cells that count against the limit."""
        return _blocks(len(self.tokens))


class PrefixCache:
    """KV caches of finished requests of one target, those that were not used for the longest time dropped first.

    It belongs to whoever made it: engines use it one after the other, and none of them empties it.

    Args:
        max_tokens: most tokens of all kept texts, each rounded up to blocks of 256.
        min_tokens: fewest tokens worth copying.

    Raises:
        ValueError: fewer tokens than a block.
    """

    def __init__(self, max_tokens: int, min_tokens: int = MIN_TOKENS) -> None:
        self.max_tokens, self.min_tokens = (
            whole("prefix_cache", max_tokens, BLOCK, ", or null", maximum=MAX_TOKENS),
            min_tokens,
        )
        self.texts: list[Kept] = []  # the most recently used last

    @property
    def tokens(self) -> int:
        """Tokens kept, in whole blocks."""
        return sum(text.size for text in self.texts)

    def open(
        self, lm: Runner, tokens: Sequence[int], reserve: int, live: Iterable[tuple[Sequence[int], Any]] = ()
    ) -> KVSequence:
        """Return a KV cache for ``tokens`` with as many of the first ones as are known, but not the last token.

        Args:
            lm: the target's runner.
            tokens: of the sequence that begins.
            reserve: positions that it may need.
            live: tokens and KV caches of the sequences that are decoded.
        """
        self._forget_given_up()
        longest, length = None, max(self.min_tokens, 1) - 1
        for text in self.texts:
            if (common := _common(text.tokens, tokens[:-1])) > length:
                longest, length, source = text, common, text.kv
        for other, kv in live:
            if (common := _common(other[: len(kv)], tokens[:-1])) > length:
                longest, length, source = None, common, kv
        if longest is not None:
            self.texts.remove(longest)
            self.texts.append(longest)
        return lm.open_copy(source, length, reserve) if length >= max(self.min_tokens, 1) else lm.open(reserve)

    def keep(self, lm: Runner, tokens: Sequence[int], kv: Any) -> None:
        """Keep a copy of a sequence's KV cache, unless a text that is kept begins with it.

        Args:
            lm: the target's runner.
            tokens: at least those that are computed.
            kv: its KV cache, which stays the caller's.
        """
        self._forget_given_up()
        computed = list(tokens[: min(len(kv), self.max_tokens // BLOCK * BLOCK)])
        if len(computed) < self.min_tokens:
            return
        for text in self.texts:
            if _common(text.tokens, computed) == len(computed):
                self.texts.remove(text)
                return self.texts.append(text)
        for text in [text for text in self.texts if _common(text.tokens, computed) == len(text.tokens)]:
            self._drop(text)
        while self.tokens + _blocks(len(computed)) > self.max_tokens:
            self._drop(self.texts[0])
        if len(copy := lm.open_copy(kv, len(computed), len(computed), exact=True)):
            self.texts.append(Kept(computed, copy))

    def clear(self) -> None:
        """Drop all texts, and free their memory for other requests."""
        for text in [*self.texts]:
            self._drop(text)

    def _forget_given_up(self) -> None:
        """Forget the texts whose KV cache the runner gave up (``Runner.open_copy``)."""
        self.texts = [text for text in self.texts if len(text.kv)]

    def _drop(self, text: Kept) -> None:
        self.texts.remove(text)
        text.kv.close()


def check_prefix_cache(proposer: Proposer, target: Target) -> None:
    """Refuse a prefix cache where it cannot work.

    The target's runner must be able to copy its KV cache, and the proposer must not require hidden states of every
    position of a prompt.

    Raises:
        ValueError: names the target's runner, or the proposer.
    """
    copier(target)
    requires = proposer.requires
    if requires.hidden and requires.every_position:
        raise ValueError(
            f"proposer '{proposer.name}' requires hidden states of every position of a prompt, and a prefix cache "
            "leaves out those that were computed before: set prefix_cache=null, or choose another proposer"
        )


def copier(target: Target) -> Runner:
    """Return the target's runner, which can copy the KV cache of a prefix.

    Raises:
        ValueError: it cannot.
    """
    lm = target.lm
    if "copied_prefix" in lm.capabilities.abilities:
        return lm
    raise ValueError(
        f"prefix_cache requires copied_prefix of the target ({ABILITIES['copied_prefix']}), which its runner "
        f"{type(lm).__name__} lacks with these options: set prefix_cache=null"
    )


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def _common(first: Sequence[int], other: Sequence[int]) -> int:
    """Return how many of the first tokens of two texts agree."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(first, other, strict=False)))
