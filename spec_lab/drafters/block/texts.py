"""The blocks of whole texts in training: where they begin, and their attention, in place of a KV cache.

Letters: B texts of T tokens, A blocks of b rows in each, h heads, d width of a head, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_lab.runners.attention import FULL, AttentionKind
from spec_lab.runners.softmax import Softmax
from spec_lab.train.attention import HIDDEN, merged_attention
from spec_lab.train.texts import Texts


def draw_anchors(text: Texts, count: int, seed: int) -> Tensor:
    """Return at most ``count`` positions of each text whose next token is learned, ``[B, A]``; 0 stands for none.

    A text has the same ones whenever it is seen. They are on the host.
    """
    counts = text.counts(1)
    counts[:, 0] = False  # before which there are no features
    width = max(1, min(count, int(counts.sum(1).max())))
    drawn = torch.zeros(len(counts), width, dtype=torch.long, device=counts.device)
    for generator, learned, row in zip(text.generators(seed), counts, drawn, strict=True):
        places = learned.nonzero()[:, 0]
        order = torch.randperm(len(places), generator=generator, device=places.device)
        chosen = places[order[:width]].sort().values
        row[: len(chosen)] = chosen
    return drawn


class BlockTexts:
    """The rows of a forward: the features of all texts, and then their blocks.

    Args:
        anchors: ``[B, A]`` the positions of the pending tokens, 1 or more.
        size: b.
        kinds: of attention, by layer; layers left out are FULL.
        ids: ``[B, T]`` the tokens.
    """

    def __init__(self, anchors: Tensor, size: int, kinds: Mapping[int, AttentionKind], ids: Tensor) -> None:
        self.anchors, self.size, self.kinds, self.ids = anchors.to(ids.device), size, kinds, ids
        self.masks: dict[AttentionKind, tuple[Tensor, Tensor | None]] = {}

    def run(self, network: Any, features: Tensor) -> Tensor:
        """Features ``[B, T, H]`` -> the layers' outputs of the blocks' rows ``[B * A * b, H]``."""
        count, device = features.shape[0] * features.shape[1], features.device
        pending = self.ids.gather(1, self.anchors).flatten()
        blocks = network.block(pending).to(features.dtype).flatten(0, 1)
        x = torch.cat([features.flatten(0, 1), blocks])
        known = torch.arange(features.shape[1], device=device).repeat(len(features))
        positions = torch.cat([known, self.positions.flatten()])
        rows = torch.arange(count, len(x), device=device)
        outputs: Tensor = network(x[None], positions[None], self, rows)
        return outputs

    @property
    def positions(self) -> Tensor:
        """Positions of the blocks' rows, ``[B, A, b]``."""
        return self.anchors[..., None] + torch.arange(self.size, device=self.anchors.device)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[LayerOfTexts, LayerOfTexts]:
        """See ``runners.attention.CellCache``: a layer's keys and values ``[1, heads, N, d]``."""
        kind = self.kinds.get(layer_idx, FULL)
        layer = LayerOfTexts(self, key, value, kind)
        return layer, layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always explicit."""
        return 0

    def mask(self, kind: AttentionKind, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Additive masks of a kind of layer: of the texts ``[B, 1, A * b, T]``, and of a block ``[b, b]``."""
        if kind not in self.masks:
            device = self.anchors.device
            query, key = self.positions[..., None], torch.arange(self.ids.shape[1], device=device)
            anchors = self.anchors[..., None, None]
            seen = (key < anchors) & kind.reaches(query, key, anchors - 1)
            seen = seen.expand(*query.shape[:3], -1)
            rows = torch.arange(self.size, device=device)
            within = torch.zeros(self.size, self.size, dtype=dtype, device=device)
            within = within.masked_fill(~kind.reaches(rows[:, None], rows, -1), -torch.inf)
            texts = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, HIDDEN)
            self.masks[kind] = texts.flatten(1, 2)[:, None], None if kind == FULL else within
        return self.masks[kind]


@dataclass(frozen=True, eq=False)
class LayerOfTexts:
    """One layer's keys and values. See ``runners.attention.ReadsCells``."""

    texts: BlockTexts
    keys: Tensor
    values: Tensor
    kind: AttentionKind

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[1, h, N, d] -> [1, N, h, d]``; zeros for the rows of features, which have keys and values only.

        Raises:
            NotImplementedError: the layer has a soft cap or sinks.
        """
        if not softmax.plain:
            raise NotImplementedError("layers with soft-capped attention or attention sinks cannot be trained")
        batch, length = self.texts.ids.shape
        count, groups = batch * length, self.texts.anchors.shape[1]

        def split(tensor: Tensor) -> tuple[Tensor, Tensor]:
            texts, blocks = tensor[0].split([count, tensor.shape[2] - count], 1)
            return texts.unflatten(1, (batch, length)).transpose(0, 1), blocks.unflatten(1, (batch, -1)).transpose(0, 1)

        (keys, own_keys), (values, own_values), (_, rows) = map(split, (self.keys, self.values, query))
        private = (own_keys.unflatten(2, (groups, -1)), own_values.unflatten(2, (groups, -1)))
        scale = query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling
        mask, private_mask = self.texts.mask(self.kind, torch.promote_types(query.dtype, torch.float32))
        mixed = merged_attention(rows, (keys, values), [private], scale, mask, private_mask)  # [B, h, A * b, d]
        blocks = mixed.permute(0, 2, 1, 3).flatten(0, 1)
        return torch.cat([blocks.new_zeros(count, *blocks.shape[1:]), blocks])[None]
