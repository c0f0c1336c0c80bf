"""Checkpoints with every kind of tensor that a GGUF file of a Llama-like model may hold, and bytes of hostile files."""

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from spec_lab.models import gguf_tokenizer
from tests.checkpoints import checkpoint

ZOO = Path(__file__).parent.parent / "spec_lab/zoo/target"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"family": "mistral"}, "qwen2": {"family": "qwen2"}, "qwen3": {"family": "qwen3"},
    "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 16}, "llama3-rope": {"rope_parameters": LLAMA3},
    "linear-rope": {"rope_parameters": LINEAR}, "yarn-rope": {"rope_parameters": YARN},
    "yarn-rope-qwen2": {"family": "qwen2", "rope_parameters": YARN},
}  # fmt: skip
"""Models that are written as GGUF: names, and arguments of ``checkpoint``."""


def spread(folder: Path) -> Path:
    """Replace the vectors of a checkpoint, all zeros or ones in a new model, by random ones; return the folder."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if values.dim() == 1:
            tensors[name] = values + torch.rand(values.shape, generator=generator).to(values.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def tiny(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """Save one of ``MODELS``, with random vectors; return the folder."""
    return spread(checkpoint(folder, **MODELS[name], **changes))


def with_zoo_tokenizer(folder: Path, pre: str | None = None, **changes: Any) -> Path:
    """Save a tiny model with the bundled target's tokenizer; return the folder.

    Args:
        folder: where.
        pre: one of ``PRE_TOKENIZERS`` that replaces the tokenizer's own pre-tokenizer.
        changes: to the model.
    """
    checkpoint(folder, **dict(vocab_size=4096, eos_token_id=0) | changes)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ZOO / file, folder / file)
    if pre is not None:
        pre_tokenizer = gguf_tokenizer.PRE_TOKENIZERS[pre]
        whole = json.loads((folder / "tokenizer.json").read_text())
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        steps: list[dict[str, Any]] = [{**split, "pattern": {"Regex": pattern}} for pattern in pre_tokenizer.patterns]
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        whole["model"]["ignore_merges"] = pre_tokenizer.ignore_merges
        (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def text(value: str) -> bytes:
    """A string as GGUF stores it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    """A metadata field as GGUF stores it."""
    return text(name) + struct.pack("<I", kind) + value


def header(fields: list[bytes] = (), tensors: list[bytes] = (), magic: bytes = b"GGUF", version: int = 3) -> bytes:  # type: ignore[assignment]
    """The beginning of a GGUF file."""
    return magic + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join([*fields, *tensors])


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's description as GGUF stores it; the shape is in torch's order."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


TYPED = {
    "token_embd.weight": (512, 256), "output.weight": (512, 256), "output_norm.weight": (256,),
    "rope_freqs.weight": (64,), "blk.0.attn_norm.weight": (256,), "blk.0.ffn_norm.weight": (256,),
    "blk.0.attn_q.bias": (256,), **{f"blk.0.{name}.weight": (256, 256) for name in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
    )},
}  # fmt: skip
"""Shapes of a Llama-like model of one layer, whose rows are whole blocks of every data type."""

NUMBERS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
FATAL = [
    *((name, kind) for name in ("token_embd.weight", "output.weight", "blk.0.attn_q.weight") for kind in NUMBERS),
    *((name, kind) for name in ("output_norm.weight", "blk.0.ffn_norm.weight", "blk.0.attn_q.bias", "rope_freqs.weight")
      for kind in ("F16", "BF16", "I8", "I16", "I32", "I64", "F64")),
    ("blk.0.attn_norm.weight", "Q8_0"), ("blk.0.attn_norm.weight", "Q4_K"),
]  # fmt: skip
"""Tensors of ``TYPED`` and data types with which llama.cpp ends the process, or computes something else."""


def typed(file: Path, name: str, kind: str) -> Path:
    """Write a model of zeros in float32, but one tensor with another data type; return the file."""
    import gguf

    def number(name: str, value: int) -> bytes:
        return field(f"llama.{name}", 4, struct.pack("<I", value))

    fields = [
        field("general.architecture", 8, text("llama")), number("context_length", 512), number("embedding_length", 256),
        number("block_count", 1), number("feed_forward_length", 256), number("attention.head_count", 2),
        number("vocab_size", 512), field("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        field("tokenizer.ggml.model", 8, text("no_vocab")),
    ]  # fmt: skip
    tensors, offset = [], 0
    for other, shape in TYPED.items():
        quantization = gguf.GGMLQuantizationType[kind if other == name else "F32"]
        block, size = gguf.GGML_QUANT_SIZES[quantization]
        tensors.append(tensor(other, shape, quantization, offset))
        offset += -(-math.prod(shape) // block * size // 32) * 32
    begin = header(fields, tensors)
    with file.open("wb") as stream:
        stream.write(begin)
        stream.truncate(-(-len(begin) // 32) * 32 + offset)
    return file
