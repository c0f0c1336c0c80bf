"""A language as a nondeterministic automaton over bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tests.oracles.expressions import Characters, Either, Expression, Ranges, Repeat, Sequence

STATES = 50_000
"""Most states of an automaton, unless the caller sets another limit."""


class Edge(NamedTuple):
    """The bytes ``low`` to ``high`` lead to the state ``to``."""

    low: int
    high: int
    to: int


@dataclass(frozen=True, eq=False)
class Language:
    """A language: the texts whose bytes lead from state 0 to ``accept``.

    Only states from which ``accept`` can be reached are led to, so whatever has not failed can be completed.

    Args:
        edges: of each state, by byte.
        skips: of each state, those reached without a byte.
        accept: the state in which a text may end.
    """

    edges: tuple[tuple[Edge, ...], ...]
    skips: tuple[tuple[int, ...], ...]
    accept: int

    @staticmethod
    def of(expression: Expression, limit: int = STATES) -> Language:
        """The texts that match the whole expression, in UTF-8.

        Args:
            expression: what they match.
            limit: most states.

        Raises:
            ValueError: more states than that; nothing matches.
        """
        builder = _Builder(limit)
        accept = builder.add(expression, builder.new())
        alive = builder.reaching(accept)
        if 0 not in alive:
            raise ValueError("no text at all satisfies the constraint")
        edges = tuple(tuple(edge for edge in state if edge.to in alive) for state in builder.edges)
        skips = tuple(tuple(to for to in state if to in alive) for state in builder.skips)
        return Language(edges, skips, accept)

    @property
    def size(self) -> int:
        """How many states."""
        return len(self.edges)

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        """All states reached from these without a byte, as far as they matter: those with edges, and ``accept``."""
        seen, ahead = set(states), list(states)
        while ahead:
            for to in self.skips[ahead.pop()]:
                if to not in seen:
                    seen.add(to)
                    ahead.append(to)
        return frozenset(state for state in seen if self.edges[state] or state == self.accept)

    def row(self, states: frozenset[int]) -> list[frozenset[int] | None]:  # [256]
        """The successor of a closed set of states for each byte; None: none."""
        edges = [edge for state in states for edge in self.edges[state]]
        cuts = sorted({edge.low for edge in edges} | {edge.high + 1 for edge in edges})
        row: list[frozenset[int] | None] = [None] * 256
        closed: dict[frozenset[int], frozenset[int]] = {}
        for low, end in pairwise(cuts):
            targets = frozenset(edge.to for edge in edges if edge.low <= low <= edge.high)
            if targets:
                if targets not in closed:
                    closed[targets] = self.closure(targets)
                row[low:end] = [closed[targets]] * (end - low)
        return row


class _Builder:
    """Thompson's construction. Nothing leads back into a state that was handed in, so alternatives may share theirs."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.edges: list[list[Edge]] = []
        self.skips: list[list[int]] = []

    def new(self, *before: int) -> int:
        """A new state, reached without a byte from those before it."""
        if len(self.edges) == self.limit:
            raise ValueError(
                f"the constraint needs an automaton of more than {self.limit} states; repeat less, or use llguidance"
            )
        self.edges.append([])
        self.skips.append([])
        for state in before:
            self.skips[state].append(len(self.edges) - 1)
        return len(self.edges) - 1

    def add(self, expression: Expression, start: int) -> int:
        """Read the expression from ``start``; returns the state in which it ends."""
        if isinstance(expression, Characters):
            return self.characters(expression.ranges, start)
        if isinstance(expression, Sequence):
            for part in expression.parts:
                start = self.add(part, start)
            return start
        if isinstance(expression, Either):
            return self.new(*[self.add(part, start) for part in expression.parts])
        return self.repeat(expression, start)

    def repeat(self, expression: Repeat, start: int) -> int:
        for _ in range(expression.least):
            start = self.add(expression.part, self.new(start))
        if expression.most is None:
            again = self.new(start)
            self.skips[self.add(expression.part, again)].append(again)
            return self.new(again)
        ends = [start]
        for _ in range(expression.most - expression.least):
            ends.append(self.add(expression.part, self.new(ends[-1])))
        return self.new(*ends)

    def characters(self, ranges: Ranges, start: int) -> int:
        end = self.new()
        after: dict[tuple[tuple[int, int], ...], int] = {(): end}  # so that all alternatives share their common endings
        for way in (way for low, high in ranges for way in utf8(low, high)):
            for place in range(len(way) - 1, 0, -1):
                if way[place:] not in after:
                    after[way[place:]] = self.new()
                    self.edges[after[way[place:]]].append(Edge(*way[place], after[way[place + 1 :]]))
            self.edges[start].append(Edge(*way[0], after[way[1:]]))
        return end

    def reaching(self, accept: int) -> set[int]:
        """The states from which ``accept`` can be reached."""
        before: list[list[int]] = [[] for _ in self.edges]
        for state in range(len(self.edges)):
            for to in [edge.to for edge in self.edges[state]] + self.skips[state]:
                before[to].append(state)
        seen, ahead = {accept}, [accept]
        while ahead:
            for state in before[ahead.pop()]:
                if state not in seen:
                    seen.add(state)
                    ahead.append(state)
        return seen


def utf8(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The bytes of the characters ``low`` to ``high``: ways of one to four ranges of bytes. No surrogate among them."""
    for last in (0x7F, 0x7FF, 0xFFFF, 0x10FFFF):
        if low <= last and low <= high:
            yield from _same_length(low, min(high, last))
            low = last + 1


def _same_length(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The same, for characters of equally many bytes: cut until all but the first bytes that differ are full ranges."""
    for bits in (6, 12, 18):
        part = (1 << bits) - 1
        if low >> bits != high >> bits and chr(high) > "\x7f":
            if low & part:
                yield from _same_length(low, low | part)
                yield from _same_length((low | part) + 1, high)
                return
            if high & part != part:
                yield from _same_length(low, (high & ~part) - 1)
                yield from _same_length(high & ~part, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
