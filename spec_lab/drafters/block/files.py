"""Files of block drafters: those of DFlash and of DSpark.

A folder holds ``config.json``, a config of Qwen3 or Llama with more fields, and weights in safetensors; both are
untrusted input (``models.checkpoint``). Tensors: ``layers.*``, ``fc.weight``, ``hidden_norm.weight``, ``norm.weight``,
and perhaps ``embed_tokens.weight`` and ``lm_head.weight``, in place of which the target's are used otherwise. Taps are
numbers of layers whose outputs are read, one less than those of ``hidden_states``. Fields that may change what is
computed, and are not read, are refused by name (``DFLASH``, ``DSPARK``).

- DFlash: ``block_size`` (here or in ``dflash_config``), and in ``dflash_config`` ``mask_token_id`` and
  ``target_layer_ids``. Row i of a block predicts the token at its own position.
- DSpark: ``block_size``, ``mask_token_id``, ``target_layer_ids``, ``markov_rank`` and ``markov_head_type`` (only
  "vanilla") at the top level; ``markov_head.markov_w1.weight`` and ``markov_head.markov_w2.weight``, both [V, r]. Row i
  predicts the token after its position. A confidence head, which shortens drafts, is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.core.options import brief
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
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
    taps,
    whole,
)
from spec_lab.models.checkpoint import open_weights, read_drafter_config, weight_files, weights_hash
from spec_lab.models.target import Target

FAMILIES = ("llama", "qwen3")
PLACES = ("block_size", "mask_token_id", "target_layer_ids")
"""Fields that may stand at the top level or in ``dflash_config``."""
COMMON = {*LAYER.read, *PLACES, "target_hidden_size"}
CAUSAL = (False,), "blocks whose rows attend only to rows before them are not supported"
MEANS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "causal": CAUSAL,
    "is_causal": CAUSAL,
    "attention_mode": (("gqa", "mha"), "latent attention is not supported"),
    "final_logit_softcapping": ((), "logits that are capped are not supported"),
    "output_multiplier": ((1.0,), "logits that are scaled are not supported"),
}
COUNT = {"num_target_layers": "the target has its own number of layers, with which the taps are compared"}
OWN_ROW = (False,), "the rows of DFlash predict the token at their own position"
NEXT_ROW = (True,), "the rows of DSpark predict the token after their position"
MARKOV = (0,), "a Markov head (DSpark) in DFlash's layout is not supported, only in that of DSpark's authors"
DFLASH = Fields(
    "a DFlash drafter",
    COMMON,
    {
        **MEANS, "projector_type": (("dflash",), "drafters with another head than DFlash's are not supported"),
        "sample_from_anchor": OWN_ROW, "shift_label": OWN_ROW, "dspark_bonus_anchor": ((True,), OWN_ROW[1]),
        "markov_rank": MARKOV, "pure_draft_prefix_len": ((0,), "levels without Domino's head are not supported"),
        "enable_confidence_head": ((False,), MARKOV[1]), "use_confidence_head": ((False,), MARKOV[1]),
    },
    COUNT,
)  # fmt: skip
"""At the top level of the config, and in its ``dflash_config``."""
DSPARK = Fields(
    "a DSpark drafter",
    {*COMMON, "markov_rank", "markov_head_type"},
    {**MEANS, "sample_from_anchor": NEXT_ROW, "shift_label": NEXT_ROW, "dspark_bonus_anchor": ((False,), NEXT_ROW[1])},
    COUNT | dict.fromkeys(
        ("enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"),
        "the confidence head shortens drafts, and is not read",
    ),
)  # fmt: skip
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
MOST_BLOCK = 256


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
    folder, config = read_drafter_config(path, "a block drafter", converts=False)
    with open_weights(weight_files(folder)) as held:
        shapes = {name: tuple(one.get_shape()) for name, one in held.items() if name not in CONFIDENCE}
        with named_by(folder):
            network = BlockNetwork(_settings(folder, config, shapes, target))
        wanted = {name.removeprefix("body."): (name, tuple(one.shape)) for name, one in network.named_parameters()}
        refuse(folder, misfits({name: shape for name, (_, shape) in wanted.items()}, shapes))
        tensors = {own: read_weight(folder, held, name, target.lm.dtype) for name, (own, _) in wanted.items()}
    load_weights(network, tensors, target.services, target.lm.device, target.lm.dtype)
    return ReadBlock(network, weights_hash(path))


def _settings(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: Target
) -> BlockSettings:
    """Return the settings of the drafter. Errors as of ``read_block``."""
    file, inner, rank = folder / "config.json", config.get("dflash_config"), 0
    dspark = inner is None
    if dspark and "speculators_model_type" in config:
        kind = brief(config["speculators_model_type"])
        raise ValueError(
            f"{file}: block drafters in the format of speculators (speculators_model_type {kind}) are not supported: "
            "choose one in the layout of DFlash's or DSpark's authors"
        )
    if dspark:
        if "markov_rank" not in config:
            raise ValueError(
                f"{file} describes no block drafter: it has neither dflash_config (DFlash) nor markov_rank (DSpark)"
            )
        inner, rank = config, whole(file, config, "markov_rank", least=0)
        if rank and config.get("markov_head_type") != "vanilla":
            kind = brief(config.get("markov_head_type"))
            raise ValueError(f"{file}: markov_head_type {kind} is not supported: choose a drafter with 'vanilla'")
    if not isinstance(inner, dict):
        raise ValueError(f"{file}: dflash_config must be a mapping, not {brief(inner)}")
    (DSPARK if dspark else DFLASH).check(file, config, "dflash_config")
    for name in PLACES:
        if None not in (outer := config.get(name), own := inner.get(name)) and outer != own:
            raise ValueError(f"{file}: {name} is {brief(outer)}, but {brief(own)} in dflash_config")
    inner = {name: config.get(name) if inner.get(name) is None else inner[name] for name in PLACES}
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type must be one of {', '.join(FAMILIES)}, not {brief(family)}")
    refuse_windows(file, config)
    h, v, wide = whole(file, config, "hidden_size"), target.vocabulary, target.services.hidden_size
    layers = whole(file, config, "num_hidden_layers")
    if layers > len(shapes):
        raise ValueError(f"{file}: num_hidden_layers is {layers}, but the weight files hold {len(shapes)} tensors")
    of_target = whole(file, config, "target_hidden_size", default=h)
    embedding, own_head = (shapes.get("embed_tokens.weight") or (None,))[0], "lm_head.weight" in shapes
    if of_target != wide or (h != wide and (embedding is None or not own_head)):
        raise ValueError(
            f"the block drafter at {folder} is for hidden size {of_target}, the target {target.name} has {wide}"
        )
    size = whole(file, inner, "block_size", most=MOST_BLOCK)
    if size + dspark < 2:
        raise ValueError(f"{file}: block_size is {size}: a block of DFlash holds the pending token and mask tokens")
    known = v if embedding is None else embedding
    mask = whole(file, inner, "mask_token_id", least=0, most=known - 1)
    fields = {name: config[name] for name in OF_LAYERS if name in config}
    if fields.get("head_dim") is None:
        fields["head_dim"] = h // whole(file, config, "num_attention_heads")
    fields["max_position_embeddings"] = whole(file, config, "max_position_embeddings", default=target.context + size)
    read = _taps(file, inner, layers, target)
    return BlockSettings(fields, h, of_target, v, read, size, mask, layers, dspark, rank, embedding, own_head)


def _taps(file: Path, config: Mapping[str, Any], layers: int, target: Target) -> tuple[int, ...]:
    """The numbers of the hidden states that the drafter reads; spread over the target's layers if none are named."""
    last = target.lm.capabilities.hidden_layers
    named = config.get("target_layer_ids")
    if named is None:
        spread = [round(1 + i * (last - 4) / (layers - 1)) for i in range(layers)] if layers > 1 else [last // 2]
        return tuple(max(0, min(one + 1, last)) for one in spread)
    layers_read = taps(file, "target_layer_ids", named, 1, last, target.name)
    if list(layers_read) != sorted({*layers_read}):
        raise ValueError(
            f"{file}: target_layer_ids must name different layers in ascending order, not {brief(named)}: engines "
            "differ in the order in which they read others"
        )
    return layers_read
