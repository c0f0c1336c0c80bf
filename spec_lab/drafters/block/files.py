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

from typing import Any

from spec_lab.core.options import brief
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
from spec_lab.drafters.drafter_files import LAYER, DrafterFiles, Fields, Meanings
from spec_lab.drafters.layouts import Entry, Layout
from spec_lab.models.target import Target

BLOCK = Layout("block drafter", (
    Entry("confidence_head.proj.weight", "", "?"),
    Entry("confidence_head.proj.bias", "", "?"),
    Entry("layers.{l}.*", "body.layers.{l}.*"),
    Entry("*", "*"),  # fc, hidden_norm, norm, embed_tokens, lm_head, markov_head
))  # fmt: skip
FAMILIES = ("llama", "qwen3")
PLACES = ("block_size", "mask_token_id", "target_layer_ids")
"""Fields that may stand at the top level or in ``dflash_config``."""
COMMON = {*LAYER.read, *PLACES, "target_hidden_size"}
CAUSAL = (False,), "blocks whose rows attend only to rows before them are not supported"
MEANS: Meanings = {
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
MAX_BLOCK = 256


def read_block(path: str, target: Target) -> BlockNetwork:
    """Read a block drafter for a target, into its dtype and onto its device.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no block drafter; the config describes none that is supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; the drafter is for another hidden size, another vocabulary or hidden
            states that the target does not have.
    """
    with DrafterFiles.open(path, "a block drafter", target, converts=False) as files:
        settings = _settings(files)
        return files.read(BLOCK, lambda: BlockNetwork(settings))


def _settings(files: DrafterFiles) -> BlockSettings:
    """Return the settings of the drafter. Errors as of ``read_block``."""
    file, config, shapes, target = files.file, files.config, files.shapes, files.target
    inner, rank = config.get("dflash_config"), 0
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
        inner, rank = config, files.whole("markov_rank", minimum=0)
        if rank and config.get("markov_head_type") != "vanilla":
            kind = brief(config.get("markov_head_type"))
            raise ValueError(f"{file}: markov_head_type {kind} is not supported: choose a drafter with 'vanilla'")
    if not isinstance(inner, dict):
        raise ValueError(f"{file}: dflash_config must be a mapping, not {brief(inner)}")
    (DSPARK if dspark else DFLASH).check(file, config, "dflash_config")
    for name in PLACES:
        if None not in (outer := config.get(name), inner_value := inner.get(name)) and outer != inner_value:
            raise ValueError(f"{file}: {name} is {brief(outer)}, but {brief(inner_value)} in dflash_config")
    inner = {name: config.get(name) if inner.get(name) is None else inner[name] for name in PLACES}
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type must be one of {', '.join(FAMILIES)}, not {brief(family)}")
    size = files.whole("block_size", maximum=MAX_BLOCK, config=inner)
    if size + dspark < 2:
        raise ValueError(f"{file}: block_size is {size}: a block of DFlash holds the pending token and mask tokens")
    fields = files.layer_fields(config, target.context + size)
    h, layers = config["hidden_size"], files.whole("num_hidden_layers")
    embedding, own_head = (shapes.get("embed_tokens.weight") or (None,))[0], "lm_head.weight" in shapes
    of_target = files.whole("target_hidden_size", h)
    files.check_target(of_target)
    if embedding is None or not own_head:
        files.check_target(h)
    known = target.vocabulary if embedding is None else embedding
    mask = files.whole("mask_token_id", minimum=0, maximum=known - 1, config=inner)
    taps = _taps(files, inner["target_layer_ids"], layers)
    return BlockSettings(
        fields, h, of_target, target.vocabulary, taps, size, mask, layers, dspark, rank, embedding, own_head
    )


def _taps(files: DrafterFiles, named: Any, layers: int) -> tuple[int, ...]:
    """The numbers of the hidden states that the drafter reads; spread over the target's layers if none are named."""
    last = files.target.lm.capabilities.hidden_layers
    if named is None:
        spread = [round(1 + i * (last - 4) / (layers - 1)) for i in range(layers)] if layers > 1 else [last // 2]
        return tuple(max(0, min(layer + 1, last)) for layer in spread)
    taps = files.taps("target_layer_ids", named, 1)
    if taps != sorted({*taps}):
        raise ValueError(
            f"{files.file}: target_layer_ids must name different layers in ascending order, not {brief(named)}: "
            "engines differ in the order in which they read others"
        )
    return tuple(taps)
