"""Where a model is placed: a device, the devices of its modules, or the ranks of torchrun."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from spec_lab.core.device_memory import readable
from spec_lab.core.options import one_of
from spec_lab.models import ranks
from spec_lab.models.packed import packed_dtypes
from spec_lab.models.support import Unsupported

LOG = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def automatic_device() -> str:
    """Return the device of ``target.device=auto``: the GPU that torch would use, which is said, or else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    LOG.warning(
        "target.device=auto: the target runs on the GPU (%s); target.device=cpu chooses the CPU",
        torch.cuda.get_device_name(),
    )
    return "cuda"


def chosen(device: str, dtype: str, on_several: bool, quantized: bool) -> tuple[str, str]:
    """Return the device and the data type, those that ``auto`` stands for.

    Args:
        device, dtype: as in ``Target.load``.
        on_several: whether the layers are on several devices, which are not named.
        quantized: whether the weights are quantized while they are read: most ways require bfloat16.

    Raises:
        ValueError: as ``device_of``.
    """
    if device == "auto":
        device = "cpu" if on_several else automatic_device()
    if dtype == "auto":
        on_gpus = on_several and torch.cuda.is_available()
        dtype = "bfloat16" if on_gpus or quantized else automatic_dtype(device_of(device))
    return device, dtype


def device_of(name: str | int, instead: str = "set target.device=cpu") -> torch.device:
    """Return the torch device of a name, or of a GPU's number.

    Args:
        instead: what to do where this machine has no such GPU, for the message.

    Raises:
        ValueError: an unknown device, or one that this machine does not have.
    """
    try:
        where = torch.device(f"cuda:{name}" if isinstance(name, int) else name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {name!r}; choose cpu, cuda or cuda:N") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; choose cpu, cuda or cuda:N")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise ValueError(f"device {name!r} was requested, but this torch sees {seen or 'no'} GPU; {instead}")
    return where


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for products of matrices in bfloat16."""
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return device.type == "cuda"


def automatic_dtype(where: torch.device) -> str:
    """Return the dtype of ``target.dtype=auto``: bfloat16, but float32 on a CPU that is faster in it, which is said.

    A CPU without instructions for products in bfloat16 may read half the bytes in the time that it needs to convert
    them. One layer decides, by its seconds for a single row and for the eight of a small tree.
    """
    if where.type != "cpu" or multiplies_bfloat16(where):
        return "bfloat16"
    seconds = {name: sum(linear_seconds(DTYPES[name], rows) for rows in (1, 8)) for name in ("bfloat16", "float32")}
    fastest = min(seconds, key=lambda name: seconds[name])
    LOG.warning(
        "target.dtype=auto: the target is computed in %s, since this CPU has no instructions for products in bfloat16 "
        "(a linear layer for 1 and for 8 rows: %.2f ms in bfloat16, %.2f ms in float32)",
        fastest, 1000 * seconds["bfloat16"], 1000 * seconds["float32"],
    )  # fmt: skip
    return fastest


def linear_seconds(dtype: torch.dtype, rows: int, size: int = 2048, repeats: int = 5) -> float:
    """Return the least seconds of a linear layer of ``size`` inputs and outputs on the CPU."""
    weight, inputs = torch.ones(size, size, dtype=dtype), torch.ones(rows, size, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.nn.functional.linear(inputs, weight)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


KV_DTYPES = {name: DTYPES[name] for name in ("float32", "bfloat16", "float16")} | {"float8_e4m3fn": torch.float8_e4m3fn}


def kv_dtype_of(name: str | None, dtype: str) -> torch.dtype | None:
    """Return the dtype in which keys and values are stored; None for the model's own.

    Args:
        name: as in ``Target.load``.
        dtype: the model's.

    Raises:
        ValueError: an unknown name, or a dtype of more bytes than the model's.
    """
    if name is None or name == dtype:
        return None
    one_of("target.kv_dtype", name, tuple(KV_DTYPES))
    if dtype in DTYPES and KV_DTYPES[name].itemsize > DTYPES[dtype].itemsize:
        raise ValueError(
            f"target.kv_dtype must have at most the bytes of target.dtype={dtype} (got {name}): set it to null, which "
            "stores keys and values as they are computed"
        )
    return KV_DTYPES[name]


def weight_bytes(model: Any, dtype: torch.dtype, device: torch.device, stays: bool = True) -> int:
    """Return the bytes of a model's weights, and of the largest one again, which is held twice while it is laid out.

    Args:
        model: as its config describes it, without weights.
        device: where they are read. On the CPU a tied LM head is a copy of the embedding (``models.packed``).
        stays: whether they remain there; if not, they are not laid out.
    """
    sizes = [tensor.numel() for tensor in model.parameters()]
    total = sum(sizes) + sum(tensor.numel() for tensor in model.buffers())
    if device.type == "cpu" and stays:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = head is not None and embedding is not None and head.weight is embedding.weight
        total += max(sizes, default=0) + (head.weight.numel() if tied and dtype in packed_dtypes() else 0)
    return total * dtype.itemsize


def check_weights_fit(
    path: str, model: Any, dtype: str, device: torch.device, room: int | None, stays: bool = True
) -> None:
    """Refuse a model whose weights do not fit the memory, before they are read.

    Args:
        model: as its config describes it, without weights.
        dtype: of ``DTYPES``.
        device, stays: as in ``weight_bytes``.
        room: available bytes there; None where they are not known.

    Raises:
        ValueError: states what is needed, what is available, and which dtype fits.
    """
    needed = weight_bytes(model, DTYPES[dtype], device, stays)
    if room is None or needed <= room:
        return
    smaller = [
        f"target.dtype={name} needs {readable(size)}" for name, other in DTYPES.items()
        if other.itemsize < DTYPES[dtype].itemsize and (size := weight_bytes(model, other, device, stays)) <= room
    ]  # fmt: skip
    advice = " or ".join(smaller) or "no smaller target.dtype fits: choose a smaller model, or more memory"
    raise ValueError(
        f"the weights of {path} need {readable(needed)} in {dtype}, and {readable(room)} of memory are available on "
        f"{device}{'' if stays else ', through which they are read without the package accelerate'}: {advice}"
    )


def check_device_map(model: Any, device_map: Any) -> None:
    """Refuse device maps that transformers accepts silently: it puts omitted modules on the CPU, skips unknown names.

    Args:
        model: as its config describes it, with or without weights.
        device_map: as in ``Target.load``.

    Raises:
        ValueError: as in ``Target.load``.
    """
    if find_spec("accelerate") is None:
        raise ValueError("target.device_map requires the package accelerate: pip install 'spec-lab[large]'")
    if device_map in ("auto", "balanced"):
        return
    if not isinstance(device_map, Mapping) or not device_map:
        raise ValueError(f"target.device_map must be auto, balanced or a device for each module, not {device_map!r}")
    for module, device in device_map.items():
        if device in ("disk", "meta"):
            raise ValueError(f"target.device_map puts {module or 'the model'} on {device}, not on cpu or cuda:N")
        try:
            device_of(device, "choose cpu, or a GPU that there is")
        except ValueError as error:
            raise ValueError(f"target.device_map, {module or 'the whole model'}: {error}") from error
    if wrong := [module for module in device_map if module not in dict(model.named_modules())]:
        parts = ", ".join(name for name, _ in [*model.named_children(), *model.base_model.named_children()])
        raise ValueError(
            f"target.device_map names {wrong[0]!r}, which is not a module of the model; its modules are {parts}, ..."
        )
    tensors = [name for kind in (model.named_parameters, model.named_buffers) for name, _ in kind()]
    prefixes = tuple(f"{module}." * bool(module) for module in device_map)
    bare = [name for name in tensors if not f"{name}.".startswith(prefixes)]
    if bare:
        raise ValueError(f"target.device_map names no device for {bare[0].rpartition('.')[0]}: add it")


def refuse_offloading(model: Any) -> None:
    """Refuse a model with parts that are copied to a GPU for every forward: its timings would measure the copies.

    Raises:
        ValueError: there are such parts; the message names one.
    """
    places = getattr(model, "hf_device_map", None) or {}  # absent where everything is on one device
    off = [module for module, device in places.items() if str(device) in ("cpu", "disk")]
    if off and len({str(device) for device in places.values()}) > 1:
        raise ValueError(
            f"target.device_map leaves no GPU for {off[0]} and {len(off) - 1} more modules (they went to "
            f"{places[off[0]]}); use more GPUs, or a smaller target.dtype"
        )


def check_ranks(config: Any) -> None:
    """Refuse tensor parallelism for a model without a plan, or over ranks that do not divide its attention heads.

    Raises:
        ValueError: no torchrun, a number of ranks that fits neither the heads nor the GPUs, or this is not rank 0.
        Unsupported: transformers has no tensor-parallel plan for this kind of model.
    """
    size, local = ranks.size(), ranks.size_here()
    if not ranks.started():
        raise ValueError(
            "target.tensor_parallel requires torchrun: torchrun --nproc-per-node 2 -m spec_lab ... starts two ranks"
        )
    if ranks.rank():
        raise ValueError(f"rank {ranks.rank()} cannot load a target: only rank 0 does, and the others call follow()")
    if "tp_size" not in signature(DistributedConfig).parameters:
        raise ValueError("target.tensor_parallel requires a newer transformers, whose DistributedConfig has a tp_size")
    if 0 < torch.cuda.device_count() < local:
        raise ValueError(
            f"target.tensor_parallel: torchrun started {local} ranks here, but this torch sees "
            f"{torch.cuda.device_count()} GPU; start as many ranks as there are GPUs"
        )
    if torch.version.cuda and not torch.cuda.is_available():  # transformers would use GPUs that are missing
        raise ValueError("target.tensor_parallel: this torch is built for CUDA and sees no GPU; use a CPU build of it")
    if not getattr(config, "base_model_tp_plan", None):
        raise Unsupported(
            f"model type '{config.model_type}' cannot be split: transformers has no tensor-parallel plan for it; "
            "use target.device_map"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or size
        if heads % size:
            raise ValueError(
                f"target.tensor_parallel: {heads} heads ({name}) cannot be divided evenly among {size} ranks"
            )
