"""Occurrences of contexts in text that grows: positions sorted by their reversed preceding tokens.

Position p of a text stands for the context ``tokens[:p]`` and its continuation ``tokens[p:]``. Sorted by the reversed
context (a suffix array of the reversed text), the positions that share the last m tokens with the current text are one
contiguous range for every m, and its size is their count. The suffix automaton of SAM-Decoding (2411.10666, section 3)
and the suffix tree of SuffixDecoding (2411.04975, section 3) answer the same questions; a sorted list also forgets its
oldest text, and is copied for forks by copying arrays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spec_lab.propose.suffix_contexts import SEPARATOR, as_bytes, sorted_contexts
from spec_lab.propose.suffix_search import Level, around, levels, until

LAST = b"\xff" * 4
"""Larger than the bytes of any token: follows a prefix to find where its range ends."""

BLOCK = 500
"""Positions of a block of the sorted list: half the most that it holds."""

BULK = 512
"""From so many new tokens on, and from an eighth of the text on, everything is sorted at once."""


class SuffixIndex:
    """A sorted list, in blocks, of the positions of a text that grows (``follow``), or of several (``add``, ``drop``).

    Inserting or removing a position takes some microseconds; many are sorted at once. Positions with the same context
    are in the order of the text. The first position of a text has no context and is left out.

    Args:
        max_match: number of preceding tokens by which positions are sorted, the longest match.
    """

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.end = SEPARATOR
        self.dropped = 0  # tokens (and separators) that are forgotten
        self.documents: deque[int] = deque()  # lengths of the texts that ``add`` added, the oldest first
        self._pad = [SEPARATOR] * (max_match + 1)  # before each text: contexts end within it
        self._text = array("i", self._pad)
        # The same in bytes: token + 1 in four of them, the lowest first. From the last byte to the first, the tokens
        # before a position are compared as their reversed list is.
        self._bytes = bytearray(4 * len(self._pad))
        self._blocks = [array("q")]
        self._heads: list[bytearray] = [bytearray()]  # the first context of each block
        self._next: tuple[int, int] | None = None  # where the next position of the text is inserted, if that is known

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
        other._text, other._bytes = self._text[:], self._bytes[:]
        other._heads, other._next = self._heads.copy(), self._next
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
        if common < had:
            mine, theirs = self._text[pad + common :].tolist(), list(tokens[common:had])
            differs = (at for at, (token, other) in enumerate(zip(mine, theirs, strict=False)) if token != other)
            common += next(differs, min(len(mine), len(theirs)))
        changed = had - common + len(tokens) - common
        if changed > BULK and changed > len(tokens) // 8:
            self._truncate(common)
            self._extend(tokens[common:])
            self._sort()
            return
        for position in range(had - 1, max(common, 1) - 1, -1):
            self._remove(position, newest=True)
        if common < had:
            self._next = None
            self._truncate(common)
        self._extend(tokens[common:])
        for position in range(max(common, 1), len(tokens)):
            self._insert(position)

    # Several texts ---------------------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text, apart from the others."""
        start = self.dropped + len(self)
        self._extend([*tokens, *self._pad])
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
        del self._text[:gone], self._bytes[: 4 * gone]
        self.dropped += gone

    # Lookups ---------------------------------------------------------------------------------------------------------

    def matches(self, context: Sequence[int], max_matches: int, worth: Callable[[int], bool]) -> Iterator[Level]:
        """As in ``SuffixSource``."""
        context = context[-self.max_match :]
        length = len(context)
        followed = self._text[-length:].tolist() == context  # as long as one text is followed
        query = self._bytes[: -4 * length - 1 : -1] if followed else as_bytes(context)[::-1]
        at, offset = point = self._find(query + LAST)
        if followed and length == self.max_match:
            self._next = point  # the text's next position goes there
        text, shift, size = self._bytes, 4 * (len(self._pad) - self.dropped), 4 * length
        number = int.from_bytes(query, "big")

        def match(position: int, max_length: int) -> int:
            end = 4 * position + shift
            differs = int.from_bytes(text[end - size : end], "little") ^ number
            return min(max_length, length - (differs.bit_length() + 31) // 32)

        def sample(length: int, first: int, second: int, wanted: int) -> list[int]:
            prefix = query[: 4 * length]
            low, high = self._find(prefix), self._find(prefix + LAST)
            middle = self._distance(low, point)
            return self._select(
                low, around(0, middle - first, middle + second, middle + self._distance(point, high), wanted)
            )

        nearest = self._before(at, offset, 1), self._after(at, offset, 1)
        left, right = (match(neighbours[0], length) if neighbours else 0 for neighbours in nearest)
        if not worth(max(left, right)):
            return iter(())
        before, after = self._before(at, offset, max_matches + 1), self._after(at, offset, max_matches + 1)
        return levels(before, after, left, right, max_matches, worth, match, sample)

    def following(self, places: Sequence[int], offset: int) -> list[int]:
        """As in ``SuffixSource``."""
        text, shift = self._text, len(self._pad) - self.dropped + offset
        last = len(text) - shift
        return [text[position + shift] if position < last else SEPARATOR for position in places]

    def continuations(self, places: Sequence[int], count: int) -> list[list[int]]:
        """As in ``SuffixSource``."""
        text, shift = self._text, len(self._pad) - self.dropped
        read = [text[shift + position : shift + position + count].tolist() for position in places]
        return read if not self.documents else [until(tokens, SEPARATOR) for tokens in read]

    # The sorted list -------------------------------------------------------------------------------------------------

    def _extend(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)
        self._bytes += as_bytes(tokens)

    def _truncate(self, length: int) -> None:
        length += len(self._pad)
        del self._text[length:], self._bytes[4 * length :]

    def _context(self, position: int) -> bytearray:
        """The reversed preceding tokens by which a position is sorted."""
        last = 4 * (position + len(self._pad) - self.dropped) - 1
        return self._bytes[last : last - 4 * self.max_match : -1]

    def _find(self, context: bytes | bytearray) -> tuple[int, int]:
        """Where the positions end whose context is smaller: the block, and the place within it."""
        at = max(0, bisect_left(self._heads, context) - 1)
        text, last, size = self._bytes, 4 * (len(self._pad) - self.dropped) - 1, 4 * self.max_match
        return at, bisect_left(self._blocks[at], context, key=lambda p: text[(end := 4 * p + last) : end - size : -1])

    def _before(self, at: int, offset: int, count: int) -> list[int]:
        """Up to ``count`` positions before a place, the nearest first."""
        positions = self._blocks[at][max(0, offset - count) : offset].tolist()[::-1]
        while len(positions) < count and at > 0:
            at -= 1
            positions += self._blocks[at][-(count - len(positions)) :].tolist()[::-1]
        return positions

    def _after(self, at: int, offset: int, count: int) -> list[int]:
        """Up to ``count`` positions from a place on."""
        positions = self._blocks[at][offset : offset + count].tolist()
        while len(positions) < count and at + 1 < len(self._blocks):
            at += 1
            positions += self._blocks[at][: count - len(positions)].tolist()
        return positions

    def _distance(self, low: tuple[int, int], high: tuple[int, int]) -> int:
        """The number of positions from one place to a later one."""
        return sum(map(len, self._blocks[low[0] : high[0]])) - low[1] + high[1]

    def _select(self, low: tuple[int, int], ranks: list[int]) -> list[int]:
        """The positions of these ranks, which rise, counted from a place on."""
        at, offset = low
        block, start = self._blocks[at], -offset  # the rank of the block's first position
        end = start + len(block)
        positions = []
        for rank in ranks:
            while rank >= end:
                at += 1
                block, start = self._blocks[at], end
                end += len(block)
            positions.append(block[rank - start])
        return positions

    def _insert(self, position: int) -> None:
        """Add the newest position: after those with its context."""
        if self._next is not None:
            (at, offset), self._next = self._next, None
        else:
            at, offset = self._find(self._context(position) + LAST)
        block = self._blocks[at]
        block.insert(offset, position)
        if offset == 0:
            self._heads[at] = self._context(position)
        if len(block) > 2 * BLOCK:
            self._blocks.insert(at + 1, block[BLOCK:])
            del block[BLOCK:]
            self._heads.insert(at + 1, self._context(self._blocks[at + 1][0]))

    def _remove(self, position: int, newest: bool) -> None:
        """Remove the newest or the oldest position: the last or the first of those with its context."""
        context = self._context(position)
        at, offset = self._find(context + LAST if newest else context)
        if newest:
            offset -= 1
        elif offset == len(self._blocks[at]):
            at, offset = at + 1, 0
        block = self._blocks[at]
        assert block[offset] == position
        del block[offset]
        if not block and len(self._blocks) > 1:
            self._delete(at)
            return
        if offset == 0:
            self._heads[at] = self._context(block[0]) if block else bytearray()
        if at + 1 < len(self._blocks) and len(block) + len(self._blocks[at + 1]) < BLOCK:
            block.extend(self._blocks[at + 1])
            self._delete(at + 1)

    def _delete(self, at: int) -> None:
        del self._blocks[at], self._heads[at]

    def _sort(self) -> None:
        """Build the sorted list anew."""
        self._next = None
        pad = len(self._pad)
        order = sorted_contexts(np.array(self._text, dtype=np.int64), self.max_match) - pad + self.dropped
        cuts = range(0, max(1, len(order)), BLOCK)
        self._blocks = [array("q", order[cut : cut + BLOCK].tobytes()) for cut in cuts]
        self._heads = [self._context(block[0]) if block else bytearray() for block in self._blocks]
