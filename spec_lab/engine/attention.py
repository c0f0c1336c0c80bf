"""Attention of transformers' models over cells of the KV cache, sequence by sequence.

One function, registered with transformers' ``AttentionInterface``, runs over views of the cells. transformers hands
each layer's new keys and values to the object that stands in for its cache (``Pack``), which writes them into their
cells and passes itself on to the attention function. One dense mask over all sequences (``attention="dense"``) is a
slow reference for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from spec_lab.engine.kv_cache import Cells, stored

SPANS = "spec_lab_spans"
"""The name under which attention over spans of cells is registered with transformers."""

Attention = Literal["spans", "dense"]


class AttentionKind(NamedTuple):
    """Which earlier positions a layer attends to. Conventions and names are those of transformers' configs.

    Args:
        sliding_window: W; position i attends to positions i - W + 1 to i. None for no window.
        chunk: C; position i attends to positions of its own chunk, i // C. None for no chunks.
    """

    sliding_window: int | None = None
    chunk: int | None = None

    @property
    def layer_type(self) -> str:
        """Its name in ``layer_types`` of transformers' configs."""
        return "sliding_attention" if self.sliding_window else "chunked_attention" if self.chunk else "full_attention"


FULL = AttentionKind()
"""Attention to all earlier positions."""


def layer_kinds(config: Any) -> dict[int, AttentionKind]:
    """Return the kinds of a model's layers, by layer number, from its transformers config. Layers left out are FULL.

    Raises:
        NotImplementedError: a layer of another type.
    """
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if types is None:
        types = ["sliding_attention"] * config.num_hidden_layers if window else []
    known = {
        "full_attention": FULL,
        "sliding_attention": AttentionKind(sliding_window=window),
        "chunked_attention": AttentionKind(chunk=getattr(config, "attention_chunk_size", None)),
    }
    if unknown := set(types) - known.keys():
        raise NotImplementedError(f"it has layers of type {', '.join(sorted(unknown))}")
    return {layer: known[name] for layer, name in enumerate(types) if known[name] != FULL}


def attention_mask(kind: AttentionKind, query: np.ndarray, key: np.ndarray, full: np.ndarray) -> np.ndarray:
    """Return the additive attention mask of a layer of this kind, ``[Q, K]``.

    Args:
        kind: of the layer.
        query: ``[Q]`` positions of the queries. A tree's node has its root's position plus its depth.
        key: ``[K]`` positions of the keys; of keys that no query attends to, any number.
        full: ``[Q, K]`` the mask with full attention: 0 where the key's token is the query's own or comes before it on
            its path, -inf elsewhere.
    """
    near = np.ones(full.shape, dtype=bool)
    if kind.sliding_window is not None:
        near &= query[:, None] - key < kind.sliding_window
    if kind.chunk is not None:
        near &= query[:, None] // kind.chunk == key // kind.chunk
    return np.where(near, full, np.float32(-np.inf))


class Segment(NamedTuple):
    """One sequence's rows among those of a forward, and the cells they attend to in layers of one kind."""

    span: int
    start: int  # first row
    stop: int  # last row + 1
    slots: slice | Tensor  # cells that receive the rows' keys and values
    first: int  # first cell attended to
    end: int  # last cell attended to + 1
    mask: Tensor | None  # [rows, end - first] additive; None: everything is visible, or causal
    causal: bool

    def on(self, device: torch.device) -> Segment:
        """The same with its tensors on a device."""
        slots = self.slots.to(device) if isinstance(self.slots, Tensor) else self.slots
        return self._replace(slots=slots, mask=None if self.mask is None else self.mask.to(device))


@dataclass(frozen=True, eq=False)
class Pack:
    """The cells of one forward. It is passed to transformers in place of a cache.

    Args:
        cells: the store.
        kinds: by layer; layers left out are FULL.
        segments: for each kind of layer that the model has, every sequence's rows and cells.
        device: of the segments' masks and indices.
        dense: whether one mask covers all rows and all cells.
    """

    cells: Cells
    kinds: Mapping[int, AttentionKind]
    segments: Mapping[AttentionKind, list[Segment]]
    device: torch.device
    dense: bool = False
    _elsewhere: dict[torch.device, Pack] = field(default_factory=dict, init=False)

    is_compileable = False

    @cached_property
    def places(self) -> list[tuple[int, int, int, slice | Tensor]]:
        """Where each segment's rows are written; see ``Cells.write``."""
        return [segment[:4] for segment in next(iter(self.segments.values()))]

    def on(self, device: torch.device) -> Pack:
        """The pack on a layer's device. Masks and indices are moved once for each device."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            moved = {kind: [one.on(device) for one in segments] for kind, segments in self.segments.items()}
            self._elsewhere[device] = Pack(self.cells, self.kinds, moved, device, self.dense)
        return self._elsewhere[device]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write a layer's new keys and values ``[1, heads, N, dim]``; return what attention should read."""
        here = self.on(key.device)
        self.cells.write(layer_idx, key, value, here.places)
        if self.dense:  # [1, heads, S * C, dim]; a mask does not remove NaN in a dead cell (0 x NaN)
            dead = torch.from_numpy(self.cells.references == 0).to(key.device)[:, None, :, None]
            all_keys, all_values = (
                store[layer_idx].to(key.dtype).masked_fill(dead, 0.0).transpose(0, 1).flatten(1, 2)[None]
                for store in (self.cells.keys, self.cells.values)
            )
            return all_keys, all_values
        kind = self.kinds.get(layer_idx, FULL)
        layer = Layer(*self.cells.views[layer_idx], kind, here.segments[kind])
        return layer, layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always explicit."""
        return 0


class RoundedCache:
    """What stands in for transformers' cache in a plain forward whose keys and values are rounded as in cells.

    Args:
        dtype: of the cells.
    """

    is_compileable = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, rounded."""
        return stored(key, self.dtype).to(key.dtype), stored(value, self.dtype).to(value.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: nothing was computed before."""
        return 0


class Layer(NamedTuple):
    """One layer's cells, by span, its kind, and what each sequence attends to in it."""

    keys: list[Tensor]  # [1, heads, C, dim]
    values: list[Tensor]
    kind: AttentionKind
    segments: list[Segment]

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """Each sequence's rows over its own cells: ``[1, heads, N, dim] -> [1, N, heads, dim]``.

        Keys and values are never repeated for query heads that share them: a single row's query heads become rows,
        several rows read expanded views.
        """
        outputs = []
        twice = query.dtype == torch.bfloat16 and query.device.type == "cpu"  # two rows take half the time of one there
        for span, start, stop, _slots, first, end, mask, causal in self.segments:
            keys = self.keys[span].narrow(2, first, end - first)
            values = self.values[span].narrow(2, first, end - first)
            if keys.dtype != query.dtype:
                keys, values = keys.to(query.dtype), values.to(query.dtype)
            q, rows = query if len(self.segments) == 1 else query.narrow(2, start, stop - start), stop - start
            heads, groups = q.shape[1], q.shape[1] // keys.shape[1]
            if groups > 1 and rows == 1:
                q = q.reshape(1, heads // groups, groups, -1)
            elif groups > 1:
                q = q.reshape(heads // groups, groups, rows, -1)
                keys, values = (one.transpose(0, 1).expand(-1, groups, -1, -1) for one in (keys, values))
            elif rows == 1 and twice:
                q = torch.cat((q, q), 2)
            out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal, scale=scaling)
            if groups > 1:
                out = out.reshape(1, heads, rows, -1)
            elif rows == 1 and twice:
                out = out.narrow(2, 0, 1)
            outputs.append(out.transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


class ReadsCells(Protocol):
    """What stands in for a layer's keys and values: it attends to cells."""

    @property
    def kind(self) -> AttentionKind:
        """Of the layer."""
        ...

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """``[b, heads, n, dim] -> [b, n, heads, dim]``."""
        ...


def cell_attention(
    module: nn.Module,
    query: Tensor,  # [b, heads, n, dim]
    key: ReadsCells | Tensor,
    value: Any,  # as key
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    head_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over cells. Returns ``[b, n, heads, dim]``.

    Raises:
        NotImplementedError: the layer requires a softmax over other scores than scaled dot products, or a sliding
            window that differs from the model's config.
    """
    if softcap is not None or s_aux is not None or position_bias is not None or head_mask is not None:
        raise NotImplementedError("its attention uses one of softcap, s_aux, position_bias, head_mask")
    expected = None if isinstance(key, Tensor) else key.kind.sliding_window
    if sliding_window != expected:
        raise NotImplementedError(f"its attention uses sliding_window={sliding_window} where {expected} is expected")
    if isinstance(key, Tensor):  # a forward without cells: plain causal attention
        groups = query.shape[1] // key.shape[1]
        plain = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return plain.transpose(1, 2), None
    return key.attend(query, scaling), None


AttentionInterface.register(SPANS, cell_attention)
