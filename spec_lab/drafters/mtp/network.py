"""The network of multi-token prediction (MTP): modules that were trained with the target to predict further tokens.

Sources: DeepSeek-V3 (2412.19437, section 2.2, equations 21 to 23), and the modules of Qwen3-Next. With e the embedding
and h_j the target's hidden state at position j after its final norm, a module computes

    h'_{j+1} = norm(layer(eh_proj([enorm(e(t_{j+1})); hnorm(h_j)])))

and the LM head reads h'_{j+1}, which predicts t_{j+2}. One position later h'_{j+1}, after the module's norm, stands in
for h_{j+1}. (The state before that norm makes the second position much less likely to be accepted.) The embedding comes
first in both families.

Several modules are used in turn, module k for the k-th drafted token and the last one from there on. Every module has a
KV cache of its own over all positions, in which its input at a committed position reads the target's hidden state.
(In training, module k reads what module k - 1 predicted of that state. vLLM runs the first module for every token.)

Letters: H hidden size, V vocabulary, n rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.drafters.draft_layers import DraftLayers, FeatureNetwork, random_network, small_layer
from spec_lab.models.services import TargetServices
from spec_lab.models.target import Target


@dataclass(frozen=True)
class MtpSettings:
    """The sizes and kind of MTP modules.

    Args:
        layer: config of their decoder layers, as transformers names its fields.
        hidden_size: H, that of the target.
        vocab_size: V.
        modules: how many they are.
        shared: whether all modules have the same norms and ``eh_proj``, and differ in their layers only (Qwen3-Next).
        own_embedding: whether they have an embedding of their own.
        own_head: whether they have an LM head of their own.
        taps: the number of the hidden state that the first module reads.
        positions: by how many rotary positions the first drafted row comes after the last computed one.
    """

    layer: Mapping[str, Any]
    hidden_size: int
    vocab_size: int
    modules: int = 1
    shared: bool = False
    own_embedding: bool = False
    own_head: bool = False
    taps: tuple[int, ...] = (-1,)
    positions: int = 1


class Frame(nn.Module):
    """The parts of a module around its decoder layer."""

    def __init__(self, settings: MtpSettings, body: DraftLayers) -> None:
        super().__init__()
        h, v = settings.hidden_size, settings.vocab_size
        self.enorm, self.hnorm, self.norm = body.norm(), body.norm(), body.norm()
        self.eh_proj = nn.Linear(2 * h, h, bias=False, device="meta")
        self.embed_tokens = nn.Embedding(v, h, device="meta") if settings.own_embedding else None
        self.head = nn.Linear(h, v, bias=False, device="meta") if settings.own_head else None

    def input(self, token: Tensor, hidden: Tensor, services: TargetServices) -> Tensor:
        """Tokens ``[n]`` and hidden states before them ``[n, H]`` -> the layer's input ``[n, H]``."""
        embedded = services.embed(token) if self.embed_tokens is None else self.embed_tokens(token)
        mixed: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return mixed


class Mtp(FeatureNetwork):
    """The network. With several modules a feature ends with the number of the module that reads it, from 0 on."""

    def __init__(self, settings: MtpSettings) -> None:
        super().__init__()
        self.settings, self.hidden = settings, settings.taps
        self.body = DraftLayers(settings.layer, settings.modules, whole=True)
        frames = 1 if settings.shared else settings.modules
        self.frames: Any = nn.ModuleList(Frame(settings, self.body) for _ in range(frames))

    @property
    def lm_heads(self) -> list[tuple[nn.Module, str]]:
        """See ``DrafterNetwork``."""
        return [(frame, "head") for frame in self.frames] if self.settings.own_head else super().lm_heads

    @property
    def layers(self) -> int:
        """The number of decoder layers, one of each module."""
        return self.settings.modules

    def features(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` hidden states after the final norm -> features, which the first module reads."""
        return self._numbered(hidden, hidden.new_zeros(len(hidden), 1))

    def inputs(self, token: Tensor, feature: Tensor) -> Tensor:
        """Tokens ``[n]`` and the features before them -> the inputs of every frame, side by side."""
        hidden, number = self._split(feature)
        inputs = [frame.input(token, hidden, self.services) for frame in self.frames]
        return self._numbered(inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1), number)

    def forward(self, x: Tensor, positions: Tensor, cache: Any, mask: Any = None) -> Tensor:
        """Inputs ``[b, N, X]`` at positions ``[b, N]`` -> normed outputs ``[b, N, H]`` of the module of each row.

        Every module computes every row, so that its KV cache is complete.
        """
        wide, number = self._split(x)
        inputs = wide.split(self.settings.hidden_size, -1)
        rotation = self.body.rotate(inputs[0], positions)
        outputs = []
        for module in range(self.layers):
            frame = min(module, len(inputs) - 1)
            output = self.body.whole(module, inputs[frame], positions, rotation, cache, mask)
            outputs.append(self.frames[frame].norm(output))
        return self._numbered(_chosen(outputs, number), number)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of ``forward`` -> features, which the next module reads, and logits ``[n, W]`` of drafted tokens."""
        hidden, number = self._split(x)
        if self.settings.own_head:
            logits = _chosen([frame.head(hidden) for frame in self.frames], number)
        else:
            logits = self.row_logits(hidden)
        following = None if number is None else (number + 1).clamp(max=self.layers - 1)
        return self._numbered(hidden, following), logits

    def toy(self, target: Target) -> Mtp:
        """The same kind of network with random weights, in the sizes of another target."""
        h = target.services.hidden_size
        settings = replace(
            self.settings, layer=small_layer(h), hidden_size=h, vocab_size=target.vocabulary,
            own_embedding=False, own_head=False,
        )  # fmt: skip
        return self.trimmed_like(random_network(Mtp(settings), target))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split off the module's number, which is the last column; None with one module."""
        return (x, None) if self.layers == 1 else (x[..., :-1], x[..., -1:])

    def _numbered(self, x: Tensor, number: Tensor | None) -> Tensor:
        return x if self.layers == 1 or number is None else torch.cat([x, number], -1)


def _chosen(values: Sequence[Tensor], number: Tensor | None) -> Tensor:
    """Each row of the value with its number, ``[.., D]``."""
    chosen = values[0]
    for module, value in enumerate(values[1:], start=1):
        assert number is not None
        chosen = torch.where(number == module, value, chosen)
    return chosen
