"""Prompt lookup: what followed the last tokens the last time they occurred. No model, no parameters.

Source: prompt lookup decoding (Saxena 2023) and LLMA (2304.04487, section 2.2); several continuations merged into a
tree as in REST (2311.08252, section 3.2), from the text itself instead of a datastore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from spec_lab.core.draft import Draft, Drawn, Shape, chain, forest
from spec_lab.core.options import whole
from spec_lab.engine.proposer import Lifecycle
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.trees import MOST_NODES

SCAN = 32
"""Most earlier occurrences of one n-gram that a tree looks at, the most recent first."""


MOST_DEPTH = 1024
"""Most tokens drafted."""

LONGEST = 64
"""Longest n-gram that can be looked up: indexing a token costs the square of it."""


class Index:
    """Where each n-gram of a growing text has occurred.

    ``ends[gram]`` lists, in ascending order, the places e with ``gram == tokens[e - n : e]`` that have a token after
    them (e < len(tokens)), so the text's own last n tokens are never their own match.

    Args:
        lengths: the n-gram lengths looked up, longest first.
    """

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths
        self.ends: dict[tuple[int, ...], list[int]] = {}
        self.tokens: list[int] = []  # the text up to the last place indexed

    def follow(self, tokens: list[int]) -> None:
        """Make this the index of ``tokens``: O(new tokens), or O(tokens taken back) after a rewind.

        The check for a rewind compares two lists, some nanoseconds a token.
        """
        if self.tokens != tokens[: len(self.tokens)] or len(self.tokens) >= len(tokens):
            self._rewind(tokens)
        for end in range(len(self.tokens) + 1, len(tokens)):
            for n in self.lengths:
                if n <= end:
                    self.ends.setdefault(tuple(tokens[end - n : end]), []).append(end)
        self.tokens = tokens[:-1]

    def _rewind(self, tokens: list[int]) -> None:
        common = 0
        for mine, theirs in zip(self.tokens, tokens[:-1], strict=False):
            if mine != theirs:
                break
            common += 1
        for end in range(len(self.tokens), common, -1):
            for n in self.lengths:
                if n <= end:
                    self.ends[tuple(self.tokens[end - n : end])].pop()
        del self.tokens[common:]

    def matches(self, tokens: list[int]) -> Iterator[int]:
        """Places to read on from: longer matches first, then the more recent; a place may come more than once."""
        for n in self.lengths:
            if n < len(tokens):
                yield from self.ends.get(tuple(tokens[-n:]), ())[: -SCAN - 1 : -1]


def continuation(tokens: list[int], place: int, count: int) -> list[int]:
    """``count`` tokens read from ``place``; at the end of the text reading goes on in what was just read."""
    found = tokens[place : place + count]
    return found if len(found) == count else (found * -(-count // len(found)))[:count]


@dataclass(eq=False)
class Ngram(Lifecycle):
    """Drafts the continuation of the longest, then most recent, earlier occurrence of the last tokens.

    Args:
        depth: tokens drafted, k; at most ``MOST_DEPTH``.
        max_ngram: longest n-gram looked up; at most ``LONGEST``.
        min_ngram: shortest.
    """

    depth: int
    max_ngram: int
    min_ngram: int
    name: str = "ngram"
    drawn: Drawn = "point"
    branches: bool = False

    @staticmethod
    def load(target: Target, depth: int = 10, max_ngram: int = 4, min_ngram: int = 1) -> Ngram:
        """Needs nothing from the target.

        Raises:
            ValueError: an option of the wrong type or range; names it.
        """
        return Ngram(whole("proposer.depth", depth, most=MOST_DEPTH), *lengths(max_ngram, min_ngram))

    @property
    def nodes(self) -> int:
        """Most nodes drafted below one head."""
        return self.depth

    def propose(self, batch: Batch) -> Draft:
        """One chain per sequence; none where nothing matches."""
        drafted: list[int] = []
        shapes = []
        for sequence in batch.sequences:
            index: Index = sequence.state
            index.follow(sequence.tokens)
            place = next(index.matches(sequence.tokens), None)
            found = [] if place is None else continuation(sequence.tokens, place, self.depth)
            drafted += found
            shapes.append(chain(len(found)))
        return Draft(forest(tuple(shapes)), torch.tensor(drafted, dtype=torch.long, device=batch.device))

    def init(self, request: Request) -> Index:
        """The index of a text that is still empty."""
        return Index(range(self.max_ngram, self.min_ngram - 1, -1))


@dataclass(eq=False)
class NgramTree(Lifecycle):
    """Drafts several continuations merged into one tree: longer matches first, then more recent ones.

    Args:
        nodes: most nodes of a tree; at most ``trees.MOST_NODES``.
        depth: longest continuation; at most ``MOST_DEPTH``.
        max_ngram: longest n-gram looked up; at most ``LONGEST``.
        min_ngram: shortest.
    """

    nodes: int
    depth: int
    max_ngram: int
    min_ngram: int
    name: str = "ngram_tree"
    drawn: Drawn = "point"
    branches: bool = True

    @staticmethod
    def load(target: Target, nodes: int = 12, depth: int = 6, max_ngram: int = 4, min_ngram: int = 1) -> NgramTree:
        """Needs nothing from the target.

        Raises:
            ValueError: an option of the wrong type or range; names it.
        """
        most = whole("proposer.nodes", nodes, most=MOST_NODES)
        return NgramTree(most, whole("proposer.depth", depth, most=MOST_DEPTH), *lengths(max_ngram, min_ngram))

    def propose(self, batch: Batch) -> Draft:
        """One tree per sequence; none where nothing matches."""
        drafted: list[int] = []
        shapes = []
        for sequence in batch.sequences:
            index: Index = sequence.state
            index.follow(sequence.tokens)
            parents, tokens = merge(sequence.tokens, index.matches(sequence.tokens), self.depth, self.nodes)
            drafted += tokens
            shapes.append(shape_of(tuple(parents)))
        return Draft(forest(tuple(shapes)), torch.tensor(drafted, dtype=torch.long, device=batch.device))

    def init(self, request: Request) -> Index:
        """The index of a text that is still empty."""
        return Index(range(self.max_ngram, self.min_ngram - 1, -1))


def lengths(max_ngram: int, min_ngram: int) -> tuple[int, int]:
    """Both, checked.

    Raises:
        ValueError: not whole numbers with 1 <= min_ngram <= max_ngram <= ``LONGEST``.
    """
    if whole("proposer.min_ngram", min_ngram, most=LONGEST) > whole("proposer.max_ngram", max_ngram, most=LONGEST):
        raise ValueError(f"proposer.min_ngram is {min_ngram}, larger than proposer.max_ngram, which is {max_ngram}")
    return max_ngram, min_ngram


def merge(tokens: list[int], places: Iterator[int], depth: int, nodes: int) -> tuple[list[int], list[int]]:
    """A trie of the continuations read from ``places``, in that order, at most ``nodes`` nodes.

    Returns:
        Each node's parent row (0 is the head) and its token; siblings are distinct.
    """
    row: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    drafted: list[int] = []
    visited = set()
    for place in places:
        if place in visited:
            continue
        visited.add(place)
        at = 0
        for token in continuation(tokens, place, depth):
            child = row.get((at, token))
            if child is None:
                if len(drafted) == nodes:
                    return parents, drafted
                parents.append(at)
                drafted.append(token)
                child = row[at, token] = len(drafted)
            at = child
    return parents, drafted


@lru_cache(maxsize=1024)
def shape_of(parents: tuple[int, ...]) -> Shape:
    """The one-tree shape with these parent rows."""
    return Shape(1, np.array(parents, dtype=np.int64))
