"""How occurrences of a context become a draft: a trie of their continuations with counts, cut to the best nodes.

Source: SuffixDecoding (2411.04975, section 3.2): a tree within a budget for each match length, and the best score of
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from spec_lab.propose.suffix_search import SuffixSource


class SuffixDraft(NamedTuple):
    """A tree for one sequence.

    Args:
        score: the expected number of accepted tokens: the sum of the nodes' shares of the occurrences.
        parents: the row above each node; 0 is the root.
        tokens: of each node.
        counts: occurrences that lead to each row, the root's first.
    """

    score: float
    parents: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def shares(self) -> list[float]:
        """The share of each parent's occurrences that lead to the node: count(child) / count(node) of the paper."""
        return [count / self.counts[above] for count, above in zip(self.counts[1:], self.parents, strict=True)]


NO_DRAFT = SuffixDraft(0.0)


class Found(NamedTuple):
    """Result of a search: the draft, and the length of the longest match."""

    draft: SuffixDraft
    longest: int


@dataclass(frozen=True)
class SuffixRules:
    """How occurrences become a draft.

    Args:
        nodes: maximum number of nodes.
        depth: maximum number of tokens of a path.
        min_match: length of the shortest match.
        occurrences: maximum number of occurrences that are counted.
        factor, offset: a match of m tokens drafts at most factor * m + offset nodes.
        min_share: a node which a smaller share of the occurrences leads to is not drafted.
        children: maximum number of children of a node; 1 drafts chains.
        longest_only: whether only the longest match is tried.
    """

    nodes: int = 32
    depth: int = 32
    min_match: int = 1
    occurrences: int = 64
    factor: float = 1.0
    offset: int = 0
    min_share: float = 0.1
    children: int = 1
    longest_only: bool = False

    def budget(self, match: int) -> int:
        """Return the maximum number of nodes after a match of this length."""
        return min(self.nodes, int(self.factor * match) + self.offset)

    def worth(self, match: int, score: float) -> bool:
        """Whether occurrences with a match of this length may have a better score."""
        return match >= self.min_match and self.budget(match) > score  # a node adds at most 1

    def draft(self, source: SuffixSource, context: Sequence[int], best: SuffixDraft = NO_DRAFT) -> Found:
        """Return the draft with the best score: ``best``, or one from a source. Ties go to ``best``, then to longer
        matches.
        """
        longest = 0

        def worth(match: int) -> bool:
            nonlocal longest
            longest = longest or match
            return self.worth(match, best.score)  # shorter matches have smaller budgets

        positions: list[int] = []
        for match, places in source.matches(context, self.occurrences, worth):
            positions += places
            budget = self.budget(match)
            depth = min(self.depth, budget)
            if self.children == 1:
                draft = chain(source, positions, depth, self.min_share, best.score)
            else:
                draft = grow(source.continuations(positions, depth), budget, self.children, self.min_share)
            best = draft if draft.score > best.score else best
            if self.longest_only:
                break
        return Found(best, longest)


def chain(source: SuffixSource, places: Sequence[int], budget: int, min_share: float, min_score: float) -> SuffixDraft:
    """Return the tree of ``grow`` with one child, a chain, in less time; no draft if its score is <= ``min_score``.

    Args:
        source: what the positions are of.
        places: the position of each occurrence.
        budget: maximum number of nodes.
        min_share: smallest probability of a node.
        min_score: a score.
    """
    tokens: list[int] = []
    counts = [len(places)]
    total, counted, ended = len(places), 0, source.end
    while len(tokens) < budget:
        depth = len(tokens)
        column = source.following(places, depth)
        token = column[0]
        same = column.count(token)
        if token == ended or 2 * same < len(column):
            counter = Counter(column)
            counter[ended] = 0
            token = max(counter, key=counter.__getitem__)  # the first of the most frequent ones
            same = counter[token]
        if not same or same / total < min_share or (counted + same * (budget - depth)) / total <= min_score:
            break
        if same < len(places):
            places = [position for position, following in zip(places, column, strict=True) if following == token]
            tokens.append(token)
        else:
            tokens += _common(source.continuations([position + depth for position in places], budget - depth))
        counted += same * (len(tokens) - depth)
        counts += [same] * (len(tokens) - depth)
    score = counted / total
    if score <= min_score:
        return NO_DRAFT
    return SuffixDraft(score, tuple(range(len(tokens))), tuple(tokens), tuple(counts))


def _common(rows: list[list[int]]) -> list[int]:
    """Return the tokens that all rows begin with."""
    if len(rows) == 1:
        return rows[0]
    low, high = min(rows), max(rows)  # the others begin as both do
    same = next((at for at, (token, other) in enumerate(zip(low, high, strict=False)) if token != other), len(low))
    return low[:same]


def grow(rows: Sequence[Sequence[int]], budget: int, children: int, min_share: float) -> SuffixDraft:
    """Return the tree of the continuations that most occurrences agree on, likeliest nodes first.

    A node's probability is the product of count(child) / count(node) along its path (2411.04975, equation 1), which is
    the share of the occurrences whose continuation begins with the path.

    Args:
        rows: the continuation of each occurrence. Of equally frequent tokens the one of the earlier row comes first.
        budget: maximum number of nodes.
        children: maximum number of children of a node.
        min_share: smallest probability of a node.
    """
    parents: list[int] = []
    tokens: list[int] = []
    heap: list[tuple[int, int, int, int, int, list[Sequence[int]]]] = []
    total, order, counted = len(rows), 0, 0
    counts = [total]
    parent, depth, here = 0, 0, list(rows)
    while len(tokens) < budget:
        below: dict[int, list[Sequence[int]]] = {}
        for row in here:
            if depth < len(row):
                below.setdefault(row[depth], []).append(row)
        likeliest = sorted(below.items(), key=lambda item: -len(item[1])) if len(below) > 1 else list(below.items())
        for token, through in likeliest[:children]:
            if len(through) / total >= min_share:
                order += 1
                heappush(heap, (-len(through), order, parent, token, depth + 1, through))
        if not heap:
            break
        if heap[0][0] == -1:  # so are all others, which take turns
            heap.sort()
            for _, _, above, token, depth, (row,) in heap:
                parents.append(above)
                tokens.append(token)
                counts.append(1)
                counted += 1
                if len(tokens) == budget:
                    break
                if depth < len(row):
                    heap.append((-1, 0, len(tokens), row[depth], depth + 1, [row]))
            break
        count, _, above, token, depth, here = heappop(heap)
        counted -= count
        parents.append(above)
        tokens.append(token)
        counts.append(-count)
        parent = len(tokens)
    return SuffixDraft(counted / total, tuple(parents), tuple(tokens), tuple(counts))
