"""Decoder layers of a drafter that reads features, with a KV cache of their own.

Such a drafter (EAGLE 2401.15077) has an input for each position that combines a hidden state with the token after it,
where a language model has a token. So it decodes inputs ``[n, X]``, and returns the outputs ``[n, Y]`` of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Phase
from spec_lab.core.inference import inference
from spec_lab.core.shape import Shape
from spec_lab.core.upload import rows_at
from spec_lab.runners.attention import AttentionKind, Pack
from spec_lab.runners.kv_cache import GRAIN, Cells, CellSequence
from spec_lab.runners.prepare import LevelsAhead, Packer, Prepared

Layers = Callable[[Tensor, Tensor, Pack], Tensor]
"""Inputs ``[1, N, X]``, positions ``[1, N]`` and what stands in for transformers' cache -> outputs ``[1, N, Y]``."""

NO_KINDS: Mapping[int, AttentionKind] = {}

Then = Callable[[Tensor], Any]
"""A function of outputs that is part of the same call, such as an LM head."""


def _outputs(outputs: Tensor) -> Tensor:
    return outputs


class FeatureCells:
    """The KV cache of decoder layers that read rows ``[n, X]`` in place of tokens.

    Args:
        layers: whose attention is ``attention.SPANS``.
        dtype: of the layers.
        chunk: most rows of one sequence that one forward appends.
        kinds: of the layers' attention, by layer; layers left out have full attention.
        skip: how many rotary positions are left out between computed rows and those that are drafted after them.
    """

    def __init__(
        self,
        layers: Callable[..., Tensor],
        count: int,
        device: torch.device,
        dtype: torch.dtype,
        chunk: int = 512,
        kinds: Mapping[int, AttentionKind] = NO_KINDS,
        skip: int = 0,
    ) -> None:
        self.layers, self.device, self.dtype, self.skip = layers, device, dtype, skip
        self.cells = Cells()
        self._packer = Packer(self.cells, kinds, count, device, dtype, chunk)

    def open(self, reserve: int = GRAIN) -> CellSequence:
        """An empty sequence with room for ``reserve`` positions (it grows on demand)."""
        return self.cells.open(reserve)

    def _append_early(
        self, sequences: Sequence[Any], parts: Sequence[Tensor], call: Callable[[Tensor, Prepared], object]
    ) -> list[Tensor]:
        """Append rows beyond ``Packer.chunk`` to sequences, whose held nodes are forgotten; return what is left."""
        for sequence in sequences:
            sequence.accept()
        early, _ = self._packer.early(sequences, [range(len(part)) for part in parts])
        rest = list(parts)
        for prepared, numbers in early:
            size = prepared.pending[0].stop
            call(torch.cat([rest[number][:size] for number in numbers]), prepared)
            for number in numbers:
                rest[number] = rest[number][size:]
        return rest


class FeatureLM(FeatureCells):
    """Runs ``Layers`` over the new inputs of several sequences, or over the nodes of a forest."""

    @inference
    def forward(
        self, sequences: Sequence[Any], lengths: Sequence[int], inputs: Tensor, timed: Phase, then: Then = _outputs
    ) -> Any:
        """Append inputs to sequences.

        Args:
            sequences: ``[B]``; nodes that they hold are forgotten.
            lengths: ``[B]`` how many inputs each gets, at least one.
            inputs: ``[sum of lengths, X]``, sequence by sequence.
            then: what is computed of outputs ``[B, Y]``, those at each sequence's last input; these unless given.

        Returns:
            The result of ``then``.
        """
        rest = self._append_early(
            sequences, inputs.split(list(lengths)), lambda rows, early: self.run_level(early, rows, timed)
        )
        if sum(map(len, rest)) < len(inputs):
            inputs = torch.cat(rest)
        prepared = self._packer.append(sequences, [[0] * len(part) for part in rest])
        return self.run_level(prepared, inputs, timed, lambda outputs: then(last_rows(outputs, prepared)))

    @inference
    def extend(
        self, sequences: Sequence[Any], shape: Shape, rows: np.ndarray, inputs: Tensor, timed: Phase,
        then: Then = _outputs,
    ) -> Any:  # fmt: skip
        """Compute nodes whose root and ancestors are computed already; see ``runner.DraftRunner.extend``.

        Args:
            sequences, shape, rows: as there; the nodes are held.
            inputs: ``[n, X]`` of the rows.
            then: as in ``forward``, of outputs ``[n, Y]``.

        Returns:
            The result of ``then``.
        """
        return self.run_level(self._moved(self._packer.level(sequences, shape, rows, inputs)), inputs, timed, then)

    def levels_ahead(
        self, sequences: Sequence[Any], lengths: Sequence[int], shape: Shape, arrays: Sequence[np.ndarray]
    ) -> LevelsAhead | None:
        """Prepare inputs and all levels of a forest below, with one upload; see ``runner.DraftRunner.levels_ahead``.

        Args:
            sequences, shape, arrays: as there; nodes that the sequences hold are forgotten.
            lengths: how many inputs each of the sequences with nodes gets, at least one.

        Returns:
            The forwards, which ``run_level`` computes; None where a sequence gets more inputs than one forward appends.
        """
        if max(lengths) > self._packer.chunk:
            return None
        active = [sequence for sequence in sequences if sequence is not None]
        for sequence in active:
            sequence.accept()
        planned = self._packer.plan(active, [[0] * length for length in lengths], None, 0)
        ahead = self._packer.levels_ahead(planned, sequences, shape, arrays)
        return ahead._replace(levels=[self._moved(level) for level in ahead.levels])

    def _moved(self, drafted: Prepared) -> Prepared:
        return replace(drafted, positions=drafted.positions + self.skip) if self.skip else drafted

    @inference
    def run_level(self, prepared: Prepared, inputs: Tensor, timed: Phase, then: Then = _outputs) -> Any:
        """Compute a forward that is prepared, of inputs ``[n, X]``; return the result of ``then``, as in ``extend``."""
        with timed:
            return then(self.layers(inputs[None], prepared.positions, prepared.pack)[0])


def last_rows(outputs: Tensor, prepared: Prepared) -> Tensor:  # [N, Y] -> [B, Y]
    """Return the outputs at each sequence's last pending row, of a forward of pending rows alone."""
    if len(prepared.pending) == 1:
        return outputs[-1:]
    return rows_at(outputs, [rows.stop - 1 for rows in prepared.pending])
