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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from spec_lab.core.options import brief
from spec_lab.drafters.config_fields import OF_LAYERS, Fields, Meanings
from spec_lab.drafters.draft_layers import load_weights
from spec_lab.drafters.drafter_files import DrafterFiles, write_drafter
from spec_lab.drafters.layer_conventions import choose_positions, settle_last_state
from spec_lab.drafters.layouts import Entry, Layout, misfits
from spec_lab.drafters.mtp.network import Mtp, MtpSettings
from spec_lab.models.checkpoint import (
    MTP,
    check_described,
    mtp_prefixes,
    open_weights,
    read_config,
    refuse_misfits,
    weight_files,
)
from spec_lab.models.loading import describe
from spec_lab.models.target import Target

Names = Literal["deepseek", "qwen"]

FRAMES: Mapping[Names, Mapping[str, str]] = {
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
COUNTS: Mapping[Names, str] = {"deepseek": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}
"""Fields of a config that hold the number of modules."""
MEANINGS: Meanings = {
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


def mtp_layout(names: Names, prefixes: Sequence[str]) -> Layout:
    """The table of modules whose tensors begin with these prefixes, in order of module."""
    rows = [
        Entry(f"{prefix}{published}.*", f"frames.{number}.{part}.*")
        for number, prefix in enumerate(prefixes)
        for published, part in FRAMES[names].items()
    ]
    if names == "qwen":
        rows.append(Entry(f"{MTP}layers.*", "body.layers.*"))
    else:
        rows += [Entry(f"{prefix}*", f"body.layers.{number}.*") for number, prefix in enumerate(prefixes)]
    return Layout("MTP", tuple(rows))


def read_mtp(path: str | None, target: Target, options: Mapping[str, Any] | None = None) -> Mtp:
    """Read MTP modules for a target, into its dtype and onto its device.

    Args:
        path: folder of the modules; None: the target's own checkpoint.
        options: by convention, how it is read (``DrafterFiles``).

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: there is no module, or another number of modules than the config states; a tensor is missing,
            surplus, misshapen, NaN or infinite; the modules are for another hidden size.
        Unsupported: decoder layers of a family that a drafter cannot run; no path, and a target that is not a
            checkpoint of transformers.
    """
    if path is not None and (not isinstance(path, str) or not path):
        raise ValueError(f"proposer.path must name a folder of MTP modules, or be null, not {path!r}")
    in_checkpoint = in_target(path, target)
    if in_checkpoint:
        _ = target.model  # refuses other runners
    folder = (target.folder or describe(target.name).folder) if in_checkpoint else Path(str(path))
    config = read_config(folder)
    with open_weights(weight_files(folder)) as held:
        layers = target.services.num_layers if in_checkpoint else 0
        prefixes = mtp_prefixes(held, layers)
        examples = ", ".join(sorted(held)[:3])
        if not prefixes:
            raise ValueError(
                f"{'the checkpoint of the target' if in_checkpoint else 'proposer.path'} {folder} holds no MTP module: "
                f"there is neither model.layers.N.eh_proj.weight{f' with N from {layers} on' if in_checkpoint else ''} "
                "nor mtp.fc.weight "
                f"(it holds: {examples}); set proposer.path to a folder that holds one, or choose another proposer"
            )
        names: Names = "qwen" if prefixes[-1] == MTP else "deepseek"
        if names == "qwen" and len(prefixes) > 1:
            raise ValueError(f"{folder} holds MTP modules of two layouts, {prefixes[0]} and {MTP}: remove one of them")
        if in_checkpoint:  # other tensors are the target's
            held = {name: tensor for name, tensor in held.items() if name.startswith(tuple(prefixes))}
        return _read(
            DrafterFiles("MTP modules", folder, config, held, target, options or {}), names, prefixes, in_checkpoint
        )


def in_target(path: str | None, target: Target) -> bool:
    """Whether the modules are in the target's own checkpoint."""
    return path is None or Path(path).resolve() == Path(target.name).resolve()


def _read(files: DrafterFiles, names: Names, prefixes: Sequence[str], in_checkpoint: bool) -> Mtp:
    """Read the modules that begin with these prefixes. Errors as in ``read_mtp``."""
    layout, dtype = mtp_layout(names, prefixes), files.target.lm.dtype
    ours = {name: layout.network_name(name) for name in files.held}
    settings = _settings(files, {*ours.values()}, names, len(prefixes))
    network = files.described(lambda: Mtp(settings))
    _check_fields(files, network, in_checkpoint)
    described = sum(parameter.numel() for parameter in network.parameters())
    count = sum(math.prod(shape) for shape in files.shapes.values())
    check_described(files.folder, "MTP modules with {} parameters", described, count)  # before such layers are made
    # The names of a family's checkpoints may differ from those of its modules (experts): transformers converts them.
    layers = {f"model.{our[5:]}": files.held[name] for name, our in ours.items() if our and our.startswith("body.")}
    body, problems = network.body.read(layers, dtype)
    problems = [
        re.sub(r"^model(\.layers\.\S+)", lambda match: layout.published(f"body{match[1]}")[0], text)
        for text in problems
    ]
    parameters = dict(network.named_parameters())
    frames = {name: tuple(parameters[name].shape) for name in parameters if name.startswith("frames.")}
    wanted = layout.of_network(frames, files.shapes)
    held = {name: files.shapes[name] for name, our in ours.items() if our is None or our.startswith("frames.")}
    refuse_misfits(files.folder, problems + misfits(wanted.shapes, held))
    tensors = {our: files.tensor(published[0], dtype) for our, published in wanted.names.items()}
    for name, tensor in body.items():
        tensors[f"body.{name}"] = files.finite(layout.published(f"body.{name}")[0], tensor)
    network.reading = files.reading
    return load_weights(network, tensors, files.target)


def _settings(files: DrafterFiles, ours: set[str | None], names: Names, prefixes: int) -> MtpSettings:
    """Return the settings of the modules. Errors as in ``read_mtp``.

    Args:
        ours: our names of the tensors.
        prefixes: how many begin names of tensors.
    """
    file, config = files.file, files.config
    numbers = {match[1] for name in ours if name and (match := re.match(r"body\.layers\.([0-9]{1,9})\.", name))}
    modules = prefixes if names == "deepseek" else max(len(numbers), 1)
    stated = config.get(COUNTS[names])
    if stated is not None and stated != modules:
        raise ValueError(f"{file}: {COUNTS[names]} is {brief(stated)}, but the weight files hold {modules} MTP modules")
    files.check_target(files.whole("hidden_size"))
    fields = {name: value for name, value in config.items() if name not in NOT_OF_LAYERS}
    fields["max_position_embeddings"] = files.whole("max_position_embeddings", max(files.target.context, 1))
    before = config.get("num_hidden_layers")
    first, kinds = fields.get("first_k_dense_replace"), fields.get("mlp_layer_types")
    if names == "deepseek" and isinstance(before, int):  # the modules are further layers
        if isinstance(first, int):
            fields["first_k_dense_replace"] = max(first - before, 0)
        if isinstance(kinds, list) and kinds:
            fields["mlp_layer_types"] = [*kinds, *kinds[-1:] * modules][before : before + modules]
    return MtpSettings(
        fields, files.target.services.hidden_size, files.target.vocabulary, modules, names == "qwen",
        own_embedding="frames.0.embed_tokens.weight" in ours, own_head="frames.0.head.weight" in ours,
        taps=settle_last_state(files, "MTP modules read the state after the final norm"),
        positions=choose_positions(files),
    )  # fmt: skip


def _check_fields(files: DrafterFiles, network: Mtp, in_checkpoint: bool) -> None:
    """Refuse fields that are not known; those of the target's layers are checked when the target is loaded."""
    family = type(network.body.config)
    read = {*family().to_dict(), *family.attribute_map, *OF_LAYERS, "partial_rotary_factor", *COUNTS.values()}
    config = files.config
    if in_checkpoint:
        config = {name: value for name, value in config.items() if "mtp" in name or "nextn" in name}
    Fields("MTP modules", read, MEANINGS, NOT_READ).check(files.file, config)


def write_mtp(
    network: Mtp,
    folder: Path,
    layout: Names,
    layers: int,
    facts: Mapping[str, str],
    dtype: torch.dtype | None = None,
) -> str:
    """Write modules to a folder of their own; return the SHA-256 of the weights.

    Args:
        network: whose layers have the names of their family's checkpoints (Llama, Qwen3).
        layout: of the names. Modules that share all but their layers are "qwen"; several that do not are "deepseek".
        layers: of the target.
        dtype: of the weights in the file; None: their own.

    Raises:
        ValueError: a layout that cannot hold these modules.
    """
    settings = network.settings
    if settings.modules > 1 and settings.shared != (layout == "qwen"):
        kind = "share" if settings.shared else "do not share"
        raise ValueError(f"layout {layout!r} cannot hold {settings.modules} MTP modules that {kind} their norms")
    prefixes = [MTP] if layout == "qwen" else [f"model.layers.{layers + number}." for number in range(settings.modules)]
    tensors = mtp_layout(layout, prefixes).named(network)
    config = dict(settings.layer) | {
        "num_hidden_layers": layers, "vocab_size": settings.vocab_size, COUNTS[layout]: settings.modules,
    }  # fmt: skip
    return write_drafter(folder, config, tensors, facts, dtype)
