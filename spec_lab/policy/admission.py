"""Which rows of a forest are admitted, given how likely each node is accepted if its parent is."""

from __future__ import annotations

import numpy as np

from spec_lab.core.shape import Shape


def survivals(confidence: np.ndarray, shape: Shape) -> np.ndarray:  # [M] -> [R]
    """Return the survival of every row: the product of confidences along its path; that of a sibling is lower by its
    rank. NaN, where nothing was measured (below forced tokens of chains), counts as certain.
    """
    confidence = np.nan_to_num(confidence, nan=1.0).clip(0.0, 1.0)
    if_reached = confidence * (1 - confidence) ** shape.rank  # accepted where its earlier siblings were not
    survival = np.ones(shape.rows)
    for row, (above, share) in enumerate(zip(shape.parent.tolist(), if_reached.tolist(), strict=True), shape.roots):
        survival[row] = survival[above] * share
    return survival


def largest(
    shape: Shape,
    sampled: np.ndarray,
    survival: np.ndarray,
    rows: np.ndarray,
    count: int,
) -> np.ndarray:  # [n] bool
    """Return which of ``rows`` are roots or among the ``count`` nodes of the largest survivals, sampled siblings
    together.

    The first siblings that exceed the number end the admission: rows after them have smaller survivals.

    Args:
        shape: the forest.
        sampled: ``[M]`` bool, of its nodes.
        survival: ``[R]`` of its rows.
        rows: ``[n]`` of whole trees, parents first.
        count: of nodes.
    """
    admitted = rows < shape.roots
    positions = np.flatnonzero(~admitted)
    nodes = rows[positions] - shape.roots
    families = np.where(sampled[nodes], shape.parent[nodes], -1 - nodes)  # those that are admitted together
    together: dict[int, list[int]] = {}
    for position, family in zip(positions.tolist(), families.tolist(), strict=True):
        together.setdefault(family, []).append(position)
    share: list[float] = survival[rows].tolist()
    for siblings in sorted(together.values(), key=lambda siblings: -share[siblings[0]]):  # parents come first
        if len(siblings) > count:
            break
        admitted[siblings] = True
        count -= len(siblings)
    return admitted
