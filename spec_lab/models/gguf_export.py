"""Write a checkpoint of transformers as a GGUF file, the format of llama.cpp.

Weights are read from safetensors, one tensor at a time. Tensors and metadata follow llama.cpp's own converter
(``convert_hf_to_gguf.py``): rows of q and k are permuted where llama.cpp rotates neighbouring pairs (its architecture
``llama``), a tied LM head is left out, and vectors (norms, biases) are stored in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from spec_lab.core.files import replacing
from spec_lab.core.options import brief, one_of
from spec_lab.core.progress import Progress
from spec_lab.models import checkpoint
from spec_lab.models.gguf_checkpoint import PARTS, permuted, rope_factors
from spec_lab.models.gguf_file import SOURCE, gguf_package
from spec_lab.models.gguf_tokenizer import write_tokenizer
from spec_lab.models.loading import describe, read_texts
from spec_lab.models.support import Unsupported, model_context
from spec_lab.runners.attention import layer_kinds

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's architecture of a model type of transformers."""

FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}
"""``general.file_type`` of each data type (llama.h, ``LLAMA_FTYPE``)."""

OWN_DTYPES = {"F64": "f32", "F32": "f32", "F16": "f16", "BF16": "bf16"}
"""The data type of the file, by that of the checkpoint's embedding in safetensors."""


class Written(NamedTuple):
    """Facts about a GGUF file that was written."""

    architecture: str
    dtype: str
    tensors: int
    parameters: int
    size: int
    """Size of the file, in bytes."""
    tokenizer: str
    """The part of the tokenizer that llama.cpp reads; for a message."""


class _Planned(NamedTuple):
    """A tensor of the file before its numbers are read."""

    name: str
    source: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...]
    kind: Any
    """Its data type (``gguf.GGMLQuantizationType``)."""
    heads: int
    """Number of attention heads over which its rows are permuted; 0: they are not."""


def convert(
    path: str, out: Path, dtype: str | None = None, overwrite: bool = False, revision: str | None = None
) -> Written:
    """Write a checkpoint as a GGUF file.

    Args:
        path: folder of a checkpoint of a Llama-like model (``ARCHITECTURES``), or a hub name.
        out: the file; it appears when it is complete.
        dtype: of the matrices: "f32", "bf16", "f16", "q8_0" or "q4_0" (blocks of 32 weights with a common scale;
            llama.cpp's reference rounding). With q4_0 the embedding and the LM head are q8_0, and matrices with rows
            that are no multiple of 32 are f16 with either. None is the checkpoint's own.
        overwrite: whether an existing file is replaced.
        revision: branch, tag or commit of a hub name; None: main.

    Raises:
        ValueError: an unknown dtype; weights that do not fit the config or the dtype; as in ``Target.load``.
        Unsupported: a model that llama.cpp's architectures above do not describe.
        OSError: the file exists or cannot be written; a checkpoint that cannot be read.
    """
    gguf = gguf_package()
    if dtype is not None:
        one_of("--dtype", dtype, tuple(FILE_TYPES))
    if out.is_dir() or (out.exists() and not overwrite):
        what = "is a folder: name a file" if out.is_dir() else "exists: --force overwrites it, or name another file"
        raise FileExistsError(f"{out} {what}")
    if Path(path).is_file():
        raise ValueError(
            f"{path} is a file: spec-lab convert reads the folder of a checkpoint of transformers, or a hub name; a "
            "GGUF file is a target as it is (target=gguf target.path=FILE)"
        )
    checked = describe(path, revision=revision)
    if checkpoint.read_quantization(checked.folder) is not None:
        raise Unsupported(f"{path} is quantized: llama.cpp's formats are written from an unquantized checkpoint")
    config = checked.model.config
    _refuse_by_name(checked.folder / "config.json", config)
    tokenizer, stops = read_texts(path, checked)
    with checkpoint.open_weights(checkpoint.weight_files(checked.folder)) as held:
        tensors = checked.model_tensors(held)
        dtype = dtype or _own_dtype(path, tensors)
        planned = _plan(path, checked.model, tensors, dtype)
        writer = gguf.GGUFWriter(None, ARCHITECTURES[config.model_type])
        writer.add_name(Path(path).name)
        writer.add_string(SOURCE, checkpoint.weights_hash(checked.folder))
        writer.add_file_type(FILE_TYPES[dtype])
        if dtype.startswith("q"):
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        vocabulary = next(tensor.shape[0] for tensor in planned if tensor.name == "token_embd.weight")
        _write_model(writer, config, vocabulary)
        described = write_tokenizer(writer, tokenizer, vocabulary, stops)
        factors = _rope_factors(config)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for tensor in planned:
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), tensor.kind)
        with replacing(out) as stream:
            writer.fout, writer.state = [stream], gguf.gguf_writer.WriterState.EMPTY
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.write_padding(stream, stream.tell())
            numbers = chain([] if factors is None else [factors], _numbers(path, planned, tensors))
            for data in Progress(numbers, out.name, len(writer.tensors[0]), unit="tensor"):
                stream.write(np.ascontiguousarray(data).data)  # unlike tofile, names the file when the disk is full
                writer.write_padding(stream, data.nbytes)
    return Written(
        ARCHITECTURES[config.model_type], dtype, len(planned) + (factors is not None),
        sum(math.prod(tensor.shape) for tensor in planned), out.stat().st_size, described,
    )  # fmt: skip


def _refuse_by_name(file: Path, config: Any) -> None:
    """Refuse models that llama.cpp's architectures do not describe."""

    def refuse(name: str, value: Any, why: str) -> None:
        raise Unsupported(f"{file}: {name} {brief(value)} cannot be written as GGUF: {why}")

    kind = config.model_type
    if kind not in ARCHITECTURES:
        refuse("model_type", kind, f"spec-lab convert writes {', '.join(ARCHITECTURES)}; use llama.cpp's converter")
    if layer_kinds(config):
        refuse("sliding_window", config.sliding_window, "llama.cpp would compute full attention in every layer")
    heads, width = config.num_attention_heads, _head_dim(config)
    if config.hidden_act != "silu":
        refuse("hidden_act", config.hidden_act, f"llama.cpp's architecture {ARCHITECTURES[kind]} has silu")
    if width % 2 or (kind == "qwen2" and width * heads != config.hidden_size):
        refuse("head_dim", width, "llama.cpp expects even heads, and for qwen2 hidden_size / num_attention_heads")
    if kind == "qwen3" and config.attention_bias:
        refuse("attention_bias", True, "llama.cpp's architecture qwen3 has no bias after attention")
    if float(getattr(config, "partial_rotary_factor", None) or 1) != 1:
        refuse("partial_rotary_factor", config.partial_rotary_factor, "llama.cpp rotates whole heads here")
    rope = config.rope_parameters
    known = {
        "default": {"rope_theta"},
        "linear": {"rope_theta", "factor"},
        "yarn": {"rope_theta", "factor", "original_max_position_embeddings"},
        "llama3": {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    }
    fields = {name: value for name, value in rope.items() if value is not None and name not in ("rope_type", "type")}
    if rope["rope_type"] not in known:
        refuse("rope_type", rope["rope_type"], f"supported are {', '.join(known)}")
    if fields.get("partial_rotary_factor") == 1.0:
        del fields["partial_rotary_factor"]
    if more := fields.keys() - known[rope["rope_type"]]:
        refuse(f"rope_parameters.{min(more)}", fields[min(more)], f"RoPE '{rope['rope_type']}' has no such field there")
    if missing := known[rope["rope_type"]] - fields.keys():
        refuse(f"rope_parameters.{min(missing)}", None, f"RoPE '{rope['rope_type']}' requires it")
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            refuse(f"rope_parameters.{name}", value, "it must be a positive number")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _own_dtype(path: str, tensors: Mapping[str, Any]) -> str:
    """Return the data type of a file that holds the checkpoint's numbers as they are."""
    held = tensors["model.embed_tokens.weight"].get_dtype() if "model.embed_tokens.weight" in tensors else "none"
    if held not in OWN_DTYPES:
        raise ValueError(f"the embedding of {path} has the data type {held}; give --dtype")
    return OWN_DTYPES[held]


def _plan(path: str, described: Any, tensors: Mapping[str, Any], dtype: str) -> list[_Planned]:
    """Return the tensors of the file, in the order in which they are stored."""
    gguf, config = gguf_package(), described.config
    planned = []
    for source, parameter in described.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, part, what = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(weight|bias)", source).groups()  # type: ignore[union-attr]
        if part not in PARTS:
            raise Unsupported(f"{path}: llama.cpp's architecture has no tensor for {source}")
        shape = tuple(parameter.shape)
        if source not in tensors or tuple(tensors[source].get_shape()) != shape:
            held = list(tensors[source].get_shape()) if source in tensors else "missing"
            raise ValueError(f"the weights of {path} do not fit its config.json: {source} is {held}, not {list(shape)}")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(PARTS[part], 0)
        if ARCHITECTURES[config.model_type] != "llama":
            heads = 0
        wide = "f32" if len(shape) == 1 else dtype
        if wide == "q4_0" and layer is None:
            wide = "q8_0"
        if wide.startswith("q") and shape[-1] % 32:
            wide = "f16"
        name = "" if layer is None else f"blk.{layer}."
        kind = gguf.GGMLQuantizationType[wide.upper()]
        planned.append(_Planned(f"{name}{PARTS[part]}.{what}", source, shape, kind, heads))
    return planned


def _numbers(path: str, planned: list[_Planned], tensors: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Yield the numbers of each tensor in its data type."""
    gguf = gguf_package()
    for tensor in planned:
        full = tensors[tensor.source][:].to(torch.float32)
        if tensor.heads:
            full = permuted(full, tensor.heads)
        if tensor.kind == gguf.GGMLQuantizationType.BF16:  # torch rounds to nearest even, as llama.cpp does
            data = full.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint8)
            finite = bool(full.isfinite().all())
        else:
            with np.errstate(all="ignore"):
                data = gguf.quants.quantize(full.numpy(), tensor.kind)
            finite = bool(np.isfinite(data).all()) if data.dtype != np.uint8 else bool(full.isfinite().all())
        if not finite:
            raise ValueError(
                f"{tensor.source} of {path} holds a number that is not finite in {tensor.kind.name.lower()}: choose "
                "another --dtype, or check the checkpoint"
            )
        yield data


def _write_model(writer: Any, config: Any, vocabulary: int) -> None:
    """Write the hyperparameters."""
    gguf, width = gguf_package(), _head_dim(config)
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(model_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))


def _rope_factors(config: Any) -> np.ndarray | None:
    """Return ``rope_factors`` of a config with Llama 3.1's RoPE; None for other kinds of RoPE."""
    rope = config.rope_parameters
    return rope_factors(rope, _head_dim(config)) if rope["rope_type"] == "llama3" else None
