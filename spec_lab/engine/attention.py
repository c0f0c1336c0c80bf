"""Attention of transformers' models over cells, span by span.

One function, registered with transformers' ``AttentionInterface``, runs over views of the cells. transformers hands
each layer's new keys and values to the object in its cache's place (``Pack``), which writes them into their cells and
passes itself on to the attention function. A dense mask over the whole pack (``attention="dense"``) is the slow twin
that tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from spec_lab.engine.kv_cache import Cells

SPANS = "spec_lab_spans"
"""The name under which span-by-span attention is registered with transformers."""

Attention = Literal["spans", "dense"]

BEYOND_SOFTMAX = {"softcap", "sliding_window", "s_aux", "position_bias", "head_mask"}
"""What transformers' models may ask of an attention function and this one does not do."""


class Piece(NamedTuple):
    """One sequence's rows of the pack."""

    span: int
    start: int  # first row of the pack
    stop: int  # last row + 1
    slots: slice | Tensor  # cells that receive the rows' keys and values
    extent: int  # cells attended: the span's first ``extent``
    mask: Tensor | None  # [rows, extent] additive; None: everything is visible, or causal
    causal: bool

    def on(self, device: torch.device) -> Piece:
        """The same with its tensors on a device."""
        slots = self.slots.to(device) if isinstance(self.slots, Tensor) else self.slots
        return self._replace(slots=slots, mask=None if self.mask is None else self.mask.to(device))


@dataclass(frozen=True, eq=False)
class Pack:
    """What one forward needs to know about its cells. Stands where transformers expects a cache."""

    cells: Cells
    pieces: list[Piece]
    device: torch.device  # of the pieces' masks and indices
    dense: bool = False
    _elsewhere: dict[torch.device, Pack] = field(default_factory=dict, init=False)

    is_compileable = False

    @cached_property
    def places(self) -> list[tuple[int, int, int, slice | Tensor]]:
        """Where each piece's rows go, as ``Cells.write`` wants it."""
        return [piece[:4] for piece in self.pieces]

    def on(self, device: torch.device) -> Pack:
        """The pack on a layer's device. Of several layers on another one the first moves masks and indices."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Pack(self.cells, [piece.on(device) for piece in self.pieces], device, self.dense)
        return self._elsewhere[device]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write a layer's new keys and values ``[1, heads, N, dim]``; return what attention should read."""
        here = self.on(key.device)
        self.cells.write(layer_idx, key, value, here.places)
        keys, values = self.cells.keys[layer_idx], self.cells.values[layer_idx]
        if self.dense:  # [1, heads, S * C, dim]; NaN in a dead cell would outlive every mask (0 x NaN)
            dead = torch.from_numpy(self.cells.references == 0).to(key.device)[:, None, :, None]
            all_keys, all_values = (
                torch.cat(spans).masked_fill(dead, 0.0).transpose(0, 1).flatten(1, 2)[None] for spans in (keys, values)
            )
            return all_keys, all_values
        layer = Layer(keys, values, here.pieces)
        return layer, layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always explicit."""
        return 0


class Layer(NamedTuple):
    """One layer's cells, by span, and the pieces to run over them."""

    keys: list[Tensor]  # [1, heads, C, dim]
    values: list[Tensor]
    pieces: list[Piece]


def span_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, N, dim]
    key: Layer | Tensor,
    value: Any,  # as key; a Layer holds both
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of each piece of the pack over its own span. Returns ``[1, N, heads, dim]``.

    Query heads that share a key-value head are folded into the query's length, so no key is ever repeated.

    Raises:
        NotImplementedError: the model asks for attention that is more than softmax over all visible keys.
    """
    for name in BEYOND_SOFTMAX & more.keys():
        if more[name] is not None:
            raise NotImplementedError(f"its attention uses {name}")
    if not isinstance(key, Layer):  # a forward without cells: plain causal attention
        groups = query.shape[1] // key.shape[1]
        plain = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return plain.transpose(1, 2), None
    outputs, pieces = [], key.pieces
    for piece in pieces:
        keys, values = (cells[piece.span].narrow(2, 0, piece.extent) for cells in (key.keys, key.values))
        q, mask = query if len(pieces) == 1 else query[:, :, piece.start : piece.stop], piece.mask
        _, heads, rows, dim = q.shape
        groups = heads // keys.shape[1]
        causal = piece.causal
        if groups > 1:
            if causal:
                mask = causal_bias(rows, q)
                causal = False
            q = q.reshape(1, heads // groups, groups * rows, dim)
            mask = None if mask is None else mask.repeat(groups, 1)
        out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal, scale=scaling)
        outputs.append((out.reshape(1, heads, rows, -1) if groups > 1 else out).transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), None


def causal_bias(rows: int, like: Tensor) -> Tensor:  # [rows, rows]
    """The additive causal mask."""
    return torch.full((rows, rows), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)


AttentionInterface.register(SPANS, span_attention)
