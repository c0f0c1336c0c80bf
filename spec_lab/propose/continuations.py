"""What follows a place of a text, and texts merged into a tree, for proposers that draft what they have found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def continuation(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """Return the ``count`` tokens from ``place`` on; at the end of the text they repeat from ``place``."""
    found = list(tokens[place : place + count])
    return found if len(found) == count else (found * -(-count // len(found)))[:count]


def merged(texts: Iterable[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Merge texts, in their order, into a trie of at most ``nodes`` nodes.

    Returns:
        Each node's parent row (0 is the root) and its token; siblings have distinct tokens.
    """
    row: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    drafted: list[int] = []
    for text in texts:
        at = 0
        for token in text:
            child = row.get((at, token))
            if child is None:
                if len(drafted) == nodes:
                    return parents, drafted
                parents.append(at)
                drafted.append(token)
                child = row[at, token] = len(drafted)
            at = child
    return parents, drafted
