"""Quantized targets: which methods are supported, what each requires, and what transformers is told.

A checkpoint is quantized while it is loaded (``target.quantization``), or carries a ``quantization_config`` in its
``config.json``. Such a config is untrusted input: its method must be one of ``CARRIED``, only the fields in ``FIELDS``
are passed on, and those that would choose a kernel, a data set or a file are left out. The packages and the device that
a method requires are checked before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig

from spec_lab.core.device_memory import readable
from spec_lab.core.options import brief, one_of
from spec_lab.models.support import Unsupported

OPTIONS = ("torchao_int8", "torchao_int4", "bnb_int8", "bnb_int4")
"""Values of ``target.quantization``: the weights of linear layers are quantized when they are read.

- ``torchao_int8``: 8 bits, one scale for each output feature; products in the model's data type.
- ``torchao_int4``: 4 bits, asymmetric, one scale for each group of input features; products in the model's data type.
- ``bnb_int8``: LLM.int8() of Dettmers et al. (2208.07339); activations are rounded to 8 bits as well.
- ``bnb_int4``: NF4 of QLoRA, Dettmers et al. (2305.14314), in blocks of 64.
"""

GROUPS = (32, 64, 128)
"""Group sizes of ``torchao_int4`` that its kernels on CPUs and GPUs share."""

CARRIED = ("gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "torchao")
"""Methods of checkpoints that are quantized already."""

SKIPPED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "ignore")
"""Fields that name modules which are not quantized."""

FIELDS = {
    "gptq": {
        "bits", "group_size", "damp_percent", "desc_act", "sym", "true_sequential", "format", "checkpoint_format",
        "modules_in_block_to_quantize",
    },
    "awq": {"bits", "group_size", "zero_point", "version", "format", "modules_to_not_convert"},
    "fp8": {
        "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers", "modules_to_convert",
        "scale_fmt", "expert_dtype",
    },
    "compressed-tensors": {"config_groups", "format", "ignore", "quantization_status"},
    "bitsandbytes": {
        "load_in_8bit", "load_in_4bit", "llm_int8_threshold", "llm_int8_skip_modules", "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage",
    },
    "torchao": set[str](),
}  # fmt: skip
"""Fields of each method's config that say how the weights are stored."""

REFUSED = {
    "gptq": {"lm_head": "its LM head is quantized", "dynamic": "its layers are quantized in different ways"},
    "compressed-tensors": {
        "kv_cache_scheme": "its KV cache is quantized",
        "sparsity_config": "its weights are stored as sparse ones",
        "transform_config": "its activations are rotated",
    },
    "torchao": {"include_input_output_embeddings": "its embedding and LM head are quantized"},
}
"""Fields that ask for what this engine does not do, and why each is refused. null, false and {} are allowed."""

PACKAGES = {
    "gptq": (("gptqmodel", "1.4.3"), ("optimum", "1.24.0")),
    "awq": (("gptqmodel", "1.4.3"), ("accelerate", "1.5")),
    "fp8": (("accelerate", "1.5"),),
    "compressed-tensors": (("compressed-tensors", "0.15.0"),),
    "bitsandbytes": (("bitsandbytes", "0.48"), ("accelerate", "1.5")),
    "torchao": (("torchao", "0.16.0"),),
}
"""The packages of each method, and the oldest version of each."""

EXTRAS = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed-tensors"}
"""Extras of this package that install them; the others are installed by name."""

PATTERN = 200
"""Maximum length of a pattern that names modules, in characters."""


@dataclass(frozen=True)
class Quantization:
    """How a model is quantized.

    Args:
        method: one of ``OPTIONS`` or ``CARRIED``.
        package: one of ``CARRIED``, whose packages load it.
        fields: of the checkpoint's own config; empty for an option.
        group_size: of ``torchao_int4``.
        dequantized: the weights are turned into the model's data type when they are read. The distribution is that of
            the quantized weights; layers are plain ones.
    """

    method: str
    package: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    group_size: int | None = None
    dequantized: bool = False

    @property
    def carried(self) -> bool:
        """True if the checkpoint is quantized already."""
        return self.method in CARRIED

    def facts(self) -> dict[str, Any]:
        """Facts about it for records and the self-check. JSON can hold it."""
        versions = {name: metadata.version(name) for name, _ in PACKAGES[self.package] if name != "accelerate"}
        return {
            "method": self.method,
            "carried": self.carried,
            "dequantized": self.dequantized,
            "rounds": not self.dequantized and self.package != "torchao",
            "group_size": self.group_size if self.group_size is not None else self.fields.get("group_size"),
            "versions": versions,
        }


def chosen(option: Any, group_size: Any, where: torch.device, dtype: str) -> Quantization | None:
    """Return what ``target.quantization`` asks for; None where it is null.

    Args:
        option, group_size: as in ``Target.load``.
        where: the device that computes the model.
        dtype: of the model.

    Raises:
        ValueError: an unknown option, a group size without ``torchao_int4`` or an unknown one, a data type that the
            method does not support.
        Unsupported: a package is missing or too old.
    """
    if group_size is not None:
        if option != "torchao_int4":
            raise ValueError(
                f"target.quantization_group_size is an option of target.quantization=torchao_int4 only (got {option!r})"
            )
        if isinstance(group_size, bool) or group_size not in GROUPS:
            raise ValueError(
                f"target.quantization_group_size must be null or one of {', '.join(map(str, GROUPS))}, not "
                f"{brief(group_size)}"
            )
    if option is None:
        return None
    one_of("target.quantization", option, OPTIONS)
    asked = f"target.quantization={option}"
    package = "torchao" if option.startswith("torchao") else "bitsandbytes"
    _require(asked, package, where)
    _check_dtype(asked, option, where, dtype)
    return Quantization(option, package, group_size=(group_size or 128) if option == "torchao_int4" else None)


def carried(folder: Path, config: Mapping[str, Any], where: torch.device, dtype: str) -> Quantization:
    """Return how a checkpoint is quantized that carries a ``quantization_config``.

    Args:
        config: that field of its ``config.json``.
        where: the device that computes the model.
        dtype: of the model.

    Raises:
        ValueError: a field of the wrong kind, or a data type that the method does not support.
        Unsupported: an unknown method or one that is not supported, a field in ``REFUSED``, a package that is missing
            or too old.
    """
    file = folder / "config.json"
    method = config.get("quant_method")
    if method is None and (config.get("load_in_8bit") is True or config.get("load_in_4bit") is True):
        method = "bitsandbytes"
    if method not in CARRIED:
        raise Unsupported(
            f"{file}: quantization_config has the quant_method {brief(method)}, which is not supported; supported are "
            f"{', '.join(CARRIED)}. Use the unquantized checkpoint"
        )
    for name, why in REFUSED.get(method, {}).items():
        if config.get(name) not in (None, False, {}, "none", {"format": "dense"}):
            raise Unsupported(f"{file}: quantization_config.{name} is not supported: {why}")
    fields = {name: value for name, value in config.items() if name in FIELDS[method]} | {"quant_method": method}
    for name in (*SKIPPED, "modules_to_convert"):
        if fields.get(name) is not None:
            _check_names(file, name, fields[name])
    asked = f"{folder} is quantized with {method}, which"
    groups = _groups(file, fields) if method == "compressed-tensors" else []
    _require(asked, method, where)
    _check_dtype(asked, method, where, dtype)
    weights_only = len(groups) == 1 and not any(groups[0].get(f"{side}_activations") for side in ("input", "output"))
    return Quantization(method, method, fields, dequantized=method == "fp8" or weights_only)


def arguments(quantization: Quantization, where: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of transformers' ``from_pretrained`` that quantize a model while it is loaded.

    Empty for a checkpoint that is quantized already.

    Raises:
        Unsupported: torchao has no 4-bit kernels for the device.
    """
    if quantization.carried:
        return {}
    config: Any
    if quantization.method == "bnb_int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    elif quantization.method == "bnb_int4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    elif quantization.method == "torchao_int8":
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    else:
        config = TorchAoConfig(_int4(quantization.group_size, where))
    return {"quantization_config": config}


def _int4(group_size: int | None, where: torch.device) -> Any:
    """Return torchao's config of 4-bit weights in the layout of the kernels of a device."""
    if where.type == "cpu":
        try:
            from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        except ImportError as error:
            raise Unsupported(
                f"target.quantization=torchao_int4 requires a GPU: torchao {metadata.version('torchao')} has no 4-bit "
                "kernels for CPUs; use torchao_int8, or torchao 0.18"
            ) from error
        return PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(
        group_size=group_size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def own_config(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a checkpoint's own that transformers reads; None where it needs none."""
    if not quantization.carried or quantization.method == "torchao":  # ``torchao_files`` reads those
        return None
    more: dict[str, Any] = {"dequantize": True} if quantization.dequantized else {}
    if quantization.method == "bitsandbytes" and quantization.fields.get("load_in_4bit"):
        more["bnb_4bit_compute_dtype"] = dtype
    return {**quantization.fields, **more}


def _require(asked: str, package: str, where: torch.device) -> None:
    """Refuse a method without its packages."""
    wanted = PACKAGES[package]
    if wrong := [f"{name} {oldest} or newer" for name, oldest in wanted if not _newer(name, oldest)]:
        extra = EXTRAS.get(package)
        install = f"'spec-lab[{extra}]'" if extra else " ".join(f"'{name}>={oldest}'" for name, oldest in wanted)
        raise Unsupported(f"{asked} requires {' and '.join(wrong)}: pip install {install}")
    if package == "bitsandbytes" and where.type == "cpu" and find_spec("kernels") is not None:
        raise Unsupported(
            f"{asked} uses bitsandbytes, which would download and run code from the hub since the package kernels is "
            "installed: uninstall it, or use target.device=cuda"
        )


def _newer(name: str, oldest: str) -> bool:
    """Return whether a package is installed in this version or a newer one."""
    try:
        return Version(metadata.version(name)) >= Version(oldest)
    except (metadata.PackageNotFoundError, InvalidVersion):
        return False


def _check_dtype(asked: str, method: str, where: torch.device, dtype: str) -> None:
    """Refuse a data type for which the method has no kernels."""
    allowed: tuple[str, ...] = ()
    if method in ("gptq", "awq"):
        allowed = ("float16",) if where.type == "cuda" and method == "awq" else ("float16", "bfloat16", "float32")
    elif method == "torchao_int4" and where.type == "cuda":
        allowed = ("bfloat16",)
    elif method in (*OPTIONS, "bitsandbytes"):
        allowed = ("float16", "bfloat16", "float32")
    if allowed and dtype not in allowed:
        raise ValueError(f"{asked} requires target.dtype={' or '.join(allowed)} on {where.type}, not {dtype}")


def _check_names(file: Path, field_name: str, value: Any) -> None:
    """Refuse names of modules that are no short strings, or patterns whose matching could take very long."""
    if not isinstance(value, list) or not all(isinstance(name, str) and len(name) <= PATTERN for name in value):
        raise ValueError(
            f"{file}: quantization_config.{field_name} must be a list of names of at most {PATTERN} characters, not "
            f"{brief(value)}"
        )
    for name in value:
        slow = re.search(r"\)[*+{]", name) or len(re.findall(r"[*+{]", name)) > 4
        if slow:  # transformers matches all of them as patterns
            raise ValueError(
                f"{file}: quantization_config.{field_name} has the pattern {name!r}, which may match slowly"
            )


def _groups(file: Path, fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of a compressed-tensors config."""
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"{file}: quantization_config.config_groups must map names to groups, not {brief(groups)}")
    for group in groups.values():
        _check_names(file, "config_groups.targets", group.get("targets"))
    return list(groups.values())


def quantized_bytes(model: Any, how: Quantization, dtype: torch.dtype, files: Sequence[Path]) -> int:
    """Return the bytes that the weights of a quantized model take at least.

    Args:
        model: as its config describes it, without weights.
        how: it is quantized.
        dtype: of what is not.
        files: of its weights; a checkpoint that is quantized already keeps what they hold.
    """
    if how.carried and not how.dequantized:
        return sum(file.stat().st_size for file in files)
    everything = sum(tensor.numel() for tensor in model.parameters())
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    linear = sum(layer.weight.numel() for layer in layers)
    bits = 8 * dtype.itemsize if how.dequantized else 4 if how.method.endswith("int4") else 8
    return (everything - linear) * dtype.itemsize + linear * bits // 8


def check_quantized_fit(
    path: str,
    model: Any,
    how: Quantization,
    dtype: torch.dtype,
    files: Sequence[Path],
    device: torch.device,
    room: int | None,
) -> None:
    """Refuse a quantized model whose weights do not fit the memory, before they are read.

    Args:
        model, how, dtype, files: as in ``quantized_bytes``.
        device: where the weights will be.
        room: available bytes there; None where they are not known.

    Raises:
        ValueError: states what is needed and what is available.
    """
    needed = quantized_bytes(model, how, dtype, files)
    if room is not None and needed > room:
        raise ValueError(
            f"the weights of {path}, quantized with {how.method}, need at least {readable(needed)}, and "
            f"{readable(room)} of memory are available on {device}: choose a smaller model, or more memory"
        )
