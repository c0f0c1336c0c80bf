"""Files of multi-token-prediction modules: inside the target's own checkpoint, or in a folder of their own.

Both are untrusted input (``models.checkpoint``): a folder holds ``config.json`` and weights in safetensors. Two layouts
are known by their names:

- DeepSeek-V3's, GLM-4.5's: module k is layer L + k of the checkpoint, where L is the number of the target's layers:
  ``model.layers.{L+k}.{enorm,hnorm,eh_proj,embed_tokens}``, ``shared_head.{norm,head}`` and a decoder layer.
- Qwen3-Next's, Qwen3.5's: ``mtp.{fc,pre_fc_norm_embedding,pre_fc_norm_hidden,norm}`` and ``mtp.layers.{k}``, where all
  modules share what is not a decoder layer.

``embed_tokens`` and the LM head may be missing: they are the target's then. Fields of a folder's config that its family
does not have are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spec_lab.core.options import brief
from spec_lab.drafters.drafter_files import (
    OF_LAYERS,
    Fields,
    misfits,
    named_by,
    read_weight,
    refuse,
    whole,
    write_drafter,
)
from spec_lab.drafters.mtp.network import Mtp, MtpSettings, mtp_with_weights
from spec_lab.models.checkpoint import MTP, mtp_prefixes, open_weights, read_config, weight_files, weights_hash
from spec_lab.models.loading import describe
from spec_lab.models.target import Target

Layout = Literal["deepseek", "qwen"]

FRAMES: Mapping[Layout, Mapping[str, str]] = {
    "deepseek": {
        "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "embed_tokens": "embed_tokens",
        "shared_head.norm": "norm", "shared_head.head": "head",
    },
    "qwen": {
        "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj",
        "embed_tokens": "embed_tokens", "norm": "norm", "lm_head": "head",
    },
}  # fmt: skip
"""Published names of what is around a decoder layer, and the network's own."""
COUNTS: Mapping[Layout, str] = {"deepseek": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}
"""Fields of a config that hold the number of modules."""
MEANINGS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "scoring_func": (("sigmoid",), "experts that are scored otherwise are not supported"),
    "topk_method": (("noaux_tc",), "experts that are chosen otherwise are not supported"),
    "moe_layer_freq": ((1,), "experts in some layers only are not supported"),
}
NOT_READ = {
    "mtp_use_dedicated_embeddings": "the tensors of the files tell",
    "full_attention_interval": "a module's layers have full attention",
    **dict.fromkeys(("seq_aux", "aux_loss_alpha", "router_aux_loss_coef", "output_router_logits"), "concerns training"),
    **dict.fromkeys(("ep_size", "mamba_ssm_dtype"), "concerns how the target runs"),
}
NOT_OF_LAYERS = {
    "architectures", "transformers_version", "tie_word_embeddings", "vocab_size", "bos_token_id", "eos_token_id",
    "pad_token_id", "num_hidden_layers", "max_position_embeddings", "initializer_range", *COUNTS.values(),
}  # fmt: skip
"""Fields of a config that do not describe the decoder layers."""


@dataclass(frozen=True, eq=False)
class MtpModules:
    """Modules that were read.

    Args:
        network: bound to the target.
        sha256: of the weight files.
    """

    network: Mtp
    sha256: str


def read_mtp(path: str | None, target: Target) -> MtpModules:
    """Read MTP modules for a target, into its dtype and onto its device.

    Args:
        path: folder of the modules; None: the target's own checkpoint.
        target: the target.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: there is no module, or another number of modules than the config states; a tensor is missing,
            surplus, misshapen, NaN or infinite; the modules are for another hidden size.
        Unsupported: decoder layers of a family that a drafter cannot run; no path, and a target that is not a
            checkpoint of transformers.
    """
    if path is not None and (not isinstance(path, str) or not path):
        raise ValueError(f"proposer.path must name a folder of MTP modules, or be null, not {path!r}")
    own = path is None or Path(path).resolve() == Path(target.name).resolve()
    if own:
        _ = target.model  # refuses other runners
        folder = describe(target.name).folder
    else:
        folder = Path(str(path))
    config = read_config(folder)
    with open_weights(weight_files(folder)) as held:
        layers = target.services.num_layers if own else 0
        prefixes = mtp_prefixes(held, layers)
        some = ", ".join(sorted(held)[:3])
        if not prefixes:
            raise ValueError(
                f"{'the checkpoint of the target' if own else 'proposer.path'} {folder} holds no MTP module: there is "
                f"neither model.layers.N.eh_proj.weight{f' with N from {layers} on' if own else ''} nor mtp.fc.weight "
                f"(it holds: {some}); set proposer.path to a folder that holds one, or choose another proposer"
            )
        layout: Layout = "qwen" if prefixes[-1] == MTP else "deepseek"
        if layout == "qwen" and len(prefixes) > 1:
            raise ValueError(f"{folder} holds MTP modules of two layouts, {prefixes[0]} and {MTP}: remove one of them")
        names = _names(held, prefixes, layout, surplus=not own)
        settings = _settings(folder, config, names, prefixes, layout, target)
        with named_by(folder):
            network = settings.network()
        _check_fields(folder / "config.json", config, network, own)
        published = partial(_published, layout=layout, prefixes=prefixes)
        tensors = _weights(folder, network, held, names, target.lm.dtype, published)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{folder}: '{published(name)}' holds NaN or infinite values")
    mtp_with_weights(network, tensors, target.services, target.lm.device)
    return MtpModules(network, target.sha256 if own else weights_hash(str(folder)))


def _names(held: Mapping[str, Any], prefixes: Sequence[str], layout: Layout, surplus: bool) -> dict[str, str]:
    """The network's own name of each published tensor of the modules.

    Args:
        surplus: whether tensors of no module are included, under their own names.
    """
    found = {}
    for name in held:
        number = next((number for number, prefix in enumerate(prefixes) if name.startswith(prefix)), None)
        if number is None:
            if surplus:
                found[name] = name
            continue
        rest = name.removeprefix(prefixes[number])
        kind, _, tensor = rest.rpartition(".")
        if kind in FRAMES[layout]:
            found[name] = f"frames.{number}.{FRAMES[layout][kind]}.{tensor}"
        elif layout == "deepseek":
            found[name] = f"body.layers.{number}.{rest}"
        else:
            found[name] = f"body.{rest}" if rest.startswith("layers.") else name
    return found


def _published(name: str, layout: Layout, prefixes: Sequence[str]) -> str:
    """The published name of one of the network's tensors; other names as they are."""
    if match := re.fullmatch(r"frames\.(\d+)\.(\w+)\.(\w+)", name):
        outer = {own: kind for kind, own in FRAMES[layout].items()}
        return f"{prefixes[int(match[1])]}{outer[match[2]]}.{match[3]}"
    if match := re.fullmatch(r"body\.layers\.(\d+)\.(.+)", name):
        return f"{MTP}layers.{match[1]}.{match[2]}" if layout == "qwen" else f"{prefixes[int(match[1])]}{match[2]}"
    return name


def _settings(
    folder: Path,
    config: Mapping[str, Any],
    names: Mapping[str, str],
    prefixes: Sequence[str],
    layout: Layout,
    target: Target,
) -> MtpSettings:
    """Return the settings of the modules. Errors as of ``read_mtp``."""
    file, wide = folder / "config.json", target.services.hidden_size
    own = {*names.values()}
    numbers = {int(match[1]) for name in own if (match := re.match(r"body\.layers\.([0-9]{1,9})\.", name))}
    modules = len(prefixes) if layout == "deepseek" else max(len(numbers), 1)
    stated = config.get(COUNTS[layout])
    if stated is not None and stated != modules:
        raise ValueError(
            f"{file}: {COUNTS[layout]} is {brief(stated)}, but the weight files hold {modules} MTP modules"
        )
    h = config.get("hidden_size")
    if h != wide:
        raise ValueError(
            f"the MTP modules in {folder} are for hidden size {brief(h)}, the target {target.name} has {wide}"
        )
    fields = {name: value for name, value in config.items() if name not in NOT_OF_LAYERS}
    fields["max_position_embeddings"] = whole(file, config, "max_position_embeddings", default=max(target.context, 1))
    before = config.get("num_hidden_layers")
    first, kinds = fields.get("first_k_dense_replace"), fields.get("mlp_layer_types")
    if layout == "deepseek" and isinstance(before, int):  # the modules are further layers
        if isinstance(first, int):
            fields["first_k_dense_replace"] = max(first - before, 0)
        if isinstance(kinds, list) and kinds:
            fields["mlp_layer_types"] = [*kinds, *kinds[-1:] * modules][before : before + modules]
    return MtpSettings(
        fields, wide, target.vocabulary, modules, layout == "qwen",
        own_embedding="frames.0.embed_tokens.weight" in own, own_head="frames.0.head.weight" in own,
    )  # fmt: skip


def _check_fields(file: Path, config: Mapping[str, Any], network: Mtp, own: bool) -> None:
    """Refuse fields that are not known; those of the target's layers are checked when the target is loaded.

    Raises:
        ValueError: names them.
    """
    family = type(network.body.config)
    read = {*family().to_dict(), *family.attribute_map, *OF_LAYERS, "partial_rotary_factor", *COUNTS.values()}
    fields = Fields("MTP modules", read, MEANINGS, NOT_READ)
    fields.check(file, {name: value for name, value in config.items() if not own or "mtp" in name or "nextn" in name})


def _weights(
    folder: Path,
    network: Mtp,
    held: Mapping[str, Any],
    names: Mapping[str, str],
    dtype: torch.dtype,
    published: Callable[[str], str],
) -> dict[str, Tensor]:
    """The network's weights.

    Args:
        folder: for messages.
        network: without weights.
        held: tensors of the files.
        names: the network's own name of each.
        dtype: of the weights.
        published: the published name of one of the network's tensors.

    Raises:
        ValueError: a tensor is missing, surplus or misshapen.
    """
    described = sum(one.numel() for one in network.parameters())
    count = sum(math.prod(one.get_shape()) for one in held.values())
    if described > 4 * count + 2**26:  # exact sizes are compared below, where layers of these sizes are made
        raise ValueError(
            f"the weights of {folder} do not fit its config.json, which describes MTP modules with {described} "
            f"parameters; the weight files hold {count}"
        )
    layers = {f"model.{own[5:]}": held[name] for name, own in names.items() if own.startswith("body.")}
    body, problems = network.body.read(layers, dtype)
    problems = [re.sub(r"^model(\.layers\.\S+)", lambda one: published(f"body{one[1]}"), text) for text in problems]
    frames = {name: tuple(one.shape) for name, one in network.named_parameters() if name.startswith("frames.")}
    wanted = {published(name): shape for name, shape in frames.items()}
    others = {name: tuple(held[name].get_shape()) for name, own in names.items() if not own.startswith("body.")}
    refuse(folder, problems + misfits(wanted, others))
    tensors = {names[name]: read_weight(folder, held, name, dtype) for name in wanted}
    return tensors | {f"body.{name}": one for name, one in body.items()}


def write_mtp(
    network: Mtp,
    folder: Path,
    layout: Layout,
    layers: int,
    facts: Mapping[str, str],
    dtype: torch.dtype | None = None,
) -> str:
    """Write modules to a folder of their own; return the SHA-256 of the weights.

    Args:
        network: whose layers have the names of their family's checkpoints (Llama, Qwen3).
        folder: is made.
        layout: of the names. Modules that share all but their layers are "qwen"; several that do not are "deepseek".
        layers: of the target.
        facts: for the file's metadata.
        dtype: of the weights in the file; None: their own.

    Raises:
        ValueError: a layout that cannot hold these modules.
    """
    settings = network.settings
    if settings.modules > 1 and settings.shared != (layout == "qwen"):
        kind = "share" if settings.shared else "do not share"
        raise ValueError(f"layout {layout!r} cannot hold {settings.modules} MTP modules that {kind} their norms")
    prefixes = [MTP] if layout == "qwen" else [f"model.layers.{layers + one}." for one in range(settings.modules)]
    tensors = {_published(name, layout, prefixes): tensor.to(dtype) for name, tensor in network.state_dict().items()}
    config = dict(settings.layer) | {
        "num_hidden_layers": layers, "vocab_size": settings.vocab_size, COUNTS[layout]: settings.modules,
    }  # fmt: skip
    return write_drafter(folder, config, tensors, facts)
