"""Tensors in files of safetensors, written atomically: the same tensors and facts give the same bytes.

(The library writes several facts in an order that differs from process to process, and reports a full disk without the
file's name.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spec_lab.core.files import replacing

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Data types, as safetensors names them."""


def save_tensors(tensors: Mapping[str, Tensor], file: Path, facts: Mapping[str, str] | None = None) -> None:
    """Write tensors, and facts as the file's metadata; an older file is replaced when the new one is complete.

    Args:
        tensors: by name, of any device, dense; those that share memory are written each.
        file: in a folder that exists.
        facts: texts by name.

    Raises:
        OSError: it cannot be written; names ``file``. Nothing is left behind.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": dict(sorted(facts.items()))} if facts else {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(file) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            dense = tensors[name].detach().cpu().contiguous()
            stream.write(dense.reshape(-1).view(torch.uint8).numpy().data)
