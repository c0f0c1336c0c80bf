"""Common parts of the suffix proposers' sources: the order in which the occurrences of the last tokens are found.

A source sorts the positions of its text by their reversed preceding tokens. The last tokens of another text have a
place in this order, and the positions beside it have the longest matches, which become shorter in both directions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

Level = tuple[int, list[int]]
"""The occurrences of one match length: how many of the last tokens of a text precede them, at most the longest match
that is looked up, and the positions of the tokens that followed, more recent ones first.
"""

Match = Callable[[int, int], int]
"""How many of the last tokens of a text precede a position, counted up to a length."""


class SuffixSource(Protocol):
    """Text in which contexts are looked up."""

    end: int
    """Stands for a token where a text ends."""

    def matches(self, context: Sequence[int], max_matches: int, worth: Callable[[int], bool]) -> Iterator[Level]:
        """Up to ``max_matches`` occurrences of the last tokens of ``context``, by match length, the longest first.

        Where more occurrences have one match length than are wanted, they are taken evenly spread over their range.

        Args:
            context: a text, of which the last tokens are enough.
            max_matches: at least 1.
            worth: whether a match of this length is of use; asked just before its occurrences are collected, and from
                the first one on that is not the search ends.
        """
        ...

    def following(self, places: Sequence[int], offset: int) -> list[int]:
        """The token that stands ``offset`` after each position, ``end`` where the text ends there.

        (Nothing is promised for positions beyond.)
        """
        ...

    def continuations(self, places: Sequence[int], count: int) -> list[list[int]]:
        """Up to ``count`` tokens from each position on; fewer where the text ends."""
        ...


def levels(
    before: list[int],
    after: list[int],
    left: int,
    right: int,
    max_matches: int,
    worth: Callable[[int], bool],
    match: Match,
    sample: Callable[[int, int, int, int], list[int]],
) -> Iterator[Level]:
    """Yield the occurrences around the place of a context in sorted positions, as ``SuffixSource.matches`` does.

    Args:
        before, after: up to ``max_matches + 1`` positions on both sides of the place, the nearest first.
        left, right: the matches of the nearest; 0 where there is none.
        max_matches, worth: as in ``SuffixSource.matches``.
        sample: of a match length, how many positions before and after the place have longer matches, and a number,
            returns so many positions of this match length, evenly spread.
    """
    i = j = 0  # how many of ``before`` and ``after`` match at least the length at hand
    while i + j < max_matches and (length := max(left, right)) and worth(length):
        first, second = i, j
        if left == length:
            i, left = _passed(before, i, length, match)
        if right == length:
            j, right = _passed(after, j, length, match)
        if i + j <= max_matches:
            places = before[first:i] + after[second:j]
        else:
            places = sample(length, first, second, max_matches - first - second)
        places.sort(reverse=True)
        yield length, places


def _passed(places: list[int], at: int, length: int, match: Match) -> tuple[int, int]:
    """Return the end of the positions from ``at`` on with matches of this length, and the match of the next."""
    low, end, step = at + 1, at + 1, 1
    while end < len(places):  # in steps that double
        near = match(places[end], length)
        if near < length:
            break
        low, end, step = end + 1, end + 2 * step, 2 * step
    else:
        end, near = len(places), 0
    if low < end:
        end = bisect_left(places, True, lo=low, hi=end, key=lambda position: match(position, length) < length)
        near = match(places[end], length) if end < len(places) else 0
    return end, near


def spread(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` of the numbers below ``count``, evenly spread from the first to the last; all if there are no
    more, and the last one where one is wanted.
    """
    if count <= wanted:
        return list(range(count))
    return [number * (count - 1) // (wanted - 1) for number in range(wanted)] if wanted > 1 else [count - 1]


def around(low: int, inner: int, outer: int, high: int, wanted: int) -> list[int]:
    """Return ``wanted`` of the ranks from ``low`` to ``high`` but not from ``inner`` to ``outer``, evenly spread."""
    below, gap = inner - low, outer - inner + low
    return [low + rank if rank < below else rank + gap for rank in spread(high - low - (outer - inner), wanted)]


def until(tokens: list[int], separator: int) -> list[int]:
    """Return the tokens before the first separator."""
    return tokens[: tokens.index(separator)] if separator in tokens else tokens
