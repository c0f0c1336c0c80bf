"""Load a causal LM and its tokenizer from a local folder or from the hub: safetensors only, no remote code."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file, logging

from spec_lab.core import memory
from spec_lab.models import checkpoint, ranks
from spec_lab.models import tensor_parallel as parallel
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.placement import (
    DTYPES,
    check_device_map,
    check_ranks,
    check_weights_fit,
    device_of,
    refuse_offloading,
)
from spec_lab.models.support import Unsupported, refuse_by_name
from spec_lab.models.tokenizer import check_stop_tokens, check_vocabulary, read_tokenizer


def follow() -> None:
    """Serve rank 0 on any other rank of tensor parallelism (``tensor_parallel.follow``)."""
    parallel.follow(_read_weights)


def load_model(
    path: str,
    device: str,
    dtype: str,
    device_map: str | Mapping[str, str | int] | None = None,
    tensor_parallel: bool = False,
) -> tuple[Any, Any]:
    """Return the model in eval mode and its tokenizer. Arguments and errors as in ``Target.load``."""
    if not isinstance(path, str) or not path:
        raise ValueError(f"path must name a folder of a checkpoint or a model of the hub, not {path!r}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    where = device_of(device)
    found = describe(path)
    folder, described = found.folder, found.model
    if device_map is not None or tensor_parallel:
        gc.collect()  # such models are part of reference cycles: free that of an earlier run before this one is loaded
    if device_map is not None:
        check_device_map(described, device_map)
        model = _fill(path, folder, described, dtype, device_map=device_map)
        refuse_offloading(model)
    elif tensor_parallel:
        check_ranks(described.config)
        if ranks.size() > 1:
            how = {"path": path, "dtype": dtype, "over": ranks.size(), "threads": torch.get_num_threads()}
            model = parallel.join().load(_read_weights, **how, sha256=weights_hash(path))
        else:
            model = _fill(path, folder, described, dtype).to("cuda" if torch.cuda.is_available() else "cpu")
    else:
        for place in {torch.device("cpu"), where}:  # weights are read on the CPU, and copied from there
            check_weights_fit(path, described, dtype, place, memory.available(place))
        model = _fill(path, folder, described, dtype).to(where)
    tokenizer, stops = read_texts(path, found)
    model.generation_config = GenerationConfig(eos_token_id=stops or None)
    return model, tokenizer


class CheckedCheckpoint(NamedTuple):
    """A checkpoint whose files were checked, before its weights are read."""

    folder: Path
    """Of its files; in the cache for a hub name."""
    revision: str | None
    """Of a hub name."""
    model: Any
    """The model that its config describes, on torch's meta device."""


def describe(path: str) -> CheckedCheckpoint:
    """Check the files of a checkpoint, after downloading them for a hub name, and describe its model.

    Raises:
        OSError, ValueError, Unsupported: as in ``Target.load``.
    """
    if not Path(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        hint = "" if "/" in path else "; give a model of the hub as owner/name, e.g. openai-community/gpt2"
        raise OSError(f"there is no folder {path}, and it is not a hub name (owner/name){hint}")
    folder, revision = _folder(path)
    config = _read_config(path, folder)
    _fetch_weights(path, folder, revision)
    return CheckedCheckpoint(folder, revision, _describe(path, folder, config))


def read_texts(path: str, found: CheckedCheckpoint) -> tuple[Any, list[int]]:
    """Return a checkpoint's tokenizer and its end-of-text tokens, both checked against the model's vocabulary.

    Args:
        path: the folder or hub name as given.
        found: what ``describe`` returned for it.

    Raises:
        OSError, ValueError: as in ``Target.load``.
    """
    folder, revision, described = found
    vocabulary = int(described.get_output_embeddings().weight.shape[0])
    vocabulary = min(vocabulary, int(described.get_input_embeddings().weight.shape[0]))
    where, stops = checkpoint.stop_tokens(folder, getattr(described.config, "eos_token_id", None))
    stops = check_stop_tokens(where, stops, vocabulary)
    tokenizer = read_tokenizer(path, folder, revision, described.config)
    check_vocabulary(path, tokenizer, vocabulary)
    return tokenizer, stops


def _folder(path: str) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint after checking its files, and the revision of a hub name.

    For a hub name it is the folder in the cache; every file but the weights is downloaded before it is checked.

    Raises:
        OSError: there is no config.json, or the hub cannot be reached.
        ValueError: as for ``checkpoint.check_files``.
    """
    if Path(path).exists():
        folder, revision = Path(path), None
    else:
        config = cached_file(path, "config.json")
        if config is None:
            raise OSError(f"{path} holds no config.json: give the hub name of a model written by save_pretrained")
        folder = Path(config).parent
        revision = folder.name
        for name in ("generation_config.json", "adapter_config.json", *checkpoint.TOKENIZER_FILES):
            _fetched(path, name, revision)
    checkpoint.check_files(folder)
    return folder, revision


def _fetched(path: str, name: str, revision: str) -> bool:
    """Download a file of a model of the hub into the cache; return whether the model has such a file.

    Offline, a file that is not in the cache counts as missing from the model.

    Raises:
        OSError: the hub cannot be reached, or denies access.
    """
    known = try_to_load_from_cache(path, name, revision=revision)
    if known is not None:
        return isinstance(known, str)  # else the cache records that the hub has no such file
    try:
        hf_hub_download(path, name, revision=revision)
    except Exception as error:  # also those of the HTTP library
        missing = isinstance(error, EntryNotFoundError)
        if missing and (is_offline_mode() or not isinstance(error, LocalEntryNotFoundError)):
            return False
        raise OSError(
            f"{name} of {path} cannot be fetched from the hub ({checkpoint.one_line(error)}): try again when the hub "
            "can be reached, or set HF_HUB_OFFLINE=1 to use only the files in the cache"
        ) from error
    return True


def _fetch_weights(path: str, folder: Path, revision: str | None) -> None:
    """Download the weight files of a hub name into the cache.

    Raises:
        OSError: there are none, or they cannot be downloaded.
        ValueError: as for ``checkpoint.shard_names``.
    """
    if revision is None or _fetched(path, checkpoint.SINGLE, revision):
        return
    _fetched(path, checkpoint.INDEX, revision)
    for name in checkpoint.shard_names(folder):
        _fetched(path, name, revision)


def _read_config(path: str, folder: Path) -> Any:
    """Return the checkpoint's config as transformers' object.

    Raises:
        OSError: there is none.
        ValueError: it is not one that transformers can read.
        Unsupported: a kind of model that is known to fail.
    """
    fields = checkpoint.read_config(folder)
    try:
        kind = CONFIG_MAPPING[fields["model_type"]]
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} does not support model_type "
            f"{fields['model_type']!r}; install a newer version, or choose another model"
        ) from error
    try:
        config = kind.from_dict(_fields_of(kind, fields) | {"name_or_path": path})
        refuse_by_name(config)
        return config
    except Unsupported:
        raise
    except Exception as error:  # transformers raises errors of many types
        raise ValueError(f"{folder / 'config.json'} holds an invalid value ({checkpoint.one_line(error)})") from error


def _describe(path: str, folder: Path, config: Any) -> Any:
    """Return the model that a config describes on torch's meta device, where it needs no memory.

    Raises:
        OSError: no weight files, or corrupt ones.
        ValueError: the config describes no causal LM, or one much larger than its weight files.
    """
    with checkpoint.open_weights(checkpoint.weight_files(folder)) as tensors:
        held, count = sum(math.prod(one.get_shape()) for one in tensors.values()), len(tensors)
    checkpoint.check_counts(folder, checkpoint.read_config(folder), count)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many types
        raise ValueError(
            f"{folder / 'config.json'} describes no causal LM that transformers can build "
            f"({checkpoint.one_line(error)})"
        ) from error
    for what, group in (("parameters", model.parameters()), ("numbers in buffers", model.buffers())):
        described = sum(tensor.numel() for tensor in group)
        if described > 4 * held + 2**26:  # exact sizes are compared on loading
            raise ValueError(
                f"the weights of {path} do not fit its config.json, which describes a model with {described} {what}; "
                f"the weight files hold {held} parameters"
            )
    return model


def _fields_of(kind: type[PreTrainedConfig], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's fields without those that would replace a method or a plan of its class."""
    known = {one.name for one in dataclass_fields(kind)} if is_dataclass(kind) else {*signature(kind).parameters}
    return {
        name: value
        for name, value in fields.items()
        if name in known or not hasattr(kind, name) or isinstance(getattr(kind, name), property)
    }


def _read_weights(path: str, dtype: str, over: int = 1, threads: int | None = None, sha256: str = "") -> Any:
    """Load this rank's part of a model for tensor parallelism.

    Args:
        path, dtype: as in ``Target.load``.
        over: number of ranks over which the model is split.
        threads: for torch to use; None leaves the number as it is.
        sha256: ``weights_hash`` on rank 0, with which the other ranks compare theirs; empty for a hub name.

    Raises:
        OSError: the weights differ from those of rank 0; otherwise errors as in ``Target.load``.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    found = describe(path)
    model = _fill(path, found.folder, found.model, dtype, over=over)
    if ranks.rank() and sha256 and weights_hash(path) != sha256:
        raise OSError(f"{path} holds other weights than on rank 0: copy the same checkpoint to every machine")
    return model


def _fill(
    path: str,
    folder: Path,
    described: Any,
    dtype: str,
    device_map: str | Mapping[str, str | int] | None = None,
    over: int = 1,
) -> Any:
    """Return the model with every tensor read from the checkpoint. (transformers would fill gaps with random numbers.)

    Args:
        path, dtype, device_map: as in ``Target.load``.
        folder: of the weight files.
        described: the model as ``_describe`` returns it.
        over: as in ``_read_weights``.
    """
    more: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if over > 1:
        more["distributed_config"] = DistributedConfig(tp_size=over)
    logging.disable_progress_bar()
    depth = int(getattr(described.config, "num_hidden_layers", 0) or 0)
    with checkpoint.open_weights(checkpoint.weight_files(folder)) as held:
        drafts = tuple(checkpoint.mtp_prefixes(held, depth))  # modules that only the proposer mtp reads
        tensors = {name: one for name, one in held.items() if not name.startswith(drafts)}
        try:
            # Given tensors and no path, transformers opens no file: no adapter, other format or other shard.
            model, report = type(described).from_pretrained(
                None, config=described.config, state_dict=tensors, dtype=DTYPES[dtype],
                ignore_mismatched_sizes=True, output_loading_info=True, **more,
            )  # fmt: skip
        except SafetensorError as error:
            raise OSError(
                f"{path} is truncated or corrupt ({checkpoint.one_line(error)}): copy or download it again"
            ) from error
    wrong = {f"{name} is missing" for name in report["missing_keys"]}
    wrong |= {f"{name} is {list(shape)}, not {list(own)}" for name, shape, own in report["mismatched_keys"]}
    wrong |= {f"{name} is in no layer of the model" for name in report["unexpected_keys"] if not _harmless(name)}
    if wrong:
        more_wrong = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the weights of {path} do not fit its config.json: {'; '.join(sorted(wrong)[:3])}{more_wrong}"
        )
    return model.eval()


def _harmless(tensor: str) -> bool:
    """Return whether a tensor that no layer reads is a table that the model computes itself.

    transformers drops more of them, by kind of model, before it reports unexpected tensors.
    """
    return tensor.endswith((".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.masked_bias", "position_ids"))
