"""The losses of EAGLE: training-time test of EAGLE-3 heads, and regression of features of EAGLE-1 heads.

Sources: EAGLE-3 (2503.01840, section 3.2: unrolled steps, soft cross-entropy on the draft vocabulary, no feature loss)
and EAGLE-1 (2401.15077, section 4: regression of features plus 0.1 of the cross-entropy, noise on features).

Unroll i reads, in column j, the token t_{j+1+i} and the features that unroll i - 1 returned there (unroll 0: the
target's at position j). It has rotary position j + i. Its query attends to the keys of unroll 0 in columns 0 to j and
to those of unrolls 1 to i in its own column: what a drafter sees that drafts i tokens after position j. It predicts the
token after t_{j+1+i}. Letters: B texts, C columns, d width of an attention head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from spec_lab.engine.attention import FULL, SPANS, AttentionKind
from spec_lab.engine.softmax import Softmax
from spec_lab.models.eagle import Eagle, Eagle3
from spec_lab.train.objectives import Loss, Measured, Truth, measure
from spec_lab.train.texts import Texts


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
    """Attention of the newest unroll in one layer. See ``engine.attention.ReadsCells``."""

    keys: list[Tensor]
    values: list[Tensor]
    kind: AttentionKind = FULL

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[B, heads, C, d] -> [B, C, heads, d]``, computed in float32 at least.

        In bfloat16 the gradients of queries and keys are differences of rounded numbers: mostly noise.

        Raises:
            NotImplementedError: the layer has a soft cap or sinks.
        """
        if not softmax.plain:
            raise NotImplementedError("layers with soft-capped attention or attention sinks cannot be trained")
        columns, groups = query.shape[2], query.shape[1] // self.keys[0].shape[1]
        given, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
        keys, values = (
            [
                (one[:, :, :columns].repeat_interleave(groups, 1) if groups > 1 else one[:, :, :columns]).to(wide)
                for one in some
            ]
            for some in (self.keys, self.values)
        )
        query = query.to(wide) * (query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling)
        future = torch.ones(columns, columns, dtype=torch.bool, device=query.device).triu(1)
        scores = [(query @ keys[0].transpose(2, 3)).masked_fill(future, -torch.inf)]
        scores += [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
        share = torch.cat(scores, -1).softmax(-1)
        mixed = share[..., :columns] @ values[0]
        for number, value in enumerate(values[1:]):
            mixed = mixed + share[..., columns + number, None] * value
        return mixed.transpose(1, 2).to(given)


def eagle3_losses(
    network: Eagle3, text: Texts, truth: Truth, embedded: Tensor, unrolls: int, kind: Loss = "kl"
) -> list[Measured]:
    """Return what each unroll achieves on some texts.

    Args:
        network: in training.
        text: with the taps as its hidden states ``[B, T, k * H_t]``.
        truth: the target's distributions after each token, ``[B * T]`` rows.
        embedded: ``[B, T, H]`` the embeddings of the tokens.
        unrolls: how many tokens are drafted.
        kind: of loss.
    """
    assert text.hidden is not None
    (batch, length), device = text.ids.shape, text.ids.device
    rows = torch.arange(batch * length, device=device).view(batch, length)
    cache, found = Unrolls(), []
    feature = network.features(text.hidden[:, : length - 1])
    for unroll in range(unrolls):
        columns = length - 1 - unroll
        x = torch.cat([embedded[:, 1 + unroll :], feature[:, :columns]], -1)
        positions = torch.arange(unroll, unroll + columns, device=device)[None]
        hidden = network(x, positions, cache)
        normed = network.norm(hidden)
        feature = normed if network.settings.norm_output else hidden
        assert network.lm_head is not None
        # Column j predicts the distribution after t_{j+1+unroll}; the last column's next token is not in the text.
        logits = network.lm_head(normed).flatten(0, 1)
        counts = torch.zeros(batch, columns, dtype=torch.bool, device=device)
        counts[:, :-1] = text.counts(2 + unroll)
        found.append(measure(logits, truth[rows[:, 1 + unroll :].flatten()], counts.flatten(), kind))
    return found


def eagle1_losses(
    network: Eagle,
    text: Texts,
    truth: Truth,
    embedded: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    noise: Tensor | None = None,
    kind: Loss = "kl",
) -> tuple[Tensor, list[Measured]]:
    """Return the loss of features, and what the first draft position achieves.

    Args:
        network: in training.
        text: with the states after the final norm as its hidden states ``[B, T, H]``.
        truth, embedded, kind: as of ``eagle3_losses``.
        lm_head: of the target.
        noise: ``[B, T, H]`` added to what the network reads; None for none.
    """
    assert text.hidden is not None
    (batch, length), device = text.ids.shape, text.ids.device
    rows = torch.arange(batch * length, device=device).view(batch, length)
    read = text.hidden if noise is None else text.hidden + noise
    x = network.fc(torch.cat([embedded[:, 1:], read[:, : length - 1]], -1))
    predicted = network(x, torch.arange(length - 1, device=device)[None], Unrolls())
    counts = torch.zeros(batch, length - 1, dtype=torch.bool, device=device)
    counts[:, :-1] = text.counts(2)
    distance = torch.nn.functional.smooth_l1_loss(predicted, text.hidden[:, 1:], reduction="none").mean(-1)
    features = (distance * counts).sum() / counts.sum().clamp_min(1)
    logits = lm_head(predicted).flatten(0, 1)
    return features, [measure(logits, truth[rows[:, 1:].flatten()], counts.flatten(), kind)]
