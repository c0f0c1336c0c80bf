"""Files of Hydra heads: ``config.json`` and weights in safetensors, both untrusted input (``models.checkpoint``).

Names of tensors are those of the published ``hydra_lm_head.pt`` (``spec-lab convert`` makes safetensors of it), where
o, s = 1, 2 with a prefix layer and 0, 1 without, since dropout layers have numbers too:

- ``hydra_mlp.{i}.{o}.linear`` and ``.res_connection``: the first layer of head i, which reads (i + 2)H.
- ``hydra_mlp.{i}.{o + k * s}.linear``, k = 1 to L - 1: the layers after it, which are one layer. A file holds L - 1
  equal copies, or the first alone.
- ``hydra_lm_head.{i}`` without, ``hydra_lm_head.{i}.1`` with a prefix layer: the LM head of head i.
- ``prefix_embeding_layer.layers.0`` and ``.norm``: the prefix layer (the spelling is the published one). Its
  ``embed_tokens`` and ``inv_freq`` are not used.

``config.json`` holds ``hydra_num_heads``, ``hydra_num_layers``, ``hydra_head_arch``, ``grounded_heads`` and
``base_model_name_or_path``. The prefix layer has the sizes of the target's own layers. Three fields deviate from the
published layout: with ``shared_lm_head: true`` the file holds no ``hydra_lm_head``, and all heads use the target's LM
head; with ``identity_skip: true`` it holds no ``res_connection``, and the state itself takes its place;
``prefix_layer_config`` describes the prefix layer where the target has no config of transformers. Other fields are
refused by name (``FIELDS``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.options import brief
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
    whole,
    write_drafter,
)
from spec_lab.drafters.hydra.network import HydraHeads, HydraSettings
from spec_lab.models.checkpoint import MAX_LAYERS, open_weights, read_drafter_config, weight_files
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target

ARCHS = ("mlp", "prefix-mlp")
PREFIX = "prefix_embeding_layer"
FIELDS = Fields(
    "Hydra heads",
    {
        "hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "hidden_state_offset",
        "shared_lm_head", "identity_skip", "prefix_layer_config",
    },
    {},
    dict.fromkeys(("hidden_size", "vocab_size", "model_type"), "the tensors of the files tell"),
)  # fmt: skip
UNUSED = (f"{PREFIX}.embed_tokens.weight", f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq")


def read_hydra(path: str, target: Target) -> HydraHeads:
    """Read heads for a target, into its dtype and onto its device.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no Hydra heads; the config describes none that are supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; repeated layers differ; the heads are for another hidden size or
            vocabulary.
        Unsupported: the target's config, which describes the prefix layer, is not known or of another family.
    """
    folder, config = read_drafter_config(path, "Hydra heads")
    with open_weights(weight_files(folder)) as held:
        shapes = {name: tuple(one.get_shape()) for name, one in held.items()}
        with named_by(folder):
            network = HydraHeads(_settings(folder, config, shapes, target))
        names = _names(folder, network, shapes)
        tensors = {own: _tensor(folder, copies, held, target.lm.dtype) for own, copies in names.items()}
    return load_weights(network, tensors, target.services, target.lm.device, target.lm.dtype)


def write_hydra(
    network: HydraHeads, folder: Path, target: str, facts: Mapping[str, str], dtype: torch.dtype | None = None
) -> str:
    """Write heads under their published names; return the SHA-256 of their weights.

    Args:
        network: the heads.
        folder: is made.
        target: name or path of the target.
        facts: for the file's metadata.
        dtype: of the weights in the file; None: their own.
    """
    settings = network.settings
    config = {
        "hydra_num_heads": settings.heads,
        "hydra_num_layers": settings.layers,
        "hydra_head_arch": settings.arch,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": target,
    }
    config |= {name: True for name in ("shared_lm_head", "identity_skip") if getattr(settings, name)}
    if settings.prefix is not None:
        config["prefix_layer_config"] = dict(settings.prefix)
    tensors = {
        name: parameter.to(dtype)
        for key, parameter in network.named_parameters()
        for name in published_names(key, settings)
    }
    return write_drafter(folder, config, tensors, facts)


def published_names(own: str, settings: HydraSettings) -> list[str]:
    """The published names of one of the network's parameters, of which all but the first are copies."""
    if own.startswith("prefix."):
        return [own.replace("prefix.body", PREFIX).replace("prefix.", f"{PREFIX}.")]
    _, head, part, kind = own.split(".")  # heads.{i}.{linear, skip, block or lm_head}.{weight or bias}
    offset, step = (0, 1) if settings.prefix is None else (1, 2)
    if part == "lm_head":
        return [f"hydra_lm_head.{head}.{'1.' if offset else ''}{kind}"]
    if part == "block":
        return [f"hydra_mlp.{head}.{offset + k * step}.linear.{kind}" for k in range(1, settings.layers)]
    return [f"hydra_mlp.{head}.{offset}.{'res_connection' if part == 'skip' else part}.{kind}"]


def _settings(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: Target
) -> HydraSettings:
    """Return the settings of the heads. Errors as of ``read_hydra``."""
    file = folder / "config.json"
    h, v = target.services.hidden_size, target.vocabulary
    numbers = {found[1] for name in shapes if (found := re.match(r"hydra_mlp\.(\d{1,4})\.", name))}
    if not numbers:
        some = brief(", ".join(sorted(shapes)[:5]) or "none")
        raise ValueError(f"{folder} holds no Hydra heads, whose tensors include hydra_mlp.0 (it holds: {some})")
    FIELDS.check(file, config)
    heads, layers = (whole(file, config, name, most=MAX_LAYERS) for name in ("hydra_num_heads", "hydra_num_layers"))
    if heads != len(numbers):
        raise ValueError(f"{file}: hydra_num_heads is {heads}, but the weight files hold {len(numbers)} heads")
    arch = config.get("hydra_head_arch")
    if arch not in ARCHS:
        raise ValueError(f"{file}: hydra_head_arch must be one of {', '.join(ARCHS)}, not {brief(arch)}")
    if config.get("grounded_heads") is not True:
        raise ValueError(
            f"{file}: grounded_heads must be true, not {brief(config.get('grounded_heads'))}: heads that do not read "
            "the drafted tokens are not supported"
        )
    if (offset := config.get("hidden_state_offset", 0)) != 0:
        raise ValueError(
            f"{file}: hidden_state_offset must be 0, not {brief(offset)}: only heads that read the hidden state after "
            "the final norm are supported"
        )
    shared, identity = (flag(file, config, name) for name in ("shared_lm_head", "identity_skip"))
    prefix = _prefix(file, config, target) if arch == "prefix-mlp" else None
    settings = HydraSettings(h, v, heads, layers, prefix, shared, identity)
    for part, what, own in (("linear", "hidden size", h), ("lm_head", "vocabulary", v)):
        size = (shapes.get(published_names(f"heads.0.{part}.weight", settings)[0]) or (own,))[0]
        if size != own:
            raise ValueError(f"the Hydra heads at {folder} are for {what} {size}, the target {target.name} has {own}")
    return settings


def _prefix(file: Path, config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The config of the prefix layer. Errors as of ``read_hydra``."""
    fields = config.get("prefix_layer_config")
    if fields is None:
        try:
            fields = target.model.config.to_dict()
        except Unsupported as error:
            raise Unsupported(
                f"the prefix layer of the Hydra heads has the sizes of the target's layers, but {target.name} has no "
                f"config of transformers: put one into {file} as prefix_layer_config"
            ) from error
    elif isinstance(fields, dict):
        LAYER.check(file, fields)
    else:
        raise ValueError(f"{file}: prefix_layer_config must be a mapping, not {brief(fields)}")
    if (size := fields.get("hidden_size")) != target.services.hidden_size:
        raise ValueError(
            f"{file}: prefix_layer_config.hidden_size is {brief(size)}, the target {target.name} has "
            f"{target.services.hidden_size}"
        )
    kept = {name: fields[name] for name in OF_LAYERS if fields.get(name) is not None}
    most = whole(file, fields, "max_position_embeddings", default=max(target.context, 1))
    return kept | {"max_position_embeddings": most}


def _names(folder: Path, network: HydraHeads, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """The names in the files of each of the network's parameters: one, or those of all copies.

    Raises:
        ValueError: a tensor is missing, surplus or misshapen.
    """
    settings, names, wanted = network.settings, dict[str, list[str]](), dict[str, tuple[int, ...]]()
    held = dict(shapes)
    if network.prefix is not None:
        held.pop(UNUSED[1], None)
        if UNUSED[0] in held:
            wanted[UNUSED[0]] = settings.vocab_size, settings.hidden_size
    for own, parameter in network.named_parameters():
        copies = published_names(own, settings)
        alone = len(copies) > 1 and not any(name in shapes for name in copies[1:])
        names[own] = copies[:1] if alone else copies
        wanted |= dict.fromkeys(names[own], tuple(parameter.shape))
    refuse(folder, misfits(wanted, held))
    return names


def _tensor(folder: Path, copies: list[str], held: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """One of the network's parameters.

    Raises:
        ValueError: it is quantized, NaN or infinite, or its copies differ.
    """
    first = read_weight(folder, held, copies[0], dtype)
    for name in copies[1:]:
        if not torch.equal(held[copies[0]][:], held[name][:]):
            raise ValueError(
                f"{folder}: '{name}' differs from '{copies[0]}', but the layers after a head's first are one layer"
            )
    return first
