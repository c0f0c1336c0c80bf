"""Static draft trees, as pure functions: how they are written, how they grow, and which is best.

A tree is a set of nodes, each named by the path of child ranks that leads to it ("choices", as Medusa and EAGLE publish
theirs). ``value(path)`` is the probability that the node at ``path`` is accepted; the expected tokens of a step
are 1 + the sum of its nodes' values.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated, TypeGuard

import numpy as np

from spec_lab.core.options import Form, Whole, WrongOption, brief
from spec_lab.core.shape import tree as shape_of

Ranks = tuple[int, ...]
"""A node, as the path of child ranks that leads to it."""

Choices = tuple[Ranks, ...]
MAX_NODES = 1024
"""Most nodes of a tree: published ones have up to 768, and a step's cost grows with them."""

MAX_DEPTH = 256
"""Most levels of a tree, or tokens of a chain."""

Written = Form("widths such as 3x2x1, ranks such as '0 1 0.0' or the name of a published tree")
TreeText = Annotated[str, Written] | Annotated[int, Whole(1), Written] | Sequence[Sequence[int]]
TreeNodes = Annotated[int, Whole(1, MAX_NODES)]
TreeDepth = Annotated[int, Whole(1, MAX_DEPTH)]

Value = Callable[[Ranks], float]


def parse(text: TreeText) -> Choices:
    """Return the choices that ``text`` names.

    Args:
        text: widths per depth ("3x2x1"); paths of ranks ("0 1 0.0 0.1 0.0.0"), as text or as a sequence; or the name
            of a published tree ("vicuna_7b_stage1"), see ``published_trees.json``.

    Raises:
        ValueError: none of these forms, an unknown name, no tree (a missing parent, a missing earlier sibling, a
            repeated path), more than ``MAX_NODES`` nodes or ``MAX_DEPTH`` levels. Names proposer.tree.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(min(text, MAX_NODES + 1)) if text > 0 else brief(text)  # one width, as YAML reads it
    if isinstance(text, str):
        text = text.strip()
        if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text, re.ASCII):
            counts = [_number(width) for width in text.split("x")]
            nodes = level = 1
            for depth, count in enumerate(counts, start=1):
                level *= count
                nodes += level
                _check_size(nodes - 1, depth)
            return widths(counts)
        if not re.fullmatch(r"\d+(\.\d+)*(\s+\d+(\.\d+)*)*", text, re.ASCII):
            text = _published(text)
        written = text.split()
        _check_size(len(written), max(path.count(".") + 1 for path in written))
        paths: Iterable[Ranks] = (tuple(map(_number, path.split("."))) for path in written)
    elif _are_paths(text):
        _check_size(len(text), max(map(len, text), default=0))
        paths = (tuple(path) for path in text)
    else:
        raise WrongOption(
            f"tree: a tree is text, widths (3x2x1) or paths of ranks (0 1 0.0), not {brief(text)}: "
            "quote it, \"tree='0.0'\""
        )
    choices = tuple(sorted(paths, key=lambda path: (len(path), path)))
    try:
        shape_of(choices)  # refuses what is no tree
    except ValueError as error:
        raise WrongOption(f"tree: {error}") from None
    return choices


def _published(name: str) -> str:
    """Return the paths of a published tree."""
    known = json.loads(Path(__file__).with_name("published_trees.json").read_text(encoding="utf-8"))
    if name not in known:
        near = get_close_matches(name, known, 3, 0.5)
        raise WrongOption(
            "tree: a tree is written as widths (3x2x1), as paths of ranks (0 1 0.0) or as the name of a "
            f"published tree ({', '.join(near or known)}), not {brief(name)}"
        )
    return str(known[name]["paths"])


def _number(digits: str) -> int:
    """The number; one of more than six digits, which no tree can have, becomes the largest of six."""
    return int(digits) if len(digits) <= 6 else 999_999


def _check_size(nodes: int, depth: int) -> None:
    if nodes > MAX_NODES:
        raise WrongOption(f"tree has {nodes} nodes or more, at most {MAX_NODES} are possible: give a smaller one")
    if depth > MAX_DEPTH:
        raise WrongOption(f"tree is {depth} levels deep, at most {MAX_DEPTH} are possible: give a shallower one")


def _are_paths(value: object) -> TypeGuard[Sequence[Sequence[int]]]:
    """Whether ``value`` is a sequence of sequences of ranks."""
    return isinstance(value, Sequence) and all(
        isinstance(path, Sequence) and not isinstance(path, str) and all(isinstance(rank, int) for rank in path)
        for path in value
    )


def write(choices: Choices) -> str:
    """Return the text that ``parse`` reads back, such as ``0 1 0.0``."""
    return " ".join(".".join(map(str, path)) for path in choices)


def widths(counts: Sequence[int]) -> Choices:
    """Return the tree in which every node at depth d has ``counts[d]`` children (Sequoia's and SpecInfer's widths)."""
    levels = (product(*map(range, counts[:depth])) for depth in range(1, len(counts) + 1))
    return tuple(path for level in levels for path in level)


def depth_of(choices: Choices) -> int:
    """Return the number of edges on the longest path."""
    return max(map(len, choices), default=0)


def width_of(choices: Choices) -> int:
    """Return the largest number of children of a node."""
    return max((path[-1] + 1 for path in choices), default=0)


def by_rank(accuracy: Sequence[Sequence[float]]) -> Value:
    """Return the value of a path when ranks at different depths are independent: the product of its accuracies.

    Args:
        accuracy: ``[d][r]``: P(the child of rank r is the accepted one | its parent, at depth d, is accepted).

    Returns:
        A function from paths of child ranks to P(all of the path is accepted).
    """

    def value(path: Ranks) -> float:
        return float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)]))

    return value


def expected_tokens(choices: Choices, value: Value) -> float:
    """Return the expected tokens of a step, bonus or recovered token included.

    Args:
        choices: the nodes as paths of child ranks.
        value: P(a path is accepted).
    """
    return 1.0 + sum(map(value, choices))


def grow(value: Value, nodes: int, depth: int, ranks: int) -> list[tuple[Ranks, float]]:
    """Return nodes and values in the order in which a tree grows: always the likeliest that can be attached next.

    Values never rise along a path. Where they fall along ranks as well, the first n nodes are the n likeliest of
    all, so they are the best tree of n nodes. Sequoia (2402.12374, section 4.1) finds that tree by a recurrence over
    sizes, for values that are products of accuracies by rank (``by_rank``); there the two agree, and the tests compare
    this function with the recurrence. Growth supports any values, such as the counts of whole paths. Where some rank
    beats an earlier one it only approximates: a good node behind a poor sibling is found late.

    Args:
        value: of every path of at most ``depth`` ranks below ``ranks``.
        nodes: how many to grow at most.
        depth: of the deepest node, at most.
        ranks: most children of a node.
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
