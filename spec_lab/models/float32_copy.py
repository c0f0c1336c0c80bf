"""Copies of a model in float32, and of its first layers, with which a self-check tells faults from rounding."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.core.device_memory import available
from spec_lab.models.packed import PackedLinear, dense_copy
from spec_lab.runners.layer_ranges import find_layers
from spec_lab.runners.model_work import parameters_of
from spec_lab.runners.quantized import is_quantized

MAX_COPIED = 2**28
"""Maximum parameters of a model on a CPU that is copied as a whole: the forwards of a self-check then take seconds."""
MIN_LAYERS = 4
"""Minimum layers of a copy of the first ones."""


def comparable(model: Any, whole: bool = False) -> tuple[Any, Any]:
    """Return what a self-check compares: a model, or its first layers, and the same in float32.

    A model is represented by its first layers, at least one of each kind, where a copy of the whole does not fit, and
    on a CPU where it has more than ``MAX_COPIED`` parameters. They share its weights.

    Args:
        whole: whether its first layers cannot represent it.

    Raises:
        MemoryError: the copy does not fit, or takes too long.
        Exception: of many types; the model cannot be copied.
    """
    slow = model.device.type == "cpu" and parameters_of(model) > MAX_COPIED
    if not whole and (slow or not _fits(model)) and (short := _needed(model)):
        model, slow = _copy(model, {}, short), False
    if (slow and whole) or not _fits(model):
        raise MemoryError("a copy in float32 does not fit" if not slow else "a copy in float32 takes too long")
    return model, float32_copy(model)


def _fits(model: Any) -> bool:
    """Return whether a copy in float32 takes at most half of the memory that is left."""
    room = available(model.device)
    return room is None or 4 * parameters_of(model) <= room / 2


def float32_copy(model: Any) -> Any:
    """Return a model with the same weights in float32, as plain layers; quantized ones are dequantized."""
    known: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            known[id(module)] = dense_copy(module).float()
        elif is_quantized(module):
            known[id(module)] = _dequantized(module, model.dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is Tensor and tensor.layout == torch.strided and tensor.is_floating_point():
            wide = tensor.detach().float()
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(wide, requires_grad=False) if is_parameter else wide
    made = _copy(model, known)
    made.config.dtype = torch.float32
    return made


def _copy(model: Any, known: dict[int, Any], layers: int | None = None) -> Any:
    """Return a copy of a model, or of its first layers.

    Args:
        known: by the id of a module or tensor, what takes its place. Other weights are shared.
        layers: how many; None for all.
    """
    shared: dict[int, Any] = {
        id(tensor): tensor
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    shared |= {id(module): module for module in model.modules() if is_quantized(module)}
    shared |= {id(module): module for module in model.modules() if isinstance(module, PackedLinear)}
    memo = shared | known
    if layers is not None:
        whole = find_layers(model)[2]
        memo[id(whole)] = deepcopy(whole[:layers], memo)
    made = deepcopy(model, memo)
    if layers is not None:
        count = len(whole)
        for name, value in list(vars(made.config).items()):
            if isinstance(value, list) and len(value) == count:
                setattr(made.config, name, value[:layers])
        made.config.num_hidden_layers = layers
    return made


def _dequantized(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """Return a linear layer with the weight that a quantized one multiplies by: its products with unit vectors."""
    unit = torch.eye(layer.in_features, dtype=dtype, device=next(iter((*layer.parameters(), *layer.buffers()))).device)
    bias = getattr(layer, "bias", None)
    with torch.inference_mode():
        weight = layer(unit) if bias is None else layer(unit) - bias
    made = nn.Linear(layer.in_features, layer.out_features, bias is not None, device="meta")
    made.weight = nn.Parameter(weight.T.float().clone(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().float().clone(), requires_grad=False)
    return made


def _needed(model: Any) -> int | None:
    """Return how many of the first layers have every kind of layer among them; None where all are needed."""
    layers = find_layers(model)[2]
    types = getattr(model.config, "layer_types", None) or [""] * len(layers)
    kinds = [(kind, _signature(layer)) for kind, layer in zip(types, layers, strict=True)]
    first = {kind: layer for layer, kind in reversed([*enumerate(kinds)])}
    needed = max(MIN_LAYERS, 1 + max(first.values()))
    return needed if needed < len(layers) else None


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Return what sets layers apart: their modules, and the numbers and words that these keep, but for their place."""
    return tuple(
        (name, type(module).__name__, *sorted(
            (key, value) for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and key not in IGNORED_ATTRIBUTES
        ))
        for name, module in layer.named_modules()
    )  # fmt: skip


IGNORED_ATTRIBUTES = {"layer_idx", "layer_id", "layer_number", "training"}
"""Attributes in which modules of transformers keep the number of their layer, or what does not matter here."""
