"""The order of contexts, which are the reversed tokens before a position: as bytes, and of a whole text at once."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np

SEPARATOR = -1
"""Stands before and between texts, so that no context and no continuation joins two of them."""


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return token + 1 in four bytes, the lowest first, for each token or SEPARATOR."""
    numbers = array("I", [token + 1 for token in tokens])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def sorted_contexts(text: np.ndarray, length: int) -> np.ndarray:
    """Return the positions p of a text with a context, sorted by the reversed ``length`` tokens before p, then by p.

    Contexts of twice the length are sorted by pairs of ranks (Manber and Myers 1993).

    Args:
        text: ``[n]`` int64, tokens and SEPARATOR, which precedes the first token.
        length: at least 1.

    Returns:
        ``[<= n]`` int64: those p for which neither ``text[p]`` nor ``text[p - 1]`` is a separator.
    """
    rank, done = np.unique(text, return_inverse=True)[1].astype(np.int64), 1
    while done < length:
        step = min(done, length - done)  # the second half may overlap the first
        earlier = np.zeros_like(rank)
        earlier[step:] = rank[:-step] if step < len(rank) else 0
        rank = np.unique(rank * (len(text) + 1) + earlier, return_inverse=True)[1].astype(np.int64)
        done += step
    order = np.argsort(rank[:-1], kind="stable") + 1
    return order[(text[order] != SEPARATOR) & (text[order - 1] != SEPARATOR)]
