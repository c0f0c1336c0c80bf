"""The files of a checkpoint, checked before anything is loaded from them.

A checkpoint is untrusted input. Its weights are read from safetensors only: ``model.safetensors``, or the shards that
``model.safetensors.index.json`` names; no other file is a source of weights. Its ``config.json`` describes a model and
chooses no code: fields that select an attention or experts implementation, kernels, remote code or a data type are
ignored, and fields that select another loader are refused by name. Of ``quantization_config`` only known fields of
known methods are passed on (``models.quantization``).

Bounds: a JSON file of a checkpoint has at most 64 MiB (``files.MAX_BYTES``) and a tokenizer file at most 256 MiB; JSON
is nested at most 64 levels deep (``files.MAX_DEPTH``); a config names at most 1024 layers or experts, and no more
layers than the checkpoint has tensors. Every file that is read must be a regular file; a symbolic link to one is
allowed, since the hub's cache and many users link weights. Files that are not read are not checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from spec_lab.core.files import MAX_BYTES, file_hash, read_json
from spec_lab.core.options import brief
from spec_lab.core.tensors import readable

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MEDUSA = "medusa_lm_head.safetensors"
"""The name of the weights of Medusa heads in the folders of Medusa's authors."""
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model",
    "sentencepiece.model", "spiece.model", "spm.model", "tiktoken.model", "tekken.json", "emoji.json",
)  # fmt: skip
"""Files from which transformers reads the tokenizer of a causal LM."""
VOCABULARIES = {
    "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model",
    "sentencepiece.model", "spiece.model", "spm.model", "tiktoken.model", "tekken.json",
}  # fmt: skip
"""Those that may have ``MAX_TOKENIZER`` bytes: each holds a whole vocabulary."""
TEMPLATES = "additional_chat_templates"
"""Folder of chat templates, which transformers reads with the tokenizer."""
PICKLES = (".bin", ".pt", ".pth")
"""How the names of files of ``torch.save`` end."""
MAX_TOKENIZER = 256 * 2**20
"""Largest file of a vocabulary, in bytes."""
MAX_LAYERS = 1024
"""Maximum number of layers or experts in a config."""
MAX_WHOLE = 2**53
"""Largest whole number in a config."""

IGNORED = {
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal", "auto_map", "dtype",
    "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash", "num_labels", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "torchscript", "use_cache",
    "spec_lab_quantization",
}  # fmt: skip
"""Fields of a config that do not describe the model but how it runs, which the options of a run decide."""

UNBOUNDED = {"time_step_limit"}
"""Fields that may be infinite: models of type mamba have them, which are refused by their type."""

REFUSED = {
    "quantization_config": "inside another config; it must be at the top level",
    "compression_config": "compressed checkpoints need a loader of their own; use the uncompressed one",
    "transformers_weights": f"weights are read from {SINGLE} or the shards of {INDEX} only; rename the file",
    "fusion_config": "it replaces modules of the model; remove it",
    "kernel_config": "it replaces modules of the model by kernels of the hub; remove it",
    "use_kernels": "it replaces modules of the model by kernels of the hub; remove it",
    "distributed_config": "target.tensor_parallel and target.device_map decide how a model is split; remove it",
}
"""Fields of a config that make another loader or other code necessary, and why each is refused. null is allowed."""

COUNTS = re.compile(r"(^|_)(layers?|blocks|experts)$")
"""Names of fields that count layers or experts."""
NUMBERS = {"vision_feature_layer"}
"""Names of fields that number a layer instead, from the end if negative."""
DEPTHS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"}
"""Names of fields that hold the number of layers of a language model."""
MTP_LAYER = re.compile(r"(model\.layers\.([0-9]{1,9})\.)eh_proj\.weight")
MTP = "mtp."
"""How the names of the tensors of multi-token-prediction modules begin in Qwen3-Next's checkpoints."""


def check_files(folder: Path) -> None:
    """Check the kinds and sizes of a checkpoint's JSON and tokenizer files before any of them is opened.

    Raises:
        OSError: the folder holds no config.json.
        ValueError: a folder, pipe, device or socket in place of a file; a file that is too large; an adapter.
    """
    if not (folder / "config.json").exists():
        raise OSError(f"{folder} holds no config.json: give a folder written by save_pretrained, or a hub name")
    check_sizes(folder)
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds adapter_config.json: adapters are not supported and would be left out silently; merge it "
            "into the weights (peft's merge_and_unload), or remove the adapter's files"
        )


def check_sizes(folder: Path) -> None:
    """Check the kinds and sizes of the JSON and tokenizer files of a folder.

    Raises:
        ValueError: a folder, pipe, device or socket in place of a file; a file that is too large.
    """
    names = ("config.json", "generation_config.json", *TOKENIZER_FILES)
    for file in (*(folder / name for name in names), *sorted((folder / TEMPLATES).glob("*.jinja"))):
        if not file.exists():
            continue
        if not file.is_file():
            raise ValueError(f"{file} is not a regular file: a checkpoint holds files only; remove it")
        check_size(str(file), file.name, file.stat().st_size)


def check_size(where: str, name: str, size: int) -> None:
    """Refuse a JSON or tokenizer file that would not be read; other files have no bound.

    Args:
        where: the file, for the message.
        size: of the file, in bytes.

    Raises:
        ValueError: it is too large.
    """
    bounded = name in TOKENIZER_FILES or name.endswith((".json", ".jinja"))
    max_bytes = MAX_TOKENIZER if name in VOCABULARIES else MAX_BYTES
    if bounded and size > max_bytes:
        raise ValueError(f"{where} has {size} bytes, more than the {max_bytes} that are read of such a file")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of ``config.json`` that describe the model.

    Raises:
        OSError: there is none.
        ValueError: not a JSON mapping within the bounds, no model_type, a field that is refused, or a value that no
            model has; the message names the field.
    """
    file = folder / "config.json"
    config = read_json(file, any_number=True)
    if config is None:
        raise OSError(f"{folder} holds no config.json: give a folder written by save_pretrained, or a hub name")
    _check_values(file, "", config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"{file}: model_type must name a kind of model of transformers, not {brief(kind)}")
    return _described(file, {name: value for name, value in config.items() if name != "quantization_config"})


def read_quantization(folder: Path) -> dict[str, Any] | None:
    """Return ``quantization_config`` of ``config.json``; None of a checkpoint that is not quantized.

    Raises:
        OSError: there is no config.json.
        ValueError: not a JSON mapping within the bounds, or a value that no config has.
    """
    file = folder / "config.json"
    quantization = (read_json(file, any_number=True) or {}).get("quantization_config")
    if quantization in (None, False, {}):
        return None
    if not isinstance(quantization, dict):
        raise ValueError(f"{file}: quantization_config must be a mapping, not {brief(quantization)}")
    _check_values(file, "quantization_config", quantization)
    return quantization


def refuse_pickles(path: str, names: Iterable[str], converts: bool | None = True) -> None:
    """Refuse weights in files of ``torch.save`` alone.

    Args:
        path: the folder or hub name as given.
        names: of the files there.
        converts: whether ``spec-lab convert`` knows the layout; None: perhaps.

    Raises:
        ValueError: names one, and what writes its weights as safetensors.
    """
    names = sorted(names)
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") or name == INDEX for name in names):
        convert = f"spec-lab convert {path} OUT writes them as safetensors"
        advice = {True: convert, False: "save them as safetensors", None: f"{convert} if it knows the layout"}[converts]
        raise ValueError(
            f"{path} holds its weights in {pickles[0]}, which a run does not read because loading it may execute code: "
            f"{advice}"
        )


def stop_tokens(folder: Path, default: Any) -> tuple[str, list[int]]:
    """Return where the end-of-text tokens are named (for messages), and those tokens.

    Args:
        default: ``eos_token_id`` of the model's config, used if there is no generation_config.json.

    Raises:
        ValueError: the file is no JSON mapping, or a value is no token id.
    """
    file = folder / "generation_config.json"
    generation = read_json(file)
    value = default if generation is None else generation.get("eos_token_id")
    where = str(folder / "config.json" if generation is None else file)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{where}: eos_token_id must be a token id or a list of them, not {brief(value)}")
    return where, tokens


def shard_names(folder: Path) -> list[str]:
    """Return the names of a checkpoint's weight files, from its index if there is one; the files may be missing.

    Raises:
        OSError: neither ``model.safetensors`` nor its index.
        ValueError: an index that is malformed, or that names anything but safetensors files of this folder.
    """
    for name in (SINGLE, MEDUSA):
        if (folder / name).exists():
            return [name]
    file = folder / INDEX
    index = read_json(file)
    if index is None:
        raise OSError(f"{folder} holds neither {SINGLE} nor {INDEX}; weights are read from safetensors only")
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{file}: weight_map must map each tensor's name to its file; copy or download it again")
    for tensor, name in shards.items():
        plain = isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name) and not name.startswith(".")
        if not plain:
            raise ValueError(
                f"{file}: weight_map puts {brief(tensor)} in {brief(name)}, which is not the name of a "
                ".safetensors file in the same folder: only such files are read"
            )
    return sorted(set(shards.values()))


def weight_files(folder: Path) -> list[Path]:
    """Return a checkpoint's weight files in order of name: exactly those that are loaded.

    Raises:
        OSError: there are none, or the index names one that is missing.
        ValueError: as for ``shard_names``; a file that is not regular.
    """
    files = [folder / name for name in shard_names(folder)]
    for file in files:
        if not file.exists():
            raise OSError(f"{file} is missing, but {INDEX} names it: copy or download it again")
        if not file.is_file():
            raise ValueError(f"{file} is not a regular file")
    return files


def weights_hash(folder: Path | str) -> str:
    """Return the SHA-256 over the weight files of a checkpoint's folder in order of name.

    Raises:
        OSError, ValueError: as for ``weight_files``.
    """
    return file_hash(*weight_files(Path(folder)))


def mtp_prefixes(tensors: Iterable[str], layers: int = 0) -> list[str]:
    """How the names of the tensors of a checkpoint's multi-token-prediction modules begin, in order of module.

    In DeepSeek-V3's checkpoints these modules are further layers; Qwen3-Next's have one prefix for all modules.

    Args:
        tensors: names of the checkpoint's tensors.
        layers: number of layers of the language model; modules are layers of this number and above.
    """
    names = list(tensors)
    modules = [match for name in names if (match := MTP_LAYER.fullmatch(name)) and int(match[2]) >= layers]
    further = [match[1] for match in sorted(modules, key=lambda match: int(match[2]))]
    return further + [MTP] * (f"{MTP}fc.weight" in names)


@contextmanager
def open_weights(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Open weight files, and yield their tensors by name, not yet read (slices of ``safe_open``).

    Raises:
        OSError: a file is truncated or corrupt; there is too little memory for the files, also where the tensors are
            read later.
        ValueError: a tensor is in two files.
    """
    with readable(files), ExitStack() as stack:
        tensors: dict[str, Any] = {}
        places: dict[str, Path] = {}
        for file in files:
            with readable([file]):
                opened = stack.enter_context(safe_open(file, framework="pt"))
                new = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            if twice := sorted(new.keys() & tensors.keys()):
                raise ValueError(f"the tensor {brief(twice[0])} is both in {places[twice[0]]} and in {file}")
            tensors |= new
            places |= dict.fromkeys(new, file)
        yield tensors


def misfits_of(report: Mapping[str, Any]) -> list[str]:
    """Name each tensor that is missing, surplus or misshapen in transformers' report of loading."""
    wrong = [f"{name} is missing" for name in report["missing_keys"]]
    wrong += [f"{name} is {list(shape)}, not {list(expected)}" for name, shape, expected in report["mismatched_keys"]]
    return wrong + [f"{name} is in no layer of the model" for name in report["unexpected_keys"]]


def refuse_misfits(path: Path | str, problems: Iterable[str]) -> None:
    """Refuse weights that do not fit the config.

    Raises:
        ValueError: there are ``problems``; names three of them.
    """
    if wrong := sorted({*problems}):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the weights of {path} do not fit its config.json: {'; '.join(wrong[:3])}{more}")


def check_described(path: Path | str, what: str, described: int, held: int, max_quotient: int = 4) -> None:
    """Refuse a config of much larger weights than are held; exact sizes are compared where they are read.

    Args:
        what: is described, for messages; ends with the kind of the numbers.
        described, held: how many numbers.
        max_quotient: largest quotient of both.

    Raises:
        ValueError: states both.
    """
    if described > max_quotient * held + 2**26:
        raise ValueError(
            f"the weights of {path} do not fit its config.json, which describes {what.format(described)}; the weight "
            f"files hold {held} parameters"
        )


def check_counts(folder: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a config with more layers than the checkpoint has tensors: building it could take forever.

    Raises:
        ValueError: names the field.
    """
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for name in sorted(DEPTHS & fields.keys()):
            if isinstance(fields[name], int) and fields[name] > tensors:
                raise ValueError(
                    f"{folder / 'config.json'}: {name} is {fields[name]}, but the weight files hold {tensors} tensors"
                )


def _described(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without ignored fields, at every level."""
    for name, why in REFUSED.items():
        if config.get(name) not in (None, False, {}):
            raise ValueError(f"{file}: {name} is not supported: {why}")
    dropped = IGNORED | REFUSED.keys()
    kept = {name: value for name, value in config.items() if name not in dropped}
    return {name: _described(file, value) if isinstance(value, dict) else value for name, value in kept.items()}


def _check_values(file: Path, name: str, value: Any) -> None:
    """Refuse values that no config of a model has."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else ((name, item) for item in value)
        for key, item in items:
            _check_values(file, key, item)
    elif isinstance(value, float) and not math.isfinite(value) and not (name in UNBOUNDED and math.isinf(value)):
        raise ValueError(f"{file}: {name} must be a finite number, not {value}")
    elif isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise ValueError(f"{file}: {name} is {brief(value)}, too large a number")
    elif (
        COUNTS.search(name)
        and name not in NUMBERS
        and isinstance(value, int)
        and not 0 <= value <= MAX_LAYERS
        and value != -1
    ):
        raise ValueError(f"{file}: {name} must lie between 0 and {MAX_LAYERS}, not {value}")


def one_line(error: Exception) -> str:
    """Return an error's type and message on one line of limited length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"
