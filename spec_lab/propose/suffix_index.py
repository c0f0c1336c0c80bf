"""Occurrences of contexts in text that grows: positions sorted by their reversed preceding tokens.

Position p of a text stands for the context ``tokens[:p]`` and its continuation ``tokens[p:]``. Sorted by the reversed
context (a suffix array of the reversed text), the positions that share the last m tokens with the current text are one
contiguous range for every m, and its size is their count. The suffix automaton of SAM-Decoding (2411.10666, section 3)
and the suffix tree of SuffixDecoding (2411.04975, section 3) answer the same questions; a sorted list also forgets its
oldest text, and is copied for forks by copying arrays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Protocol

import numpy as np

SEPARATOR = -1
"""Stands before and between texts, so that no context and no continuation joins two of them."""

LAST = 2**62
"""Larger than any token: follows a prefix to find where its range ends."""

BLOCK = 1000
"""Positions of a block of the sorted list: half the most that it holds."""

BULK = 512
"""From so many new tokens on, and from an eighth of the text on, everything is sorted at once."""


Occurrence = tuple[int, int]
"""An earlier occurrence of the last tokens of a text: the position of the token that followed it, and how many of the
last tokens are the same (the match), at most the longest match that is looked up. (Named tuples take longer to make.)
"""


class SuffixSource(Protocol):
    """Text in which contexts are looked up."""

    def matches(self, context: Sequence[int], least: int, most: int) -> list[Occurrence]:
        """Up to ``most`` occurrences of the last tokens of ``context`` with matches of at least ``least`` tokens.

        Longer matches come first, then more recent ones. Where more occurrences have one match length than are wanted,
        they are taken evenly spread over their range.
        """
        ...

    def continuations(self, found: Sequence[Occurrence], count: int) -> list[list[int]]:
        """Up to ``count`` tokens that followed each occurrence; fewer where the text ends."""
        ...


class SuffixIndex:
    """A sorted list, in blocks, of the positions of a text that grows (``follow``), or of several (``add``, ``drop``).

    Inserting or removing a position takes some microseconds; many are sorted at once. Positions with the same context
    are in the order of the text. The first position of a text has no context and is left out.

    Args:
        max_match: number of preceding tokens by which positions are sorted, the longest match.
    """

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.dropped = 0  # tokens (and separators) that are forgotten
        self.documents: deque[int] = deque()  # lengths of the texts that ``add`` added, the oldest first
        self._pad = [SEPARATOR] * (max_match + 1)  # before each text: contexts end within it
        self._text = list(self._pad)
        self._blocks = [array("q")]
        self._heads: list[list[int]] = [[]]  # the first context of each block
        self._starts = np.zeros(1, dtype=np.int64)  # the rank of the first position of each block

    def __len__(self) -> int:
        return len(self._text) - len(self._pad)

    @property
    def positions(self) -> list[int]:
        """All positions, sorted."""
        return [position for block in self._blocks for position in block]

    def copy(self) -> SuffixIndex:
        """Return an independent copy, in time proportional to the text, a few nanoseconds per token."""
        other = SuffixIndex(self.max_match)
        other.dropped, other.documents = self.dropped, self.documents.copy()
        other._text, other._heads, other._starts = self._text.copy(), self._heads.copy(), self._starts.copy()
        other._blocks = [block[:] for block in self._blocks]
        return other

    # A text that grows ----------------------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int], known: int = 0) -> None:
        """Make this the index of ``tokens``, in time proportional to the tokens that are new, and to those removed.

        Args:
            tokens: a text; its last token is the continuation of the last position.
            known: number of tokens which are known to be the same as those that are indexed.
        """
        pad, had = len(self._pad), len(self)
        common = min(known, had, len(tokens))
        mine, theirs = self._text[pad + common :], tokens[common:had]
        if mine != theirs:
            for one, other in zip(mine, theirs, strict=False):
                if one != other:
                    break
                common += 1
        else:
            common += len(mine)
        changed = had - common + len(tokens) - common
        if changed > BULK and changed > len(tokens) // 8:
            self._text[pad + common :] = tokens[common:]
            self._sort()
            return
        for position in range(had - 1, max(common, 1) - 1, -1):
            self._remove(position, newest=True)
        self._text[pad + common :] = tokens[common:]
        for position in range(max(common, 1), len(tokens)):
            self._insert(position)

    # Several texts ---------------------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text, apart from the others."""
        start = self.dropped + len(self)
        self._text += [*tokens, *self._pad]
        self.documents.append(len(tokens))
        if len(tokens) > BULK and len(tokens) > len(self) // 8:
            self._sort()
            return
        for position in range(start + 1, start + len(tokens)):
            self._insert(position)

    def drop(self) -> None:
        """Forget the oldest text that was added."""
        length = self.documents.popleft()
        for position in range(self.dropped + 1, self.dropped + length):
            self._remove(position, newest=False)
        gone = length + len(self._pad)
        del self._text[:gone]
        self.dropped += gone

    # Lookups ---------------------------------------------------------------------------------------------------------

    def matches(self, context: Sequence[int], least: int, most: int) -> list[Occurrence]:
        """As in ``SuffixSource``."""
        query = list(context[: -self.max_match - 1 : -1])
        point = self._rank([*query, LAST])
        before, after = self._slice(point - most - 1, point)[::-1], self._slice(point, point + most + 1)
        found: list[Occurrence] = []
        i = j = 0  # how many of ``before`` and ``after`` match at least the length at hand
        left = self._match(before[0], query) if before else 0
        right = self._match(after[0], query) if after else 0
        while len(found) < most and (length := max(left, right)) >= least:
            wanted, first, second = query[:length], i, j
            differs = self._differs(wanted)
            if left == length:
                i = bisect_left(before, True, lo=i, key=differs)
                left = self._match(before[i], wanted) if i < len(before) else 0
            if right == length:
                j = bisect_left(after, True, lo=j, key=differs)
                right = self._match(after[j], wanted) if j < len(after) else 0
            if i + j <= most:
                places = before[first:i] + after[second:j]
            else:
                low, inner, outer = self._rank(wanted), point - first, point + second
                ranks = around(low, inner, outer, self._rank([*wanted, LAST]), most - len(found))
                places = self._select(np.array(ranks))
            found += zip(sorted(places, reverse=True), repeat(length))
        return found

    def continuations(self, found: Sequence[Occurrence], count: int) -> list[list[int]]:
        """As in ``SuffixSource``."""
        text, shift = self._text, len(self._pad) - self.dropped
        read = [text[shift + position : shift + position + count] for position, _ in found]
        return read if not self.documents else [until(one, SEPARATOR) for one in read]

    # The sorted list -------------------------------------------------------------------------------------------------

    def _context(self, position: int) -> list[int]:
        """The reversed preceding tokens by which a position is sorted."""
        last = position + len(self._pad) - self.dropped - 1
        return self._text[last : last - self.max_match : -1]

    def _differs(self, query: list[int]) -> Callable[[int], bool]:
        """Return the test whether other tokens precede a position than the reversed ``query``."""
        text, shift, length = self._text, len(self._pad) - self.dropped - 1, len(query)
        return lambda position: text[position + shift : position + shift - length : -1] != query

    def _match(self, position: int, query: list[int]) -> int:
        """How many tokens of the reversed ``query`` precede a position."""
        text, last = self._text, position + len(self._pad) - self.dropped - 1
        if text[last : last - len(query) : -1] == query:
            return len(query)
        length = 0
        while text[last - length] == query[length]:
            length += 1
        return length

    def _rank(self, context: list[int]) -> int:
        """The number of positions whose context is smaller."""
        at = max(0, bisect_left(self._heads, context) - 1)
        text, shift, length = self._text, len(self._pad) - self.dropped - 1, self.max_match
        return int(self._starts[at]) + bisect_left(
            self._blocks[at], context, key=lambda p: text[p + shift : p + shift - length : -1]
        )

    def _select(self, ranks: np.ndarray) -> list[int]:
        at = np.searchsorted(self._starts, ranks, side="right") - 1
        within = ranks - self._starts[at]
        return [self._blocks[b][w] for b, w in zip(at.tolist(), within.tolist(), strict=True)]

    def _slice(self, low: int, high: int) -> list[int]:
        """The positions of these ranks, as far as there are any."""
        low = max(low, 0)
        at = int(np.searchsorted(self._starts, low, side="right")) - 1
        low -= int(self._starts[at])
        high -= int(self._starts[at])
        found: list[int] = []
        while high > 0 and at < len(self._blocks):
            block = self._blocks[at]
            found += block[low:high]
            low, high, at = max(0, low - len(block)), high - len(block), at + 1
        return found

    def _insert(self, position: int) -> None:
        context = self._context(position)
        at = max(0, bisect_right(self._heads, context) - 1)
        block = self._blocks[at]
        place = bisect_right(block, context, key=self._context)
        block.insert(place, position)
        if place == 0:
            self._heads[at] = context
        self._starts[at + 1 :] += 1
        if len(block) > 2 * BLOCK:
            self._blocks.insert(at + 1, block[BLOCK:])
            del block[BLOCK:]
            self._heads.insert(at + 1, self._context(self._blocks[at + 1][0]))
            self._starts = np.insert(self._starts, at + 1, self._starts[at] + BLOCK)

    def _remove(self, position: int, newest: bool) -> None:
        """Remove the newest or the oldest position: the last or the first of those with its context."""
        context = self._context(position)
        if newest:
            at = bisect_right(self._heads, context) - 1
            place = bisect_right(self._blocks[at], context, key=self._context) - 1
        else:
            at = max(0, bisect_left(self._heads, context) - 1)
            place = bisect_left(self._blocks[at], context, key=self._context)
            if place == len(self._blocks[at]):
                at, place = at + 1, 0
        block = self._blocks[at]
        assert block[place] == position
        del block[place]
        self._starts[at + 1 :] -= 1
        if not block and len(self._blocks) > 1:
            self._delete(at)
            return
        if place == 0:
            self._heads[at] = self._context(block[0]) if block else []
        if at + 1 < len(self._blocks) and len(block) + len(self._blocks[at + 1]) < BLOCK:
            block.extend(self._blocks[at + 1])
            self._delete(at + 1)

    def _delete(self, at: int) -> None:
        del self._blocks[at], self._heads[at]
        self._starts = np.delete(self._starts, at)

    def _sort(self) -> None:
        """Build the sorted list anew."""
        pad = len(self._pad)
        order = sorted_contexts(np.array(self._text, dtype=np.int64), self.max_match) - pad + self.dropped
        cuts = range(0, max(1, len(order)), BLOCK)
        self._blocks = [array("q", order[cut : cut + BLOCK].tobytes()) for cut in cuts]
        self._heads = [self._context(block[0]) if block else [] for block in self._blocks]
        self._starts = np.array(cuts, dtype=np.int64)


def sorted_contexts(text: np.ndarray, length: int) -> np.ndarray:
    """Return the positions p of a text with a context, sorted by the reversed ``length`` tokens before p, then by p.

    Contexts of twice the length are sorted by pairs of ranks (Manber and Myers 1993).

    Args:
        text: ``[n]`` int64, tokens and SEPARATOR, which precedes the first token.
        length: at least 1.

    Returns:
        ``[<= n]`` int64: those p for which neither ``text[p]`` nor ``text[p - 1]`` is a separator.
    """
    rank, done = np.unique(text, return_inverse=True)[1].astype(np.int64), 1
    while done < length:
        step = min(done, length - done)  # the second half may overlap the first
        earlier = np.zeros_like(rank)
        earlier[step:] = rank[:-step] if step < len(rank) else 0
        rank = np.unique(rank * (len(text) + 1) + earlier, return_inverse=True)[1].astype(np.int64)
        done += step
    order = np.argsort(rank[:-1], kind="stable") + 1
    return order[(text[order] != SEPARATOR) & (text[order - 1] != SEPARATOR)]


def spread(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` of the numbers below ``count``, evenly spread from the first to the last; all if there are no
    more, and the last one where one is wanted.
    """
    if count <= wanted:
        return list(range(count))
    return [one * (count - 1) // (wanted - 1) for one in range(wanted)] if wanted > 1 else [count - 1]


def around(low: int, inner: int, outer: int, high: int, wanted: int) -> list[int]:
    """Return ``wanted`` of the ranks from ``low`` to ``high`` but not from ``inner`` to ``outer``, evenly spread."""
    gap = outer - inner
    return [rank if rank < inner else rank + gap for rank in (low + one for one in spread(high - low - gap, wanted))]


def until(tokens: list[int], separator: int) -> list[int]:
    """Return the tokens before the first separator."""
    return tokens[: tokens.index(separator)] if separator in tokens else tokens
