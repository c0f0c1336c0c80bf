"""Files of block drafters: those of DFlash and of DSpark.

A folder holds ``config.json``, a config of Qwen3 or Llama with more fields, and weights in safetensors; both are
untrusted input (``models.checkpoint``). Tensors: ``layers.*``, ``fc.weight``, ``hidden_norm.weight``, ``norm.weight``,
and perhaps ``embed_tokens.weight`` and ``lm_head.weight``, in place of which the target's are used otherwise. Taps are
numbers of layers whose outputs are read, one less than those of ``hidden_states``.

- DFlash: ``block_size``, and in ``dflash_config`` ``mask_token_id`` and ``target_layer_ids``. Row i of a block predicts
  the token at its own position.
- DSpark: ``block_size``, ``mask_token_id``, ``target_layer_ids``, ``markov_rank`` and ``markov_head_type`` (only
  "vanilla") at the top level; ``markov_head.markov_w1.weight`` and ``markov_head.markov_w2.weight``, both [V, r]. Row i
  predicts the token after its position. A confidence head, which shortens drafts, is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_lab.core.files import read_json
from spec_lab.core.options import brief
from spec_lab.models.block import BlockNetwork, BlockSettings, with_weights
from spec_lab.models.checkpoint import SINGLE, open_weights, weight_files, weights_hash
from spec_lab.models.target import Target

FAMILIES = ("llama", "qwen3")
OF_LAYERS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Fields of a config that describe the decoder layers of these families."""
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
MOST_TAPS, MOST_BLOCK = 64, 256


@dataclass(frozen=True, eq=False)
class ReadBlock:
    """A block drafter that was read.

    Args:
        network: ready to draft for the target.
        sha256: of its weight files.
    """

    network: BlockNetwork
    sha256: str


def read_block(path: str, target: Target) -> ReadBlock:
    """Read a block drafter for a target, into its dtype and onto its device.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no block drafter; the config describes none that is supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; the drafter is for another hidden size, another vocabulary or hidden
            states that the target does not have.
    """
    if not isinstance(path, str) or not path:
        raise ValueError(f"proposer.path must name a folder of a block drafter, not {path!r}")
    folder = Path(path)
    config = read_json(folder / "config.json")
    if config is None:
        where = "" if folder.is_dir() else ", as is the folder"
        raise OSError(f"no block drafter at {folder}: config.json is missing{where}")
    pickled = sorted(one.name for pattern in ("*.bin", "*.pt", "*.pth") for one in folder.glob(pattern))
    if pickled and not (folder / SINGLE).exists() and not (folder / f"{SINGLE}.index.json").exists():
        raise ValueError(
            f"{folder} holds its weights in {pickled[0]}, which a run does not read because loading it may execute "
            "code: save them as safetensors"
        )
    with open_weights(weight_files(folder)) as held:
        shapes = {name: tuple(one.get_shape()) for name, one in held.items() if name not in CONFIDENCE}
        network = BlockNetwork(_settings(folder, config, shapes, target))
        tensors = {own: held[name][:] for name, own in _names(folder, network, shapes).items()}
    for name, one in tensors.items():
        if not torch.isfinite(one).all():
            raise ValueError(f"{folder}: '{name.removeprefix('body.')}' holds NaN or infinite values")
    return ReadBlock(with_weights(network, tensors, target), weights_hash(path))


def _settings(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: Target
) -> BlockSettings:
    """What the drafter is. Errors as of ``read_block``."""
    file, inner, rank = folder / "config.json", config.get("dflash_config"), 0
    dspark = inner is None
    if dspark:
        if "markov_rank" not in config:
            raise ValueError(
                f"{file} describes no block drafter: it has neither dflash_config (DFlash) nor markov_rank (DSpark)"
            )
        inner, rank = config, _whole(file, config, "markov_rank", least=0)
        if rank and config.get("markov_head_type") != "vanilla":
            kind = brief(config.get("markov_head_type"))
            raise ValueError(f"{file}: markov_head_type {kind} is not supported: choose a drafter with 'vanilla'")
    if not isinstance(inner, dict):
        raise ValueError(f"{file}: dflash_config must be a mapping, not {brief(inner)}")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type must be one of {', '.join(FAMILIES)}, not {brief(family)}")
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(one != "full_attention" for one in types)):
        raise ValueError(f"{file}: layer_types must be full_attention in every layer, not {brief(types)}")
    h, v, wide = _whole(file, config, "hidden_size"), target.vocabulary, target.services.hidden_size
    layers = _whole(file, config, "num_hidden_layers")
    if layers > len(shapes):
        raise ValueError(f"{file}: num_hidden_layers is {layers}, but the weight files hold {len(shapes)} tensors")
    of_target = _whole(file, config, "target_hidden_size", default=h)
    embedding, own_head = shapes.get("embed_tokens.weight", (None,))[0], "lm_head.weight" in shapes
    if of_target != wide or (h != wide and (embedding is None or not own_head)):
        raise ValueError(
            f"the block drafter at {folder} is for hidden size {of_target}, the target {target.name} has {wide}"
        )
    size = _whole(file, config, "block_size", most=MOST_BLOCK)
    if size + dspark < 2:
        raise ValueError(f"{file}: block_size is {size}: a block of DFlash holds the pending token and mask tokens")
    known = v if embedding is None else embedding
    mask = _whole(file, inner, "mask_token_id", least=0, most=known - 1)
    fields = {name: config[name] for name in OF_LAYERS if name in config}
    if fields.get("head_dim") is None:
        fields["head_dim"] = h // _whole(file, config, "num_attention_heads")
    fields["max_position_embeddings"] = target.context + size
    taps = _taps(file, inner, layers, target)
    return BlockSettings(fields, h, of_target, v, taps, size, mask, layers, dspark, rank, embedding, own_head)


def _whole(
    file: Path, config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1
) -> int:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{file}: {name} must be a whole number from {least} to {most}, not {brief(value)}")
    return value


def _taps(file: Path, config: Mapping[str, Any], layers: int, target: Target) -> tuple[int, ...]:
    """The numbers of the hidden states that the drafter reads; spread over the target's layers if none are named."""
    last = target.lm.capabilities.hidden_layers
    named = config.get("target_layer_ids")
    if named is None:
        spread = [round(1 + i * (last - 4) / (layers - 1)) for i in range(layers)] if layers > 1 else [last // 2]
        return tuple(max(0, min(one + 1, last)) for one in spread)
    plain = isinstance(named, list) and 0 < len(named) <= MOST_TAPS
    if not plain or any(isinstance(one, bool) or not isinstance(one, int) for one in named):
        raise ValueError(f"{file}: target_layer_ids must be a list of layers, not {brief(named)}")
    if wrong := [one for one in named if not -1 <= one < last]:
        raise ValueError(
            f"{file}: target_layer_ids names layer {wrong[0]}, but the target {target.name} has layers 0 to "
            f"{last - 1}: the drafter is for another target"
        )
    return tuple(one + 1 for one in named)


def _names(folder: Path, network: BlockNetwork, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The network's own name of each tensor in the files.

    Raises:
        ValueError: a tensor is missing, surplus or misshapen.
    """
    wanted = {name: tuple(one.shape) for name, one in network.named_parameters()}
    names = {name: f"body.{name}" if name.startswith("layers.") else name for name in shapes}
    problems = []
    for name, shape in shapes.items():
        expected = wanted.get(names[name])
        if expected is None:
            problems.append(f"{brief(name)} is in no layer of the network")
        elif expected != shape:
            problems.append(f"{name} is {list(shape)}, not {list(expected)}")
    held = set(names.values())
    problems += [f"{name.removeprefix('body.')} is missing" for name in wanted if name not in held]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"the weights of {folder} do not fit its config.json: {'; '.join(sorted(problems)[:3])}{more}")
    return names
