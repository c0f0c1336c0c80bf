"""Files of Kangaroo's adapters: ``config.json`` and weights in safetensors, both untrusted (``models.checkpoint``).

Names of tensors are those of the published ``pytorch_model.bin`` (``spec-lab convert`` makes safetensors of it):
``layers.{i}.input_layernorm``, ``layers.{i}.self_attn.{q,k,v,o}_proj`` and ``norm``. ``config.json`` is that of a Llama
with ``num_hidden_layers`` such layers; fields of its MLP are not used, unknown ones are refused by name. One field
deviates from the published layout: ``exit_layer``, the number of the target's hidden state that is read. Published
configs do not hold it, so a run states it (``proposer.exit_layer``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from spec_lab.core.options import brief
from spec_lab.drafters.config_fields import LAYER, Fields
from spec_lab.drafters.drafter_files import DrafterFiles, write_drafter
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.drafters.layer_conventions import layer_fields
from spec_lab.drafters.layouts import Entry, Layout, decoder_layer
from spec_lab.models.target import Target

FIELDS = Fields("an adapter of Kangaroo", {*LAYER.read, "exit_layer"})
KANGAROO = Layout("Kangaroo", (
    Entry("layers.{l}.*", "body.layers.{l}.*", decoder_layer(norms=("input_layernorm",), mlp=False)),
    Entry("norm.weight", "norm.weight", "H"),
))  # fmt: skip


def read_kangaroo(path: str, target: Target, exit_layer: int | None = None) -> Kangaroo:
    """Read an adapter for a target, into its dtype and onto its device.

    Args:
        path: folder of the adapter.
        exit_layer: number of the hidden state that the adapter reads; None: the config holds it.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no adapter; the config describes none that is supported, or another exit layer than
            the one given; a tensor is missing, surplus, misshapen, NaN or infinite; the adapter is for another hidden
            size, another vocabulary or an exit layer that the target does not have.
    """
    given = {"exit_layer": exit_layer}
    with DrafterFiles.open(path, "an adapter of Kangaroo", target, options=given) as files:
        settings = _settings(files, exit_layer)
        return files.read(KANGAROO, lambda: Kangaroo(settings))


def _settings(files: DrafterFiles, exit_layer: int | None) -> KangarooSettings:
    """Return the settings of the adapter. Errors as in ``read_kangaroo``."""
    config, first = files.config, "layers.0.self_attn.q_proj.weight"
    files.expect(first in files.held and "fc.weight" not in files.held, f"{first} and others of attention and norms")
    if (kind := config.get("model_type", "llama")) != "llama":
        raise ValueError(f"{files.file}: model_type must be llama, not {brief(kind)}: an adapter has Llama's attention")
    FIELDS.check(files.file, config)
    fields = layer_fields(files, config) | {"model_type": kind, "intermediate_size": 1}  # there is no MLP
    files.check_target(config["hidden_size"], config.get("vocab_size"))
    layers = files.whole("num_hidden_layers", 1)
    return KangarooSettings(fields, config["hidden_size"], _exit_layer(files, exit_layer), layers)


def _exit_layer(files: DrafterFiles, given: int | None) -> int:
    """The number of the hidden state that the adapter reads."""
    file, target, stated = files.file, files.target, files.config.get("exit_layer")
    if stated is None and given is None:
        raise ValueError(
            f"{file} holds no exit_layer, the number of the target's hidden state that the adapter reads: set "
            "proposer.exit_layer to that with which it was trained"
        )
    number = files.whole("exit_layer", given)
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
    why, others = "the config states it", dict[str, int]()
    if stated is None:
        near = {"one layer earlier": number - 1, "one layer later": number + 1}
        why, others = "", {label: other for label, other in near.items() if 1 <= other <= last}
    return int(files.choose("exit_layer", number, "file", why, others))


def write_kangaroo(
    network: Kangaroo, folder: Path, vocab_size: int, facts: Mapping[str, str], dtype: torch.dtype
) -> str:
    """Write an adapter; return the SHA-256 of its weights.

    Args:
        vocab_size: of the target.
    """
    settings = network.settings
    config = dict(settings.layer) | {
        "exit_layer": settings.exit_layer, "num_hidden_layers": settings.layers, "vocab_size": vocab_size,
    }  # fmt: skip
    return write_drafter(folder, config, KANGAROO.named(network), facts, dtype)
