"""The recipe of Hydra heads (2402.05109), which share the target's LM head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from spec_lab.core.options import Count, OneOf, Share
from spec_lab.drafters.draft_layers import load_weights, random_network
from spec_lab.drafters.hydra.files import ARCHS, write_hydra
from spec_lab.drafters.hydra.network import HydraHead, HydraHeads, HydraSettings
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.train.chain import ChainObjective
from spec_lab.train.objectives import ChainLoss
from spec_lab.train.recipe import Beginning, Recipe, TargetHead, layer_of
from spec_lab.train.texts import Texts


@dataclass(frozen=True)
class HydraRecipe(Recipe):
    """Hydra heads.

    Args:
        heads: K.
        layers: of each head.
        arch: "mlp": the heads read the target's states; "prefix-mlp": a decoder layer before them does.
        decay: weight of a head's loss over that of the head before it.
        loss: "kl", "reverse_kl", "tv" (1 - alpha), "nla" (-log alpha), "hybrid_lk", "ce" (of the texts' own tokens)
            or "tau" (-E[tau]); see ``train.objectives``.
        intermediate_size: of the prefix layer's MLP; None: as in the target.
        identity_skip: the state itself in place of the matrix beside a head's first layer (``HydraSettings``).
    """

    heads: Count = 4
    layers: Count = 1
    arch: Annotated[str, OneOf(ARCHS)] = "mlp"
    decay: Share = 1.0
    loss: ChainLoss = "kl"
    intermediate_size: Count | None = None
    identity_skip: bool = False
    name: ClassVar = "hydra"

    @property
    def depth(self) -> int:
        """See ``Recipe``."""
        return self.heads

    def begin(self, target: Target, paths: Sequence[Path], seed: int) -> Beginning:
        """See ``Recipe``. The heads begin as the identity on the state."""
        h = target.services.hidden_size
        prefix = None if self.arch == "mlp" else layer_of(target, None, self.intermediate_size)
        sizes = h, target.vocabulary, self.heads, self.layers
        network = HydraHeads(HydraSettings(*sizes, prefix, shared_lm_head=True, identity_skip=self.identity_skip))
        random_network(network, target, torch.float32, seed)
        with torch.no_grad():
            for head in network.heads.children():
                assert isinstance(head, HydraHead)
                for part in head.children():
                    assert isinstance(part, torch.nn.Linear)
                    part.weight.zero_()
                if head.skip is not None:
                    head.skip.weight[:, :h] = torch.eye(h)
        network.requires_grad_(True).train()
        head_of_target = TargetHead.of(target)
        drafts, scale = HydraDrafts(network, head_of_target), head_of_target.embedding_scale
        objective = ChainObjective(network, drafts, head_of_target, target.lm.dtype, self.decay, self.loss, scale)
        return Beginning(network, objective, {"arch": self.arch})

    def write(self, module: Any, target: Target, folder: Path, facts: Mapping[str, str]) -> str:
        """See ``Recipe``: for embeddings that are not scaled."""
        h, scale = module.settings.hidden_size, TargetHead.of(target).embedding_scale
        tensors = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        for name, tensor in tensors.items():
            if name.endswith(("linear.weight", "skip.weight")):
                tensor[:, h:] *= scale
        network = load_weights(HydraHeads(module.settings), tensors, target)
        return write_hydra(network, folder, target.name, facts, torch.bfloat16)

    def load(self, target: Target, folder: Path, depth: int) -> Proposer:
        """See ``Recipe``."""
        return Hydra.load(target, str(folder), depth=depth)


@dataclass(frozen=True, eq=False)
class HydraDrafts:
    """See ``chain.Drafts``: what each head reads."""

    network: HydraHeads
    target: TargetHead

    def states(self, text: Texts, hidden: Tensor, embedded: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """``[B, T - 1 - k, (k + 2)H]``, and all columns."""
        if self.network.prefix is not None:
            hidden = self.network.prefix(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None], None)
        for head in range(len(self.network)):
            columns = max(0, hidden.shape[1] - 1 - head)
            after = [embedded[:, 1 + column : 1 + column + columns] for column in range(head + 1)]
            places = torch.arange(columns, device=text.first.device).expand(len(hidden), -1)
            yield torch.cat([hidden[:, :columns], *after], -1), places

    def logits(self, position: int, states: Tensor) -> Tensor:
        """``[n, (k + 2)H] -> [n, V]``."""
        out: Tensor = self.network.heads[position](states, self.target.lm_head)
        return out
