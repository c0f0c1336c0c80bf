"""Files of EAGLE heads: the official format, SpecForge's and SGLang's, and that of vLLM's speculators.

A folder holds ``config.json`` and weights in safetensors; both are untrusted input (``models.checkpoint``). The format
is detected: ``speculators_model_type`` in the config is speculators'; tensors of a ``midlayer`` or a draft vocabulary
are EAGLE-3 as its authors, SpecForge and SGLang write it; ``fc.weight`` and ``layers.0`` alone are EAGLE-1 or EAGLE-2.

Names and conventions that differ, and what they become here:

- ``midlayer.*`` is layer 0; so is ``transformer.*`` of speculators' EAGLE-1, where ``fc`` is ``fusion_fc``.
- ``d2t`` is an offset: draft token i is the target's token i + d2t[i]. ``t2d`` marks these tokens.
- Taps: ``eagle_aux_hidden_state_layer_ids`` at the top level are numbers of hidden states (number i is the input of
  layer i); inside ``eagle_config`` they are numbers of layers whose outputs are read, which is one less. Without either
  they are hidden states 2, L // 2 and L - 3. They are read in the order of the layers, whatever the order of the list:
  so do engines, which collect them as the layers run.
- Fields that may change what is computed, and are not read, are refused by name (``FIRST``, ``THIRD``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spec_lab.core.options import brief
from spec_lab.core.tensors import readable
from spec_lab.drafters.draft_layers import load_weights
from spec_lab.drafters.drafter_files import (
    LAYER,
    OF_LAYERS,
    Fields,
    flag,
    misfits,
    named_by,
    read_weight,
    refuse,
    refuse_windows,
    taps,
    whole,
    write_drafter,
)
from spec_lab.drafters.eagle.network import Eagle3Settings, EagleSettings, Network, Settings
from spec_lab.models.checkpoint import open_weights, read_drafter_config, weight_files, weights_hash
from spec_lab.models.target import Target

log = logging.getLogger(__name__)

TAPS = "eagle_aux_hidden_state_layer_ids"
TABLES = ("d2t", "t2d")
FORMAT_VERSION = "0.3.0"


@dataclass(frozen=True, eq=False)
class EagleHead:
    """A head that was read.

    Args:
        network: bound to the target.
        name: "eagle" or "eagle3".
        sha256: of its weight files.
        tokens: how many of the target's tokens it drafts.
    """

    network: Network
    name: str
    sha256: str
    tokens: int


def read_eagle(path: str, target: Target, dtype: torch.dtype | None = None) -> EagleHead:
    """Read a head for a target, onto its device.

    Args:
        path: folder of the head.
        target: the target.
        dtype: of the head; None: the target's.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no EAGLE head; the config describes none that is supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; ``d2t`` is no offset; the head is for another hidden size, another
            vocabulary or hidden states that the target does not have.
    """
    dtype = dtype or target.lm.dtype
    folder, config = read_drafter_config(path, "an EAGLE head")
    with open_weights(weight_files(folder)) as held:
        shapes = {name: tuple(one.get_shape()) for name, one in held.items()}
        settings = _settings(folder, config, shapes, target)
        with named_by(folder):
            network = settings.network()
        names = _names(folder, network, shapes)
        tensors = {own: read_weight(folder, held, name, dtype) for name, own in names.items()}
        tables = {name: held[name][:] for name in TABLES if name in shapes}
    name, tokens = "eagle", target.vocabulary
    if isinstance(settings, Eagle3Settings):
        name, tokens = "eagle3", settings.draft_vocab_size or tokens
        network.ids = draft_tokens(folder, settings, tables)
    load_weights(network, tensors, target.services, target.lm.device, dtype)
    return EagleHead(network, name, weights_hash(path), tokens)


def draft_tokens(folder: Path, settings: Eagle3Settings, tables: Mapping[str, Tensor]) -> Tensor:  # [W]
    """The target's number of each draft token, from ``d2t`` and ``t2d``.

    Raises:
        ValueError: a smaller vocabulary without ``d2t``; tables of other shapes; a ``d2t`` that is no offset.
    """
    v, w = settings.vocab_size, settings.draft_vocab_size
    if w is None:
        return torch.arange(0)
    if "d2t" not in tables:
        if w == v:
            return torch.arange(w)
        raise ValueError(
            f"{folder} drafts {w} of the target's {v} tokens, but holds no d2t that states which: the head was saved "
            "without it and would draft wrong tokens; export it again"
        )
    d2t, t2d = tables["d2t"], tables.get("t2d")
    if d2t.shape != (w,) or d2t.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{folder}: d2t must hold {w} whole numbers, not {list(d2t.shape)} of {d2t.dtype}")
    ids = torch.arange(w) + d2t
    fine = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < v
    if fine and t2d is not None:
        fine = t2d.shape == (v,) and bool(torch.equal(t2d.bool().nonzero()[:, 0], ids))
    if not fine:
        raise ValueError(
            f"{folder}: d2t is no offset: draft token i is the target's token i + d2t[i], which must ascend, lie below "
            f"{v} and be the tokens that t2d marks"
        )
    return ids


def _settings(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: Target
) -> Settings:
    """Return the settings of the head. Errors as of ``read_eagle``."""
    file = folder / "config.json"
    kind = config.get("speculators_model_type")
    layer = config.get("transformer_layer_config") if kind is not None else config
    if kind not in (None, "eagle", "eagle3"):
        raise ValueError(f"{file}: speculators_model_type {brief(kind)} is not supported: choose eagle or eagle3")
    if not isinstance(layer, dict):
        raise ValueError(f"{file}: transformer_layer_config must be a mapping, not {brief(layer)}")
    third = kind == "eagle3" or any(name.startswith("midlayer.") or name in TABLES for name in shapes)
    if not third and not {"fc.weight", "fusion_fc.weight"} & shapes.keys():
        some = ", ".join(sorted(shapes)[:5]) or "none"
        raise ValueError(f"{folder} holds no EAGLE head, whose tensors include fc.weight (it holds: {some})")
    h = whole(file, layer, "hidden_size")
    layers = whole(file, layer, "num_hidden_layers", default=1)
    if layers > len(shapes):
        raise ValueError(f"{file}: num_hidden_layers is {layers}, but the weight files hold {len(shapes)} tensors")
    refuse_windows(file, layer)
    if layer is config:
        (THIRD if third else FIRST).check(file, config, "eagle_config")
    else:
        SPECULATORS.check(file, config)
        LAYER.check(file, layer)
    v, wide = target.vocabulary, target.services.hidden_size
    if (size := layer.get("vocab_size", v)) != v:
        raise ValueError(
            f"the EAGLE head at {folder} is for a vocabulary of {brief(size)} tokens, the target {target.name} has {v}"
        )
    fields = {name: layer[name] for name in (*OF_LAYERS, *WINDOWS) if name in layer}
    fields["model_type"] = layer.get("model_type", "llama")
    if fields["model_type"] == "llama" and any(name.endswith("self_attn.q_norm.weight") for name in shapes):
        fields["model_type"] = "qwen3"  # Llama's layers with norms of queries and keys, as DeepSpec writes them
    if fields.get("head_dim") is None and isinstance(heads := layer.get("num_attention_heads"), int) and heads:
        fields["head_dim"] = h // heads
    fields["max_position_embeddings"] = whole(file, layer, "max_position_embeddings", default=max(target.context, 1))
    if not third:
        if h != wide:
            raise ValueError(f"the EAGLE head at {folder} is for hidden size {h}, the target {target.name} has {wide}")
        if kind == "eagle" and flag(file, config, "layernorms"):
            raise ValueError(f"{file}: layernorms=true is not supported: choose a head without further norms")
        bias = flag(file, config, "fusion_bias") if kind == "eagle" else flag(file, config, "bias", default=True)
        return EagleSettings(fields, h, v, layers, bias)
    of_target = whole(file, config, "target_hidden_size", default=h)
    if of_target != wide:
        raise ValueError(
            f"the EAGLE head at {folder} reads hidden states of size {of_target}, the target {target.name} has {wide}"
        )
    w = config.get("draft_vocab_size")
    if w is None and shapes.get("lm_head.weight"):
        w = shapes["lm_head.weight"][0]
    if w is not None and (isinstance(w, bool) or not isinstance(w, int) or not 0 < w <= v):
        raise ValueError(f"{file}: draft_vocab_size must lie between 1 and the target's {v} tokens, not {brief(w)}")
    if w is None and h != wide:
        raise ValueError(f"{folder} holds no lm_head.weight, and the target's reads hidden size {wide}, not {h}")
    own = "embed_tokens.weight" in shapes
    if not own and h != wide:
        raise ValueError(f"{folder} holds no embed_tokens.weight, and the target's has hidden size {wide}, not {h}")
    inner = config.get("eagle_config") or {}  # where NVIDIA's exporter writes flags
    flags = {name: flag(file, inner if config.get(name) is None else config, name) for name in FLAGS}
    return Eagle3Settings(fields, h, wide, v, _taps(file, config, target), w, layers, **flags, own_embedding=own)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
WINDOWS = ("sliding_window", "use_sliding_window")
"""Fields of families whose layers have windows unless they are null: those layers are refused (``DraftLayers``)."""
OF_THIRD = (False,), "it is a part of EAGLE-3, but the files hold an EAGLE-1 or EAGLE-2 head"
HEADS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_mtp_layernorm": ((False,), "norms of the inputs are not supported"),
    "parallel_draft_step": ((1,), "further heads of the same step are not supported"),
    "parallel_drafting": ((False,), "P-EAGLE is not supported"),
}
NOT_READ = {
    "has_lm_head": "the tensors of the files tell",
    "parallel_draft_heads_num_layers": "concerns further heads, which are refused",
}
FIRST = Fields(
    "an EAGLE head",
    {*LAYER.read, "bias"},
    {
        **HEADS, **dict.fromkeys((*FLAGS, "use_aux_hidden_state"), OF_THIRD),
        "use_input_layernorm_in_first_layer": ((False,), "a norm before the first layer is not supported"),
        "use_last_layernorm": ((False,), "a norm after the last layer is not supported"),
    },
    NOT_READ | dict.fromkeys((TAPS, "draft_vocab_size", "target_hidden_size", "next_layer_regular"), OF_THIRD[1]),
)  # fmt: skip
"""Fields of EAGLE-1 and EAGLE-2, in the config and in its ``eagle_config``."""
THIRD = Fields(
    "an EAGLE-3 head",
    {*LAYER.read, *FLAGS, TAPS, "draft_vocab_size", "target_hidden_size"},
    {
        **HEADS, "bias": ((False,), "a bias of fc is not supported"),
        "use_aux_hidden_state": ((True,), "heads that read the last hidden state in place of taps are not supported"),
        "use_input_layernorm_in_first_layer": ((True,), "a first layer without a norm is not supported"),
        "use_last_layernorm": ((True,), "an LM head without a norm before it is not supported"),
        "next_layer_regular": ((True,), "further layers that read the embedding are not supported"),
    },
    NOT_READ,
)  # fmt: skip
"""Fields of EAGLE-3, in the config and in its ``eagle_config``."""
SPECULATORS = Fields(
    "a head in the format of speculators",
    {
        "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size", TAPS, *FLAGS,
        "fusion_bias", "layernorms",
    },
    {
        **HEADS, "eagle31": ((False,), "state norm_before_fc, fc_norm and norm_output instead"),
        "transformer_layer_architecture": (("LlamaDecoderLayer", "auto"), "layers of other classes are not supported"),
    },
    {"model_type": "speculators_model_type tells"},
)  # fmt: skip
"""Fields of EAGLE-1 and EAGLE-3 in the format of speculators, beside the layers."""


def _taps(file: Path, config: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    """The numbers of the hidden states that the head reads."""
    last = target.lm.capabilities.hidden_layers
    named, shift, where = config.get(TAPS), 0, TAPS
    if named is None and config.get("eagle_config"):
        named, shift, where = config["eagle_config"].get(TAPS), 1, f"eagle_config.{TAPS}"
    if named is None:
        return tuple(sorted(max(0, min(tap, last)) for tap in (2, last // 2, last - 3)))
    found = taps(file, where, named, shift, last, target.name)
    if list(found) == sorted(found):
        return tuple(found)
    if _is_of_training(file.parent):
        log.warning("%s: %s is %s, the order in which this package trained the head; it is kept", file, where, named)
        return tuple(found)
    log.warning("%s: %s is %s, but taps are read in the order of the layers", file, where, named)
    return tuple(sorted(found))


def _is_of_training(folder: Path) -> bool:
    """Return whether ``task=train`` wrote a head: its facts are the metadata of the weights (``write_eagle3``)."""
    file = weight_files(folder)[0]
    with readable([file]), safe_open(file, framework="pt") as opened:
        return {"target_sha256", "method", "seed"} <= (opened.metadata() or {}).keys()


def _names(folder: Path, network: Network, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The network's own name of each tensor in the files; ``TABLES`` and an embedding that is not used are left out.

    Raises:
        ValueError: a tensor is missing, surplus or misshapen.
    """
    v, h = network.settings.vocab_size, network.settings.hidden_size
    first = isinstance(network.settings, EagleSettings)
    names = {name: own_name(name) for name in shapes if first or name not in TABLES}
    published = {own: name for name, own in names.items()}
    own_shapes = {own: tuple(one.shape) for own, one in network.named_parameters()}
    wanted = {published.get(own, published_name(own)): shape for own, shape in own_shapes.items()}
    unused = {"embed_tokens.weight": (v, h)} if first and "embed_tokens.weight" in shapes else {}
    refuse(folder, misfits(wanted | unused, {name: shapes[name] for name in names}))
    return {name: own for name, own in names.items() if name not in unused}


def own_name(name: str) -> str:
    """The network's own name of a published tensor."""
    name = re.sub(r"^(midlayer|transformer)\.", "layers.0.", name).replace("fusion_fc.", "fc.", 1)
    if name == "layers.0.hidden_norm.weight":
        return "hidden_norm.weight"
    return f"body.{name}" if name.startswith("layers.") else name


def published_name(name: str) -> str:
    """The name of one of the network's tensors in the format of speculators."""
    if name == "hidden_norm.weight":
        return "layers.0.hidden_norm.weight"
    return name.removeprefix("body.")


def write_eagle3(
    network: Any, folder: Path, target: str, architecture: str, facts: Mapping[str, str], dtype: torch.dtype
) -> str:
    """Write an EAGLE-3 head in the format of speculators, which vLLM serves; return the SHA-256 of its weights.

    Args:
        network: ``drafters.eagle.network.Eagle3``.
        folder: is made.
        target: name or path of the target.
        architecture: of the target, as transformers names it.
        facts: for the file's metadata.
        dtype: of the weights in the file.
    """
    settings: Eagle3Settings = network.settings
    tensors = {published_name(name): parameter.to(dtype) for name, parameter in network.named_parameters()}
    if settings.draft_vocab_size is not None:
        ids = network.ids.cpu()
        kept = torch.zeros(settings.vocab_size, dtype=torch.bool)
        kept[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
        "transformer_layer_config": dict(settings.layer)
        | {"num_hidden_layers": settings.layers, "vocab_size": settings.vocab_size},
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.target_hidden_size,
        TAPS: list(settings.taps),
        **{name: getattr(settings, name) for name in FLAGS},
    }
    return write_drafter(folder, config, tensors, facts)


def write_eagle(
    settings: EagleSettings,
    weights: Mapping[str, Tensor],
    folder: Path,
    embedding: Tensor,
    facts: Mapping[str, str],
    dtype: torch.dtype,
) -> str:
    """Write an EAGLE-1 or EAGLE-2 head in the official format; return the SHA-256 of its weights.

    Args:
        settings: what the head is.
        weights: by the network's own names.
        folder: is made.
        embedding: ``[V, H]`` of the target, which the official loader reads from the head's file.
        facts: for the file's metadata.
        dtype: of the weights in the file.
    """
    tensors = {published_name(name): weight.to(dtype) for name, weight in weights.items()}
    tensors["embed_tokens.weight"] = embedding[: settings.vocab_size].to(dtype)
    config = dict(settings.layer) | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": settings.layers, "vocab_size": settings.vocab_size,
        "bias": settings.bias,
    }  # fmt: skip
    return write_drafter(folder, config, tensors, facts)
