"""Decoder layers of a drafter that reads features, with a KV cache of their own.

Such a drafter (EAGLE 2401.15077) has an input for each position that combines a hidden state with the token after it,
where a language model has a token. So it decodes inputs ``[n, X]``, and returns the outputs ``[n, Y]`` of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.draft import Shape
from spec_lab.core.inference import inference
from spec_lab.runners.attention import Pack
from spec_lab.runners.kv_cache import GRAIN, Cells, CellSequence
from spec_lab.runners.prepare import CHUNK, Packer, chunks

Layers = Callable[[Tensor, Tensor, Pack], Tensor]
"""Inputs ``[1, N, X]``, positions ``[1, N]`` and what stands in for transformers' cache -> outputs ``[1, N, Y]``."""


class FeatureLM:
    """Runs decoder layers over the new inputs of several sequences, or over the nodes of a forest.

    Args:
        layers: whose attention is ``attention.SPANS``, with full attention in every layer.
        count: how many they are.
        device: of the layers.
        dtype: of the layers.
    """

    def __init__(self, layers: Layers, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layers, self.device, self.dtype = layers, device, dtype
        self.cells = Cells()
        self._packer = Packer(self.cells, {}, count, device, dtype, dense=False, split=False)

    def open(self, reserve: int = GRAIN) -> CellSequence:
        """An empty sequence with room for ``reserve`` positions (it grows on demand)."""
        return self.cells.open(reserve)

    @inference
    def forward(self, sequences: Sequence[Any], lengths: Sequence[int], inputs: Tensor, timed: Phase) -> Tensor:
        """Append inputs to sequences.

        Args:
            sequences: ``[B]``; nodes that they hold are forgotten.
            lengths: ``[B]`` how many inputs each gets, at least one.
            inputs: ``[sum of lengths, X]``, sequence by sequence.
            timed: records the calls of the layers.

        Returns:
            Outputs ``[B, Y]`` at each sequence's last input.
        """
        for one in sequences:
            one.accept()
        rest = list(inputs.split(list(lengths)))
        for long, rows in chunks(rest, CHUNK):
            early = self._packer.forest([sequences[n] for n in long], [[0] * CHUNK for _ in long], None, 0)
            with timed:
                self.layers(rows[None], early.positions, early.pack)
        if sum(map(len, rest)) < len(inputs):
            inputs = torch.cat(rest)
        prepared = self._packer.forest(sequences, [[0] * len(part) for part in rest], None, 0)
        with timed:
            outputs = self.layers(inputs[None], prepared.positions, prepared.pack)[0]
        if len(sequences) == 1:
            return outputs[-1:]
        last = [rows.stop - 1 for rows in prepared.pending]
        return outputs.index_select(0, torch.tensor(last, device=outputs.device))

    @inference
    def extend(self, sequences: Sequence[Any], shape: Shape, rows: np.ndarray, inputs: Tensor, timed: Phase) -> Tensor:
        """Compute nodes whose root and ancestors are computed already; see ``runner.DraftRunner.extend``.

        Args:
            sequences, shape, rows: as there; the nodes are held.
            inputs: ``[n, X]`` of the rows.
            timed: records the calls of the layers.

        Returns:
            Outputs ``[n, Y]``.
        """
        prepared = self._packer.level(sequences, shape, rows, inputs)
        with timed:
            return self.layers(inputs[None], prepared.positions, prepared.pack)[0]
