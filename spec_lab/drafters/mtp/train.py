"""The recipe of multi-token-prediction modules: one module that is iterated (FastMTP, 2509.18362)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from spec_lab.core.options import Count, Share
from spec_lab.drafters.draft_layers import random_network
from spec_lab.drafters.mtp import propose as mtp
from spec_lab.drafters.mtp.files import Names, write_mtp
from spec_lab.drafters.mtp.network import Mtp, MtpSettings
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import ChainObjective, Unrolled
from spec_lab.train.objectives import ChainLoss
from spec_lab.train.recipe import Beginning, Recipe, TargetHead, layer_of


@dataclass(frozen=True)
class MtpRecipe(Recipe):
    """One MTP module of a Llama layer with the target's embedding and LM head.

    Args:
        unrolls: tokens that are drafted in training; each one's loss has ``decay`` times the weight of the one before.
        decay: see there.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk", "ce" (of the texts' own tokens)
            or "tau" (-E[tau]); see ``train.objectives``.
        intermediate_size: of the MLP; None: as in the target.
        heads: attention heads; None: as in the target.
        layout: names of the tensors in the file, "deepseek" or "qwen".
    """

    unrolls: Count = 3
    decay: Share = 0.6
    loss: ChainLoss = "kl"
    intermediate_size: Count | None = None
    heads: Count | None = None
    layout: Names = "deepseek"
    name: ClassVar = "mtp"

    @property
    def depth(self) -> int:
        """See ``Recipe``."""
        return self.unrolls

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``."""
        layer = layer_of(target, self.heads, self.intermediate_size)
        settings = MtpSettings(layer, target.services.hidden_size, target.vocabulary, shared=self.layout == "qwen")
        network = random_network(Mtp(settings), target, torch.float32, seed)
        network.requires_grad_(True).train()
        head = TargetHead.of(target)
        frame = network.frames[0]

        def mix(embedded: Tensor, feature: Tensor) -> Tensor:
            mixed: Tensor = frame.eh_proj(torch.cat([frame.enorm(embedded), frame.hnorm(feature)], -1))
            return mixed

        drafts = Unrolled(network, mix, head.lm_head, self.unrolls)
        objective = ChainObjective(network, drafts, head, target.lm.dtype, self.decay, self.loss)
        return Beginning(network, objective, {"layout": self.layout})

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``."""
        return write_mtp(module, folder, self.layout, target.services.num_layers, facts, torch.bfloat16)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return mtp.load(target, str(folder), depth=depth)
