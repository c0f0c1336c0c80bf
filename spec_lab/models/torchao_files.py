"""Checkpoints that torchao quantized, in safetensors: parts of tensors, and what each consists of, in the header.

torchao's own ``unflatten_tensor_state_dict`` puts them together. The header is untrusted: every type in it must be one
that it knows, and every data type one of torch's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from spec_lab.core.options import brief
from spec_lab.models.checkpoint import one_line

DEPTH = 16
"""Maximum nesting of what a header says of a tensor."""


def read_torchao(
    files: Sequence[Path], tensors: Mapping[str, Any], asked: str, dtype: torch.dtype
) -> tuple[dict[str, Any], bool]:
    """Return a checkpoint's tensors, quantized ones put together, and whether activations are rounded as well.

    Args:
        tensors: their tensors by name, not yet read.
        asked: the checkpoint, for messages.
        dtype: of the model.

    Raises:
        ValueError: the headers do not describe the tensors as torchao writes them; products are computed in another
            data type than the model's.
    """
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    described = _headers(files, asked)
    parts: dict[str, str] = {}
    by_owner: dict[str, list[str]] = {}
    for name, what in described.items():
        owner, _, leaf = name.rpartition(".")
        for part in what.get("_tensor_data_names") or ():
            parts[f"{owner}._{leaf}_{part}"] = name
            by_owner.setdefault(name, []).append(f"{owner}._{leaf}_{part}")
    if missing := sorted(name for name in parts if name not in tensors):
        raise ValueError(f"{asked}: {missing[0]}, a part of {parts[missing[0]]}, is missing from the weight files")
    whole = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for name in by_owner:
        pieces = {part: tensors[part][...] for part in by_owner[name]}
        header = {"tensor_names": json.dumps([name]), name: json.dumps(described[name])}
        try:
            made, left = unflatten_tensor_state_dict(pieces, header)
            if left or not isinstance(made.get(name), torch.Tensor):
                raise ValueError("parts are left over")
        except Exception as error:  # constructors of torchao raise errors of many types
            raise ValueError(f"{asked}: {name} cannot be put together ({one_line(error)})") from error
        if made[name].dtype != dtype:
            quantized_in = str(made[name].dtype).removeprefix("torch.")
            raise ValueError(f"{asked} was quantized in {quantized_in}: set target.dtype={quantized_in}")
        whole[name] = made[name]
    rounds = any("Kwargs" in json.dumps(described[name]) for name in by_owner)
    return whole, rounds


def _headers(files: Sequence[Path], asked: str) -> dict[str, dict[str, Any]]:
    """Return what the headers say of each tensor."""
    from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao

    described: dict[str, dict[str, Any]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
        if not is_metadata_torchao(header):
            raise ValueError(
                f"{asked}: the header of {file.name} does not describe tensors of torchao; save the model again with "
                "save_pretrained"
            )
        for name in json.loads(header["tensor_names"]):
            what = json.loads(header[name])
            if "." not in name or not isinstance(what.get("_tensor_data_names") or [], list):
                raise ValueError(f"{asked}: the header of {file.name} describes {brief(name)} wrongly")
            _check_types(f"{asked}: the header of {file.name}, {brief(name)}", what)
            described[name] = what
    return described


def _check_types(where: str, value: Any, depth: int = 0) -> None:
    """Refuse data types that torch does not have; torchao looks names up in torch itself."""
    if depth > DEPTH:
        raise ValueError(f"{where}: nested more than {DEPTH} levels deep")
    if isinstance(value, list):
        for item in value:
            _check_types(where, item, depth + 1)
    elif isinstance(value, dict):
        if value.get("_type") == "torch.dtype" and not _is_dtype(value.get("_data")):
            raise ValueError(f"{where}: {brief(value.get('_data'))} is no data type")
        for item in value.values():
            _check_types(where, item, depth + 1)


def _is_dtype(name: Any) -> bool:
    return isinstance(name, str) and isinstance(vars(torch).get(name), torch.dtype)
