"""The experts that a step's rows read: counted by layer, of rows that are kept and of rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spec_lab.core.draft import Draft
from spec_lab.decode.commit import Committed
from spec_lab.runners.runner import Output


class ExpertCounts(NamedTuple):
    """Different experts that the rows of one forward chose, of each layer with experts.

    Args:
        read: by any row: what the forward reads.
        accepted: by pending tokens, chunks of prompts and accepted nodes.
        rejected: by all other rows. Both together are at least ``read``; what ``read`` exceeds ``accepted`` by was
            read for rejected rows alone.
    """

    read: list[int]
    accepted: list[int]
    rejected: list[int]

    @staticmethod
    def of(chosen: np.ndarray, accepted: np.ndarray, rejected: np.ndarray, experts: int) -> ExpertCounts:
        """Count.

        Args:
            chosen: ``[layers, N, k]``; numbers from ``experts`` on, and negative ones, read nothing.
            accepted, rejected: numbers of rows; other rows do not count.
            experts: E.
        """
        layers = np.arange(len(chosen))[:, None, None]
        numbers = np.where((chosen >= 0) & (chosen < experts), chosen, experts)
        hit = np.zeros((2, len(chosen), experts + 1), dtype=bool)
        for part, rows in enumerate((accepted, rejected)):
            hit[part, layers, numbers[:, rows]] = True
        hit = hit[..., :experts]
        return ExpertCounts(hit.any(0).sum(1).tolist(), *hit.sum(2).tolist())

    @staticmethod
    def of_step(
        output: Output, chosen: np.ndarray, experts: int, forest: Draft, committed: Sequence[Committed]
    ) -> ExpertCounts:
        """Count those of a step whose draft is verified.

        Args:
            chosen: as in ``of``, on the host.
            experts: E.
            forest: that was computed.
            committed: of each tree; its path is what was accepted, before limits cut it.
        """
        every = np.arange(chosen.shape[1])
        kept = [every[rows] for rows in output.pending_rows]
        left = []
        for nodes, got in zip(output.node_rows, committed, strict=True):
            rows, path = every[nodes], [forest.shape.places.item(row) for row in got.path]
            kept.append(rows[path])
            left.append(np.delete(rows, path))
        empty = np.empty(0, dtype=np.int64)
        return ExpertCounts.of(chosen, np.concatenate([empty, *kept]), np.concatenate([empty, *left]), experts)
