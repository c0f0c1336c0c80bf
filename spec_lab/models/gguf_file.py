"""Read a GGUF file, the format of llama.cpp: metadata, sizes of tensors, and single tensors as numbers.

A GGUF file is untrusted input. Everything in its header is checked against the file's size and the bounds below before
it is used, and every error names the file. llama.cpp reads the same file again by itself; what would end the process
(a token that occurs twice, a tensor of a data type that llama.cpp does not compute) is refused here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.files import Unreadable, open_regular
from spec_lab.core.options import brief
from spec_lab.models.checkpoint import MAX_TOKENIZER
from spec_lab.models.support import Unsupported

MAX_FIELDS = 2**16
"""Maximum number of metadata fields, and of tensors."""
MAX_ARRAY = 2**24
"""Maximum number of elements of a metadata array."""
MAX_CONTEXT = 2**31 - 1
"""Largest number of positions of a model; llama.cpp counts them in 32 bits."""
MAX_LAYERS, MAX_EXPERTS = 512, 1024
"""llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS; it aborts the process above them."""
MAX_STOPS = 1024
"""Maximum number of end-of-text tokens that are read."""
MAX_NAME = 2**16
"""Maximum length of a name, in bytes; llama.cpp's own tensors have at most 64."""

PART = 2**20
"""Number of elements of a tensor that are dequantised at once."""

SOURCE = "spec_lab.weights_sha256"
"""Metadata field: SHA-256 of the weight files of the checkpoint that was converted (``checkpoint.weights_hash``)."""

STOPS = "spec_lab.stop_token_ids"
"""Metadata field: all end-of-text tokens of the checkpoint that was converted; the format itself names three."""

UNCOMPUTED = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
"""Data types of the format that llama.cpp does not multiply matrices of, nor reads rows of an embedding in. (Q8_1 and
Q8_K are those of its intermediate results.)"""

FLOAT32_PARTS = ("norm", "ssm_conv1d", "shortconv.conv")
"""Parts of names of matrices that llama.cpp computes in float32 only, as it does vectors."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values (``gguf.GGUFValueType``) that are numbers, as codes of ``struct``."""
_STRING, _ARRAY = 8, 9


def gguf_package() -> ModuleType:
    """Return the package ``gguf``.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"GGUF files require an extra: pip install 'spec-lab[llamacpp]' ({error})") from error
    return gguf


class TensorInfo(NamedTuple):
    """A tensor of a GGUF file."""

    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous."""
    kind: int
    """Its data type (``gguf.GGMLQuantizationType``)."""
    offset: int
    """From the beginning of the file, in bytes."""
    nbytes: int

    @property
    def parameters(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def type_name(self) -> str:
        """The name of its data type, such as F32 or Q4_K."""
        return str(gguf_package().GGMLQuantizationType(self.kind).name)


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """The header of a GGUF file that was checked.

    Args:
        metadata: its fields; arrays of numbers are NumPy arrays, arrays of strings are lists.
        tensors: by name, in the order of the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the kind of model."""
        return str(self.metadata["general.architecture"])

    @property
    def context(self) -> int:
        """Maximum number of positions of the model."""
        return self.count("context_length", MAX_CONTEXT)

    @property
    def num_layers(self) -> int:
        """L, the number of decoder layers."""
        return self.count("block_count", MAX_LAYERS)

    @property
    def hidden_size(self) -> int:
        """H, the width of the hidden states."""
        return self.count("embedding_length", 2**24)

    @property
    def vocabulary(self) -> int:
        """V, the width of the logits."""
        return self._head.shape[0]

    @property
    def tokens(self) -> list[str] | None:
        """The tokens as llama.cpp spells them; None for a file without a vocabulary."""
        return self.metadata.get("tokenizer.ggml.tokens")

    @property
    def ends(self) -> frozenset[int]:
        """The end-of-text tokens that the file names. (llama.cpp adds those that it knows by their text.)"""
        named = [self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        stops = self.metadata.get(STOPS)
        if isinstance(stops, np.ndarray) and stops.dtype.kind in "iu":
            named += stops[:MAX_STOPS].tolist()
        return frozenset(token for token in named if isinstance(token, int) and 0 <= token < self.vocabulary)

    @property
    def source_sha256(self) -> str:
        """SHA-256 of the weight files from which ``spec-lab convert`` wrote the file; empty if it is not known."""
        return str(self.metadata.get(SOURCE, ""))

    @property
    def tied(self) -> bool:
        """True if the LM head is the embedding."""
        return "output.weight" not in self.tensors

    @property
    def _head(self) -> TensorInfo:
        return self.info("token_embd.weight" if self.tied else "output.weight")

    def count(self, name: str, maximum: int, minimum: int = 1) -> int:
        """Return a whole number of the architecture's metadata.

        Raises:
            ValueError: the file lacks it, or it is not a whole number from ``minimum`` to ``maximum``.
        """
        value = self.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise Unreadable(
                f"{self.path}: {self.architecture}.{name} must be a whole number from {minimum} to {maximum}, not "
                f"{brief(value)}"
            )
        return value

    def info(self, name: str) -> TensorInfo:
        """Return the size and place of a tensor.

        Raises:
            ValueError: the file has no such tensor.
        """
        if name not in self.tensors:
            raise Unreadable(f"{self.path} has no tensor {name}: it holds no language model")
        return self.tensors[name]

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor, dequantised if it is quantised, part by part, so that no second copy is held in float32.

        Args:
            dtype: to which its numbers are rounded.

        Raises:
            ValueError: the file has no such tensor, or of a data type that the package ``gguf`` cannot dequantise.
            OSError: it cannot be read, or ends before the tensor does.
        """
        gguf, info = gguf_package(), self.info(name)
        kind, width = gguf.GGMLQuantizationType(info.kind), info.shape[-1]
        rows, part = info.parameters // width, max(1, PART // width)
        weights = torch.empty(rows, width, dtype=dtype)
        with self.path.open("rb") as stream:
            stream.seek(info.offset)
            for start in range(0, rows, part):
                count = min(part, rows - start)
                data = np.fromfile(stream, np.uint8, count * info.nbytes // rows)
                if len(data) < count * info.nbytes // rows:
                    raise OSError(f"{self.path} was truncated while it was in use: copy or download it again")
                try:
                    numbers = gguf.quants.dequantize(data.reshape(count, -1), kind)
                except NotImplementedError as error:
                    raise Unsupported(
                        f"{self.path}: {name} is {kind.name}, which gguf cannot dequantise ({error})"
                    ) from error
                weights[start : start + count] = torch.from_numpy(np.ascontiguousarray(numbers).reshape(count, width))
        return weights.view(info.shape)


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file.

    Raises:
        OSError: it does not exist, or cannot be opened.
        ValueError: it is not a GGUF file within the bounds, is truncated, is one part of several, or holds no model;
            the message names it.
    """
    if path.is_dir():
        raise Unreadable(f"{path} is a folder: give the path of a GGUF file")
    with open_regular(path) as stream:
        if stream.read(4) != b"GGUF":
            raise Unreadable(f"{path} is not a GGUF file (it does not begin with GGUF)")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _checked(path, *_parse(data))
            except _Malformed as error:
                raise Unreadable(f"{path} is not readable ({error}): copy or download it again") from error


class _Malformed(ValueError):
    """A header that breaks the format; the message lacks the file's name."""


class _Cursor:
    """Reads values of a header one after the other."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise _Malformed("it ends within its header")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, code: str, maximum: int) -> int:
        number: int = self.number(code)
        if number > maximum:
            raise _Malformed(f"it declares {number} {what}; at most {maximum} are read")
        return number

    def text(self, maximum: int) -> str:
        # llama.cpp takes any bytes; a byte that is not UTF-8 is kept, so that different texts stay different.
        return self.take(self.count("bytes of a string", "Q", maximum)).decode("utf-8", "surrogateescape")

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.text(MAX_TOKENIZER)
        if kind != _ARRAY:
            return self.number(self.code(kind))
        kind = self.number("I")
        size = self.count("elements of an array", "Q", MAX_ARRAY)
        if kind == _STRING:
            return [self.text(MAX_TOKENIZER) for _ in range(size)]
        dtype = np.dtype(f"<{self.code(kind)}" if kind != 7 else np.bool_)
        return np.frombuffer(self.take(size * dtype.itemsize), dtype)

    @staticmethod
    def code(kind: int) -> str:
        if kind not in _NUMBERS:
            raise _Malformed(f"a metadata value has the unknown type {kind}")
        return _NUMBERS[kind]


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return the metadata and tensors of a file.

    Raises:
        _Malformed: the header breaks the format or the bounds, or a tensor lies outside of the file.
    """
    cursor = _Cursor(data)
    cursor.take(4)
    version = cursor.number("I")
    if version not in (2, 3):
        order = "; it may be big-endian" if version & 0xFFFF == 0 else ""
        raise _Malformed(f"it has version {version} of the format, supported are 2 and 3{order}")
    count = cursor.count("tensors", "Q", MAX_FIELDS)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata fields", "Q", MAX_FIELDS)):
        name = cursor.text(MAX_NAME)
        if name in metadata:
            raise _Malformed(f"the metadata field {brief(name)} occurs twice")
        metadata[name] = cursor.value()
    described: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.text(MAX_NAME)
        if name in described:
            raise _Malformed(f"the tensor {brief(name)} occurs twice")
        sizes = [cursor.number("Q") for _ in range(cursor.count("dimensions of a tensor", "I", 4))]
        described[name] = (tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise _Malformed(f"general.alignment is {brief(alignment)}, not a power of two")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in described.items():
        tensors[name] = TensorInfo(shape, kind, begin + offset, _size(name, shape, kind))
        if offset % alignment or begin + offset + tensors[name].nbytes > len(data):
            raise _Malformed(f"the tensor {brief(name)} lies outside of the file, which has {len(data)} bytes")
    return metadata, tensors


def _size(name: str, shape: tuple[int, ...], kind: int) -> int:
    """Return the size of a tensor in bytes.

    Raises:
        _Malformed: an unknown data type, or rows that are not whole blocks of it.
    """
    gguf = gguf_package()
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (KeyError, ValueError) as error:
        raise _Malformed(f"the tensor {brief(name)} has the data type {kind}, unknown to the package gguf") from error
    if not shape or not all(shape) or shape[-1] % block:
        raise _Malformed(f"the tensor {brief(name)} has the shape {list(shape)}; rows must be whole blocks of {block}")
    return math.prod(shape) // block * int(size)


def _checked(path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> GGUFFile:
    """Return the file if it describes a whole language model."""
    file = GGUFFile(path, metadata, tensors)
    if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
        raise Unsupported(
            f"{path} is one of {parts} parts of a split GGUF: merge them with llama.cpp's llama-gguf-split"
        )
    if not isinstance(metadata.get("general.architecture"), str):
        raise Unreadable(f"{path} names no general.architecture: it holds no language model")
    head, embedding = file._head, file.info("token_embd.weight")
    for name, info in (("the LM head", head), ("token_embd.weight", embedding)):
        if len(info.shape) != 2 or info.shape[1] != file.hidden_size:
            raise Unreadable(f"{path}: {name} has the shape {list(info.shape)}, not [V, {file.hidden_size}]")
    for name, maximum in (("context_length", MAX_CONTEXT), ("block_count", MAX_LAYERS)):
        file.count(name, maximum)
    _check_kinds(file)
    experts = f"{file.architecture}.expert_count" in metadata and file.count("expert_count", MAX_EXPERTS, minimum=0)
    used = metadata.get(f"{file.architecture}.expert_used_count", 0)
    if isinstance(used, int) and not (experts > 1) <= used <= experts:
        raise Unreadable(
            f"{path}: expert_used_count must be at most expert_count ({experts:d}), and at least 1 with several experts"
            f", not {brief(used)}"
        )
    tokens = file.tokens
    if tokens is not None and (not isinstance(tokens, list) or len({*tokens}) < len(tokens)):
        raise Unreadable(f"{path}: tokenizer.ggml.tokens holds a token twice, which llama.cpp does not load")
    return file


def _check_kinds(file: GGUFFile) -> None:
    """Refuse data types for which llama.cpp ends the process: at the first forward, by a signal.

    It adds and multiplies by norms, biases and other vectors in float32 only.
    """
    for name, info in file.tensors.items():
        kind = info.type_name
        vector = len(info.shape) == 1 or not name.endswith(".weight") or any(part in name for part in FLOAT32_PARTS)
        if kind in UNCOMPUTED or (vector and kind != "F32"):
            computed = "F32 only" if vector else "F32, F16, BF16 and quantized types"
            raise Unsupported(
                f"{file.path} cannot be computed: the tensor {brief(name)} is {kind}, and llama.cpp computes "
                f"{'vectors and norms' if vector else 'matrices'} of {computed}; convert the model again, with norms "
                "and biases in F32 (spec-lab convert, or llama.cpp's convert_hf_to_gguf.py)"
            )
