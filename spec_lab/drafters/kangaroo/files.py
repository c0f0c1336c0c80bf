"""Files of Kangaroo's adapters: ``config.json`` and weights in safetensors, both untrusted (``models.checkpoint``).

Names of tensors are those of the published ``pytorch_model.bin`` (``spec-lab convert`` makes safetensors of it):
``layers.{i}.input_layernorm``, ``layers.{i}.self_attn.{q,k,v,o}_proj`` and ``norm``. ``config.json`` is that of a Llama
with ``num_hidden_layers`` such layers; fields of its MLP are not used, unknown ones are refused by name. One field
deviates from the published layout: ``exit_layer``, the number of the target's hidden state that is read. Published
configs do not hold it, so a run states it (``proposer.exit_layer``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_lab.core.options import brief
from spec_lab.drafters.draft_layers import load_weights
from spec_lab.drafters.drafter_files import (
    LAYER,
    OF_LAYERS,
    Fields,
    misfits,
    named_by,
    read_weight,
    refuse,
    refuse_windows,
    whole,
    write_drafter,
)
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.models.checkpoint import MAX_LAYERS, open_weights, read_drafter_config, weight_files, weights_hash
from spec_lab.models.target import Target

FIELDS = Fields("an adapter of Kangaroo", {*LAYER.read, "exit_layer"})


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that was read.

    Args:
        network: bound to the target.
        sha256: of its weight files.
    """

    network: Kangaroo
    sha256: str


def read_kangaroo(path: str, target: Target, exit_layer: int | None = None) -> Adapter:
    """Read an adapter for a target, into its dtype and onto its device.

    Args:
        path: folder of the adapter.
        target: the target.
        exit_layer: number of the hidden state that the adapter reads; None: the config holds it.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no adapter; the config describes none that is supported, or another exit layer than
            the one given; a tensor is missing, surplus, misshapen, NaN or infinite; the adapter is for another hidden
            size, another vocabulary or an exit layer that the target does not have.
    """
    folder, config = read_drafter_config(path, "an adapter of Kangaroo")
    with open_weights(weight_files(folder)) as held:
        shapes = {name: tuple(one.get_shape()) for name, one in held.items()}
        settings = _settings(folder, config, shapes, exit_layer, target)
        with named_by(folder):
            network = settings.network()
        wanted = {own.removeprefix("body."): tuple(one.shape) for own, one in network.named_parameters()}
        refuse(folder, misfits(wanted, shapes))
        names = {own: own.removeprefix("body.") for own, _ in network.named_parameters()}
        tensors = {own: read_weight(folder, held, name, target.lm.dtype) for own, name in names.items()}
    load_weights(network, tensors, target.services, target.lm.device, target.lm.dtype)
    return Adapter(network, weights_hash(path))


def _settings(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    exit_layer: int | None,
    target: Target,
) -> KangarooSettings:
    """Return the settings of the adapter. Errors as of ``read_kangaroo``."""
    file = folder / "config.json"
    if "layers.0.self_attn.q_proj.weight" not in shapes or "fc.weight" in shapes:
        some = ", ".join(sorted(shapes)[:5]) or "none"
        raise ValueError(
            f"{folder} holds no adapter of Kangaroo, whose tensors are layers.0.self_attn.q_proj.weight and others of "
            f"attention and norms (it holds: {some})"
        )
    if (kind := config.get("model_type", "llama")) != "llama":
        raise ValueError(f"{file}: model_type must be llama, not {brief(kind)}: an adapter has Llama's attention")
    refuse_windows(file, config)
    FIELDS.check(file, config)
    h, v, wide = whole(file, config, "hidden_size"), target.vocabulary, target.services.hidden_size
    if h != wide:
        raise ValueError(f"the adapter at {folder} is for hidden size {h}, the target {target.name} has {wide}")
    if (size := config.get("vocab_size", v)) != v:
        raise ValueError(
            f"the adapter at {folder} is for a vocabulary of {brief(size)} tokens, the target {target.name} has {v}"
        )
    layers = whole(file, config, "num_hidden_layers", default=1, most=min(MAX_LAYERS, len(shapes)))
    fields = {name: config[name] for name in OF_LAYERS if config.get(name) is not None}
    if "head_dim" not in fields:
        fields["head_dim"] = h // whole(file, config, "num_attention_heads")
    fields["model_type"], fields["intermediate_size"] = kind, 1  # there is no MLP
    fields["max_position_embeddings"] = whole(file, config, "max_position_embeddings", default=max(target.context, 1))
    return KangarooSettings(fields, h, _exit_layer(file, config, exit_layer, target), layers)


def _exit_layer(file: Path, config: Mapping[str, Any], given: int | None, target: Target) -> int:
    """The number of the hidden state that the adapter reads."""
    stated = config.get("exit_layer")
    if stated is None and given is None:
        raise ValueError(
            f"{file} holds no exit_layer, the number of the target's hidden state that the adapter reads: set "
            "proposer.exit_layer to that with which it was trained"
        )
    number = whole(file, config, "exit_layer", default=given)
    if given is not None and number != given:
        raise ValueError(
            f"proposer.exit_layer must be {number}, which {file} states, or null (got {given}): an adapter reads only "
            "the hidden state with which it was trained"
        )
    last = target.services.num_layers - 1
    if not 1 <= number <= last:
        raise ValueError(
            f"{'proposer.exit_layer' if stated is None else f'{file}: exit_layer'} is {number}, but of the target "
            f"{target.name}, which has {last + 1} layers, 1 to {last} can be named: the adapter is for another target"
        )
    return number


def write_kangaroo(
    network: Kangaroo, folder: Path, vocab_size: int, facts: Mapping[str, str], dtype: torch.dtype
) -> str:
    """Write an adapter; return the SHA-256 of its weights.

    Args:
        network: the adapter.
        folder: is made.
        vocab_size: of the target.
        facts: for the file's metadata.
        dtype: of the weights in the file.
    """
    settings = network.settings
    parameters = network.named_parameters()
    tensors = {name.removeprefix("body."): parameter.to(dtype) for name, parameter in parameters}
    config = dict(settings.layer) | {
        "exit_layer": settings.exit_layer, "num_hidden_layers": settings.layers, "vocab_size": vocab_size,
    }  # fmt: skip
    return write_drafter(folder, config, tensors, facts)
