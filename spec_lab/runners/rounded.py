"""Plain forwards whose keys and values are rounded as in cells of a narrower data type, which need no cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.runners.attention import FULL, AttentionKind, attention_mask, text_attention
from spec_lab.runners.kv_cache import stored
from spec_lab.runners.prepare import DenseMasks
from spec_lab.runners.softmax import Softmax


class RoundedCache:
    """Stands in for transformers' cache in a forward over one text. An ``attention.HoldsCells``.

    Args:
        dtype: of the cells.
        kinds: of layers without full attention, by layer.
        positions: ``[1, N]`` of the tokens.
        dense: whether attention is that of transformers, with a mask.
    """

    is_compileable = False

    def __init__(
        self, dtype: torch.dtype, kinds: Mapping[int, AttentionKind], positions: Tensor, dense: bool = False
    ) -> None:
        self.dtype, self.kinds, self.positions, self.dense = dtype, kinds, positions, dense

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return a layer's keys and values ``[1, heads, N, dim]``, rounded."""
        keys, values = (stored(one, self.dtype).to(one.dtype) for one in (key, value))
        if self.dense:
            return keys, values
        text = RoundedText(keys, values, self.kinds.get(layer_idx, FULL))
        return text, text

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: nothing was computed before."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero: as ``get_seq_length``."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """As of ``attention.Pack``."""
        return query_length, 0


class RoundedText(NamedTuple):
    """One layer's rounded keys and values. An ``attention.ReadsCells``."""

    keys: Tensor  # [1, heads, N, dim]
    values: Tensor
    kind: AttentionKind

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[1, heads, N, dim] -> [1, N, heads, dim]``."""
        return text_attention(query, self.keys, self.values, softmax, self.kind)


def text_masks(
    kinds: Mapping[int, AttentionKind], layers: int, count: int, dtype: torch.dtype, device: torch.device
) -> DenseMasks:
    """Return the masks of dense attention over one text of ``count`` tokens, for a model with these layers."""
    positions = np.arange(count)
    causal = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
    masks = {}
    for kind in {kinds.get(layer, FULL) for layer in range(layers)}:
        mask = attention_mask(kind, positions, positions, causal)
        masks[kind.layer_type] = torch.from_numpy(mask).to(device, dtype)[None, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))
