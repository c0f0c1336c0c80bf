"""Loading a causal LM from a local path or the hub, and refusing what cannot be right.

At load the model decodes a scattered two-tree forest and compares it with plain forwards over every path; a model whose
logits differ is refused with the measured error. Kinds known to be wrong are refused by name before any weight is read.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from importlib.util import find_spec
from inspect import signature
from logging import getLogger
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file, logging

from spec_lab.core.draft import Draft, Shape
from spec_lab.core.files import read_json
from spec_lab.core.options import whole
from spec_lab.engine.attention import SPANS, Attention
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.models import checkpoint, ranks
from spec_lab.models import tensor_parallel as parallel

log = getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest error of a logit allowed by the self-check, in standard deviations of the plain forward's logits."""

MOST_TOKENS = 2**53
"""A length that no text has: tokenizers warn of texts that are longer than what their own settings say."""

CHANGING_ROPE = {"dynamic", "longrope"}
ALIBI = {"bloom", "mpt"}
NOT_FULL_ATTENTION = {"mamba", "mamba2", "rwkv", "falcon_mamba", "recurrent_gemma", "jamba", "gpt_neo", "zamba"}


class Unsupported(ValueError):
    """A model that cannot be decoded correctly here."""


@dataclass(frozen=True, eq=False)
class Target:
    """A causal LM with its tokenizer.

    Args:
        lm: the model with its cells.
        tokenizer: transformers' tokenizer; None where only token ids are used.
        name: the path or hub name as given.
        context: most tokens a sequence may have.
        sha256: of the weight files in order of name; empty for a model that was not read from files.
        self_check: the largest error that the check at load measured, in standard deviations of the logits.
    """

    lm: CausalLM
    tokenizer: Any
    name: str
    context: int
    sha256: str
    self_check: float

    @property
    def vocabulary(self) -> int:
        """V, the width of the logits."""
        return int(self.lm.model.get_output_embeddings().weight.shape[0])

    @property
    def ends(self) -> frozenset[int]:
        """The end-of-text tokens of the model's generation config and of the tokenizer, of those that the model has."""
        config = getattr(self.lm.model, "generation_config", None)
        named = [getattr(config, "eos_token_id", None), getattr(self.tokenizer, "eos_token_id", None)]
        flat = [token for one in named for token in (one if isinstance(one, list) else [one])]
        return frozenset(token for token in flat if token is not None and token < self.vocabulary)

    @staticmethod
    def load(
        path: str,
        device: str | None = None,
        dtype: str = "bfloat16",
        attention: Attention = "spans",
        context: int | None = None,
        chunk: int = 512,
        device_map: str | Mapping[str, str | int] | None = None,
        tensor_parallel: bool = False,
    ) -> Target:
        """Load from a local folder or by hub name; safetensors only, no remote code.

        A checkpoint is untrusted: ``spec_lab.models.checkpoint`` says what is read of it, and within which bounds.

        Args:
            path: folder of a checkpoint, or a hub name.
            device: "cpu", "cuda" or "cuda:N"; None, the CPU, unless one of the last two arguments decides.
            dtype: "bfloat16", "float16", "float32" or "float64".
            attention: "spans", or "dense" for models that do not use transformers' ``AttentionInterface``: slower, and
                a request whose logits are NaN then ends its whole batch.
            context: most tokens of a sequence; default the model's own limit, which it may not exceed.
            chunk: longest part of a prompt computed in one forward.
            device_map: for a model too large for one device, where its layers go: "auto" or "balanced" (accelerate
                spreads them over the GPUs, or takes the CPU where there is none), or the device of each module by name.
                Layers run one device after the other. (Tested with every layer on the CPU, and for mixed devices
                without numbers; not yet seen on several GPUs.)
            tensor_parallel: for the same, every layer is split over the ranks that torchrun started, by transformers'
                plan for this kind of model; each takes the GPU of its number, or the CPU with a CPU build of torch.
                To be asked for on the first rank, while the others ``follow``. (Tested with gloo on the CPU; not yet
                seen on several GPUs.)

        Raises:
            ValueError: an unknown device or dtype, no GPU, a bad context; a config that describes no model; weights
                for another config, more of them or fewer; an unreadable tokenizer, or one whose own vocabulary (without
                added tokens) has tokens that the model does not have; end-of-text tokens none of which the model has; a
                device map that leaves a module out, names none, or puts one on no device; ranks without torchrun, or
                that cannot share the heads evenly.
            OSError: no checkpoint there, or not as safetensors; a truncated or corrupt file, by its name; a file of the
                hub that cannot be fetched.
            Unsupported: the model fails the self-check, or is of a kind known to fail.
        """
        if attention not in ("spans", "dense"):
            raise ValueError(f"target.attention must be spans or dense, not {attention!r}")
        whole("target.chunk", chunk)
        if not isinstance(tensor_parallel, bool):
            raise ValueError(f"target.tensor_parallel must be true or false, not {tensor_parallel!r}")
        if tensor_parallel and attention == "dense":
            raise ValueError("target.tensor_parallel knows no dense masks; leave target.attention=dense out")
        given = {"device": device, "device_map": device_map, "tensor_parallel": tensor_parallel or None}
        if len(both := [f"target.{name}" for name, value in given.items() if value is not None]) > 1:
            raise ValueError(f"{' and '.join(both)} both say where the model goes; give one of them")
        model, tokenizer = load_model(path, "cpu" if device is None else device, dtype, device_map, tensor_parallel)
        own = model_context(model.config)
        if context is not None and (
            isinstance(context, bool) or not isinstance(context, int) or not 0 < context <= own
        ):
            raise ValueError(f"target.context must lie between 1 and the model's own {own}, not {context!r}")
        sha256 = weights_hash(path)
        error = checked(model, attention, sha256)
        lm = CausalLM(model, attention, chunk=chunk)
        return Target(lm, tokenizer, path, context or own, sha256, error)


def follow() -> None:
    """What every rank but the first does for tensor parallelism (``tensor_parallel.follow``)."""
    parallel.follow(_read_weights)


def load_model(
    path: str,
    device: str,
    dtype: str,
    device_map: str | Mapping[str, str | int] | None = None,
    tensor_parallel: bool = False,
) -> tuple[Any, Any]:
    """The model in eval mode and its tokenizer. Arguments and errors as in ``Target.load``."""
    if not isinstance(path, str) or not path:
        raise ValueError(f"path must name a folder of a checkpoint or a model of the hub, not {path!r}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    where = _device(device)
    if not File(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        hint = "" if "/" in path else "; give a model of the hub as owner/name, e.g. openai-community/gpt2"
        raise OSError(f"there is no folder {path}, and it is not a hub name (owner/name){hint}")
    folder, revision = _folder(path)
    config = _read_config(path, folder)
    _fetch_weights(path, folder, revision)
    described = _describe(path, folder, config)
    if device_map is not None or tensor_parallel:
        gc.collect()  # such models are in cycles: that of an earlier run must not fill the devices
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
        model = _fill(path, folder, described, dtype).to(where)
    vocabulary = int(described.get_output_embeddings().weight.shape[0])
    vocabulary = min(vocabulary, int(described.get_input_embeddings().weight.shape[0]))
    where_named, stops = checkpoint.stop_tokens(folder, getattr(config, "eos_token_id", None))
    model.generation_config = GenerationConfig(eos_token_id=check_stop_tokens(where_named, stops, vocabulary) or None)
    tokenizer = _read_tokenizer(path, folder, revision, config)
    check_vocabulary(path, tokenizer, vocabulary)
    return model, tokenizer


def _folder(path: str) -> tuple[File, str | None]:
    """The folder of a checkpoint, its files checked; for a hub name, the one in the cache, and its revision.

    Of a hub name, every file but the weights is fetched before it is checked.

    Raises:
        OSError: there is no config.json, or the hub cannot be reached.
        ValueError: as for ``checkpoint.check_files``.
    """
    if File(path).exists():
        folder, revision = File(path), None
    else:
        config = cached_file(path, "config.json")
        if config is None:
            raise OSError(f"{path} holds no config.json: give the hub name of a model written by save_pretrained")
        folder = File(config).parent
        revision = folder.name
        for name in ("generation_config.json", "adapter_config.json", *checkpoint.TOKENIZER_FILES):
            _fetched(path, name, revision)
    checkpoint.check_files(folder)
    return folder, revision


def _fetched(path: str, name: str, revision: str) -> bool:
    """Whether a model of the hub has such a file; then it is in the cache.

    Offline, a file that is not in the cache counts as one that the model does not have.

    Raises:
        OSError: the hub cannot be reached, or refuses.
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


def _fetch_weights(path: str, folder: File, revision: str | None) -> None:
    """Of a hub name, get the weight files into the cache.

    Raises:
        OSError: there are none, or they cannot be fetched.
        ValueError: as for ``checkpoint.shard_names``.
    """
    if revision is None or _fetched(path, checkpoint.SINGLE, revision):
        return
    _fetched(path, checkpoint.INDEX, revision)
    for name in checkpoint.shard_names(folder):
        _fetched(path, name, revision)


def _read_config(path: str, folder: File) -> Any:
    """The checkpoint's config.

    Raises:
        OSError: there is none.
        ValueError: it is not one that transformers can read.
        Unsupported: a kind known to fail.
    """
    fields = checkpoint.read_config(folder)
    try:
        kind = CONFIG_MAPPING[fields["model_type"]]
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'}: this transformers ({transformers.__version__}) knows no model_type "
            f"{fields['model_type']!r}; install a newer one, or take another model"
        ) from error
    try:
        config = kind.from_dict(_fields_of(kind, fields) | {"name_or_path": path})
        refuse_by_name(config)
        return config
    except Unsupported:
        raise
    except Exception as error:  # transformers raises whatever it trips over
        raise ValueError(
            f"{folder / 'config.json'} holds a value that it cannot have ({checkpoint.one_line(error)})"
        ) from error


def _describe(path: str, folder: File, config: Any) -> Any:
    """The model that a config describes, on torch's meta device, where it takes no memory.

    Raises:
        OSError: no weight files, or corrupt ones.
        ValueError: no causal LM, or one much larger than its weight files.
    """
    with checkpoint.open_weights(checkpoint.weight_files(folder)) as tensors:
        held, count = sum(math.prod(one.get_shape()) for one in tensors.values()), len(tensors)
    checkpoint.check_counts(folder, checkpoint.read_config(folder), count)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever it trips over
        raise ValueError(
            f"{folder / 'config.json'} describes no causal LM that transformers can build "
            f"({checkpoint.one_line(error)})"
        ) from error
    for what, size in (("parameters", model.parameters()), ("numbers in tables", model.buffers())):
        if (wanted := sum(tensor.numel() for tensor in size)) > 4 * held + 2**26:  # exact sizes are compared on loading
            raise ValueError(
                f"the weights of {path} do not fit its config.json, which describes a model with {wanted} {what}; the "
                f"weight files hold {held} parameters"
            )
    return model


def _fields_of(kind: type[PreTrainedConfig], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config's fields without those that would replace a method or a plan of its class."""
    known = {one.name for one in dataclass_fields(kind)} if is_dataclass(kind) else {*signature(kind).parameters}
    return {
        name: value
        for name, value in fields.items()
        if name in known or not hasattr(kind, name) or isinstance(getattr(kind, name), property)
    }


def check_vocabulary(path: str, tokenizer: Any, vocabulary: int) -> None:
    """Refuse a tokenizer whose own vocabulary has tokens that the model does not have.

    An added token may lie beyond the model's vocabulary, as a padding token that was added later often does: it is
    never emitted, and a prompt that holds it is refused.

    Raises:
        ValueError: names the token.
    """
    added = tokenizer.get_added_vocab()
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= vocabulary}
    own = {token: number for token, number in beyond.items() if token not in added}
    token, largest = max((own or beyond).items(), key=lambda item: item[1], default=("", -1))
    if own:
        raise ValueError(
            f"the tokenizer of {path} has the token {token!r} with the id {largest}, but the model has {vocabulary} "
            "tokens, from 0: they do not belong together; take the tokenizer that came with the weights"
        )
    if beyond:
        more = f" (and {len(beyond) - 1} more)" if len(beyond) > 1 else ""
        log.warning(
            "the tokenizer of %s has the added token %r with the id %d%s, but the model has %d tokens: such a token is "
            "never emitted, and prompts that hold it are refused", path, token, largest, more, vocabulary,
        )  # fmt: skip


def check_stop_tokens(where: str, tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Return the end-of-text tokens that the model has; the others, which it never emits, are ignored with a warning.

    Args:
        where: the file that names them.
        tokens: their ids.
        vocabulary: number of the model's tokens.

    Raises:
        ValueError: tokens are named, but the model has none of them.
    """
    held = [token for token in tokens if token < vocabulary]
    if tokens and not held:
        raise ValueError(
            f"{where}: eos_token_id {tokens[0]} is not a token: the model has {vocabulary}, from 0; correct it, or "
            "remove the field"
        )
    if len(held) < len(tokens):
        beyond = next(token for token in tokens if token >= vocabulary)
        log.warning(
            "%s: eos_token_id %d is ignored: the model has %d tokens and never emits it", where, beyond, vocabulary
        )
    return held


def _device(name: str | int) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: there is none, or nothing can be computed on it here.
    """
    try:
        where = torch.device(f"cuda:{name}" if isinstance(name, int) else name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {name!r}; choose cpu, cuda or cuda:N") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; choose cpu, cuda or cuda:N")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise ValueError(f"device {name!r} asked for, but this torch sees {seen or 'no'} GPU; use device=cpu")
    return where


def check_device_map(model: Any, device_map: Any) -> None:
    """Refuse what transformers would overlook: it puts what a map leaves out on the CPU, and skips names of nothing.

    Args:
        model: as its config describes it; its weights are not needed.
        device_map: as in ``Target.load``.

    Raises:
        ValueError: as in ``Target.load``.
    """
    if find_spec("accelerate") is None:
        raise ValueError("target.device_map needs the package accelerate: pip install 'spec-lab[large]'")
    if device_map in ("auto", "balanced"):
        return
    if not isinstance(device_map, Mapping) or not device_map:
        raise ValueError(f"target.device_map must be auto, balanced or a device for each module, not {device_map!r}")
    for module, device in device_map.items():
        if device in ("disk", "meta"):
            raise ValueError(f"target.device_map puts {module or 'the model'} on {device}: nothing is computed there")
        try:
            _device(device)
        except ValueError as error:
            raise ValueError(f"target.device_map, {module or 'the whole model'}: {error}") from error
    if wrong := [module for module in device_map if module not in dict(model.named_modules())]:
        parts = ", ".join(name for name, _ in [*model.named_children(), *model.base_model.named_children()])
        raise ValueError(f"target.device_map names {wrong[0]!r}, which is no module of the model (of {parts}, ...)")
    tensors = [name for kind in (model.named_parameters, model.named_buffers) for name, _ in kind()]
    bare = [name for name in tensors if not any(f"{name}.".startswith(f"{one}." * bool(one)) for one in device_map)]
    if bare:
        raise ValueError(f"target.device_map says not where {bare[0].rpartition('.')[0]} goes")


def refuse_offloading(model: Any) -> None:
    """Refuse a model of which parts would be copied to a GPU for every forward: its timings would measure the copies.

    Raises:
        ValueError: names such a part.
    """
    places = getattr(model, "hf_device_map", None) or {}  # none where all is on one device
    off = [module for module, device in places.items() if str(device) in ("cpu", "disk")]
    if off and len({str(device) for device in places.values()}) > 1:
        raise ValueError(
            f"target.device_map leaves no GPU for {off[0]} and {len(off) - 1} more modules (they went to "
            f"{places[off[0]]}); use more GPUs, or a smaller target.dtype"
        )


def check_ranks(config: Any) -> None:
    """Refuse to split a model that transformers has no plan for, or over ranks that cannot share its heads.

    Raises:
        ValueError: no torchrun, ranks that do not fit the heads or the GPUs, or this is not the first rank.
        Unsupported: no plan.
    """
    size, local = ranks.size(), ranks.size_here()
    if not ranks.started():
        raise ValueError("target.tensor_parallel needs ranks: torchrun --nproc-per-node 2 -m spec_lab ... starts two")
    if ranks.rank():
        raise ValueError(f"rank {ranks.rank()} cannot lead: only the first rank loads a target, the others follow()")
    if "tp_size" not in signature(DistributedConfig).parameters:
        raise ValueError("target.tensor_parallel needs a newer transformers, whose DistributedConfig has a tp_size")
    if 0 < torch.cuda.device_count() < local:
        raise ValueError(
            f"target.tensor_parallel: torchrun started {local} ranks here, but this torch sees "
            f"{torch.cuda.device_count()} GPU; start as many ranks"
        )
    if torch.version.cuda and not torch.cuda.is_available():  # transformers would take the GPUs that are not there
        raise ValueError("target.tensor_parallel: this torch is built for CUDA and sees no GPU; use a CPU build of it")
    if not getattr(config, "base_model_tp_plan", None):
        raise Unsupported(
            f"model type '{config.model_type}' cannot be split: transformers has no tensor-parallel plan for it; "
            "use target.device_map"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or size
        if heads % size:
            raise ValueError(f"target.tensor_parallel: {heads} heads ({name}) cannot be shared by {size} ranks evenly")


def _read_weights(path: str, dtype: str, over: int = 1, threads: int | None = None, sha256: str = "") -> Any:
    """What a rank of tensor parallelism does to load its part of a model.

    Args:
        path, dtype: as in ``Target.load``.
        over: number of ranks over which the model is split; this one reads its part.
        threads: for torch to use, on ranks to which nobody else says so.
        sha256: ``weights_hash`` on the first rank, with which the others compare theirs; empty for a hub name.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    folder, revision = _folder(path)
    config = _read_config(path, folder)
    _fetch_weights(path, folder, revision)
    model = _fill(path, folder, _describe(path, folder, config), dtype, over=over)
    if ranks.rank() and sha256 and weights_hash(path) != sha256:
        raise OSError(f"{path} holds other weights than on the first rank: copy the same checkpoint to every machine")
    return model


def _fill(
    path: str,
    folder: File,
    described: Any,
    dtype: str,
    device_map: str | Mapping[str, str | int] | None = None,
    over: int = 1,
) -> Any:
    """The model with every tensor from the checkpoint. (transformers would fill gaps with random numbers.)

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
    with checkpoint.open_weights(checkpoint.weight_files(folder)) as tensors:
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
    wrong |= {f"{name} is {list(has)}, not {list(wants)}" for name, has, wants in report["mismatched_keys"]}
    wrong |= {f"{name} is in no layer of the model" for name in report["unexpected_keys"] if not _harmless(name)}
    if wrong:
        more_wrong = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the weights of {path} do not fit its config.json: {'; '.join(sorted(wrong)[:3])}{more_wrong}"
        )
    return model.eval()


def _harmless(tensor: str) -> bool:
    """Whether a tensor without a place in the model is a table that the model computes itself.

    transformers leaves out more of them, by the kind of model, before they are asked for here.
    """
    return tensor.endswith((".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.masked_bias", "position_ids"))


def _read_tokenizer(path: str, folder: File, revision: str | None, config: Any) -> Any:
    """The tokenizer.

    Raises:
        ValueError: a file that is missing or corrupt, or a tokenizer_class that is no tokenizer.
    """
    try:
        asked = read_json(folder / "tokenizer_config.json", any_number=True) or {}
        for name in (asked.get("tokenizer_class"), getattr(config, "tokenizer_class", None)):
            _check_tokenizer_class(name)
        for name in ("init_inputs", "fast_tokenizer_files"):  # arguments and files of the checkpoint's own choice
            if asked.get(name):
                raise ValueError(f"tokenizer_config.json sets {name}")
        more = {} if revision is None else {"revision": revision}
        tokenizer = AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=False, **more)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"tokenizer_config.json leads to a {type(tokenizer).__name__}")
        tokenizer.model_max_length = MOST_TOKENS  # the length of a prompt is checked against the target's context
        tokenizer.decode(tokenizer.encode("a b"), skip_special_tokens=True)
        return tokenizer
    except Exception as error:  # tokenizers raises plain Exceptions, transformers whatever it trips over
        raise ValueError(
            f"the tokenizer of {path} cannot be read ({checkpoint.one_line(error)}): its tokenizer_config.json or "
            "its tokenizer.json is missing or corrupt; copy or download it again"
        ) from error


def _check_tokenizer_class(name: Any) -> None:
    """Refuse the name of anything in transformers that is no tokenizer: its ``from_pretrained`` could read pickles.

    Raises:
        ValueError: it is.
    """
    if name is None:
        return
    if not isinstance(name, str):
        raise ValueError(f"tokenizer_class must be the name of a tokenizer, not {name!r}")
    for one in (name, name.removesuffix("Fast")):
        found = getattr(transformers, one, None)
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise ValueError(f"tokenizer_class {name!r} is no tokenizer of transformers")


def model_context(config: Any) -> int:
    """The most tokens a model's positions allow."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if value := getattr(config, name, None):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{config.model_type}: {name} must be a whole number of 1 or more, not {value!r}")
            return int(value)
    raise Unsupported(f"{config.model_type}: the config names no longest context; set max_position_embeddings in it")


def refuse_by_name(config: Any) -> None:
    """Refuse kinds whose positions or attention look at the whole pack.

    Raises:
        Unsupported: dynamic or longrope RoPE, ALiBi, sliding windows, linear attention, encoder-decoders.
    """
    kind = config.model_type

    def refuse(why: str) -> None:
        raise Unsupported(f"model type '{kind}' is not supported: {why}")

    rope = getattr(config, "rope_parameters", None) or {}
    parts = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for part in parts:
        if isinstance(part, dict) and part.get("rope_type", part.get("type")) in CHANGING_ROPE:
            refuse(f"its {part.get('rope_type', part.get('type'))} RoPE changes with the longest position in the pack")
    if kind in ALIBI or getattr(config, "alibi", False):
        refuse("ALiBi biases depend on places in the pack, not on positions")
    if kind == "xglm":
        refuse("its code of transformers runs through neither attention path, spans or dense")
    if kind in NOT_FULL_ATTENTION:
        refuse("it does not attend to all earlier tokens in every layer")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    layers = set(getattr(config, "layer_types", None) or [])
    if layers - {"full_attention"}:
        refuse(
            f"it has layers of type {', '.join(sorted(layers - {'full_attention'}))}; only full attention keeps trees"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) and not layers:
        refuse(f"it has a sliding window of {config.sliding_window} tokens; set sliding_window to null if it may go")


def self_check(model: nn.Module, attention: Attention) -> float:
    """Decode a scattered two-tree forest and compare with plain forwards over every path.

    Also ask every rotary embedding whether a token's rotation changes when a far position joins the pack.

    Returns:
        The largest error of a logit, in standard deviations of the plain logits.

    Raises:
        Unsupported: the error exceeds the tolerance of the model's dtype, or the model cannot run so at all.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    try:
        error = max(_forest_error(model, attention), _rotation_error(model))
    except Unsupported:
        raise
    except (
        ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
    ) as failure:  # fmt: skip
        advice = "; try target.attention=dense" if attention == "spans" else ""
        raise Unsupported(
            f"model type '{kind}' cannot decode forests with attention='{attention}' "
            f"({type(failure).__name__}: {failure}){advice}"
        ) from failure
    allowed = TOLERANCE[model.dtype]  # type: ignore[index]
    if not error <= allowed:
        raise Unsupported(
            f"model type '{kind}' decodes forests wrongly with attention='{attention}': its logits differ from a plain "
            f"forward's by {error:.2g} standard deviations, allowed are {allowed:g} in {model.dtype}"
        )
    return error


_CHECKED: dict[tuple[str, ...], float] = {}
"""What ``self_check`` found of checkpoints in this process, so that a sweep's next job need not check them again."""


def checked(model: Any, attention: Attention, sha256: str) -> float:
    """``self_check``, once in a process for the same weights (by their ``weights_hash``) in the same setting."""
    places = f"{model.device} {getattr(model, 'hf_device_map', None)} {getattr(model, 'tp_size', None)}"
    setting = (sha256, model.config.to_json_string(), str(model.dtype), places, attention)
    if sha256 and setting in _CHECKED:
        return _CHECKED[setting]
    error = self_check(model, attention)
    if sha256:
        _CHECKED[setting] = error
    return error


def _forest_error(model: Any, attention: Attention) -> float:
    lm = CausalLM(model, attention)
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    generator = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return generator.integers(0, vocabulary, count).tolist()

    prompts = [some(7), some(4)]
    paths = [lm.open() for _ in prompts]
    # A first forest whose nodes are partly rejected leaves holes, so the second one lies scattered.
    first = Draft(Shape(2, np.array([0, 0, 3, 1, 5])), torch.tensor(some(5), device=lm.device))
    output = lm.forward(paths, prompts, first)
    worst = _compare(model, prompts, first, output.logits)
    for path, accepted in zip(paths, ([1, 2], []), strict=True):
        path.accept(accepted)
    tokens = [prompts[0] + first.token[[1, 2]].tolist(), prompts[1]]
    pending = [some(1), some(2)]
    second = Draft(Shape(2, np.array([0, 0, 2, 1, 1, 6])), torch.tensor(some(6), device=lm.device))
    output = lm.forward(paths, pending, second)
    tokens = [done + more for done, more in zip(tokens, pending, strict=True)]
    return max(worst, _compare(model, tokens, second, output.logits))


@torch.inference_mode()
def _rotation_error(model: Any) -> float:
    """How much near positions' rotations move when the longest position joins the pack."""
    errors = [0.0]
    near = torch.arange(4, device=model.device)[None]
    both = torch.cat([near, torch.tensor([[model_context(model.config) - 1]], device=model.device)], dim=1)
    for module in model.modules():
        if hasattr(module, "inv_freq") and "position_ids" in signature(module.forward).parameters:
            like = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
            alone, joined = module(like, position_ids=near), module(like, position_ids=both)
            for a, b in zip(alone, joined, strict=True):
                errors.append(float((a - b[:, :4]).abs().max()))
    return _largest(errors)


@torch.inference_mode()
def _compare(model: Any, tokens: Sequence[list[int]], draft: Draft, logits: Tensor) -> float:
    """Largest error of any row against a plain forward over a path to a leaf, with transformers' own attention."""
    errors, ours = [], model.config._attn_implementation
    if ours == SPANS:
        model.set_attn_implementation("sdpa")
    for leaf in (row for row in range(draft.shape.rows) if not len(draft.shape.children[row])):
        nodes = [int(node) for node in draft.shape.path(leaf)]
        path = [int(draft.token[node - draft.shape.roots]) for node in nodes]
        root = int(draft.shape.root[leaf])
        ids = torch.tensor([tokens[root] + path], device=logits.device)
        plain = model(input_ids=ids, use_cache=False).logits[0, -len(path) - 1 :].double()
        for row, expected in zip([root, *nodes], plain, strict=True):
            errors.append(float((logits[row].double() - expected).abs().max() / expected.std()))
    if ours == SPANS:
        model.set_attn_implementation(SPANS)
    return _largest(errors)


def _largest(errors: Sequence[float]) -> float:
    """The largest; infinity where one of them is NaN, which ``max`` would overlook."""
    largest = float(np.max(errors))
    return largest if np.isfinite(largest) else float("inf")


def weights_hash(path: str) -> str:
    """SHA-256 over a local checkpoint's weight files in order of name, exactly those that are loaded; empty for a hub
    name.

    Raises:
        OSError, ValueError: a folder whose weight files are not to be loaded (``checkpoint.weight_files``).
    """
    if not File(path).is_dir():
        return ""
    digest = hashlib.sha256()
    for file in checkpoint.weight_files(File(path)):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
