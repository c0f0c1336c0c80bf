"""Decoder layers of a block drafter, with a KV cache of their own (DFlash 2602.06036).

Keys and values of a sequence's computed positions come from features of the target and are cached once. Each forward
appends those of new positions, and computes a block of rows after them that attend to each other in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.inference import inference
from spec_lab.core.upload import upload
from spec_lab.runners.attention import Pack
from spec_lab.runners.feature_lm import FeatureCells
from spec_lab.runners.prepare import Prepared

BlockLayers = Callable[[Tensor, Tensor, Pack, Tensor], Tensor]
"""Rows ``[1, N, H]`` (features, and the blocks' inputs), positions ``[1, N]``, what stands in for transformers' cache,
and the numbers ``[m]`` of the blocks' rows -> outputs ``[m, Y]`` of these."""


class BlockLM(FeatureCells):
    """Runs ``BlockLayers`` over blocks."""

    @inference
    def forward(
        self, sequences: Sequence[Any], features: Sequence[Tensor], block: Tensor, timed: Phase, before: int = 0
    ) -> Tensor:
        """Append features to sequences, and compute a block after each; the next forward forgets the block.

        Args:
            sequences: ``[B]``.
            features: ``[B]`` those of the positions after each sequence ``[n, H]``, perhaps of none.
            block: ``[B, b, H]`` inputs.
            before: c, outputs of as many appended rows are returned as well, which every sequence must have.

        Returns:
            Outputs ``[B, c + b, Y]``.
        """

        def call(rows: Tensor, prepared: Prepared, outputs: np.ndarray = NO_ROWS) -> Tensor:
            with timed:
                return self.layers(rows[None], prepared.positions, prepared.pack, upload(self.device, outputs)[0])

        parts, size = self._append_early(sequences, features, call), block.shape[1]
        prepared = self._packer.blocks(sequences, [len(part) for part in parts], size)
        block_rows = np.concatenate([np.arange(rows.start - before, rows.stop) for rows in prepared.nodes])
        if self.skip:
            moved = prepared.positions.clone()
            for nodes in prepared.nodes:
                moved[:, nodes] += self.skip
            prepared = replace(prepared, positions=moved)
        rows = torch.cat([piece for both in zip(parts, block, strict=True) for piece in both])
        return call(rows, prepared, block_rows).unflatten(0, (-1, before + size))


NO_ROWS = np.arange(0)
