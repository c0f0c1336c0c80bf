"""Plain forwards whose keys and values are rounded as in cells of a narrower data type, which need no cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_lab.core.cache_argument import cache_argument
from spec_lab.runners.attention import FULL, AttentionKind, CellCache, text_attention
from spec_lab.runners.dense import text_masks
from spec_lab.runners.kv_cache import stored
from spec_lab.runners.softmax import Softmax


class RoundedCache(CellCache):
    """Stands in for transformers' cache in a forward over one text.

    Args:
        dtype: of the cells.
        kinds: of layers without full attention, by layer.
        positions: ``[1, N]`` of the tokens.
        dense: whether attention is that of transformers, with a mask.
    """

    def __init__(
        self, dtype: torch.dtype, kinds: Mapping[int, AttentionKind], positions: Tensor, dense: bool = False
    ) -> None:
        self.dtype, self.kinds, self.positions, self.dense = dtype, kinds, positions, dense

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return a layer's keys and values ``[1, heads, N, dim]``, rounded."""
        keys, values = (stored(tensor, self.dtype).to(tensor.dtype) for tensor in (key, value))
        if self.dense:
            return keys, values
        text = RoundedText(keys, values, self.kinds.get(layer_idx, FULL))
        return text, text


class RoundedText(NamedTuple):
    """One layer's rounded keys and values. An ``attention.ReadsCells``."""

    keys: Tensor  # [1, heads, N, dim]
    values: Tensor
    kind: AttentionKind

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[1, heads, N, dim] -> [1, N, heads, dim]``."""
        return text_attention(query, self.keys, self.values, softmax, self.kind)


def rounded_logits(
    model: Any, tokens: Sequence[int], rows: int, dtype: torch.dtype, kinds: Mapping[int, AttentionKind], dense: bool
) -> Tensor:  # [rows, V]
    """Return the logits of the last ``rows`` rows of a forward over a text. Arguments as in ``RoundedCache``."""
    count = len(tokens)
    ids, positions = torch.tensor([list(tokens)], device=model.device), torch.arange(count, device=model.device)
    mask = text_masks(kinds, model.config.num_hidden_layers, count, model.dtype, model.device) if dense else None
    logits: Tensor = model(
        input_ids=ids, position_ids=positions[None], attention_mask=mask, use_cache=True,
        logits_to_keep=positions[count - rows :],
        **{cache_argument(model): RoundedCache(dtype, kinds, positions[None], dense)},
    ).logits[0]  # fmt: skip
    return logits
