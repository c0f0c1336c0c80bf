"""The recipe of Kangaroo's adapters: cross-entropy to the target's distributions (2404.18911, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from spec_lab.core.options import Count
from spec_lab.drafters.draft_layers import random_network
from spec_lab.drafters.kangaroo import propose as kangaroo
from spec_lab.drafters.kangaroo.files import write_kangaroo
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import AlikeObjective
from spec_lab.train.objectives import Loss
from spec_lab.train.recipe import Beginning, Recipe, TargetHead, layer_of
from spec_lab.train.texts import Texts
from spec_lab.train.unroll import Unrolls


@dataclass(frozen=True)
class KangarooRecipe(Recipe):
    """An adapter after the target's first layers.

    Args:
        depth: tokens that are drafted in a chain.
        exit_layer: how many of the target's layers draft.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk" or "ce" (of the texts'
            own tokens); see ``train.objectives``.
        layers: of attention; 1 in the paper.
        heads: attention heads; None: as in the target.
    """

    depth: Count = 6
    exit_layer: Count = 2
    loss: Loss = "kl"
    layers: Count = 1
    heads: Count | None = None
    name: ClassVar = "kangaroo"

    def states(self, target: Target) -> tuple[int, ...]:
        """See ``Recipe``."""
        return (self._exit_layer(target), -1)

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``. At first the adapter's attention returns 0, so that the adapter is its final norm."""
        settings = KangarooSettings(
            layer_of(target, self.heads, None), target.services.hidden_size, self._exit_layer(target), self.layers
        )
        network = random_network(Kangaroo(settings), target, torch.float32, seed)
        with torch.no_grad():
            for layer in network.body.layers:
                layer.self_attn.o_proj.weight.zero_()
        network.requires_grad_(True).train()
        head, h = TargetHead.of(target), settings.hidden_size

        def states(text: Texts) -> Tensor:
            """Compute the adapter's states from the exit states, as it will where the tokens are drafted."""
            assert text.hidden is not None
            exits = text.hidden[:, :-1, :h].to(next(network.parameters()).dtype)
            out: Tensor = network(exits, torch.arange(exits.shape[1], device=exits.device)[None], Unrolls())
            return out

        objective = AlikeObjective(network, states, head.lm_head, head, target.lm.dtype, self.depth, self.loss, h)
        return Beginning(network, objective, {"exit_layer": settings.exit_layer})

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``."""
        return write_kangaroo(module, folder, target.vocabulary, facts, torch.bfloat16)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return kangaroo.load(target, str(folder), depth=depth, confidence=0.0)

    def _exit_layer(self, target: Target) -> int:
        last = target.services.num_layers - 1
        if self.exit_layer > last:
            raise ValueError(
                f"task.recipe.exit_layer must be from 1 to {last}, since {target.name} has {last + 1} layers "
                f"(got {self.exit_layer})"
            )
        return self.exit_layer
