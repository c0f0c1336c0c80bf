"""Tensors in files of safetensors, written atomically: the same tensors and facts give the same bytes; and read.

(The library writes several facts in an order that differs from process to process, and reports a full disk without the
file's name.)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spec_lab.core.files import replacing

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
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
        ValueError: a tensor is of a data type that the format does not have.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            known = ", ".join(str(dtype) for dtype in NAMES)
            raise ValueError(f"{file} cannot hold {name!r} of {tensor.dtype}: convert it to one of {known}")
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


def read_tensors(file: Path, left_out: Collection[str] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, except those that are ``left_out``, and its facts.

    Raises:
        OSError: it is missing, truncated or corrupt, or does not fit into memory; names it.
    """
    with readable([file]), safe_open(file, "pt") as opened:
        names = [name for name in opened.keys() if name not in left_out]  # noqa: SIM118
        return {name: opened.get_tensor(name) for name in names}, opened.metadata() or {}


@contextmanager
def readable(files: Sequence[Path]) -> Iterator[None]:
    """Name the files in errors of reading tensors from them.

    Raises:
        OSError: one is truncated or corrupt, or they do not fit into memory.
    """
    named = str(files[0]) if len(files) == 1 else f"{files[0].parent}, {len(files)} files of weights"
    try:
        yield
    except SafetensorError as error:
        why = " ".join(str(error).split())[:300]
        raise OSError(f"{named} is truncated or corrupt (SafetensorError: {why}): copy or download it again") from error
    except (MemoryError, RuntimeError) as error:
        why = " ".join(str(error).split())
        full = isinstance(error, MemoryError) or "mmap" in why or "allocate memory" in why
        if not full or isinstance(error, torch.OutOfMemoryError):  # that of a GPU
            raise
        size = sum(file.stat().st_size for file in files) / 2**20
        raise OSError(
            f"{named} ({size:.0f} MiB) cannot be read, since there is too little memory ({why[:200]}): end other "
            "programs, or choose a smaller model or data type, or a machine with more memory"
        ) from error
