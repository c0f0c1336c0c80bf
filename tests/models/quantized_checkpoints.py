"""Quantized checkpoints on disk, made from a tiny one by hand: fp8 in blocks, and int8 of compressed-tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 16
SIZES = dict(hidden_size=64, intermediate_size=128)
"""Of the tiny model: multiples of every group and block."""

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}


def compressed(activations: bool, **more: Any) -> dict[str, Any]:
    """A config of compressed-tensors: int8 weights, one scale for each row, with int8 activations or without."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if activations else None}
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, **more,
    }  # fmt: skip


def change(folder: Path, **fields: Any) -> None:
    """Set fields of a checkpoint's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def fp8(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write an fp8 checkpoint; returns the weights that it stands for, by name."""
    shutil.copytree(source, folder)
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if ".layers." in name and weight.dim() == 2:
            rows, columns = (size // BLOCK for size in weight.shape)
            scale = weight.reshape(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
            wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            stored[name] = (weight / wide).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            meant[name] = stored[name].float() * wide
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, quantization_config=FP8)
    return meant


def int8(source: Path, folder: Path, activations: bool, **more: Any) -> dict[str, torch.Tensor]:
    """Write a checkpoint of compressed-tensors; returns the weights that it stands for, by name."""
    shutil.copytree(source, folder)
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if ".layers." in name and weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            meant[name] = stored[name].float() * scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, quantization_config=compressed(activations, **more))
    return meant
