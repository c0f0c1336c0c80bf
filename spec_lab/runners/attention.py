"""Attention of transformers' models over cells of the KV cache, sequence by sequence.

One function, registered with transformers' ``AttentionInterface`` (``per_sequence``), runs over views of the cells.
transformers hands each layer's new keys and values to the object that stands in for its cache (``Pack``), which writes
them into their cells and passes itself on to the attention function. One dense mask over all sequences
(``attention="dense_mask"``) is a slow reference for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.runners.kv_cache import Cells
from spec_lab.runners.softmax import Softmax, causal_mask, torch_attention

SPANS = "spec_lab_spans"
"""The name under which attention over cells is registered with transformers."""

Attention = Literal["per_sequence", "dense_mask"]


class AttentionKind(NamedTuple):
    """Which earlier positions a layer attends to. Conventions and names are those of transformers' configs.

    Args:
        sliding_window: W; position i attends to positions i - W + 1 to i. None for no window.
        chunk: C; position i attends to positions of its own chunk, i // C. None for no chunks.
        causal: whether no position attends to a later one, of rows that otherwise do: those of a block
            (``Packer.blocks``). Position i of a block without it attends to positions i - W + 1 to i + W - 1.
        anchored: whether the window of a drafted row is that of the last computed position, its anchor, and it attends
            to drafted rows whatever W is.
    """

    sliding_window: int | None = None
    chunk: int | None = None
    causal: bool = False
    anchored: bool = False

    def first(self, position: int) -> int:
        """The first position that a query at this position attends to."""
        near = 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)
        return near if self.chunk is None else max(near, position - position % self.chunk)

    def reaches(self, query: Any, key: Any, anchor: Any = None) -> Any:
        """Whether queries attend to keys, by their positions: arrays or tensors whose shapes broadcast.

        Args:
            query, key: the positions.
            anchor: the last computed position, after which rows are drafted; None: no row is.
        """
        near = key == key
        if self.causal:
            near = near & (key <= query)
        if self.sliding_window is not None and self.anchored and anchor is not None:
            near = near & (query.clip(max=anchor) - key < self.sliding_window)
        elif self.sliding_window is not None:
            near = near & (abs(query - key) < self.sliding_window)
        if self.chunk is not None:
            near = near & (query // self.chunk == key // self.chunk)
        return near

    @property
    def layer_type(self) -> str:
        """Its name in ``layer_types`` of transformers' configs."""
        if self.sliding_window is not None:
            return "sliding_attention"
        return "full_attention" if self.chunk is None else "chunked_attention"


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
    known |= dict.fromkeys((*RECURRENT, *WITHOUT_ATTENTION), FULL)
    if unknown := set(types) - known.keys():
        raise NotImplementedError(f"it has layers of type {', '.join(sorted(unknown))}")
    return {layer: known[name] for layer, name in enumerate(types) if known[name] != FULL}


RECURRENT = ("linear_attention", "conv", "hybrid")
"""Types of layers that keep a recurrent state; hybrid ones attend to earlier tokens as well."""

WITHOUT_ATTENTION = ("moe", "mlp")
"""Types of layers that keep nothing of earlier tokens."""


def recurrent_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that keep a recurrent state, from a transformers config."""
    types = getattr(config, "layer_types", None) or []
    return [layer for layer, name in enumerate(types) if name in RECURRENT]


def layers_without_cells(config: Any) -> frozenset[int]:
    """Return the numbers of the layers that keep no keys and values, from a transformers config."""
    types = getattr(config, "layer_types", None) or []
    none = {*RECURRENT, *WITHOUT_ATTENTION} - {"hybrid"}
    return frozenset(layer for layer, name in enumerate(types) if name in none)


def attention_mask(
    kind: AttentionKind, query: np.ndarray, key: np.ndarray, full: np.ndarray, anchor: int | None = None
) -> np.ndarray:
    """Return the additive attention mask of a layer of this kind, ``[Q, K]``.

    Args:
        query: ``[Q]`` positions of the queries. A tree's node has its root's position plus its depth.
        key: ``[K]`` positions of the keys; of keys that no query attends to, any number.
        full: ``[Q, K]`` the mask with full attention: 0 where the key's token is the query's own or comes before it on
            its path, -inf elsewhere.
        anchor: as in ``AttentionKind.reaches``.
    """
    return np.where(kind.reaches(query[:, None], key[None], anchor), full, np.float32(-np.inf))


def counting_layers(model: Any) -> dict[int, torch.device]:
    """Return the layers that count their rows' positions from the number of cached tokens, each with its device.

    Those of Llama 4 without rotary embedding do, whose queries are scaled by position ("attention temperature tuning",
    2501.19399). All other layers are given positions.
    """
    return {
        int(module.layer_idx): next(module.parameters()).device
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    }


class Segment(NamedTuple):
    """One sequence's rows among those of a forward, and the cells they attend to in layers of one kind."""

    stream: int
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


Advance = Callable[[Any, Tensor], Tensor]
"""Runs a recurrent layer (its mixer) over the rows of one sequence, and advances its state.

From the rows of all sequences ``[1, N, H]`` to those of its own ``[1, n, H]``.
"""


class CellCache:
    """Stands in for transformers' cache. A base class.

    Attributes:
        dense: whether ``update`` returns all keys and values as tensors, and not what reads cells.
        positions: ``[1, N]`` of the rows.
        streams: S, of which each has as many of the rows; 1 where they are not told apart.
    """

    is_compileable = False
    dense: bool = False
    streams: int = 1
    positions: Tensor
    _made: dict[int, tuple[Tensor, Any]]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write a layer's new keys and values ``[1, heads, N, dim]``; return what attention should read."""
        raise NotImplementedError

    def once(self, tensor: Tensor, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned for this tensor in an earlier layer of the forward, or returns now."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, make()
        return self._made[id(tensor)][1]

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Zero: positions are always explicit."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero: as ``get_mask_sizes``."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Sizes of the mask that some models build for each forward, and that attention over cells does not read."""
        return query_length, 0


@dataclass(frozen=True, eq=False)
class Pack(CellCache):
    """The cells of one forward. It is passed to transformers in place of a cache.

    Args:
        cells: the store.
        kinds: by layer; layers left out are FULL.
        segments: for each kind of layer that the model has, every sequence's rows and cells.
        device: of the segments' masks and indices.
        positions: ``[1, N]`` of the rows.
        counting: of the model (``counting_layers``).
        advances: of a model with recurrent layers, what they do with each sequence, in order of their rows.
    """

    cells: Cells
    kinds: Mapping[int, AttentionKind]
    segments: Mapping[AttentionKind, list[Segment]]
    device: torch.device
    positions: Tensor
    counting: Mapping[int, torch.device] = field(default_factory=dict)
    advances: Sequence[Advance] = ()
    _elsewhere: dict[torch.device, Self] = field(default_factory=dict, init=False)
    _made: dict[int, tuple[Tensor, Any]] = field(default_factory=dict, init=False)

    @cached_property
    def targets(self) -> list[tuple[int, int, int, slice | Tensor]]:
        """Where each segment's rows are written; see ``Cells.write``."""
        return [segment[:4] for segment in next(iter(self.segments.values()))]

    def on(self, device: torch.device) -> Self:
        """The pack on a layer's device. Masks and indices are moved once for each device."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            moved = {kind: [segment.on(device) for segment in segments] for kind, segments in self.segments.items()}
            self._elsewhere[device] = replace(self, segments=moved, device=device)
        return self._elsewhere[device]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """See ``CellCache``."""
        here = self.on(key.device)
        self.cells.write(layer_idx, key, value, here.targets)
        kind = self.kinds.get(layer_idx, FULL)
        layer = Layer(*self.cells.views[layer_idx], kind, here.segments[kind], self.cells.decode)
        return layer, layer

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Zero: positions are always explicit. For ``counting`` layers see ``uncounted``."""
        return uncounted(self.positions.to(self.counting[layer_idx])) if layer_idx in self.counting else 0


def uncounted(positions: Tensor) -> Tensor:  # [1, N] -> [N]
    """Return the number to which a layer adds 0 to N - 1 to get its rows' positions."""
    return positions[0] - torch.arange(positions.shape[1], device=positions.device)


class Layer(NamedTuple):
    """One layer's cells, by stream, its kind, and what each sequence attends to in it."""

    keys: list[Tensor]  # [1, heads, C, dim]
    values: list[Tensor]
    kind: AttentionKind
    segments: list[Segment]
    decode: Callable[[Tensor, torch.dtype], Tensor]  # what is stored in another data type than that of the rows

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """Each sequence's rows over its own cells: ``[1, heads, N, dim] -> [1, N, heads, dim]``.

        Keys and values are never repeated for query heads that share them: a single row's query heads become rows,
        several rows read expanded views.
        """
        outputs = []
        twice = query.dtype == torch.bfloat16 and query.device.type == "cpu"  # two rows take half the time of one there
        for stream, start, stop, _slots, first, end, mask, causal in self.segments:
            keys = self.keys[stream].narrow(2, first, end - first)
            values = self.values[stream].narrow(2, first, end - first)
            if keys.dtype != query.dtype:
                keys, values = self.decode(keys, query.dtype), self.decode(values, query.dtype)
            q, rows = query if len(self.segments) == 1 else query.narrow(2, start, stop - start), stop - start
            if not softmax.plain:
                outputs.append(softmax.attend(q, keys, values, causal_mask(q) if causal else mask).transpose(1, 2))
                continue
            heads, groups = q.shape[1], q.shape[1] // keys.shape[1]
            if groups > 1 and rows == 1:
                q = q.reshape(1, heads // groups, groups, -1)
            elif groups > 1:
                q = q.reshape(heads // groups, groups, rows, -1)
                keys, values = (tensor.transpose(0, 1).expand(-1, groups, -1, -1) for tensor in (keys, values))
            elif rows == 1 and twice:
                q = torch.cat((q, q), 2)
            out = torch_attention(q, keys, values, mask, softmax.scaling, causal)
            if groups > 1:
                out = out.reshape(1, heads, rows, -1)
            elif rows == 1 and twice:
                out = out.narrow(2, 0, 1)
            outputs.append(out.transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


class ReadsCells(Protocol):
    """Stands in for a layer's keys and values: it attends to cells."""

    @property
    def kind(self) -> AttentionKind:
        """The layer's kind."""
        ...

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
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
    s_aux: Tensor | None = None,
    position_bias: Any = None,
    head_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over cells. Returns ``[b, n, heads, dim]``.

    Args:
        module: the layer's attention.
        query: of the rows.
        key: what stands in for the layer's keys and values; in a forward without cells these themselves.
        value: as ``key``.
        attention_mask: not used.
        scaling: see ``Softmax``; so ``softcap`` and ``s_aux``, the sinks.
        position_bias: not supported; nor is ``head_mask``.

    Raises:
        NotImplementedError: the layer requires a position bias or a head mask, or a sliding window that differs from
            the model's config.
    """
    if position_bias is not None or head_mask is not None:
        raise NotImplementedError("its attention uses one of position_bias, head_mask")
    softmax = Softmax(scaling, softcap, s_aux)
    if isinstance(key, Tensor):
        return text_attention(query, key, value, softmax, AttentionKind(sliding_window, _chunk(module))), None
    if sliding_window not in (None, key.kind.sliding_window):  # families that pass none use masks alone
        raise NotImplementedError(
            f"its attention uses sliding_window={sliding_window} where {key.kind.sliding_window} is expected"
        )
    return key.attend(query, softmax), None


def text_attention(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, kind: AttentionKind) -> Tensor:
    """Attention of a forward over texts ``[b, heads, n, dim]``, without cells and without padding before them."""
    rows, groups = query.shape[2], query.shape[1] // key.shape[1]
    mask = None
    if kind.first(rows - 1) or not softmax.plain:
        positions = torch.arange(rows, device=query.device)
        mask = causal_mask(query).masked_fill(~kind.reaches(positions[:, None], positions[None]), -torch.inf)
    if softmax.plain:
        plain = torch_attention(query, key, value, mask, softmax.scaling, causal=mask is None, shared=groups > 1)
        return plain.transpose(1, 2)
    return softmax.attend(query, key, value, mask).transpose(1, 2)


def _chunk(module: Any) -> int | None:
    """The chunk of a layer, which transformers does not pass to its attention."""
    config = getattr(module, "config", None)
    if getattr(config, "attention_chunk_size", None) is None:
        return None
    return layer_kinds(config).get(module.layer_idx, FULL).chunk


def spans() -> str:
    """Return ``SPANS``, registered with transformers: the name to set as a model's attention. The import takes as long
    as all others together, and toys do without.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(SPANS, cell_attention)
    return SPANS
