"""Where the nodes of a draft tree are drawn: depth to the right, siblings downwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spec_lab.analysis.metrics.frames import Ranks


class Place(NamedTuple):
    """Where a node stands: ``across`` is its depth, ``down`` counts leaves."""

    across: float
    down: float


def lay_out(paths: Iterable[Ranks]) -> dict[Ranks, Place]:
    """A place for every node: leaves on lines of their own, every parent level with its first child.

    Args:
        paths: the nodes, ``()`` for the root; each with its parent.
    """
    children: dict[Ranks, list[Ranks]] = {}
    for path in sorted(paths):
        children.setdefault(path, [])
        if path:
            children[path[:-1]].append(path)
    down: dict[Ranks, float] = {}
    lines = 0
    for path in sorted(children):  # a node, then all that is below it, then its next sibling
        if path and path[:-1] in down and path == children[path[:-1]][0]:
            down[path] = down[path[:-1]]
        else:
            down[path] = float(lines)
            lines += 1
    return {path: Place(float(len(path)), line) for path, line in down.items()}
