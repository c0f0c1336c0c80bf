"""The interface for drafting with the target's own layers: the ability ``layer_ranges``.

A *draft pass* computes pending tokens and draft nodes by some of the target's layers, on the KV cells of the target's
own sequences. Early exit (LayerSkip 2404.16710) runs the first layers; the target's forward then continues from their
output. With skipped sublayers (Draft&Verify 2309.08168, SWIFT 2410.06916) everything
that the draft pass computed is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Shape

SublayerKind = Literal["attn", "mlp"]


class Sublayer(NamedTuple):
    """One of a layer's two sublayers, which add their outputs to the residual stream."""

    kind: SublayerKind
    layer: int


@dataclass(frozen=True)
class Route:
    """Which layers run.

    Args:
        first: the first one. From a layer above 0 on, the input of that layer is given.
        end: the last one + 1; None for all. The final norm and the LM head follow whatever ran last.
        skipped: sublayers that add nothing to the residual stream.
    """

    first: int = 0
    end: int | None = None
    skipped: frozenset[Sublayer] = frozenset()


class Partial(NamedTuple):
    """The results of a draft pass for some rows.

    Args:
        logits: ``[n, V]``, of roots or nodes, by the final norm and the LM head; None if the pass computes none.
        exits: ``[N, H]`` the output of the last layer that ran, of all rows: pending tokens, sequence by sequence, or
            nodes. None of a pass with skipped sublayers.
        array: the same memory as ``logits`` on the host, as of ``runner.Output``.
    """

    logits: Tensor | None
    exits: Tensor | None
    array: np.ndarray | None = None


class DraftPass(Protocol):
    """A draft that is computed by some of the target's layers. Its cells are not part of the sequences."""

    def forward(
        self, sequences: Sequence[Any], pending: Sequence[Sequence[int]], timed: Phase, every: bool = False
    ) -> Partial:
        """Compute pending tokens; called once, before any node.

        Args:
            sequences: ``[B]`` the target's.
            pending: ``[B]`` the tokens that follow, at least one and at most ``max_pending`` each.
            timed: records the calls of the model.
            every: logits of all rows, not of the last one of each sequence.
        """
        ...

    def extend(
        self, sequences: Sequence[Any], shape: Shape, rows: np.ndarray, token: np.ndarray, timed: Phase
    ) -> Partial:
        """Compute nodes whose ancestors are computed. Arguments as of ``runner.DraftRunner.extend``."""
        ...

    def finish(self, token: Tensor, host: np.ndarray | None = None) -> None:
        """The draft is complete: the target's forward continues from the rows that are computed.

        If the forward's draft differs, as after a constraint has merged forced tokens, it continues from those rows
        that occur in both, and the others are given back. The tokens of such a draft must be in the host's memory;
        where they are not, as on a GPU, it continues from the rows of pending tokens only.

        Args:
            token: ``[M]`` the tokens of the draft.
            host: the same on the host; needed where ``token`` is not in the host's memory.
        """
        ...

    def drop(self, clear: bool = False) -> None:
        """Give back all cells. Harmless when repeated.

        Args:
            clear: whether to overwrite them with zeros, for what is not finite: a mask does not remove NaN (0 x NaN).
        """
        ...
