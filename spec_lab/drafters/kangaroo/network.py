"""The adapter of Kangaroo: attention that turns the target's early states into states that its LM head can read.

Source: Kangaroo (2404.18911, section 3.2). With x_j the target's hidden state number E at position j, the *exit state*,
which is the input of its layer E, the adapter computes

    h_j = norm(x_j + attention(input_layernorm(x_j)))

over the exit states up to position j, and the target's LM head reads h_j, which predicts t_{j+1}. There is no MLP. The
first E layers of the target and the adapter together are the drafter. Row j has rotary position j.

Letters: H hidden size, L layers of the target, V vocabulary, n rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from spec_lab.drafters.draft_layers import DrafterNetwork, DraftLayers, random_network, small_layer
from spec_lab.models.target import Target


@dataclass(frozen=True)
class KangarooSettings:
    """The sizes and kind of an adapter.

    Args:
        layer: config of a decoder layer, as transformers names its fields; its attention and norm are used.
        hidden_size: H, that of the target.
        exit_layer: E, from 1 to L - 1.
        layers: how many times attention follows, each with a norm before it and a residual connection; 1 in the paper.
    """

    layer: Mapping[str, Any]
    hidden_size: int
    exit_layer: int
    layers: int = 1


class Kangaroo(DrafterNetwork):
    """The adapter. ``services`` has the target's LM head."""

    def __init__(self, settings: KangarooSettings) -> None:
        super().__init__()
        self.settings = settings
        self.body = DraftLayers(settings.layer, settings.layers)
        self.norm = self.body.norm()
        for layer in self.body.layers:
            del layer.mlp, layer.post_attention_layernorm

    def forward(self, x: Tensor, positions: Tensor, cache: Any, mask: Any = None) -> Tensor:
        """Exit states ``[b, N, H]`` at positions ``[b, N]`` -> normed states ``[b, N, H]``."""
        rotation = self.body.rotate(x, positions)
        for layer in range(self.layers):
            normed = self.body.layers[layer].input_layernorm(x)
            x = x + self.body.attend(layer, normed, rotation, cache, mask)
        out: Tensor = self.norm(x)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Normed states ``[n, H]`` -> the target's logits of them ``[n, V]``."""
        return self.services.lm_head(x)

    def toy(self, target: Target) -> Kangaroo:
        """The same kind of adapter with random weights, in the sizes of another target, after its first layer.

        It has no norm: a toy's states are log probabilities, of which a norm keeps no more than which are of 0.
        """
        h = target.services.hidden_size
        settings = replace(self.settings, layer=small_layer(h), hidden_size=h, exit_layer=1)
        network = random_network(Kangaroo(settings), target)
        network.norm = nn.Identity()
        return network
