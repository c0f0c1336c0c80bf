"""N-gram (prompt-lookup) proposers: they draft what followed the last tokens where these occurred before.

Source: prompt lookup decoding (Saxena 2023) and LLMA (2304.04487, section 2.2); several continuations merged into a
tree as in REST (2311.08252, section 3.2), from the sequence's own text instead of a datastore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import Count, Whole, WrongOption, checked
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.core.upload import upload_tokens
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.auto_depth import Acceptance, AutoDepth, Depth, resolved
from spec_lab.propose.continuations import continuation, merged
from spec_lab.propose.trees import TreeNodes

SCAN = 32
"""Maximum number of earlier occurrences of one n-gram that a tree uses, the most recent first."""

Match = Literal["recent", "first"]

LONGEST = 64
"""Length of the longest n-gram that can be looked up: indexing a token costs the square of it."""

Size = Annotated[int, Whole(1, LONGEST)]


class Index:
    """The positions at which each n-gram of a growing text has occurred.

    ``ends[gram]`` lists, in ascending order, the positions e with ``gram == tokens[e - n : e]`` that are followed by a
    token (e < len(tokens)), so the last n tokens of the text do not match themselves.

    Args:
        lengths: the lengths of n-grams, longest first.
    """

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths
        self.ends: dict[tuple[int, ...], list[int]] = {}
        self.tokens: list[int] = []  # the indexed text

    def follow(self, tokens: list[int]) -> None:
        """Make this the index of ``tokens`` in time O(new tokens), or O(removed tokens) after a rewind.

        The check for a rewind compares two lists, which takes a few nanoseconds per token.
        """
        if self.tokens != tokens[: len(self.tokens)] or len(self.tokens) >= len(tokens):
            self._rewind(tokens)
        for end in range(len(self.tokens) + 1, len(tokens)):
            for n in self.lengths:
                if n <= end:
                    self.ends.setdefault(tuple(tokens[end - n : end]), []).append(end)
        self.tokens += tokens[len(self.tokens) : -1]

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
        """Yield the ends of earlier matches, longer ones first, then more recent ones; some of them repeatedly."""
        for n in self.lengths:
            if n < len(tokens):
                yield from self.ends.get(tuple(tokens[-n:]), ())[: -SCAN - 1 : -1]

    def first(self, tokens: list[int], count: int) -> int | None:
        """Return the end of the earliest match of the longest n-gram that has ``count`` tokens after it.

        It must end before the last n tokens begin. Where the earliest match fails, later ones do as well: no scan.
        """
        for n in self.lengths:
            ends = self.ends.get(tuple(tokens[-n:]), ()) if n < len(tokens) else ()
            if ends and ends[0] + max(count, n + 1) <= len(tokens):
                return ends[0]
        return None


@dataclass(eq=False)
class Ngram(Proposer):
    """Drafts the continuation of the longest, then most recent or first, earlier occurrence of the last tokens.

    Args:
        depth: number of drafted tokens, k; at most ``auto_depth.MAX_DEPTH``; 0 drafts nothing.
        max_ngram: length of the longest n-gram that is looked up; at most ``LONGEST``.
        min_ngram: length of the shortest.
        match: which of several occurrences: "recent", the last; "first", the first with ``depth`` tokens after it that
            does not reach into the last tokens, as in Saxena's ``find_candidate_pred_tokens``.
        chosen: why the depth was chosen; None where it was given.
    """

    depth: int
    max_ngram: int
    min_ngram: int
    match: Match = "recent"
    chosen: AutoDepth | None = None
    name: str = "ngram"
    drawn: Drawn = "deterministic"
    branches: bool = False
    _chain: Callable[[int], Shape] = field(init=False, repr=False, default_factory=lambda: lru_cache(None)(chain))

    @staticmethod
    @checked
    def load(
        target: Target,
        depth: Depth = "auto",
        max_ngram: Size = 4,
        min_ngram: Size = 1,
        match: Match = "recent",
        acceptance: Acceptance = 0.7,
        batch_size: Count = 1,
    ) -> Ngram:
        """Return the proposer with valid options.

        Args:
            target: on which the costs of rows are measured where the depth is auto.
            depth: tokens drafted; 0: none; auto: as many as are fastest by measured costs and the acceptance.
            max_ngram: longest n-gram looked up in prompt and output; longer matches first.
            min_ngram: shortest n-gram looked up.
            match: of several occurrences: recent (the last) or first (the first with depth tokens after it).
            acceptance: probability of each drafted token, given those before it, with depth=auto.
            batch_size: sequences decoded together, with depth=auto.

        Raises:
            ValueError: an option of the wrong type or range; names it.
        """
        sizes = lengths(max_ngram, min_ngram)
        tokens, chosen = resolved(depth, target, acceptance, batch_size)
        return Ngram(tokens, *sizes, match, chosen)

    @property
    def nodes(self) -> int:
        """Maximum number of nodes below one root."""
        return self.depth

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts = {"max_ngram": self.max_ngram, "min_ngram": self.min_ngram, "match": self.match}
        return facts if self.chosen is None else facts | {"auto_depth": self.chosen.facts}

    def propose(self, batch: Batch) -> Draft:
        """Draft one chain per sequence, an empty one where nothing matches."""
        drafted: list[int] = []
        shapes = []
        for room, sequence in zip(batch.room(), batch.sequences, strict=True):
            if not room or not self.depth:  # as a policy decided: nothing is looked up
                shapes.append(self._chain(0))
                continue
            index: Index = sequence.state
            index.follow(sequence.tokens)
            if self.match == "first":
                position = index.first(sequence.tokens, self.depth)
            else:
                position = next(index.matches(sequence.tokens), None)
            continued = [] if position is None else continuation(sequence.tokens, position, self.depth)
            drafted += continued
            shapes.append(self._chain(len(continued)))
        return Draft(forest(tuple(shapes)), upload_tokens(batch.device, drafted))

    def init(self, request: Request) -> Index:
        """Return the index of an empty text."""
        return Index(range(self.max_ngram, self.min_ngram - 1, -1))


@dataclass(eq=False)
class NgramTree(Proposer):
    """Drafts several continuations merged into one tree: longer matches first, then more recent ones.

    Args:
        nodes: maximum number of nodes of a tree; at most ``trees.MAX_NODES``.
        depth: number of tokens of a continuation; at most ``auto_depth.MAX_DEPTH``; 0 drafts nothing.
        max_ngram: length of the longest n-gram that is looked up; at most ``LONGEST``.
        min_ngram: length of the shortest.
        chosen: why the depth was chosen; None where it was given.
    """

    nodes: int
    depth: int
    max_ngram: int
    min_ngram: int
    chosen: AutoDepth | None = None
    name: str = "ngram_tree"
    drawn: Drawn = "deterministic"
    branches: bool = True
    _shape: Callable[[tuple[int, ...]], Shape] = field(
        init=False, repr=False, default_factory=lambda: lru_cache(maxsize=1024)(shape_of)
    )

    @staticmethod
    @checked
    def load(
        target: Target,
        nodes: TreeNodes = 12,
        depth: Depth = "auto",
        max_ngram: Size = 4,
        min_ngram: Size = 1,
        acceptance: Acceptance = 0.7,
        batch_size: Count = 1,
    ) -> NgramTree:
        """Return the proposer with valid options.

        Args:
            target: on which the costs of rows are measured where the depth is auto.
            nodes: maximum nodes of a tree.
            depth: longest continuation; 0: none; auto: the fastest of chains by measured costs and the acceptance.
            max_ngram: longest n-gram looked up in prompt and output; longer matches first.
            min_ngram: shortest.
            acceptance: probability of each drafted token, given those before it, with depth=auto.
            batch_size: sequences decoded together, with depth=auto.

        Raises:
            ValueError: an option of the wrong type or range; names it.
        """
        sizes = lengths(max_ngram, min_ngram)
        tokens, chosen = resolved(depth, target, acceptance, batch_size)
        return NgramTree(nodes, tokens, *sizes, chosen)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        facts = {"depth": self.depth, "max_ngram": self.max_ngram, "min_ngram": self.min_ngram}
        return facts if self.chosen is None else facts | {"auto_depth": self.chosen.facts}

    def propose(self, batch: Batch) -> Draft:
        """Draft one tree per sequence, an empty one where nothing matches."""
        drafted: list[int] = []
        shapes = []
        for room, sequence in zip(batch.room(), batch.sequences, strict=True):
            if not room or not self.depth:  # as in ``Ngram``
                shapes.append(self._shape(()))
                continue
            index: Index = sequence.state
            index.follow(sequence.tokens)
            parents, tokens = merge(sequence.tokens, index.matches(sequence.tokens), self.depth, self.nodes)
            drafted += tokens
            shapes.append(self._shape(tuple(parents)))
        return Draft(forest(tuple(shapes)), upload_tokens(batch.device, drafted))

    def init(self, request: Request) -> Index:
        """Return the index of an empty text."""
        return Index(range(self.max_ngram, self.min_ngram - 1, -1))


def lengths(max_ngram: int, min_ngram: int) -> tuple[int, int]:
    """Return both after checking them.

    Raises:
        WrongOption: ``min_ngram`` is larger than ``max_ngram``.
    """
    if min_ngram > max_ngram:
        raise WrongOption(f"min_ngram is {min_ngram}, larger than max_ngram, which is {max_ngram}")
    return max_ngram, min_ngram


def merge(tokens: list[int], places: Iterator[int], depth: int, nodes: int) -> tuple[list[int], list[int]]:
    """Merge the continuations from ``places``, in that order, into a trie of at most ``nodes`` nodes.

    Returns:
        As ``continuations.merged``.
    """
    return merged((continuation(tokens, position, depth) for position in _distinct(places)), nodes)


def _distinct(places: Iterator[int]) -> Iterator[int]:
    visited = set()
    for position in places:
        if position not in visited:
            visited.add(position)
            yield position


def shape_of(parents: tuple[int, ...]) -> Shape:
    """Return the one-tree shape with these parent rows."""
    return Shape(1, np.array(parents, dtype=np.int64))
