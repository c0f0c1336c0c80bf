"""The network of Hydra: MLP heads that read a hidden state of the target and every token after it.

Source: Hydra (2402.05109), with the layers of its published heads. Letters: H hidden size of the target, V its
vocabulary, K heads, L layers of each head, n rows.

Head i reads ``[s_j; e(t_{j+1}); ..; e(t_{j+1+i})]``, where s_j is the state of position j and e the target's embedding,
and predicts t_{j+2+i}. So the tokens drafted before it are part of its input, unlike Medusa's. The state is the
target's hidden state after its final norm ("mlp"), or the output of a prefix layer over the hidden states of all
positions up to j ("prefix-mlp", Hydra++).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from spec_lab.drafters.draft_layers import DrafterNetwork, DraftLayers, random_network, rms_norm, small_layer
from spec_lab.models.target import Target


@dataclass(frozen=True)
class HydraSettings:
    """The sizes and kind of Hydra heads.

    Args:
        hidden_size: H.
        vocab_size: V.
        heads: K.
        layers: L, at least 1. The layers after the first are one layer that is applied L - 1 times.
        prefix: config of the prefix layer, as transformers names its fields; None: the heads read hidden states.
        shared_lm_head: whether all heads use the target's LM head in place of one each (not in published heads).
        identity_skip: whether ``skip`` is the state itself in place of a matrix, which halves a head of one layer (not
            in published heads).
        taps: the number of the hidden state that is read.
    """

    hidden_size: int
    vocab_size: int
    heads: int
    layers: int = 1
    prefix: Mapping[str, Any] | None = None
    shared_lm_head: bool = False
    identity_skip: bool = False
    taps: tuple[int, ...] = (-1,)

    @property
    def arch(self) -> str:
        """As ``hydra_head_arch`` names it."""
        return "mlp" if self.prefix is None else "prefix-mlp"


class PrefixLayer(nn.Module):
    """One decoder layer and its norm over the hidden states of all positions."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        self.body = DraftLayers(fields, 1)
        self.norm = rms_norm(self.body.config.hidden_size, self.body)

    def forward(self, x: Tensor, positions: Tensor, cache: Any, mask: Any = None) -> Tensor:
        """Hidden states after the final norm ``[b, N, H]`` at positions ``[b, N]`` -> states ``[b, N, H]``."""
        out: Tensor = self.norm(self.body.run(0, x, self.body.rotate(x, positions), cache, mask))
        return out


class HydraHead(nn.Module):
    """Head i: ``skip(x) + silu(linear(x))`` from (i + 2)H to H, then ``x + silu(block(x))`` L - 1 times.

    Args:
        number: i.
    """

    def __init__(self, number: int, settings: HydraSettings) -> None:
        super().__init__()
        h, wide = settings.hidden_size, (number + 2) * settings.hidden_size
        self.width, self.repeats = h, settings.layers - 1
        self.linear = nn.Linear(wide, h, device="meta")
        self.skip = None if settings.identity_skip else nn.Linear(wide, h, device="meta")
        self.block = nn.Linear(h, h, device="meta") if self.repeats else None
        self.lm_head = None if settings.shared_lm_head else nn.Linear(h, settings.vocab_size, device="meta")

    def forward(self, x: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """``[n, (i + 2)H]`` -> logits ``[n, V]``; ``lm_head`` stands in for an LM head of its own."""
        skipped = x[:, : self.width] if self.skip is None else self.skip(x)
        x = skipped + silu(self.linear(x))
        for _ in range(self.repeats):
            assert self.block is not None
            x = x + silu(self.block(x))
        return lm_head(x) if self.lm_head is None else self.lm_head(x)


class HydraHeads(DrafterNetwork):
    """All heads, and the prefix layer if there is one.

    Args:
        settings: what they are. The weights are on the meta device until ``draft_layers.load_weights``.

    Raises:
        ValueError: a config that describes no prefix layer.
        Unsupported: a prefix layer of a family whose layers are built otherwise.
    """

    def __init__(self, settings: HydraSettings) -> None:
        super().__init__()
        self.settings = settings
        self.prefix = None if settings.prefix is None else PrefixLayer(settings.prefix)
        self.heads = nn.ModuleList(HydraHead(number, settings) for number in range(settings.heads))

    def __len__(self) -> int:
        return self.settings.heads

    @property
    def lm_heads(self) -> list[tuple[nn.Module, str]]:
        """See ``DrafterNetwork``."""
        return super().lm_heads if self.settings.shared_lm_head else [(head, "lm_head") for head in self.heads]

    def inputs(self, state: Tensor, token: Tensor) -> Tensor:
        """States ``[n, H]`` and the tokens after them ``[n, i + 1]`` -> what head i reads ``[n, (i + 2)H]``."""
        return torch.cat([state, self.services.embed(token).flatten(1)], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of head i ``[n, (i + 2)H]`` -> its logits ``[n, V]``."""
        number = x.shape[-1] // self.settings.hidden_size - 2
        return self.token_logits(self.heads[number](x, self.row_logits))

    def toy(self, target: Target, heads: int) -> HydraHeads:
        """The same kind of network with random weights and so many heads, in the sizes of another target."""
        h = target.services.hidden_size
        prefix = None if self.prefix is None else small_layer(h)
        settings = replace(self.settings, hidden_size=h, vocab_size=target.vocabulary, heads=heads, prefix=prefix)
        return self.trimmed_like(random_network(HydraHeads(settings), target))
