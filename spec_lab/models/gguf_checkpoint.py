"""Dequantise a GGUF file to a checkpoint of transformers, once, in the user's cache.

The numbers are exactly those that the package ``gguf`` dequantises: in float32, or in the file's own data type where
that is F16 or BF16. Fields and tensors that are not understood are refused by name. (transformers leaves them out,
which changes the model: ``rope_freqs.weight`` of Llama 3.1, for example.)
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from spec_lab.core.files import file_hash, read_json, write_json
from spec_lab.core.options import brief
from spec_lab.core.progress import Progress
from spec_lab.core.tensors import save_tensors
from spec_lab.core.user_cache import default_folder
from spec_lab.models.checkpoint import INDEX, SINGLE, weights_hash
from spec_lab.models.gguf_file import MAX_CONTEXT, GGUFFile, TensorInfo, read_gguf
from spec_lab.models.gguf_tokenizer import read_gguf_tokenizer
from spec_lab.models.support import Unsupported

LOG = logging.getLogger(__name__)

VERSION = 1
"""Part of the names of folders in the cache: another one is written by code that writes other files."""

FACTS = "spec_lab.json"
"""File that is written last: the SHA-256s of the GGUF file and of the weight files, and the sizes of these."""

SHARD = 2**30
"""Maximum size of a weight file, in bytes, unless one tensor is larger. As much memory is needed."""

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Class of transformers that computes llama.cpp's architecture; its model type has the architecture's name."""

PARTS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""llama.cpp's name of each module of transformers; of those in layers without the layer's prefix."""

HYPERPARAMETERS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "vocab_size", "expert_count", "expert_used_count",
}  # fmt: skip
"""Fields of an architecture that are read."""

IRRELEVANT = {"rope.scaling.finetuned"}
"""Fields of an architecture that change no number: whether the model was trained with its RoPE scaling."""

LLAMA3_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""``original_max_position_embeddings``, ``low_freq_factor`` and ``high_freq_factor`` of Llama 3.1 to 3.3. A GGUF file
holds the factors of the frequencies that follow from them."""

END_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<|fim_pad|>", "<fim-pad>",
    "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
}  # fmt: skip
"""Tokens that llama.cpp takes for end-of-text tokens by their text (llama-vocab.cpp)."""


def dequantised(path: Path) -> Path:
    """Return the folder in the user's cache that holds a GGUF file as a checkpoint; it is written unless it is there.

    A run that is ended while it writes leaves whole weight files behind, which the next one keeps.

    Raises:
        OSError: it does not exist; there is no cache, or no room in it.
        ValueError: as in ``read_gguf``; a tokenizer that cannot be read.
        Unsupported: a model that ``CLASSES`` do not describe; names the field or the tensor.
    """
    file, cache = read_gguf(path), default_folder()
    config, names = config_of(file), _names(file)
    if cache is None:
        raise OSError(f"{path} is dequantised into the user's cache, and there is none: set SPEC_LAB_CACHE to a folder")
    sha256 = file_hash(path)
    folder = cache / "checkpoints" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', path.stem)[:64]}-{sha256[:16]}-{VERSION}"
    if _complete(folder, sha256):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not _complete(folder, sha256):
            _write(file, folder, config, names, sha256)
    return folder


def source_sha256(folder: Path, weights: str) -> str:
    """Return the SHA-256 of the GGUF file that a folder's weights are from; empty for another checkpoint.

    Args:
        weights: SHA-256 of its weight files.

    Raises:
        OSError: the weights are not those that were written.
        ValueError: a malformed file of facts.
    """
    facts = read_json(folder / FACTS)
    if facts is None or "gguf_sha256" not in facts:
        return ""
    if facts.get("weights_sha256") != weights:
        raise OSError(f"{folder} is damaged: its weights are not those of {facts.get('gguf')}; remove the folder")
    return str(facts["gguf_sha256"])


def _complete(folder: Path, sha256: str) -> bool:
    facts = read_json(folder / FACTS)
    if facts is None or facts.get("gguf_sha256") != sha256 or "weights_sha256" not in facts:
        return False
    files = facts.get("files")
    return isinstance(files, dict) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items()
    )


def _write(file: GGUFFile, folder: Path, config: Mapping[str, Any], names: Mapping[str, str], sha256: str) -> None:
    """Write a checkpoint, its weights first."""
    shards = _shards(file, names)
    _check_room(file, folder, shards)
    LOG.info("Dequantising %s to %s", file.path, folder)
    single, index = len(shards) == 1, dict[str, str]()
    for number, shard in enumerate(Progress(shards, f"dequantise {file.path.name}", unit="file"), start=1):
        name = SINGLE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        index |= dict.fromkeys((names[tensor] for tensor in shard), name)
        if not (folder / name).exists():
            tensors = {names[tensor]: _numbers(file, tensor, names[tensor], config) for tensor in shard}
            save_tensors(tensors, folder / name, {"format": "pt"})
    if not single:
        write_json(folder / INDEX, {"metadata": {}, "weight_map": index})
    read_gguf_tokenizer(file).save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": ends_of(file)})
    write_json(folder / "config.json", config)
    sizes = {name: (folder / name).stat().st_size for name in sorted({*index.values()})}
    facts = {"gguf": file.path.name, "gguf_sha256": sha256, "weights_sha256": weights_hash(folder), "files": sizes}
    write_json(folder / FACTS, facts)


def _check_room(file: GGUFFile, folder: Path, shards: list[list[str]]) -> None:
    """Refuse to write more than there is room for."""
    size = sum(_nbytes(file.tensors[tensor]) for shard in shards for tensor in shard)
    size -= sum(part.stat().st_size for part in folder.glob("*.safetensors"))
    if size > (free := shutil.disk_usage(folder).free):
        raise OSError(
            f"{file.path} needs {size / 2**30:.1f} GiB in {folder} when it is dequantised, and {free / 2**30:.1f} GiB "
            "are free: set SPEC_LAB_CACHE to a folder on another disk, or compute the file by llama.cpp (target=gguf)"
        )


def _shards(file: GGUFFile, names: Mapping[str, str]) -> list[list[str]]:
    """Return the names of the tensors of each weight file, in the order of the GGUF file."""
    shards: list[list[str]] = [[]]
    size = 0
    for tensor in names:
        more = _nbytes(file.tensors[tensor])
        if shards[-1] and size + more > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += more
    return shards


def _dtype(info: TensorInfo) -> torch.dtype:
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(info.type_name, torch.float32)


def _nbytes(info: TensorInfo) -> int:
    return info.parameters * _dtype(info).itemsize


def _numbers(file: GGUFFile, tensor: str, name: str, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor's numbers, rows of q and k in transformers' order."""
    numbers = file.tensor(tensor, _dtype(file.tensors[tensor]))
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return unpermuted(numbers, config[heads]) if heads and file.architecture == "llama" else numbers


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Return rows of q or k in llama.cpp's order: ``[heads * D, ..]`` -> the same shape.

    transformers rotates elements i and i + D/2 of a head together; llama.cpp's architecture ``llama`` rotates 2i and
    2i + 1 together, as the original weights of Llama do.
    """
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape).contiguous()


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Return rows of q or k in transformers' order: the inverse of ``permuted``."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape).contiguous()


def _names(file: GGUFFile) -> dict[str, str]:
    """Return transformers' name of each tensor, but ``rope_freqs.weight``."""
    modules = {ours: module for module, ours in PARTS.items()}
    names = {}
    for tensor in file.tensors:
        if tensor == "rope_freqs.weight":
            continue
        match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?([a-z_]+)\.(weight|bias)", tensor)
        module = modules.get(match[2]) if match else None
        if match is None or module is None or (match[1] is None) != (module.startswith(("model.", "lm_head"))):
            raise Unsupported(
                f"{file.path} cannot be computed by transformers: its tensor {brief(tensor)} is not known; compute it "
                "by llama.cpp (target=gguf)"
            )
        prefix = "" if match[1] is None else f"model.layers.{match[1]}."
        names[tensor] = f"{prefix}{module}.{match[3]}"
    return names


def ends_of(file: GGUFFile) -> list[int]:
    """Return the end-of-text tokens: those that the file names, and those that llama.cpp knows by their text."""
    return sorted(file.ends | {number for number, token in enumerate(file.tokens or ()) if token in END_TEXTS})


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of the ``config.json`` of a GGUF file's model.

    Raises:
        ValueError: a field has no value that a model can have.
        Unsupported: another architecture, or a field that is not known; names it.
    """
    kind = file.architecture
    if kind not in CLASSES:
        _refuse(file, "general.architecture", kind, f"{', '.join(CLASSES)} are")
    fields = {
        name.removeprefix(f"{kind}."): value for name, value in file.metadata.items() if name.startswith(f"{kind}.")
    }
    if unknown := sorted(fields.keys() - HYPERPARAMETERS - IRRELEVANT):
        _refuse(file, f"{kind}.{unknown[0]}", fields[unknown[0]], "the field is not known")
    if fields.get("expert_count"):
        _refuse(file, f"{kind}.expert_count", fields["expert_count"], "its experts are not read")
    heads = file.count("attention.head_count", 2**16)
    kv_heads = heads if fields.get("attention.head_count_kv") is None else file.count("attention.head_count_kv", heads)
    width = fields.get("attention.key_length", file.hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.get(name, width) != width:
            _refuse(file, f"{kind}.{name}", fields[name], f"attention heads have {brief(width)} elements")
    if isinstance(width, bool) or not isinstance(width, int) or width < 2 or width % 2:
        _refuse(file, f"{kind}.attention.key_length", width, "heads have an even number of elements")
    biases = {name.split(".")[-2] for name in file.tensors if name.endswith(".bias")}
    named = {f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    config: dict[str, Any] = {
        "model_type": kind, "architectures": [CLASSES[kind]], "hidden_act": "silu",
        "hidden_size": file.hidden_size, "num_hidden_layers": file.num_layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width,
        "intermediate_size": file.count("feed_forward_length", 2**24), "vocab_size": file.vocabulary,
        "max_position_embeddings": file.count("context_length", MAX_CONTEXT),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"), "tie_word_embeddings": file.tied,
        "rope_parameters": _rope(file, fields, width),
        **{name: token for name, token in named.items() if isinstance(token, int)},
    }  # fmt: skip
    if kind == "llama":
        config |= {"attention_bias": "attn_q" in biases, "mlp_bias": "ffn_up" in biases}
    if kind == "qwen2" and width * heads != file.hidden_size:
        _refuse(file, "qwen2.attention.key_length", width, "its heads share the hidden size")
    return config


def _rope(file: GGUFFile, fields: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return ``rope_parameters``."""
    unnamed = "linear" if fields.get("rope.scaling.factor") else "none"  # as llama.cpp reads a factor without a type
    kind, theta = fields.get("rope.scaling.type", unnamed), _number(file, "rope.freq_base", 10000.0)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            _refuse(file, f"{file.architecture}.rope.scaling.type", kind, "the file has rope_freqs.weight as well")
        factors = file.tensor("rope_freqs.weight").numpy()
        rope = {
            "rope_type": "llama3", "rope_theta": theta, "factor": float(factors.max()), "low_freq_factor": LLAMA3_LOW,
            "high_freq_factor": LLAMA3_HIGH, "original_max_position_embeddings": LLAMA3_CONTEXT,
        }  # fmt: skip
        expected = rope_factors(rope, width)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-5):
            _refuse(file, "rope_freqs.weight", "", "the factors are not those of Llama 3.1's RoPE")
        return rope
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        _refuse(file, f"{file.architecture}.rope.scaling.type", kind, "none, linear and yarn are read")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": _number(file, "rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.count("rope.scaling.original_context_length", MAX_CONTEXT)
    return rope


def rope_factors(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """Return by what Llama 3.1's RoPE divides each frequency, float32 ``[D / 2]``.

    As transformers computes it (``_compute_llama3_parameters``): wavelengths below ``original / high`` stay, those
    above ``original / low`` are multiplied by ``factor``, and between them the frequency is interpolated.

    Args:
        rope: ``rope_parameters`` of a config.
        width: D, elements of a head.
    """
    length, low, high = (
        float(rope[name]) for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, width, 2) / width)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip((length / wavelength - low) / (high - low), 0, 1) if high > low else wavelength < length / high
    factors: np.ndarray = 1 / ((1 - share) / float(rope["factor"]) + share)
    return factors.astype(np.float32)


def _number(file: GGUFFile, name: str, default: float | None = None) -> float:
    """Return a positive number of the architecture's metadata."""
    value = file.metadata.get(f"{file.architecture}.{name}", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        _refuse(file, f"{file.architecture}.{name}", value, "it must be a positive number")
    return float(value)


def _refuse(file: GGUFFile, name: str, value: Any, why: str) -> NoReturn:
    raise Unsupported(
        f"{file.path} cannot be computed by transformers: {name} {brief(value)} is not supported ({why}); compute it "
        "by llama.cpp (target=gguf)"
    )
