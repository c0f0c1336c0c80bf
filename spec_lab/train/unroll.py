"""Attention of layers that are trained on their own outputs (training-time test, EAGLE-3, 2503.01840, section 3.2).

Unroll i reads, in column j, the token t_{j+1+i} and the features that unroll i - 1 returned there (unroll 0: the
target's at position j). It has rotary position j + i. Its query attends to the keys of unroll 0 in columns 0 to j and
to those of unrolls 1 to i in its own column: what a drafter sees that drafts i tokens after position j. It predicts the
token after t_{j+1+i}. Letters: B texts, C columns, d width of an attention head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from spec_lab.runners.attention import FULL, SPANS, AttentionKind
from spec_lab.runners.softmax import Softmax
from spec_lab.train.attention import merged_attention


@dataclass(eq=False)
class Unrolls:
    """Stands in for transformers' cache: keeps the keys and values of all unrolls of each layer.

    The network needs the attention implementation ``attention``, which reads them.
    """

    attention: ClassVar = SPANS
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[UnrollAttention, UnrollAttention]:
        """Keep an unroll's keys and values ``[B, heads, C, d]``; return what attends to them."""
        for store, new in ((self.keys, key), (self.values, value)):
            store.setdefault(layer_idx, []).append(new)
        reader = UnrollAttention(self.keys[layer_idx], self.values[layer_idx])
        return reader, reader

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always explicit."""
        return 0


@dataclass(frozen=True, eq=False)
class UnrollAttention:
    """Attention of the newest unroll in one layer. See ``runners.attention.ReadsCells``."""

    keys: list[Tensor]
    values: list[Tensor]
    kind: AttentionKind = FULL

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[B, heads, C, d] -> [B, C, heads, d]``. See ``attention.merged_attention``.

        Raises:
            NotImplementedError: the layer has a soft cap or sinks.
        """
        if not softmax.plain:
            raise NotImplementedError("layers with soft-capped attention or attention sinks cannot be trained")
        columns = query.shape[2]
        scale = query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling
        pairs = [
            (key[:, :, :columns], value[:, :, :columns]) for key, value in zip(self.keys, self.values, strict=True)
        ]
        private = [(key.unsqueeze(3), value.unsqueeze(3)) for key, value in pairs[1:]]
        return merged_attention(query, pairs[0], private, scale).transpose(1, 2)
