"""Continuations of a position of a text, and texts merged into a tree, for proposers that draft found text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count


def continuation(tokens: Sequence[int], start: int, length: int) -> list[int]:
    """Return the ``length`` tokens from ``place`` on; at the end of the text they repeat from ``place``."""
    following = list(tokens[start : start + length])
    return following if len(following) == length else (following * -(-length // len(following)))[:length]


@dataclass(eq=False)
class Trie:
    """Texts or trees of one sequence, merged.

    Args:
        parent: ``[n]`` the row above each node; 0 is the root, node i has row i + 1.
        token: ``[n]`` its token; siblings have distinct ones.
    """

    parent: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    _row: dict[tuple[int, int], int] = field(default_factory=dict)  # of each child, by its parent's row and its token

    def add(self, parent: Iterable[int], token: Sequence[int], max_nodes: int) -> list[int] | None:
        """Merge a tree, as long as the trie has fewer than ``max_nodes`` nodes.

        Args:
            parent, token: ``[m]`` of the tree, as in this class.

        Returns:
            ``[m]`` the nodes' numbers within the trie; None where some were left out.
        """
        rows = [0]  # within the trie, of each row of the tree; -1 where it was left out
        for above, drafted in zip(parent, token, strict=False):
            row = rows[above]
            child = self._row.get((row, drafted), -1) if row >= 0 else -1
            if child < 0 <= row and len(self.token) < max_nodes:
                self.parent.append(row)
                self.token.append(drafted)
                child = self._row[row, drafted] = len(self.token)
            rows.append(child)
        return None if -1 in rows else [row - 1 for row in rows[1:]]


def merged(texts: Iterable[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Merge texts, in their order, into a trie of at most ``nodes`` nodes. The first that does not fit is the last.

    Returns:
        Each node's parent row and its token, as in ``Trie``.
    """
    trie = Trie()
    for text in texts:
        if trie.add(count(), text, nodes) is None:
            break
    return trie.parent, trie.token
