"""Load a causal LM and its tokenizer from a local folder or from the hub: safetensors only, no remote code."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from spec_lab.core import device_memory
from spec_lab.models import checkpoint, ranks
from spec_lab.models import tensor_parallel as parallel
from spec_lab.models.checkpoint import weight_files, weights_hash
from spec_lab.models.configs import Config, read_model_config
from spec_lab.models.hub import open_checkpoint
from spec_lab.models.placement import (
    DTYPES,
    check_device_map,
    check_ranks,
    check_weights_fit,
    device_of,
    refuse_offloading,
)
from spec_lab.models.quantization import (
    SKIPPED,
    Quantization,
    arguments,
    carried,
    check_quantized_fit,
    chosen,
    own_config,
)
from spec_lab.models.support import Unsupported
from spec_lab.models.text_part import text_modules, text_tensors
from spec_lab.models.tokenizer import check_stop_tokens, check_vocabulary, read_tokenizer
from spec_lab.models.torchao_files import read_torchao
from spec_lab.runners import quantized

LOG = logging.getLogger(__name__)

PACKED = 8
"""Maximum number of quantized weights in one number of a weight file: 4 bits in an int32."""


def follow() -> None:
    """Serve rank 0 on any other rank of tensor parallelism (``tensor_parallel.follow``)."""
    parallel.follow(_read_weights)


def load_model(
    path: str,
    device: str,
    dtype: str,
    device_map: str | Mapping[str, str | int] | None = None,
    tensor_parallel: bool = False,
    quantization: str | None = None,
    group_size: int | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """Load a model, in eval mode, and its tokenizer. Arguments and errors as in ``Target.load``."""
    if not isinstance(path, str) or not path:
        raise ValueError(f"path must name a folder of a checkpoint or a model of the hub, not {path!r}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    where = device_of(device)
    if device_map is not None or tensor_parallel:
        computes = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        computes = where
    asked = chosen(quantization, group_size, computes, dtype)
    checked = describe(path, lambda folder: _quantization(folder, asked, computes, dtype, tensor_parallel), revision)
    if device_map is not None or tensor_parallel:
        gc.collect()  # such models are part of reference cycles: free that of an earlier run before this one is loaded
    if device_map is not None:
        check_device_map(checked.model, device_map)
        model = _fill(path, checked, dtype, device_map=device_map)
        refuse_offloading(model)
    elif tensor_parallel:
        check_ranks(checked.model.config)
        if ranks.size() > 1:
            how = {
                "path": path, "dtype": dtype, "over": ranks.size(), "threads": torch.get_num_threads(),
                "revision": checked.commit, "sha256": weights_hash(checked.folder),
            }  # fmt: skip
            model = parallel.join().load(_read_weights, **how)
        else:
            model = _fill(path, checked, dtype).to("cuda" if torch.cuda.is_available() else "cpu")
    else:
        if checked.quantization is None:
            # Weights are read to a GPU tensor by tensor; without accelerate on the CPU, and copied from there.
            for memory_device in {where} if _reads_directly(where, None) else {torch.device("cpu"), where}:
                room = device_memory.available(memory_device)
                check_weights_fit(path, checked.model, dtype, memory_device, room, stays=memory_device == where)
        elif not checked.config.multimodal:  # whose files hold more than the text part
            files, room = weight_files(checked.folder), device_memory.available(where)
            check_quantized_fit(path, checked.model, checked.quantization, DTYPES[dtype], files, where, room)
        model = _fill(path, checked, dtype, where=where).to(where)
    tokenizer, stops = read_texts(path, checked)
    model.generation_config = GenerationConfig(eos_token_id=stops or None)
    return LoadedModel(model, tokenizer, checked.folder)


class LoadedModel(NamedTuple):
    """A model that was loaded."""

    model: Any
    """In eval mode."""
    tokenizer: Any
    folder: Path
    """Folder of the checkpoint's files; in the cache for a hub name."""


class CheckedCheckpoint(NamedTuple):
    """A checkpoint whose files were checked, before its weights are read."""

    folder: Path
    """Folder of its files; in the cache for a hub name."""
    commit: str | None
    """Commit of a hub name."""
    model: Any
    """The model that its config describes, on torch's meta device; of a multimodal checkpoint its text part."""
    config: Config
    """Config of the checkpoint."""
    quantization: Quantization | None = None
    """How it is quantized, or is to be quantized while it is loaded."""

    def model_tensors(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return those of the checkpoint's tensors that belong to ``model``, under its names.

        Raises:
            ValueError: as in ``text_part.text_tensors``.
        """
        return text_tensors(tensors) if self.config.multimodal else tensors


def describe(
    path: str, quantize: Callable[[Path], Quantization | None] = lambda _: None, revision: str | None = None
) -> CheckedCheckpoint:
    """Check the files of a checkpoint, after downloading them for a hub name, and describe its model.

    Args:
        path: the folder or hub name as given.
        quantize: returns how the checkpoint of a folder is quantized, before its weights are downloaded.
        revision: branch, tag or commit of a hub name; None: main.

    Raises:
        OSError, ValueError, Unsupported: as in ``Target.load``.
    """
    files = open_checkpoint(path, revision)
    config = read_model_config(path, files.folder)
    quantization = quantize(files.folder)
    files.fetch_weights()
    model = _describe(path, files.folder, config.loaded)
    return CheckedCheckpoint(files.folder, files.commit, model, config, quantization)


def _quantization(
    folder: Path, asked: Quantization | None, where: torch.device, dtype: str, tensor_parallel: bool
) -> Quantization | None:
    """Return how the model of a checkpoint is quantized."""
    config = checkpoint.read_quantization(folder)
    if asked is not None and config is not None:
        raise ValueError(
            f"target.quantization={asked.method} requires an unquantized checkpoint, and {folder} has a "
            "quantization_config: set target.quantization=null"
        )
    quantization = asked if config is None else carried(folder, config, where, dtype)
    if quantization is not None and tensor_parallel:
        raise Unsupported(f"target.tensor_parallel does not support quantized targets ({quantization.method})")
    return quantization


def read_texts(path: str, checked: CheckedCheckpoint) -> tuple[Any, list[int]]:
    """Return a checkpoint's tokenizer and its end-of-text tokens, both checked against the model's vocabulary.

    Args:
        path: the folder or hub name as given.
        checked: what ``describe`` returned for it.

    Raises:
        OSError, ValueError: as in ``Target.load``.
    """
    described = checked.model
    vocabulary = int(described.get_output_embeddings().weight.shape[0])
    vocabulary = min(vocabulary, int(described.get_input_embeddings().weight.shape[0]))
    where, stops = checkpoint.stop_tokens(checked.folder, getattr(described.config, "eos_token_id", None))
    stops = check_stop_tokens(where, stops, vocabulary)
    tokenizer = read_tokenizer(path, checked.folder, checked.config.whole)
    check_vocabulary(path, tokenizer, vocabulary)
    return tokenizer, stops


def _describe(path: str, folder: Path, config: Any) -> Any:
    """Return the model that a config describes on torch's meta device, where it needs no memory."""
    with checkpoint.open_weights(checkpoint.weight_files(folder)) as tensors:
        held, count = sum(math.prod(tensor.get_shape()) for tensor in tensors.values()), len(tensors)
    checkpoint.check_counts(folder, checkpoint.read_config(folder), count)
    max_quotient = 4 if checkpoint.read_quantization(folder) is None else 4 * PACKED
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
        checkpoint.check_described(path, f"a model with {{}} {what}", described, held, max_quotient)
    return model


def _read_weights(
    path: str, dtype: str, over: int = 1, threads: int | None = None, sha256: str = "", revision: str | None = None
) -> Any:
    """Load this rank's part of a model for tensor parallelism.

    Args:
        path, dtype: as in ``Target.load``.
        over: number of ranks over which the model is split.
        threads: for torch to use; None leaves the number as it is.
        sha256: ``weights_hash`` on rank 0, with which the other ranks compare theirs.
        revision: commit of a hub name.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    checked = describe(path, revision=revision)
    model = _fill(path, checked, dtype, over=over)
    if ranks.rank() and sha256 and weights_hash(checked.folder) != sha256:
        raise OSError(f"{path} holds other weights than on rank 0: copy the same checkpoint to every machine")
    return model


def _fill(
    path: str,
    checked: CheckedCheckpoint,
    dtype: str,
    where: torch.device | None = None,
    device_map: str | Mapping[str, str | int] | None = None,
    over: int = 1,
) -> Any:
    """Return the model with every tensor read from the checkpoint. (transformers would fill gaps with random numbers.)

    Args:
        path, dtype, device_map: as in ``Target.load``.
        where: the device; None for several. Models that are not read to it are moved by the caller.
        over: as in ``_read_weights``.
    """
    described, how = checked.model, checked.quantization
    more: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if over > 1:
        more["distributed_config"] = DistributedConfig(tp_size=over)
    if device_map is None and where is not None and _reads_directly(where, how):
        more["device_map"] = {"": where}
    if how is not None:
        more |= arguments(how, where or torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[dtype])
        if (config := own_config(how, DTYPES[dtype])) is not None:
            described.config.quantization_config = _of_the_text_part(config) if checked.config.multimodal else config
    transformers_logging.disable_progress_bar()
    depth = int(getattr(described.config, "num_hidden_layers", 0) or 0)
    files, rounds = checkpoint.weight_files(checked.folder), False
    with checkpoint.open_weights(files) as held:
        drafts = tuple(checkpoint.mtp_prefixes(held, depth))  # modules that only the proposer mtp reads
        tensors = {name: tensor for name, tensor in held.items() if not name.startswith(drafts)}
        if how is not None and how.method == "torchao":
            tensors, rounds = read_torchao(files, tensors, path, DTYPES[dtype])
        if how is not None and how.dequantized:
            quantized.check_scales(path, tensors)
        tensors = checked.model_tensors(tensors)
        try:
            # Given tensors and no path, transformers opens no file: no adapter, other format or other shard.
            model, report = type(described).from_pretrained(
                None, config=described.config, state_dict=tensors, dtype=DTYPES[dtype],
                ignore_mismatched_sizes=True, output_loading_info=True, **more,
            )  # fmt: skip
        except SafetensorError:
            raise  # ``open_weights`` names the files
        except Exception as error:  # packages of quantization raise errors of many types
            if how is None or isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise
            raise ValueError(
                f"{path} cannot be loaded with quantization {how.method} ({checkpoint.one_line(error)})"
            ) from error
    report["unexpected_keys"] = [name for name in report["unexpected_keys"] if not _harmless(name)]
    checkpoint.refuse_misfits(path, checkpoint.misfits_of(report))
    if checked.config.multimodal and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # transformers does not tie weights that the checkpoint holds apart
    if how is not None:
        if how.package == "bitsandbytes":  # it warns in every forward that activations are rounded from float16
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        if how.method == "bitsandbytes":
            quantized.in_dtype(model, DTYPES[dtype])
        _record(path, checked, model, how.facts() | ({"rounds": True} if rounds else {}))
    return model.eval()


def _reads_directly(where: torch.device, how: Quantization | None) -> bool:
    """Whether weights are read to a device tensor by tensor, so that they need not fit the host's memory.

    transformers requires accelerate for that, as do the packages of quantization that do so.
    """
    if where.type != "cuda" or (how is not None and how.method == "torchao"):
        return False
    return how is not None or find_spec("accelerate") is not None


def _of_the_text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``quantization_config`` whose names of modules are those of the text part."""
    return {
        name: text_modules(value) if name in (*SKIPPED, "modules_to_convert") and value is not None else value
        for name, value in config.items()
    }


def _record(path: str, checked: CheckedCheckpoint, model: Any, facts: dict[str, Any]) -> None:
    """Keep how a model is quantized in its config, and how much of it."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    if not (isinstance(head, torch.Tensor) and type(head.data) is torch.Tensor and head.is_floating_point()):
        raise Unsupported(f"{path} is not supported: its LM head is quantized")
    share = quantized.quantized_share(checked.model, model)
    if not facts["dequantized"] and share < MIN_SHARE:
        asked = f"{path}, quantized with {facts['method']}"
        if not share and not facts["carried"]:
            raise Unsupported(
                f"{asked}: no layer can be quantized. Only linear layers are, and for torchao_int4 only those whose "
                "number of inputs is a multiple of target.quantization_group_size"
            )
        LOG.warning("%s: %.0f %% of the weights of its layers are quantized", asked, 100 * share)
    quantized.record(model, facts | {"share": None if facts["dequantized"] else round(share, 4)})


MIN_SHARE = 0.9
"""Share of the weights outside embeddings and LM head below which a warning says how many are quantized."""


def _harmless(tensor: str) -> bool:
    """Return whether a tensor that no layer reads is a table that the model computes itself.

    transformers drops more of them, by kind of model, before it reports unexpected tensors.
    """
    return tensor.endswith((".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.masked_bias", "position_ids"))
