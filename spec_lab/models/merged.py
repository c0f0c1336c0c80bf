"""Merge linear layers that read the same input: q, k and v of attention, gate and up of the MLP.

One product with a taller matrix replaces three (or two), which saves launches on a GPU and calls on a CPU. Source: the
stacked projections of vLLM and SGLang (``qkv_proj``, ``gate_up_proj``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.runners.quantized import is_plain

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that transformers gives to layers with the same input."""


class MergedLinear(nn.Module):
    """Stands in for the first of several linear layers: whichever is called first computes the outputs of all.

    Args:
        layers: in the order in which they are called. Their weights are copied.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        biases = [layer.bias for layer in layers]
        self.joint = nn.Linear(layers[0].in_features, sum(self.sizes), biases[0] is not None, device="meta")
        self.joint.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
        if biases[0] is not None:
            self.joint.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
        self.input: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """``[.., in] -> [.., out]`` of the first layer."""
        return self.output(0, x)

    def output(self, number: int, x: Tensor) -> Tensor:
        """Return the output of a layer, ``[.., in] -> [.., out]``; it is computed with another layer's of this input.

        Args:
            number: of the layer, from 0. Models call their layers in any order (Falcon-H1's MLP calls up first).
        """
        if x is not self.input or number not in self.outputs:
            self.input, self.outputs = x, dict(enumerate(self.joint(x).split(self.sizes, -1)))
        output = self.outputs.pop(number)
        if not self.outputs:
            self.input = None
        return output


class MergedOutput(nn.Module):
    """Stands in for a later one, which ``MergedLinear`` computes."""

    def __init__(self, first: MergedLinear, number: int) -> None:
        super().__init__()
        self.first = [first]  # in a list: it is no submodule of this one
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        """``[.., in] -> [.., out]`` of this layer."""
        return self.first[0].output(self.number, x)


def merge(model: Any) -> int:
    """Merge the layers in place where a module has them by these names; return how many modules were changed.

    Left as they are: layers that are not plain ``nn.Linear`` (such as quantized ones), that differ in their input,
    or of which only some have a bias.
    """
    changed = 0
    parents = [module for module in model.modules() if type(module) is not nn.Linear]  # keeps no weights alive
    for module in parents:
        children = dict(module.named_children())
        for names in TOGETHER:
            layers = [layer for name in names if isinstance(layer := children.get(name), nn.Linear) and is_plain(layer)]
            if len(layers) < len(names) or len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:
                continue
            first = MergedLinear(layers)
            for number, name in enumerate(names):
                setattr(module, name, MergedOutput(first, number) if number else first)
            changed += 1
    return changed


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters, dense, by the names that they had before ``merge``."""
    weights: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        first, _, end = name.rpartition(".joint.")
        parent, _, last = first.rpartition(".")
        layers = next((names for names in TOGETHER if names[0] == last), ())
        if not first or not layers:
            weights[name] = weight.to_dense()
            continue
        sizes = module.get_submodule(first).sizes
        for layer, part in zip(layers, weight.to_dense().split(sizes), strict=True):
            weights[f"{parent}.{layer}.{end}" if parent else f"{layer}.{end}"] = part
    return weights
