"""Decoder layers of a block drafter, with a KV cache of their own (DFlash 2602.06036).

Keys and values of a sequence's computed positions come from features of the target and are cached once. Each forward
appends those of new positions, and computes a block of rows after them that attend to each other in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.inference import inference
from spec_lab.runners.attention import Pack
from spec_lab.runners.kv_cache import GRAIN, Cells, CellSequence
from spec_lab.runners.prepare import CHUNK, Packer, chunks

BlockLayers = Callable[[Tensor, Tensor, Pack, Tensor], Tensor]
"""Rows ``[1, N, H]`` (features, and the blocks' inputs), positions ``[1, N]``, what stands in for transformers' cache,
and the numbers ``[m]`` of the blocks' rows -> outputs ``[m, Y]`` of these."""


class BlockLM:
    """Runs decoder layers over blocks.

    Args:
        layers: whose attention is ``attention.SPANS``, with full attention in every layer.
        count: how many they are.
        device: of the layers.
        dtype: of the layers.
    """

    def __init__(self, layers: BlockLayers, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layers, self.device = layers, device
        self.cells = Cells()
        self._packer = Packer(self.cells, {}, count, device, dtype, dense=False, split=False)

    def open(self, reserve: int = GRAIN) -> CellSequence:
        """An empty sequence with room for ``reserve`` positions (it grows on demand)."""
        return self.cells.open(reserve)

    @inference
    def forward(self, sequences: Sequence[Any], features: Sequence[Tensor], block: Tensor, timed: Phase) -> Tensor:
        """Append features to sequences, and compute a block after each; the next forward forgets the block.

        Args:
            sequences: ``[B]``.
            features: ``[B]`` those of the positions after each sequence ``[n, H]``, perhaps of none.
            block: ``[B, b, H]`` inputs.
            timed: records the calls of the layers.

        Returns:
            Outputs ``[B, b, Y]``.
        """
        for one in sequences:
            one.accept()
        parts, size = list(features), block.shape[1]
        for long, rows in chunks(parts, CHUNK):
            early = self._packer.forest([sequences[n] for n in long], [[0] * CHUNK for _ in long], None, 0)
            with timed:
                self.layers(rows[None], early.positions, early.pack, torch.arange(0, device=self.device))
        prepared = self._packer.blocks(sequences, [len(part) for part in parts], size)
        own = torch.cat([torch.arange(rows.start, rows.stop) for rows in prepared.nodes]).to(self.device)
        rows = torch.cat([piece for both in zip(parts, block, strict=True) for piece in both])
        with timed:
            return self.layers(rows[None], prepared.positions, prepared.pack, own).unflatten(0, (-1, size))
