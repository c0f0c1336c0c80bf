"""Medusa heads: residual layers on the target's hidden state, followed by the target's LM head or one of their own.

Source: Medusa (2401.10774, section 2.1.1). The paper's heads do not read the pending token, although it is known when
they draft. A trunk, if the folder holds one, adds the token's embedding to the state before all heads, as Hydra
(2402.05109) and the first step of DeepSeek-V3's multi-token prediction (2412.19437, section 2.2) do. The heads remain
independent of each other, and the tree static.

Published heads have no trunk, and LM heads of their own. ``medusa.files`` describes the files. Letters: K heads,
L layers, H hidden size, V vocabulary, W width of the trunk, D drafted tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from spec_lab.core.options import WrongOption
from spec_lab.core.reading import Reading
from spec_lab.drafters.trimmed import with_tokens
from spec_lab.models.packed import linear_of
from spec_lab.models.target import Target


@dataclass(frozen=True, eq=False)
class Trunk:
    """Combines a state h with the embedding e of the next token: ``h + W2 silu(W1 [h; e] + b1) + b2``.

    Args:
        inner: W1 ``[W, 2H]`` and b1 ``[W]``; outer: W2 ``[H, W]`` and b2 ``[H]``.
        embed: the target's embedding, ``[B] -> [B, H]``.
    """

    inner: tuple[Tensor, Tensor]
    outer: tuple[Tensor, Tensor]
    embed: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor, token: Tensor) -> Tensor:
        """States ``[B, H]`` and tokens ``[B]`` -> ``[B, H]``."""
        both = torch.cat([hidden, self.embed(token)], -1)
        mixed: Tensor = self._outer(silu(self._inner(both)))
        return hidden + mixed

    @cached_property
    def _inner(self) -> nn.Module:
        return linear_of(*self.inner)

    @cached_property
    def _outer(self) -> nn.Module:
        return linear_of(*self.outer)


@dataclass(frozen=True, eq=False)
class OwnLMHeads:
    """An LM head for each head, computed as one batched product.

    Args:
        weight: ``[K, D, H]``.
        vocabulary: V, the target's.
        tokens: ``[D]`` the target's token of each row; None: row i is token i, and D = V.
        bias: ``[D]``; None: there is none.
    """

    weight: Tensor
    vocabulary: int
    tokens: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """States ``[B, K, H]`` -> logits ``[B, K, V]``; tokens that are not drafted have -inf."""
        logits = torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)  # [B, K, D]
        logits = logits if self.bias is None else logits + self.bias
        if self.tokens is None:
            return logits
        every = logits.new_full((*logits.shape[:2], self.vocabulary), -torch.inf)
        return every.index_copy_(2, self.tokens, logits)


@dataclass(frozen=True, eq=False)
class Heads:
    """K Medusa heads. Head k predicts the token k + 1 places after the target's own choice.

    Args:
        weight: ``[K, L, H, H]``, ``bias``: ``[K, L, H]``.
        lm_head: the target's, ``[n, H] -> [n, V]``; or the heads' own.
        trunk: before all heads; None for the paper's heads, which read the state alone.
        sha256: of the weight file and of every calibration*.json of the folder, which determine calibrated trees.
        taps: the number of the target's hidden state that is read.
        reading: how the files were read.
    """

    weight: Tensor
    bias: Tensor
    lm_head: Callable[[Tensor], Tensor] | OwnLMHeads
    trunk: Trunk | None = None
    sha256: str = ""
    taps: tuple[int, ...] = (-1,)
    reading: Reading = field(default_factory=Reading)

    def __len__(self) -> int:
        return len(self.weight)

    @staticmethod
    def random(target: Target, count: int, trunk: bool, seed: int = 0, own_lm_heads: bool = False) -> Heads:
        """Return ``count`` heads of one layer with random weights, in the target's sizes."""
        generator = torch.Generator().manual_seed(seed)
        h = target.services.hidden_size

        def weights(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(target.lm.device, target.lm.dtype)

        inner, outer = (weights(2 * h, 2 * h), weights(2 * h)), (weights(h, 2 * h), weights(h))
        mixing = Trunk(inner, outer, target.services.embed) if trunk else None
        layers, v = (weights(count, 1, h, h), weights(count, 1, h)), target.vocabulary
        return Heads(*layers, OwnLMHeads(weights(count, v, h), v) if own_lm_heads else target.services.lm_head, mixing)

    def first(self, count: int) -> Heads:
        """Return the first ``count`` heads."""
        own_lm_heads, lm_head = self.own_lm_heads, self.lm_head
        if own_lm_heads is not None:
            lm_head = replace(own_lm_heads, weight=own_lm_heads.weight[:count])
        return replace(self, weight=self.weight[:count], bias=self.bias[:count], lm_head=lm_head)

    def trimmed(self, tokens: Tensor, target: Target) -> Heads:
        """Return heads that draft these tokens ``[n]`` only, in so far as they draft them; rows of others are left out.

        Raises:
            ValueError: they draft none of them.
        """
        untrimmed, v = self.own_lm_heads, target.vocabulary
        known = torch.arange(v) if untrimmed is None or untrimmed.tokens is None else untrimmed.tokens.cpu()
        rows = torch.isin(known, tokens).nonzero()[:, 0]
        if not len(rows):
            raise WrongOption(f"tokens names none of the {len(known)} tokens that the heads draft")
        ids = known[rows].to(self.weight.device)
        if untrimmed is None:
            layer = target.services.lm_head_rows(known[rows]).to(self.weight)
            lm_heads = OwnLMHeads(layer.weight.data.expand(len(self), -1, -1), v, ids, layer.bias)
        else:
            lm_heads = OwnLMHeads(untrimmed.weight[:, rows.to(untrimmed.weight.device)], v, ids, untrimmed.bias)
        return replace(self, lm_head=lm_heads, sha256=with_tokens(self.sha256, known[rows]))

    @property
    def own_lm_heads(self) -> OwnLMHeads | None:
        """The LM heads of the heads' own; None if they share the target's."""
        return self.lm_head if isinstance(self.lm_head, OwnLMHeads) else None

    @property
    def tokens(self) -> int | None:
        """How many tokens a head tells apart; None for all of the target's."""
        return None if self.own_lm_heads is None else self.own_lm_heads.weight.shape[1]

    def __call__(self, hidden: Tensor, token: Tensor) -> Tensor:
        """Return logits ``[B, K, V]``: x + silu(W x + b) for each layer, then the LM heads.

        The first layer has one input for all heads and runs as one stacked matrix. (4 heads of 512 and a vocabulary of
        4096 in bfloat16, one state, two CPU cores: 0.22 ms in all; 0.30 head by head; with ``baddbmm`` within 2 %.)

        Args:
            hidden: ``[B, H]`` hidden states.
            token: ``[B]`` the tokens after them; only a trunk reads these.
        """
        count, layers, width, _ = self.weight.shape
        batch = len(hidden)
        if self.trunk is not None:
            hidden = self.trunk(hidden, token)
        x = hidden[:, None].expand(batch, count, width)
        if layers:
            x = x + silu(self._stacked(hidden)).view(batch, count, width)
        for weight, bias in self._later:
            inner = torch.baddbmm(bias, x.transpose(0, 1), weight.transpose(1, 2))  # [K, B, H]
            x = x + silu(inner).transpose(0, 1)
        if self.own_lm_heads is not None:
            return self.own_lm_heads(x)
        return self.lm_head(x.reshape(batch * count, width)).view(batch, count, -1).to(hidden.device)

    @cached_property
    def _stacked(self) -> nn.Module:
        """The heads' first layers as one, ``[B, H] -> [B, K * H]``."""
        return linear_of(self.weight[:, 0].flatten(0, 1).contiguous(), self.bias[:, 0].flatten().contiguous())

    @cached_property
    def _later(self) -> list[tuple[Tensor, Tensor]]:
        """Each later layer, ``[K, H, H]`` and ``[K, 1, H]``, in contiguous memory.

        (As slices of ``weight`` they cost four times as much: 0.93 against 0.24 ms for 5 heads of 512 in bfloat16.)
        """
        layers = range(1, self.weight.shape[1])
        return [(self.weight[:, layer].contiguous(), self.bias[:, layer, None].contiguous()) for layer in layers]
