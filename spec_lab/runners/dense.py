"""Dense attention: one additive mask over all rows and the whole store. Quadratic; a slow reference for tests.

It is also the only way for models that do not use transformers' ``AttentionInterface``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.upload import upload
from spec_lab.runners.attention import FULL, AttentionKind, Pack, Segment, attention_mask
from spec_lab.runners.prepare import Packer, Prepared

DenseMasks = Tensor | dict[str, Tensor]
"""A dense attention mask ``[1, 1, N, S * C]``, or one for each type of layer, as transformers names them."""


class DensePack(Pack):
    """The cells of one forward, which attention of transformers reads with a mask."""

    dense = True

    @cached_property
    def dead(self) -> Tensor:
        """Which cells ``[S, 1, C, 1]`` hold no token: what they hold may be NaN, which no mask removes."""
        return upload(self.device, self.cells.references == 0)[0][:, None, :, None]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write a layer's new keys and values; return all ``[1, heads, S * C, dim]``."""
        cells, here = self.cells, self.on(key.device)
        cells.write(layer_idx, key, value, here.targets)
        keys, values = (
            store[layer_idx].to(key.dtype).masked_fill(here.dead, 0.0).transpose(0, 1).flatten(1, 2)[None]
            for store in (cells.keys, cells.values)
        )
        return keys, values


class DensePacker(Packer):
    """Prepares forwards of dense attention."""

    dense = True

    def _prepared(
        self, ids: Tensor, positions: Tensor, segments: dict[AttentionKind, list[Segment]], keep: Tensor | int,
        **rows: Any,
    ) -> Prepared:  # fmt: skip
        pack = DensePack(self.cells, self.kinds, segments, self.device, positions, self.counting)
        mask = _by_type({kind: self._mask(kind_segments, ids.shape[1]) for kind, kind_segments in segments.items()})
        return Prepared(ids=ids, positions=positions, pack=pack, keep=keep, mask=mask, **rows)

    def _mask(self, segments: list[Segment], rows: int) -> Tensor:  # [1, 1, N, S * C]
        size = rows, self.cells.streams, self.cells.capacity
        store = torch.full(size, -torch.inf, dtype=self.dtype, device=self.device)
        for segment in segments:
            visible = 0.0 if segment.mask is None else segment.mask
            store[segment.start : segment.stop, segment.stream, segment.first : segment.end] = visible
        return store.flatten(1)[None, None]


def text_masks(
    kinds: Mapping[int, AttentionKind], layers: int, count: int, dtype: torch.dtype, device: torch.device
) -> DenseMasks:
    """Return the masks of dense attention over one text of ``count`` tokens, for a model with these layers."""
    positions = np.arange(count)
    causal = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
    every = {kinds.get(layer, FULL) for layer in range(layers)}
    masks = {kind: attention_mask(kind, positions, positions, causal) for kind in every}
    there = upload(device, *masks.values())
    return _by_type({kind: mask.to(dtype)[None, None] for kind, mask in zip(masks, there, strict=True)})


def _by_type(masks: Mapping[AttentionKind, Tensor]) -> DenseMasks:
    """Masks as transformers reads them."""
    named = {kind.layer_type: mask for kind, mask in masks.items()}
    return named if len(named) > 1 else next(iter(named.values()))
