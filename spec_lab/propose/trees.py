"""Static draft trees, as pure functions: how they are written, how they grow, and which is best.

A tree is a set of nodes, each named by the path of child ranks that leads to it ("choices", as Medusa and EAGLE publish
theirs). ``value(path)`` is the probability that the node at ``path`` is accepted; the tokens a step is expected to give
are 1 + the sum of its nodes' values.
"""

from __future__ import annotations

import heapq
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TypeGuard

import numpy as np

from spec_lab.draft import tree as shape_of

Ranks = tuple[int, ...]
"""A node, as the path of child ranks that leads to it."""

Choices = tuple[Ranks, ...]

MOST_NODES = 4096
"""Nodes of the largest tree, and so its greatest width."""

MOST_DEPTH = 256
"""Depth of the deepest tree: every node is written as the whole path to it."""

LONGEST = 1_000_000
"""Characters of the longest text that is read as a tree."""

TOO_LARGE = "trees that pay have some dozens of nodes"

Value = Callable[[Ranks], float]


def parse(text: str | int | Sequence[Sequence[int]]) -> Choices:
    """The choices that ``text`` names: widths per depth ("3x2x1"), or paths of ranks ("0 1 0.0 0.1 0.0.0").

    A sequence of paths is taken as it is. A tree has at most ``MOST_NODES`` nodes and is at most ``MOST_DEPTH`` deep.

    Raises:
        ValueError: neither form, or no tree (a missing parent, a missing earlier sibling, a repeated path); a tree that
            is too large.
    """
    if isinstance(text, str) and len(text) > LONGEST:
        raise ValueError(f"the text of a tree has {len(text)} characters; {LONGEST} are allowed: {TOO_LARGE}")
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)  # one width, as YAML reads it
    if isinstance(text, str):
        if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text.strip()):
            return _checked_widths(text)
        if not re.fullmatch(r"\d+(\.\d+)*(\s+\d+(\.\d+)*)*", text.strip()):
            raise ValueError(
                f"a tree is written as widths (3x2x1) or as paths of ranks (0 1 0.0), not {reprlib.repr(text)}"
            )
        paths: Iterable[Ranks] = (tuple(int(rank) for rank in path.split(".")) for path in text.split())
    elif _are_paths(text):
        paths = (tuple(path) for path in text)
    else:
        raise ValueError(
            f"a tree is text, widths (3x2x1) or paths of ranks (0 1 0.0), not {reprlib.repr(text)}: "
            "quote it, \"proposer.tree='0.0'\""
        )
    choices = tuple(sorted(paths, key=lambda path: (len(path), path)))
    _check_size(len(choices), depth_of(choices))
    shape_of(choices)  # refuses what is no tree
    return choices


def _checked_widths(text: str) -> Choices:
    """The tree of widths per depth.

    Raises:
        ValueError: it is too large; nothing is built.
    """
    counts = text.strip().split("x")
    nodes, level = 0, 1
    for depth, count in enumerate(counts, 1):
        level *= int(count) if len(count) <= len(str(MOST_NODES)) else MOST_NODES + 1
        nodes += level
        _check_size(nodes, depth)
    return widths([int(count) for count in counts])


def _check_size(nodes: int, depth: int) -> None:
    """Refuse a tree that is too large.

    Raises:
        ValueError: says which limit it exceeds.
    """
    if nodes > MOST_NODES:
        raise ValueError(f"the tree has more than {MOST_NODES} nodes: {TOO_LARGE}")
    if depth > MOST_DEPTH:
        raise ValueError(f"the tree is more than {MOST_DEPTH} deep: {TOO_LARGE}")


def _are_paths(value: object) -> TypeGuard[Sequence[Sequence[int]]]:
    """Whether ``value`` is a sequence of sequences of ranks."""
    return isinstance(value, Sequence) and all(
        isinstance(path, Sequence) and not isinstance(path, str) and all(isinstance(rank, int) for rank in path)
        for path in value
    )


def write(choices: Choices) -> str:
    """The text that ``parse`` reads back."""
    return " ".join(".".join(map(str, path)) for path in choices)


def widths(counts: Sequence[int]) -> Choices:
    """The tree in which every node at depth d has ``counts[d]`` children."""
    levels = (product(*map(range, counts[:depth])) for depth in range(1, len(counts) + 1))
    return tuple(path for level in levels for path in level)


def depth_of(choices: Choices) -> int:
    """Edges on the longest path."""
    return max(map(len, choices), default=0)


def width_of(choices: Choices) -> int:
    """Most children of a node."""
    return max((path[-1] + 1 for path in choices), default=0)


def by_rank(accuracy: Sequence[Sequence[float]]) -> Value:
    """The value of a path when ranks at different depths are independent: the product of its accuracies.

    Args:
        accuracy: ``[d][r]``: P(the child of rank r is the accepted one | its parent, at depth d, is accepted).
    """

    def value(path: Ranks) -> float:
        return float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)]))

    return value


def expected_tokens(choices: Choices, value: Value) -> float:
    """Tokens a step is expected to give, the one after the accepted path included."""
    return 1.0 + sum(map(value, choices))


def grow(value: Value, nodes: int, depth: int, ranks: int) -> list[tuple[Ranks, float]]:
    """Nodes and their values in the order in which a tree grows: always the likeliest that can be attached next.

    Along a path values fall by nature. Where they fall along ranks as well, the first n nodes are the n likeliest of
    all, so they are the best tree of n nodes. Sequoia (2402.12374, section 4.1) finds that tree by a recurrence over
    sizes, for values that are products of accuracies by rank (``by_rank``); there the two agree, and the tests hold
    this function against the recurrence. Growth takes any values, such as the counts of whole paths. Where some rank
    beats an earlier one it only approximates: a good node behind a poor sibling is found late.

    Args:
        value: of every path of at most ``depth`` ranks below ``ranks``.
        nodes: how many to grow at most.
    """
    open_: list[tuple[float, Ranks]] = [(-value((0,)), (0,))] if depth and ranks else []
    grown: list[tuple[Ranks, float]] = []
    while open_ and len(grown) < nodes:
        negative, path = heapq.heappop(open_)
        grown.append((path, -negative))
        for following in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(following) <= depth and following[-1] < ranks:
                heapq.heappush(open_, (-value(following), following))
    return grown
