"""Quantized checkpoints on disk, made from a tiny one by hand: fp8 in blocks, int8 of compressed-tensors, GPTQ, AWQ."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 16
SIZES = dict(hidden_size=64, intermediate_size=128)
"""Sizes of the tiny model: multiples of every group and block."""

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


GROUP = 128
"""Inputs with one scale in checkpoints of GPTQ and AWQ."""

GROUPED = dict(hidden_size=256, intermediate_size=512)
"""Sizes of the tiny model for them."""

FOUR_BITS = {
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False,
        "checkpoint_format": "gptq",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}  # fmt: skip


def four_bits(source: Path, folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint of GPTQ (AutoGPTQ's layout) or AWQ (AutoAWQ's); returns the weights that it stands for.

    Both hold whole numbers from 0 to 15, eight in an int32, with a scale and a zero point for each group of inputs.
    """
    shutil.copytree(source, folder)
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = weight.half()
        meant[name] = stored[name].float()
        if ".layers." in name and weight.dim() == 2:
            stem = name.removesuffix("weight")
            del stored[name]
            groups = weight.T.reshape(-1, GROUP, weight.shape[0])  # [in / GROUP, GROUP, out]
            least, most = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
            scale = ((most - least) / 15).half().float()
            zero = (-least / scale).round().clamp(0, 15)
            numbers = (groups / scale + zero).round().clamp(0, 15)
            meant[name] = ((numbers - zero) * scale).reshape(-1, weight.shape[0]).T.contiguous()
            numbers, zeros = numbers.reshape(-1, weight.shape[0]).long(), zero[:, 0].long()
            stored[f"{stem}scales"] = scale[:, 0].half().contiguous()
            if method == "gptq":  # packed along the inputs; zero points are stored less one
                stored[f"{stem}qweight"] = packed(numbers.T).T.contiguous()
                stored[f"{stem}qzeros"] = packed((zeros - 1) & 15)
                stored[f"{stem}g_idx"] = (torch.arange(weight.shape[1]) // GROUP).int()
            else:
                order = (0, 2, 4, 6, 1, 3, 5, 7)
                stored[f"{stem}qweight"], stored[f"{stem}qzeros"] = packed(numbers, order), packed(zeros, order)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, quantization_config=FOUR_BITS[method])
    return meant


def packed(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack numbers of 4 bits, ``[n, m] -> [n, m / 8]`` int32; ``order`` says which of eight has which place."""
    words = sum(numbers[:, bit::8] << (4 * number) for number, bit in enumerate(order))
    return torch.where(words < 2**31, words, words - 2**32).int().contiguous()
