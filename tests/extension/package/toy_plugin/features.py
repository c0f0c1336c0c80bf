"""A drafter that reads features: one Llama layer over fc([embed(t_{j+1}); g_j]), where g_j mixes three of the target's
hidden states at position j, as in EAGLE-3. The life cycle is that of every such drafter; only the network is here.
"""

from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.core.draft import Drawn
from spec_lab.drafters.draft_layers import DraftLayers, FeatureNetwork, random_weights, small_layer
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.models.target import Target
from spec_lab.propose.best_first import Budget
from spec_lab.propose.tree_plan import TreePlan


class Network(FeatureNetwork):
    """See the module.

    Args:
        target: with at least three layers.
        seed: of the random weights.
    """

    layers = 1

    def __init__(self, target: Target, seed: int = 0) -> None:
        super().__init__()
        self.services, dtype = target.services, target.lm.dtype
        width = self.services.hidden_size
        self.hidden = (1, self.services.num_layers // 2, -1)
        self.body = DraftLayers(small_layer(width), 1)
        self.mix = nn.Linear(3 * width, width, bias=False, device="meta")
        self.fc = nn.Linear(2 * width, width, bias=False, device="meta")
        weights = {name: weight.to(dtype) for name, weight in random_weights(self, seed).items()}
        self.load_state_dict(weights, assign=True)

    def features(self, hidden: Tensor) -> Tensor:
        return self.mix(hidden)

    def inputs(self, token: Tensor, feature: Tensor) -> Tensor:
        return self.fc(torch.cat([self.services.embed(token), feature], -1))

    def forward(self, x: Tensor, positions: Tensor, cache: Any, mask: Any = None) -> Tensor:
        return self.body.run(0, x, self.body.rotate(x, positions), cache)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.services.lm_head(x)

    def toy(self, target: Target) -> "Network":
        return Network(target)


def load(target: Target, budget: Budget, drawn: Drawn = "iid") -> FeatureDrafter:
    """The drafter with trees that grow best first."""
    return FeatureDrafter(Network(target), target, TreePlan(drawn=drawn, budget=budget), "features", None)
