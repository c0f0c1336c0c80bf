"""Facts that a model of transformers records of its quantization, and how much of it is quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def record(model: Any, facts: Mapping[str, Any]) -> None:
    """Keep ``facts`` in the config of a model, from where the self-check, records and cached measurements read them."""
    model.config.spec_lab_quantization = dict(facts)


def recorded(model: Any) -> dict[str, Any] | None:
    """Return what was kept; None of a model that is not quantized."""
    facts: dict[str, Any] | None = getattr(model.config, "spec_lab_quantization", None)
    return facts


def is_plain(layer: nn.Module) -> bool:
    """Return whether a module is a linear layer of torch itself, with an ordinary weight and its own forward."""
    return type(layer) is nn.Linear and type(layer.weight.data) is Tensor and "forward" not in vars(layer)


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose weight is stored in another form than as a matrix of numbers.

    Those of torchao are torch's own with a subclass of Tensor as weight, those of compressed-tensors torch's own with
    scales as further parameters; bitsandbytes and gptqmodel have classes of their own, with packed weights in
    parameters or buffers.
    """
    if type(module) is nn.Linear:
        scales = module._parameters.keys() - {"weight", "bias"}  # of compressed-tensors
        weight = module._parameters.get("weight")
        return bool(scales) or (weight is not None and hasattr(weight.data, "__tensor_flatten__"))
    if not (isinstance(vars(module).get("in_features"), int) and isinstance(vars(module).get("out_features"), int)):
        return False
    weight = module._parameters.get("weight")
    return weight is None or not weight.is_floating_point()


def stored(module: nn.Module) -> list[Tensor]:
    """Return the tensors in which a quantized linear layer is stored, scales included, each once."""
    tensors: list[Tensor] = []
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensors += _parts(tensor.data)
        state = vars(tensor).get("quant_state")  # of bitsandbytes' 4 bits; its scales may be quantized again
        while state is not None:
            tensors.append(state.absmax)
            state = vars(state).get("state2")
        tensors += _scales(tensor)
    tensors += _scales(vars(module).get("state"))
    return list({id(tensor): tensor for tensor in tensors}.values())


def _scales(holder: Any) -> list[Tensor]:
    """Return the scales of bitsandbytes' 8 bits, which move from the weight to the layer in the first forward."""
    scales = None if holder is None else vars(holder).get("SCB")
    return [scales] if isinstance(scales, Tensor) else []


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a subclass of Tensor consists of; of a matrix split over ranks, this rank's."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)  # DTensor has slots, and names its mesh too
    return [part for value in inner if isinstance(value, Tensor) for part in _parts(value)]


def quantized_share(described: Any, model: Any) -> float:
    """Return the share of a model's weights that is quantized; embeddings, LM head and norms are left out.

    Args:
        described: the model that the config describes, with no quantized layer.
        model: as it was loaded.
    """
    tables = {id(described.get_input_embeddings()), id(described.get_output_embeddings())}
    whole = quantized = 0
    loaded = dict(model.named_modules())
    for name, module in described.named_modules():
        if id(module) in tables:
            continue
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter.dim() > 1)
        whole += size
        quantized += size if name in loaded and isinstance(module, nn.Linear) and not is_plain(loaded[name]) else 0
    return quantized / whole if whole else 0.0


def in_dtype(model: Any, dtype: torch.dtype) -> None:
    """Turn what is not quantized into a data type; some quantizers of transformers leave it as it is stored."""
    for module in model.modules():
        if is_quantized(module):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and type(parameter.data) is Tensor and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)


def check_scales(path: str, tensors: Mapping[str, Any]) -> None:
    """Refuse quantized weights without a scale, which would be read as if they were the numbers themselves.

    Args:
        path: of the checkpoint, for messages.
        tensors: its tensors by name, not yet read.

    Raises:
        ValueError: names the tensor.
    """
    scaled = {re.sub(r"(weight)?(_scale(_inv)?|scale|qscale_weight)$", "", name) for name in tensors}
    for name, tensor in tensors.items():
        kind = tensor.get_dtype()
        if name.endswith(".weight") and not kind.startswith(FLOATS) and name.removesuffix("weight") not in scaled:
            raise ValueError(f"the weights of {path} do not fit its config.json: {name} is {kind} and has no scale")


FLOATS = ("F64", "F32", "F16", "BF16")
"""Data types of weights that are not quantized, as safetensors names them."""
