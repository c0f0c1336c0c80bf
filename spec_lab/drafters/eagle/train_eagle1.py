"""The recipe of EAGLE-1 and EAGLE-2 heads.

Source: EAGLE-1 (2401.15077, section 4: regression of features plus 0.1 of the cross-entropy, noise on features).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from spec_lab.core.options import Count, Number
from spec_lab.drafters.draft_layers import random_network
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.eagle.files import write_eagle
from spec_lab.drafters.eagle.network import Eagle, EagleSettings
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import ChainObjective, Unrolled, truth_after
from spec_lab.train.objectives import Loss, Measured, Truth, mean_losses
from spec_lab.train.recipe import Beginning, Recipe, TargetHead, layer_of
from spec_lab.train.texts import Texts
from spec_lab.train.unroll import Unrolls

NOISE = 0.2 * 512
"""Width of the noise on features, times the length of the text (the official training code)."""
DISTRIBUTION = 0.1
"""Weight of the loss of distributions over that of features (2401.15077, section 4)."""


@dataclass(frozen=True)
class Eagle1Recipe(Recipe):
    """An EAGLE-1 head of Llama layers, trained to predict the target's next feature.

    Args:
        depth: tokens that are drafted in a chain; only the first is trained, the others are measured.
        loss: of the distributions, "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk" or "ce"
            (of the texts' own tokens); see ``train.objectives``.
        noise: factor of the noise on features; 1 as in the official training, 0 for none.
        bias: whether ``fc`` has a bias.
        layers: decoder layers.
        intermediate_size: of the MLP; None: as in the target.
        heads: attention heads; None: as in the target.
    """

    depth: Count = 5
    loss: Loss = "kl"
    noise: Annotated[float, Number(0, 100)] = 1.0
    bias: bool = True
    layers: Count = 1
    intermediate_size: Count | None = None
    heads: Count | None = None
    name: ClassVar = "eagle"

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``."""
        layer = layer_of(target, self.heads, self.intermediate_size)
        settings = EagleSettings(layer, target.services.hidden_size, target.vocabulary, self.layers, self.bias)
        network = random_network(Eagle(settings), target, torch.float32, seed)
        network.requires_grad_(True).train()
        head = TargetHead.of(target)
        objective = Eagle1Objective(network, head, target.lm.dtype, self.depth, self.loss, self.noise, seed)
        return Beginning(network, objective, {"noise": self.noise})

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``: in the official format, for embeddings that are not scaled."""
        head, h = TargetHead.of(target), module.settings.hidden_size
        tensors = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        tensors["fc.weight"][:, :h] *= head.embedding_scale
        embedding = head.model.get_input_embeddings().weight
        return write_eagle(module.settings, tensors, folder, embedding, facts, torch.bfloat16)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return eagle.load(target, str(folder), depth=depth)


@dataclass(frozen=True, eq=False)
class Eagle1Objective:
    """The loss of features plus 0.1 of the loss of distributions, of the first token after each position.

    Later draft positions are measured only, in training on the first of the texts.

    Args:
        target: its embedding and LM head; embeddings are multiplied by its ``embedding_scale``.
        dtype: of the target.
        depth: draft positions.
        kind: of loss of the distributions.
        noise: factor of the noise on features.
        seed: of the noise. A text has the same noise whenever it is seen, so that a resumed training has the same too.
    """

    network: Eagle
    target: TargetHead
    dtype: torch.dtype
    depth: Count = 5
    kind: Loss = "kl"
    noise: float = 1.0
    seed: int = 0

    def __call__(self, text: Texts) -> tuple[Tensor, list[Measured]]:
        """The loss of texts with the states after the final norm as their hidden states."""
        assert text.hidden is not None
        dtype, scale, training = (
            next(self.network.parameters()).dtype,
            self.target.embedding_scale,
            self.network.training,
        )
        with torch.no_grad():
            truth = truth_after(text, self.target, self.dtype)
            embedded = self.target.embed(text.ids).to(dtype) * scale
            drafts = Unrolled(self.network, partial(_mixed, self.network), self.target.lm_head, self.depth)
            chain = ChainObjective(self.network, drafts, self.target, self.dtype, kind=self.kind, scale=scale)
            _, measured = chain(text.rows(slice(0, 1)) if training else text)
        read = replace(text, hidden=text.hidden.to(dtype))
        noise = self._noise(text).to(dtype) if training and self.noise else None
        features, loss, first = eagle1_losses(
            self.network, read, truth, embedded, self.target.lm_head, noise, self.kind
        )
        return features + DISTRIBUTION * loss, [first, *measured[1:]]

    def _noise(self, text: Texts) -> Tensor:  # [B, T, H]
        """Uniform between -1/2 and 1/2, times ``NOISE`` over the length of each text."""
        assert text.hidden is not None
        noise = torch.empty(text.hidden.shape, device="cpu")  # the same on every device
        for row, generator in zip(noise, text.generators(self.seed), strict=True):
            row.uniform_(-0.5, 0.5, generator=generator)
        return noise.to(text.ids.device) * (self.noise * NOISE / text.length.to(text.ids.device)[:, None, None])


def _mixed(network: Eagle, embedded: Tensor, feature: Tensor) -> Tensor:
    mixed: Tensor = network.fc(torch.cat([embedded, feature], -1))
    return mixed


def eagle1_losses(
    network: Eagle,
    text: Texts,
    truth: Truth,
    embedded: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    noise: Tensor | None = None,
    kind: Loss = "kl",
) -> tuple[Tensor, Tensor, Measured]:
    """Return the losses of features and of distributions, and what the first draft position achieves.

    Args:
        text: with the states after the final norm as its hidden states ``[B, T, H]``.
        truth: the target's distributions after each token before one to learn from.
        embedded: ``[B, T, H]`` the embeddings of the tokens.
        lm_head: of the target.
        noise: ``[B, T, H]`` added to what the network reads; None for none.
    """
    assert text.hidden is not None
    length, device = text.ids.shape[1], text.ids.device
    read = text.hidden if noise is None else text.hidden + noise
    predicted = network(
        _mixed(network, embedded[:, 1:], read[:, : length - 1]),
        torch.arange(length - 1, device=device)[None],
        Unrolls(),
    )
    learned, counts = text.counts(1), text.counts(2)  # column j predicts state j + 1, whose next token is t_{j+2}
    row, column = (index.to(device) for index in counts.nonzero(as_tuple=True))
    rows = (learned.flatten().cumsum(0) - 1).view(learned.shape)[:, 1:][counts].to(device)
    predicted = predicted[row, column]
    distance = torch.nn.functional.smooth_l1_loss(predicted, text.hidden[row, column + 1], reduction="none").mean(-1)
    features = distance.sum() / max(1, len(row))
    weights = list(network.parameters())
    loss, (compared,) = mean_losses([predicted], [lm_head], weights, truth, [rows], [1.0], kind)
    return features, loss, compared.measured()
