"""Files of block drafters: those of DFlash, DFlash2, DSpark and Domino.

A folder holds ``config.json``, a config of Qwen3 or Llama with more fields, and weights in safetensors; both are
untrusted input (``models.checkpoint``). Tensors: ``layers.*``, ``fc.weight``, ``hidden_norm.weight``, ``norm.weight``,
and perhaps ``embed_tokens.weight`` and ``lm_head.weight``, in place of which the target's are used otherwise. Taps are
numbers of layers whose outputs are read, one less than those of ``hidden_states``. Fields that may change what is
computed, and are not read, are refused by name (``block.layout``).

The fields of a drafter stand at the top level of the config (DeepSpec) or in its ``dflash_config`` (z-lab, SpecForge,
ModelOpt). Which kind it is, is told by ``projector_type``, else by the class in ``architectures``, else by
``markov_rank``. In the format of speculators ``speculators_model_type`` tells, ``transformer_layer_config`` describes
the layers, and taps are numbers of hidden states, in ``aux_hidden_state_layer_ids``. An LM head for a smaller
vocabulary has ``d2t`` (``drafters.eagle.conventions``).

- DFlash: ``block_size``, ``mask_token_id`` and ``target_layer_ids``; perhaps ``output_multiplier`` of the logits, which
  ``final_logit_softcapping`` then caps, and ``input_embedding_scale``. Row i of a block predicts the token at its own
  position. Windows are those of ``layer_types`` and ``sliding_window``, or, with ``use_swa``, of every layer. Whether
  the rows of a block attend to each other in both directions is told by ``is_causal`` or ``causal``, else by the layer:
  in both with full attention, to rows before them with a window. Windows end at each row, in the format of speculators
  at the last computed position (``layer_conventions.choose_anchored``).
- DSpark: besides, ``markov_rank`` and ``markov_head_type``, and the tensors of a Markov head and of a confidence head.
  Row i predicts the token after its position, unless ``sample_from_anchor`` or ``shift_label`` is false or
  ``dspark_bonus_anchor`` true. These fields tell it of the other kinds too.
- Domino: besides DFlash's, ``gru_hidden_dim``, ``emb_dim`` and ``pure_draft_prefix_len``.
- DFlash2: besides DFlash's, ``conv_kernel_size``, ``conv_group_size``, ``selector_rank`` and ``selector_top_k``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

from spec_lab.core.options import brief
from spec_lab.drafters.block.heads import HeadSettings, MarkovKind
from spec_lab.drafters.block.layout import (
    ANCHOR,
    ARCHITECTURES,
    BLOCK,
    CAUSAL,
    CONFIDENCE,
    DFLASH2_FIELDS,
    DOMINO_FIELDS,
    DSPARK_FIELDS,
    FAMILIES,
    FIELDS,
    INNER,
    NEIGHBOURS,
    NESTED_FIELDS,
    OF_LAYERS,
    OF_SPECULATORS,
    SPECULATORS,
    SPECULATORS_FIELDS,
    TAPS,
    Kind,
)
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
from spec_lab.drafters.draft_layers import read_interleaved
from spec_lab.drafters.drafter_files import DrafterFiles
from spec_lab.drafters.eagle.conventions import draft_tokens
from spec_lab.drafters.layer_conventions import (
    choose_anchored,
    choose_of_two,
    choose_positions,
    choose_rope,
    choose_window,
    layer_fields,
    layer_windows,
    numbered_taps,
    ordered_taps,
    settle_taps,
    stated_flag,
)
from spec_lab.models.target import Target

MAX_BLOCK = 256
MAX_SCALE = 1e6
"""Maximum factor of logits or embeddings."""


def read_block(path: str, target: Target, options: Mapping[str, Any] | None = None) -> BlockNetwork:
    """Read a block drafter for a target, into its dtype and onto its device.

    Args:
        options: by convention, how it is read (``DrafterFiles``).

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no block drafter; the config describes none that is supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; ``d2t`` is no offset; the drafter is for another hidden size, another
            vocabulary or hidden states that the target does not have.
    """
    with DrafterFiles.open(path, "a block drafter", target, converts=False, options=options) as files:
        stated = _stated(files)
        settings = _settings(files, stated)
        interleaved = choose_rope(files, stated, NEIGHBOURS in files.architectures)
        ids = draft_tokens(files, target.vocabulary, settings.draft_vocab_size)
        network = files.read(BLOCK, lambda: BlockNetwork(settings))
        network.ids = ids.to(target.lm.device)
        if interleaved:
            read_interleaved(network.body)
        return network


def _settings(files: DrafterFiles, stated: Mapping[str, Any]) -> BlockSettings:
    """Return the settings of the drafter. Errors as in ``read_block``."""
    file, config, shapes, target = files.file, files.config, files.shapes, files.target
    kind, layer = _kind(files, stated), config.get("transformer_layer_config", config)
    if SPECULATORS in config:
        if layer is config or not isinstance(layer, dict):
            given = brief(config.get("transformer_layer_config"))
            raise ValueError(f"{file}: transformer_layer_config must be a mapping, not {given}")
        OF_SPECULATORS[kind].check(file, config)
        OF_LAYERS.check(file, layer)
    else:
        layer = config
        FIELDS[kind].check(file, config, INNER)
    family = layer.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type must be one of {', '.join(FAMILIES)}, not {brief(family)}")
    next_row = choose_of_two(files, "anchor", stated_flag(files, stated, ANCHOR), kind == "dspark", ("own", "next"))
    size = files.whole("block_size", maximum=MAX_BLOCK, config=stated)
    if size + next_row < 2:
        raise ValueError(
            f"{file}: block_size is {size}: a block holds the pending token, and mask tokens that draft a level each"
        )
    fields = layer_fields(files, layer, target.context + size, windows=True)
    if "layers.0.self_attn.q_norm.weight" in shapes:
        fields["model_type"] = "qwen3"  # the block's authors build these layers whatever the target's family
    windows, anchored, causal = _attention(files, stated, layer)
    h, layers = layer["hidden_size"], files.whole("num_hidden_layers", config=layer)
    embedding, own_head = (shapes.get("embed_tokens.weight") or (None,))[0], shapes.get("lm_head.weight")
    of_target = files.whole("target_hidden_size", h)
    files.check_target(of_target)
    if embedding is None or not own_head:
        files.check_target(h)
    v, known = target.vocabulary, target.vocabulary if embedding is None else embedding
    drafted = files.whole("draft_vocab_size", (own_head or (v,))[0], maximum=v, config=stated)
    if not own_head and drafted != v:
        raise ValueError(f"{files.folder} drafts {drafted} of the target's {v} tokens, but holds no lm_head.weight")
    head = _head(files, stated, kind, drafted)
    taps = files.whole("conv_kernel_size", maximum=size, config=stated) if kind == "dflash2" else 0
    group = files.whole("conv_group_size", maximum=h, config=stated) if taps else 1
    if h % group:
        raise ValueError(f"{file}: conv_group_size is {group}, which does not divide hidden_size {h}")
    return BlockSettings(
        fields, h, of_target, v, _taps(files, stated, layers), size,
        files.whole("mask_token_id", minimum=0, maximum=known - 1, config=stated), layers, next_row, head=head,
        confidence=_confidence(files, stated, h, head.rank if head else 0), embedding=embedding,
        draft_vocab_size=drafted if own_head else None,
        conv_taps=taps, conv_group=group,
        embedding_scale=_factor(files, stated, "input_embedding_scale", 1.0),
        logit_scale=_factor(files, stated, "output_multiplier", 1.0),
        logit_cap=_factor(files, stated, "final_logit_softcapping", 0.0), windows=windows, causal=causal,
        anchored=anchored, positions=choose_positions(files),
    )  # fmt: skip


def _stated(files: DrafterFiles) -> dict[str, Any]:
    """The drafter's fields, wherever they stand. Null is a missing field."""
    inner = files.config.get(INNER) or {}
    if not isinstance(inner, dict):
        raise ValueError(f"{files.file}: {INNER} must be a mapping, not {brief(inner)}")
    stated: dict[str, Any] = {}
    for name in sorted({*NESTED_FIELDS, *DSPARK_FIELDS, *DOMINO_FIELDS, *DFLASH2_FIELDS, *SPECULATORS_FIELDS}):
        values = [value for value in (files.config.get(name), inner.get(name)) if value is not None]
        if not values:
            continue
        stated[name] = values[0]
        if values[0] != values[-1]:
            raise ValueError(f"{files.file}: {name} is {brief(values[0])}, but {brief(values[1])} in {INNER}")
    if files.flag("sliding_window_non_causal", stated.get(SPECULATORS) == "dflash2", config=stated):
        if files.flag("causal", config=stated):
            raise ValueError(
                f"{files.file}: sliding_window_non_causal and causal are true, which contradict each other"
            )
        stated["causal"] = False
    return stated


def _kind(files: DrafterFiles, stated: Mapping[str, Any]) -> Kind:
    """The kind of the drafter."""
    field = SPECULATORS if SPECULATORS in files.config else "projector_type"
    named = stated.get(field)
    if named is not None:
        kinds = OF_SPECULATORS if field == SPECULATORS else FIELDS
        if named not in kinds:
            known = " or ".join(map(brief, kinds))
            raise ValueError(f"{files.file}: {field} {brief(named)} is not supported, only {known}")
        return cast(Kind, named)
    for name in files.architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if stated.get("markov_rank"):
        return "dspark"
    if stated.get("conv_kernel_size"):
        return "dflash2"
    if not files.config.get(INNER):
        raise ValueError(
            f"{files.file} describes no block drafter: it has neither dflash_config (DFlash) nor markov_rank (DSpark)"
        )
    return "dflash"


def _attention(
    files: DrafterFiles, stated: Mapping[str, Any], layer: Mapping[str, Any]
) -> tuple[tuple[int | None, ...], bool, tuple[bool, ...]]:
    """The window of each layer; whether windows end at the anchor of a block; and of each layer whether the rows of a
    block attend to rows before them only.

    As z-lab's code and vLLM read them: without a field that says so, rows of layers with a window in ``layer_types``
    do, and those of other layers do not, nor where ``use_swa`` gives every layer a window.
    """
    windows = layer_windows(files, layer)
    default = "windows" if any(windows) else "none"
    size = files.whole("swa_window_size", config=stated) if "swa_window_size" in stated else None
    if files.flag("use_swa", config=stated) and not any(windows):
        windows = (size or files.whole("sliding_window", config=layer),) * len(windows)
    elif size is not None:
        windows = tuple(window and size for window in windows)
    stated_windows = windows
    windows = choose_window(files, layer, windows, "layer_types, use_swa and sliding_window tell")
    anchored = choose_anchored(files, (*windows, *stated_windows), SPECULATORS in files.config)
    stated_causal = stated_flag(files, stated, CAUSAL)
    causal = files.choose(
        "causal", default if stated_causal is None else "all" if stated_causal else "none",
        "default" if stated_causal is None else "file",
        "rows of a block attend to rows before them only in layers with a window in layer_types, unless a field tells",
        {"in every layer": "all", "in no layer": "none", "in layers with a window": "windows"},
    )  # fmt: skip
    return (
        windows,
        anchored,
        tuple(causal == "all" or (causal == "windows" and layer_window is not None) for layer_window in windows),
    )


def _head(files: DrafterFiles, stated: Mapping[str, Any], kind: Kind, drafted: int) -> HeadSettings | None:
    """The settings of the head; None where there is none, as in DSpark with rank 0."""
    if kind == "domino":
        rank, size = (files.whole(name, config=stated) for name in ("emb_dim", "gru_hidden_dim"))
        uncorrected = files.whole("pure_draft_prefix_len", 0, 0, MAX_BLOCK, config=stated)
        return HeadSettings("domino", rank, state_size=size, uncorrected=uncorrected)
    if kind == "dflash2":
        if drafted != files.target.vocabulary:
            raise ValueError(f"{files.folder}: a DFlash2 drafter has no smaller vocabulary, but this drafts {drafted}")
        candidates = files.whole("selector_top_k", maximum=drafted, config=stated)
        return HeadSettings("selector", files.whole("selector_rank", config=stated), candidates=candidates)
    if kind == "dflash":
        return None
    rank, form = files.whole("markov_rank", minimum=0, config=stated), stated.get("markov_head_type", "vanilla")
    if rank and form not in get_args(MarkovKind):
        known = ", ".join(get_args(MarkovKind))
        raise ValueError(f"{files.file}: markov_head_type must be one of {known}, not {brief(form)}")
    return HeadSettings(form, rank) if rank else None


def _confidence(files: DrafterFiles, stated: Mapping[str, Any], hidden_size: int, rank: int) -> int:
    """The width of what the confidence head reads, which its tensor tells; 0 where there is none."""
    name = BLOCK.published("confidence_head.weight", files.shapes)[0]
    if name not in files.shapes and not any(files.flag(field, config=stated) for field in CONFIDENCE):
        return 0
    return hidden_size if files.shapes.get(name) == (1, hidden_size) else hidden_size + rank


def _factor(files: DrafterFiles, stated: Mapping[str, Any], name: str, default: float) -> float:
    """A factor of logits or embeddings."""
    value = stated.get(name, default)
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or not (0 < value <= MAX_SCALE or value == default):
        raise ValueError(f"{files.file}: {name} must be a number above 0 and at most {MAX_SCALE:g}, not {brief(value)}")
    return float(value)


def _taps(files: DrafterFiles, stated: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The numbers of the hidden states that the drafter reads; spread over the target's layers if none are named."""
    last = files.target.lm.capabilities.hidden_layers
    where, shift = (TAPS, 0) if SPECULATORS in files.config else ("target_layer_ids", 1)
    if (named := stated.get(where)) is None:
        spread = [round(1 + i * (last - 4) / (layers - 1)) for i in range(layers)] if layers > 1 else [last // 2]
        taps = [max(0, min(layer + 1, last)) for layer in spread]
        return settle_taps(files, taps, "default", f"{where} names none; DFlash spreads them over the layers")
    taps = numbered_taps(files, where, named, shift)
    if len({*taps}) < len(taps):
        raise ValueError(f"{files.file}: {where} must name different layers, not {brief(named)}")
    return ordered_taps(files, where, named, shift)
