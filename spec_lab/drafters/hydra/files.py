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

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spec_lab.core.options import brief
from spec_lab.drafters.config_fields import LAYER, Fields
from spec_lab.drafters.drafter_files import DrafterFiles, write_drafter
from spec_lab.drafters.hydra.network import HydraHeads, HydraSettings
from spec_lab.drafters.layer_conventions import layer_fields, settle_last_state
from spec_lab.drafters.layouts import Entry, Layout, decoder_layer
from spec_lab.models.checkpoint import MAX_LAYERS
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


def hydra_layout(prefix: bool, grounded: bool = True) -> Layout:
    """The table of heads with or without a prefix layer. Those that are not grounded do not read drafted tokens."""
    first, later, lm_head = ("1", "{2k+3}", "{i}.1") if prefix else ("0", "{k+1}", "{i}")
    width = "{i+2}H" if grounded else "H"
    rows = [
        Entry(f"hydra_lm_head.{lm_head}.weight", "heads.{i}.lm_head.weight", "V H"),
        Entry(f"hydra_lm_head.{lm_head}.bias", "heads.{i}.lm_head.bias", "?V"),
        Entry(f"hydra_mlp.{{i}}.{first}.linear.weight", "heads.{i}.linear.weight", f"H {width}"),
        Entry(f"hydra_mlp.{{i}}.{first}.linear.bias", "heads.{i}.linear.bias", "H"),
        Entry(f"hydra_mlp.{{i}}.{later}.linear.weight", "heads.{i}.block.weight", "H H"),
        Entry(f"hydra_mlp.{{i}}.{later}.linear.bias", "heads.{i}.block.bias", "H"),
    ]
    if grounded:
        rows += [
            Entry(f"hydra_mlp.{{i}}.{first}.res_connection.weight", "heads.{i}.skip.weight", f"H {width}"),
            Entry(f"hydra_mlp.{{i}}.{first}.res_connection.bias", "heads.{i}.skip.bias", "H"),
        ]
    if prefix:
        rows += [
            Entry(f"{PREFIX}.norm.weight", "prefix.norm.weight", "H"),
            Entry(f"{PREFIX}.embed_tokens.weight", "", "?V H"),
            Entry(f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq", "", "?"),
            Entry(f"{PREFIX}.layers.{{l}}.*", "prefix.body.layers.{l}.*", decoder_layer()),
        ]
    return Layout("Hydra", tuple(rows))


def read_hydra(path: str, target: Target, options: Mapping[str, Any] | None = None) -> HydraHeads:
    """Read heads for a target, into its dtype and onto its device.

    Args:
        options: by convention, how it is read (``DrafterFiles``).

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no Hydra heads; the config describes none that are supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; repeated layers differ; the heads are for another hidden size or
            vocabulary.
        Unsupported: the target's config, which describes the prefix layer, is not known or of another family.
    """
    with DrafterFiles.open(path, "Hydra heads", target, options=options) as opened:
        settings = _settings(opened)
        held = opened.held
        if settings.shared_lm_head and not opened.flag("shared_lm_head"):
            held = {name: tensor for name, tensor in held.items() if not name.startswith("hydra_lm_head.")}
        files = replace(opened, held=held)
        layout, repeats = hydra_layout(settings.prefix is not None), settings.layers - 1
        later = [layout.published(f"heads.0.block.{kind}", copies=repeats) for kind in ("weight", "bias")]
        alone = not any(name in files.held for names in later for name in names[1:])
        return files.read(layout, lambda: HydraHeads(settings), copies=1 if alone else repeats)


def write_hydra(
    network: HydraHeads, folder: Path, target: str, facts: Mapping[str, str], dtype: torch.dtype | None = None
) -> str:
    """Write heads under their published names; return the SHA-256 of their weights.

    Args:
        target: name or path of the target.
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
    tensors = hydra_layout(settings.prefix is not None).named(network, settings.layers - 1)
    return write_drafter(folder, config, tensors, facts, dtype)


def _settings(files: DrafterFiles) -> HydraSettings:
    """Return the settings of the heads. Errors as in ``read_hydra``."""
    file, config, shapes, target = files.file, files.config, files.shapes, files.target
    h, v = target.services.hidden_size, target.vocabulary
    numbers = {name.split(".")[1] for name in shapes if name.startswith("hydra_mlp.")}
    files.expect(bool(numbers), "hydra_mlp.0")
    FIELDS.check(file, config)
    heads, layers = (files.whole(name, maximum=MAX_LAYERS) for name in ("hydra_num_heads", "hydra_num_layers"))
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
    prefix = _prefix(files) if arch == "prefix-mlp" else None
    layout = hydra_layout(prefix is not None)
    linear, lm_head = (
        shapes.get(layout.published(f"heads.0.{part}.weight")[0], (None,)) for part in ("linear", "lm_head")
    )
    files.check_target(*(sizes[0] if sizes else None for sizes in (linear, lm_head)))
    shared = files.flag("shared_lm_head")
    taps = settle_last_state(files, "Hydra's heads read the state after the final norm")
    why = "the files hold LM heads" if not shared else "shared_lm_head is true"
    ends = {} if shared else {"the target's": "target"}
    own_head = files.choose("lm_head", "target" if shared else "own", "file", why, ends) == "own"
    if own_head and shared:
        raise ValueError(f"{files.folder} holds no LM heads of its own: set lm_head=target")
    return HydraSettings(h, v, heads, layers, prefix, not own_head, files.flag("identity_skip"), taps)


def _prefix(files: DrafterFiles) -> dict[str, Any]:
    """The config of the prefix layer. Errors as in ``read_hydra``."""
    fields, target = files.config.get("prefix_layer_config"), files.target
    if fields is None:
        try:
            fields = target.model.config.to_dict()
        except Unsupported as error:
            raise Unsupported(
                f"the prefix layer of the Hydra heads has the sizes of the target's layers, but {target.name} has no "
                f"config of transformers: put one into {files.file} as prefix_layer_config"
            ) from error
        fields = {name: fields[name] for name in fields if name not in ("layer_types", "num_hidden_layers")}
    elif isinstance(fields, dict):
        LAYER.check(files.file, fields)
    else:
        raise ValueError(f"{files.file}: prefix_layer_config must be a mapping, not {brief(fields)}")
    if (size := fields.get("hidden_size")) != target.services.hidden_size:
        raise ValueError(
            f"{files.file}: prefix_layer_config.hidden_size is {brief(size)}, the target {target.name} has "
            f"{target.services.hidden_size}"
        )
    return {name: value for name, value in layer_fields(files, fields).items() if value is not None}
