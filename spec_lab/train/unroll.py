"""Attention of layers that are trained on their own outputs (training-time test, EAGLE-3, 2503.01840, section 3.2).

Unroll i reads, in column j, the token t_{j+1+i} and the features that unroll i - 1 returned there (unroll 0: the
target's at position j). It has rotary position j + i. Its query attends to the keys of unroll 0 in columns 0 to j and
to those of unrolls 1 to i in its own column: what a drafter sees that drafts i tokens after position j. It predicts the
token after t_{j+1+i}. Unroll 0 computes all columns, and later ones those from which something is learned.

Letters: B texts, C columns, n columns of an unroll, d width of an attention head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec_lab.runners.attention import FULL, AttentionKind
from spec_lab.runners.softmax import Softmax
from spec_lab.train.attention import HIDDEN, merged_attention
from spec_lab.train.texts import Texts


def packed(mask: Tensor) -> Tensor:
    """Return the numbers of the columns where a mask ``[B, C]`` is true, in order: ``[B, n]``, -1 behind them."""
    count = int(mask.sum(1).max()) if mask.numel() else 0
    order = (~mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :count]
    return order.masked_fill(~mask.gather(1, order), -1)


def columns_of(learned: Tensor, unrolls: int, kept: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the columns of each unroll, ``[B, n]`` in order and -1 for none: all, then those that are needed.

    A column is needed by an unroll if that one or a later one is learned there.

    Args:
        learned: ``[B, T - 1]`` whether the token after each is one to learn from (``Texts.counts(1)``).
        kept: for each unroll, to which columns it is limited besides, ``[B, T - 1]``; fewer with each unroll. Empty:
            no limit.
    """
    needed, columns = torch.zeros_like(learned), list[Tensor]()
    for unroll in reversed(range(1, unrolls)):
        needed = needed.clone()
        here = learned[:, 1 + unroll :]
        needed[:, : here.shape[1]] |= here
        columns.append(packed(needed & kept[unroll] if kept else needed))
    every = torch.arange(learned.shape[1], device=learned.device)
    return [every.expand(len(learned), -1), *reversed(columns)]


def drawn_columns(text: Texts, unrolls: int, retention: float, minimum: float, seed: int) -> list[Tensor]:
    """Return to which columns each unroll is limited, ``[B, T - 1]``: fewer with each, drawn at random.

    Source: P-EAGLE (2602.01469), after PARD (2504.18583, conditional drop of tokens).

    Args:
        text: has the same columns whenever it is seen.
        retention: unroll k keeps a share ``max(retention ** k, minimum)`` of the columns.
        minimum: see there.
    """
    device, count = text.first.device, text.ids.shape[1] - 1
    orders = [torch.randperm(count, generator=drawn, device=device) for drawn in text.generators(seed)]
    rank = torch.stack(orders) / max(1, count)
    return [rank < max(retention**unroll, minimum) for unroll in range(unrolls)]


@dataclass(eq=False)
class Unrolls:
    """Stands in for transformers' cache: keeps the keys and values of all unrolls of each layer.

    The network needs the attention implementation ``runners.attention.spans()``, which reads them.

    Args:
        kinds: of attention, by layer; layers left out are FULL.
    """

    kinds: Mapping[int, AttentionKind] = field(default_factory=dict)
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)
    columns: Tensor | None = None
    masks: dict[tuple[int, AttentionKind], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def narrowed(self, columns: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Let the next unroll compute some columns of the last one.

        Args:
            columns: ``[B, n]`` in order, -1 for none (which computes anything), on the host.
            tensors: of the last unroll, ``[B, m, ..]``.

        Returns:
            The tensors' rows of these columns, ``[B, n, ..]``.
        """
        count = columns.shape[1]
        if not columns.numel():
            self.columns = columns
            return [tensor[:, :0] for tensor in tensors]
        if self.columns is None and bool((columns == torch.arange(count, device=columns.device)).all()):
            for store in (self.keys, self.values):
                for layer, kept in store.items():
                    store[layer] = [kept[0], *(tensor[:, :, :count] for tensor in kept[1:])]
            return [tensor[:, :count] for tensor in tensors]
        last = 1 + int((columns if self.columns is None else self.columns).max())
        every = torch.arange(last, device=columns.device).expand(len(columns), -1)
        before = every if self.columns is None else self.columns
        places = columns.new_zeros(len(columns), last + 1)  # the last one is that of -1
        order = torch.arange(before.shape[1], device=columns.device)
        places.scatter_(1, before % (last + 1), order.expand_as(before))
        rows = places.gather(1, columns % (last + 1))

        def some(tensor: Tensor, dim: int) -> Tensor:
            shape = [len(rows), *[1] * (tensor.ndim - 1)]
            shape[dim] = count
            index = rows.to(tensor.device).view(shape)
            return tensor.gather(dim, index.expand(*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]))

        for store in (self.keys, self.values):
            for layer, kept in store.items():
                store[layer] = [kept[0], *(some(tensor, 2) for tensor in kept[1:])]
        self.columns = columns
        return [some(tensor, 1) for tensor in tensors]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[UnrollAttention, UnrollAttention]:
        """Keep an unroll's keys and values ``[B, heads, n, d]``; return what attends to them."""
        for store, new in ((self.keys, key), (self.values, value)):
            store.setdefault(layer_idx, []).append(new)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        kind = self.kinds.get(layer_idx, FULL)
        plain = self.columns is None and kind.sliding_window is None
        masks = (None, None) if plain else self._masks(len(keys) - 1, kind, keys[0], key.shape[2])
        reader = UnrollAttention(keys, values, kind, *masks)
        return reader, reader

    def _masks(self, unroll: int, kind: AttentionKind, shared: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Additive masks of an unroll: of unroll 0 ``[B or 1, 1, n, C]``, and of the later ones ``[1, unroll]``."""
        if (unroll, kind) not in self.masks:
            device, dtype = shared.device, torch.promote_types(shared.dtype, torch.float32)
            columns = torch.arange(count, device=device)[None] if self.columns is None else self.columns
            query, key = columns.to(device)[..., None], torch.arange(shared.shape[2], device=device)
            seen = (key <= query) & kind.reaches(query + unroll, key, query)
            later = torch.arange(1, unroll + 1, device=device)
            near = kind.reaches(torch.full_like(later, unroll), later, 0)
            masks = [
                torch.zeros(reached.shape, dtype=dtype, device=device).masked_fill(~reached, hidden)
                for reached, hidden in ((seen[:, None], HIDDEN), (near[None], -torch.inf))
            ]
            self.masks[unroll, kind] = masks[0], masks[1]
        return self.masks[unroll, kind]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always explicit."""
        return 0


@dataclass(frozen=True, eq=False)
class UnrollAttention:
    """Attention of the newest unroll in one layer. See ``runners.attention.ReadsCells``.

    Args:
        keys: of every unroll.
        values: of every unroll.
        mask: additive, of the keys of unroll 0; None: row i attends to its columns 0 to i.
        private_mask: additive, of the later ones.
    """

    keys: list[Tensor]
    values: list[Tensor]
    kind: AttentionKind = FULL
    mask: Tensor | None = None
    private_mask: Tensor | None = None

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[B, heads, n, d] -> [B, n, heads, d]``. See ``attention.merged_attention``.

        Raises:
            NotImplementedError: the layer has a soft cap or sinks.
        """
        if not softmax.plain:
            raise NotImplementedError("layers with soft-capped attention or attention sinks cannot be trained")
        columns = query.shape[2]
        scale = query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling
        first, *later = zip(self.keys, self.values, strict=True)
        key, value = first if self.mask is not None else (tensor[:, :, :columns] for tensor in first)
        private = [(key[:, :, :columns].unsqueeze(3), value[:, :, :columns].unsqueeze(3)) for key, value in later]
        mixed = merged_attention(query, (key, value), private, scale, self.mask, self.private_mask)
        return mixed.transpose(1, 2)
