"""The interface for drafting with the target's own layers: the ability ``layer_ranges``.

A *draft pass* computes pending tokens and draft nodes by some of the target's layers, on the KV cells of the target's
own sequences. Early exit (LayerSkip 2404.16710) runs the first layers; the target's forward then continues from their
output. With skipped sublayers (Draft&Verify 2309.08168, SWIFT 2410.06916) everything
that the draft pass computed is discarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

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
        array: the same memory as ``logits`` on the host, as in ``runner.Output``.
    """

    logits: Tensor | None
    exits: Tensor | None
    array: np.ndarray | None = None
