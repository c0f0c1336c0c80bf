"""The experts that the routers of a model of transformers choose, caught where each router's choice enters the experts.

Routers differ between families (a module that returns indices, logits, or both; a function of the layer), but all hand
the experts' module of their layer the choice of every row, as its second argument. A hook there counts what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CHOICES = {"top_k_index", "router_indices"}
"""Names of the second argument of transformers' modules of experts: ``[N, k]`` the experts that each row chose."""


class ChosenExperts(NamedTuple):
    """The experts that the rows of a forward chose.

    Args:
        numbers: ``[layers, N, k]``, of the layers with experts; other numbers than 0 to E - 1 read no weights.
        experts: E.
    """

    numbers: Tensor
    experts: int


def expert_modules(model: Any) -> list[nn.Module]:
    """Return the modules that hold a layer's experts, and are told which of them each row chose, in order of layer."""
    taken: dict[type[nn.Module], bool] = {}

    def takes_choice(kind: type[nn.Module]) -> bool:
        if kind not in taken:
            taken[kind] = not CHOICES.isdisjoint(list(signature(kind.forward).parameters)[2:3])
        return taken[kind]

    return [module for module in model.modules() if takes_choice(type(module))]


def number_of_experts(module: nn.Module) -> int:
    """Return E of a layer: the experts that have weights."""
    return min((parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() > 2), default=0)


def why_not_counted(model: Any) -> str:
    """Return why the experts that a model's rows read cannot be counted; empty where they can."""
    modules = expert_modules(model)
    if not modules:
        kind = getattr(model.config, "model_type", type(model).__name__)
        return f"model type '{kind}' has no layers with experts that a router chooses for each row"
    if len({number_of_experts(module) for module in modules}) > 1:
        return "its layers have different numbers of experts"
    if not number_of_experts(modules[0]):
        return "its experts are not stacked in tensors of three dimensions"
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "its experts are split over ranks"
    if getattr(model.config, "num_kv_shared_layers", 0):
        return "its last layers, which share keys and values, compute some of the rows only"
    return ""


class ExpertHooks:
    """Hooks on the experts of a model, which keep what its routers choose while ``listening``.

    Args:
        model: of which ``why_not_counted`` is empty.
    """

    def __init__(self, model: Any) -> None:
        modules = expert_modules(model)
        self.layers, self.experts, self.device = len(modules), number_of_experts(modules[0]), model.device
        self.listening = False
        self._chosen: list[Tensor] = []
        self._hooks = [module.register_forward_pre_hook(self._keep, with_kwargs=True) for module in modules]

    def _keep(self, _module: nn.Module, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        if self.listening:
            index = given[1] if len(given) > 1 else next(named[name] for name in CHOICES if name in named)
            self._chosen.append(index.detach().flatten(0, -2))

    def begin(self) -> None:
        """Keep what is chosen from now on, until ``take``."""
        self.listening, self._chosen = True, []

    def take(self) -> ChosenExperts | None:
        """Return what was chosen since ``begin``; None unless every layer ran once, over the same rows."""
        chosen, self._chosen, self.listening = self._chosen, [], False
        if len(chosen) != self.layers or len({index.shape for index in chosen}) > 1:
            return None
        return ChosenExperts(torch.stack([index.to(self.device) for index in chosen]), self.experts)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
