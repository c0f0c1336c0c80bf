"""Static draft trees, as pure functions: how they are written, how they grow, and which is best.

A tree is a set of nodes, each named by the path of child ranks that leads to it ("choices", as Medusa and EAGLE publish
theirs). ``value(path)`` is the probability that the node at ``path`` is accepted; the tokens a step is expected to give
are 1 + the sum of its nodes' values.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, product

import numpy as np

from spec_lab.draft import tree as shape_of

Path = tuple[int, ...]
Choices = tuple[Path, ...]
Value = Callable[[Path], float]
Accuracy = Sequence[Sequence[float]]
"""``accuracy[d][r]``: probability that the child of rank r is the accepted one, given an accepted parent at depth d."""


def parse(text: str | int | Sequence[Sequence[int]]) -> Choices:
    """The choices that ``text`` names: widths per depth ("3x2x1"), or paths of ranks ("0 1 0.0 0.1 0.0.0").

    A sequence of paths is taken as it is.

    Raises:
        ValueError: neither form, or no tree (a missing parent, a missing earlier sibling, a repeated path).
    """
    if isinstance(text, int):
        text = str(text)  # one width, as YAML reads it
    if isinstance(text, str):
        if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text.strip()):
            return widths([int(width) for width in text.split("x")])
        if not re.fullmatch(r"\d+(\.\d+)*(\s+\d+(\.\d+)*)*", text.strip()):
            raise ValueError(f"a tree is written as widths (3x2x1) or as paths of ranks (0 1 0.0), not {text!r}")
        paths: Iterable[Path] = (tuple(int(rank) for rank in path.split(".")) for path in text.split())
    else:
        paths = (tuple(path) for path in text)
    choices = tuple(sorted(paths, key=lambda path: (len(path), path)))
    shape_of(choices)  # refuses what is no tree
    return choices


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


def by_rank(accuracy: Accuracy) -> Value:
    """The value of a path when ranks at different depths are independent: the product of its accuracies."""

    def value(path: Path) -> float:
        return float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)]))

    return value


def expected_tokens(choices: Choices, value: Value) -> float:
    """Tokens a step is expected to give, the one after the accepted path included."""
    return 1.0 + sum(map(value, choices))


def grow(value: Value, nodes: int, depth: int, ranks: int) -> list[tuple[Path, float]]:
    """Nodes and their values in the order in which a tree grows: always the likeliest that can be attached next.

    The first n are the best tree of n nodes if values fall along ranks as they do along paths.

    Args:
        value: of every path of at most ``depth`` ranks below ``ranks``.
        nodes: how many to grow at most.
    """
    open_: list[tuple[float, Path]] = [(-value((0,)), (0,))] if depth and ranks else []
    grown: list[tuple[Path, float]] = []
    while open_ and len(grown) < nodes:
        negative, path = heapq.heappop(open_)
        grown.append((path, -negative))
        for following in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(following) <= depth and following[-1] < ranks:
                heapq.heappush(open_, (-value(following), following))
    return grown


def fastest(grown: Sequence[tuple[Path, float]], seconds: Callable[[int], float]) -> tuple[Choices, float]:
    """The prefix of ``grown`` with the most expected tokens per second, and these tokens.

    Args:
        grown: as ``grow`` gives it, at least one node.
        seconds: of a step that verifies n nodes, drafting included.
    """
    tokens = list(accumulate((value for _, value in grown), initial=1.0))[1:]
    best = max(range(len(grown)), key=lambda number: tokens[number] / seconds(number + 1))
    return parse([path for path, _ in grown[: best + 1]]), tokens[best]


def sequoia(accuracy: Accuracy, nodes: int) -> tuple[np.ndarray, list[Choices]]:
    """The best tree of every size, by Sequoia's recurrence (2402.12374, section 4.1), ranks differing by depth.

    With p_b at depth d, T_d(m, b) the expected tokens of the best tree of m nodes whose root, at depth d, has b
    children, and T_d(m) its maximum over b::

        T_d(1, 0) = 1
        T_d(m, b) = max over y of  T_d(y, b - 1) + p_b T_{d+1}(m - y)

    Args:
        accuracy: one list of p_b per depth; its length bounds the tree's depth.
        nodes: largest size, the head not counted.

    Returns:
        tokens ``[nodes + 1]``: expected tokens of the best tree of 0, 1, .. nodes nodes (-inf: there is none of
        that size); and these trees.
    """
    size = nodes + 1  # of a tree with its root
    best = np.full((len(accuracy) + 1, size + 1), -np.inf)  # T_d(m)
    best[-1, 1] = 1.0
    children = np.zeros(best.shape, dtype=np.int64)  # arg max over b
    splits = []  # arg max over y, [m, b] for each depth
    for depth in reversed(range(len(accuracy))):
        p = accuracy[depth]
        tokens = np.full((size + 1, len(p) + 1), -np.inf)  # T_d(m, b)
        tokens[1, 0] = 1.0
        split = np.zeros(tokens.shape, dtype=np.int64)
        for b in range(1, len(p) + 1):
            for m in range(2, size + 1):
                below = best[depth + 1, m - 1 : 0 : -1]
                options = np.where(np.isfinite(below), tokens[1:m, b - 1] + p[b - 1] * np.maximum(below, 0), -np.inf)
                split[m, b] = 1 + int(options.argmax())
                tokens[m, b] = options.max()
        children[depth], best[depth] = tokens.argmax(1), tokens.max(1)
        splits.append(split)
    splits.reverse()

    def collect(depth: int, m: int, above: Path) -> list[Path]:
        paths: list[Path] = []
        for b in range(int(children[depth, m]), 0, -1):
            y = int(splits[depth][m, b])
            child = (*above, b - 1)
            paths += [child, *collect(depth + 1, m - y, child)]
            m = y
        return paths

    reachable = [m for m in range(1, size + 1) if np.isfinite(best[0, m])]
    trees = {m: parse(collect(0, m, ())) if m > 1 else () for m in reachable}
    return best[0, 1:], [trees.get(m, ()) for m in range(1, size + 1)]
