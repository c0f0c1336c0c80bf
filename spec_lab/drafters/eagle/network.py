"""The networks of EAGLE: a drafter whose decoder layers read hidden states of the target and the tokens after them.

Sources: EAGLE-1 (2401.15077, section 3.2) and EAGLE-2 (2406.16858), which has the same network; EAGLE-3 (2503.01840,
section 3.1), with the variants of published heads. Letters: H hidden size of the drafter, H_t of the target, V its
vocabulary, W draft vocabulary, k taps (hidden states of the target that are read), n rows.

In both, ``features`` prepares observed hidden states, ``inputs`` combines them with the tokens after them, ``forward``
runs the layers, and ``outputs`` returns the features that stand in for the target's one position later, and logits.
``services`` are the target's embedding and LM head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spec_lab.drafters.draft_layers import (
    DraftLayers,
    FeatureNetwork,
    random_network,
    rms_norm,
    small_layer,
)
from spec_lab.models.target import Target

NormOutput = Literal["plain", "feedback", "raw"]


@dataclass(frozen=True)
class EagleSettings:
    """The sizes and kind of an EAGLE-1 or EAGLE-2 head.

    Args:
        layer: config of the decoder layers, as transformers names its fields.
        hidden_size: H = H_t.
        vocab_size: V.
        layers: number of decoder layers; the first has no norm before attention.
        bias: whether ``fc`` has a bias.
        taps: the number of the hidden state that is read.
        windows: W of each layer, None of one with full attention; empty: none has a window.
        anchored: whether they end at the anchor of drafted rows (``AttentionKind``).
        positions: by how many rotary positions the first drafted row comes after the last computed one.
    """

    layer: Mapping[str, Any]
    hidden_size: int
    vocab_size: int
    layers: int = 1
    bias: bool = True
    taps: tuple[int, ...] = (-1,)
    windows: tuple[int | None, ...] = ()
    anchored: bool = False
    positions: int = 1


@dataclass(frozen=True)
class Eagle3Settings:
    """The sizes and kind of an EAGLE-3 head.

    Args:
        layer: config of the decoder layers, as transformers names its fields.
        hidden_size: H.
        target_hidden_size: H_t.
        vocab_size: V.
        taps: numbers of the hidden states that are read, as in ``runner.Capabilities``.
        draft_vocab_size: W; None: the head drafts with the target's LM head.
        layers: number of decoder layers; the first reads 2H.
        norm_before_residual: whether the residual connection starts from the normed features.
        norm_before_fc: whether the concatenated taps are normed.
        fc_norm: whether each tap is normed.
        norm_output: what the final norm is for: "plain", the LM head reads the normed state and the state before is fed
            back (EAGLE-3); "feedback", the normed state is read and fed back (EAGLE-3.1); "raw", it is not applied.
        own_embedding: whether the head has an embedding of its own.
        windows: W of each layer, None of one with full attention; empty: none has a window.
        anchored: whether they end at the anchor of drafted rows (``AttentionKind``).
        positions: by how many rotary positions the first drafted row comes after the last computed one.
        fc: whether ``fc`` makes the features; False: they are the one tap.
        fc_bias: whether ``fc`` has a bias.
    """

    layer: Mapping[str, Any]
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]
    draft_vocab_size: int | None = None
    layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: NormOutput = "plain"
    own_embedding: bool = False
    windows: tuple[int | None, ...] = ()
    anchored: bool = False
    positions: int = 1
    fc: bool = True
    fc_bias: bool = False


class Eagle(FeatureNetwork):
    """The network of EAGLE-1 and EAGLE-2.

    Input j is ``fc([embed(t_{j+1}); f_j])``, where f_j is the target's hidden state after its final norm. The output of
    the layers is f_{j+1} as the drafter predicts it, and the target's LM head reads it.
    """

    name = "eagle"

    def __init__(self, settings: EagleSettings) -> None:
        super().__init__()
        self.settings, self.hidden = settings, settings.taps
        self.body = DraftLayers(settings.layer, settings.layers, windows=settings.windows, anchored=settings.anchored)
        self.body.layers[0].input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * settings.hidden_size, settings.hidden_size, settings.bias, device="meta")

    def features(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` hidden states after the final norm, as they are."""
        return hidden

    def inputs(self, token: Tensor, feature: Tensor) -> Tensor:
        """Tokens ``[n]`` and the features before them ``[n, H]`` -> inputs ``[n, H]``."""
        mixed: Tensor = self.fc(torch.cat([self.services.embed(token).to(feature.dtype), feature], -1))
        return mixed

    def forward(self, x: Tensor, positions: Tensor, cache: Any, mask: Any = None) -> Tensor:
        """Inputs ``[b, N, H]`` at positions ``[b, N]`` -> outputs ``[b, N, H]``."""
        rotation = self.body.rotate(x, positions)
        for layer in range(self.layers):
            x = self.body.run(layer, x, rotation, cache, mask)
        return x

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, H]`` -> features ``[n, H]`` and logits of the drafted tokens ``[n, W]``."""
        return x, self.row_logits(x)

    def toy(self, target: Target) -> Eagle:
        """The same kind of network with random weights, in the sizes of another target."""
        h = target.services.hidden_size
        settings = replace(
            self.settings, layer=small_layer(h), hidden_size=h, vocab_size=target.vocabulary,
            windows=tuple(window and 2 for window in self.settings.windows),
        )  # fmt: skip
        return self.trimmed_like(random_network(Eagle(settings), target))


class Eagle3(FeatureNetwork):
    """The network of EAGLE-3.

    Feature j is ``g_j = fc([tap_1; ..; tap_k])`` at position j. The first layer's attention reads
    ``[input_layernorm(embed(t_{j+1})); hidden_norm(g_j)]``; its residual connection starts from g_j. One position
    later the layers' own output stands in for g.
    """

    name = "eagle3"
    norm_pair: Tensor | None
    """``[2, H]`` weights of both norms, once fused."""

    def __init__(self, settings: Eagle3Settings) -> None:
        super().__init__()
        self.settings = settings
        h, wide = settings.hidden_size, len(settings.taps) * settings.target_hidden_size
        self.hidden = settings.taps
        self.body = DraftLayers(settings.layer, settings.layers, windows=settings.windows, anchored=settings.anchored)
        self.body.widen(2 * h)
        self.hidden_norm = rms_norm(h, self.body)
        self.norm = rms_norm(h, self.body)
        self.fc = nn.Linear(wide, h, settings.fc_bias, device="meta") if settings.fc else None
        self.input_norm = rms_norm(wide, self.body) if settings.norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if settings.fc_norm:
            self.fc_norm = nn.ModuleList(rms_norm(settings.target_hidden_size, self.body) for _ in settings.taps)
        self.embed_tokens: nn.Embedding | None = None
        if settings.own_embedding:
            self.embed_tokens = nn.Embedding(settings.vocab_size, h, device="meta")
        if settings.draft_vocab_size is not None:
            self.lm_head = nn.Linear(h, settings.draft_vocab_size, bias=False, device="meta")
            self.ids = torch.arange(settings.draft_vocab_size)
        self.register_buffer("norm_pair", None, persistent=False)

    def fuse(self) -> None:
        """See ``DrafterNetwork``. Both norms of the first layer's inputs are computed together."""
        super().fuse()
        first = self.body.layers[0].input_layernorm
        if isinstance(first, nn.RMSNorm) and first.eps == self.hidden_norm.eps:
            self.norm_pair = torch.stack([first.weight.detach(), self.hidden_norm.weight.detach()])

    def features(self, hidden: Tensor) -> Tensor:
        """The taps ``[n, k * H_t]`` -> features ``[n, H]``."""
        if self.fc_norm is not None:
            parts = hidden.split(self.settings.target_hidden_size, -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        return hidden if self.fc is None else self.fc(hidden)

    def inputs(self, token: Tensor, feature: Tensor) -> Tensor:
        """Tokens ``[n]`` and the features before them ``[n, H]`` -> inputs ``[n, 2H]``."""
        embedding = self.embed_tokens
        embedded = self.services.embed(token) if embedding is None else embedding(token)
        return torch.cat([embedded.to(feature.dtype), feature], -1)

    def forward(self, x: Tensor, positions: Tensor, cache: Any, mask: Any = None) -> Tensor:
        """Inputs ``[b, N, 2H]`` at positions ``[b, N]`` -> outputs before the final norm ``[b, N, H]``."""
        h = self.settings.hidden_size
        embedded, feature = x.split(h, -1)
        rotation = self.body.rotate(x, positions)
        if self.norm_pair is None:
            normed = self.hidden_norm(feature)
            both = torch.cat([self.body.layers[0].input_layernorm(embedded), normed], -1)
        else:
            pair = nn.functional.rms_norm(x.unflatten(-1, (2, h)), (h,), None, self.hidden_norm.eps) * self.norm_pair
            both = pair.flatten(-2)
            normed = pair[..., 1, :]
        residual = normed if self.settings.norm_before_residual else feature
        hidden = self.body.rest(0, residual, self.body.attend(0, both, rotation, cache, mask))
        for layer in range(1, self.layers):
            hidden = self.body.run(layer, hidden, rotation, cache, mask)
        return hidden

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, H]`` -> features ``[n, H]`` and logits of the draft vocabulary ``[n, W]``."""
        normed = x if self.settings.norm_output == "raw" else self.norm(x)
        logits = self.row_logits(normed)
        return (normed if self.settings.norm_output == "feedback" else x), logits

    def toy(self, target: Target) -> Eagle3:
        """The same kind of network with random weights, in the sizes of another target; it lacks the last token."""
        h, last = target.services.hidden_size, target.lm.capabilities.hidden_layers
        settings = replace(
            self.settings, layer=small_layer(h), hidden_size=h, target_hidden_size=h, vocab_size=target.vocabulary,
            windows=tuple(window and 2 for window in self.settings.windows),
            taps=tuple(min(tap, last) for tap in range(len(self.settings.taps))), own_embedding=False,
            draft_vocab_size=self.settings.draft_vocab_size and target.vocabulary - 1,
        )  # fmt: skip
        return self.trimmed_like(random_network(Eagle3(settings), target))


Network = Eagle | Eagle3
