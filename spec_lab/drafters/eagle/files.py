"""Files of EAGLE heads: the official format, SpecForge's and SGLang's, and that of vLLM's speculators.

A folder holds ``config.json`` and weights in safetensors; both are untrusted input (``models.checkpoint``). The format
is detected: ``speculators_model_type`` in the config is speculators'; tensors of a ``midlayer`` or a draft vocabulary
are EAGLE-3 as its authors, SpecForge and SGLang write it; ``fc.weight`` and ``layers.0`` alone are EAGLE-1 or EAGLE-2.

Names and conventions that differ, and what they become here:

- ``midlayer.*`` is layer 0, and so is ``midlayer.0.*``; so is ``transformer.*`` of speculators' EAGLE-1, where ``fc``
  is ``fusion_fc``. A prefix ``model.`` is left out.
- The layers of architectures named ``LlamaForCausalLMEagle..`` are Llama's whatever ``model_type`` is, which often is
  the target's. Which biases and norms of queries and keys they have, the tensors tell.
- ``d2t`` is an offset: draft token i is the target's token i + d2t[i], in any order. ``t2d`` marks these tokens. Where
  this gives no such tokens and the numbers themselves do, they are taken (``proposer.d2t``).
- Taps: ``eagle_aux_hidden_state_layer_ids`` at the top level are numbers of hidden states (number i is the input of
  layer i); inside ``eagle_config`` they are numbers of layers whose outputs are read, which is one less, unless L, the
  number of the target's layers, is among them. Without either they are hidden states 2, L // 2 and L - 3. They are read
  in the order of the layers, whatever the order of the list: so do engines, which collect them as the layers run.
  ``proposer.taps`` sets them. With ``use_aux_hidden_state`` false there are none, and the last state is the feature.
- ``norm_output``: speculators feed the normed state back. SpecForge did not until its pull request 879: true was
  "plain", false "raw" (``eagle.network``). Heads with the prefix ``model.`` are of tools that do as speculators.
- Fields that may change what is computed, and are not read, are refused by name (``EAGLE1_FIELDS``, ``EAGLE3_FIELDS``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from spec_lab.core.options import brief
from spec_lab.drafters.config_fields import LAYER, Fields, Meanings
from spec_lab.drafters.draft_layers import read_interleaved
from spec_lab.drafters.drafter_files import DrafterFiles, draft_tables, write_drafter
from spec_lab.drafters.eagle.conventions import (
    NORMS,
    TABLES,
    TAPS,
    choose_ends,
    choose_layer,
    choose_norm,
    choose_norm_output,
    choose_residual,
    choose_taps,
    draft_tokens,
    is_llama,
    reads_taps,
    unused,
)
from spec_lab.drafters.eagle.network import Eagle, Eagle3, Eagle3Settings, EagleSettings, Network
from spec_lab.drafters.layer_conventions import choose_positions, settle_last_state, window_fields
from spec_lab.drafters.layouts import Entry, Layout, decoder_layer
from spec_lab.models.target import Target

T = TypeVar("T", bound=Eagle3)
FORMAT_VERSION = "0.3.0"

EAGLE = Layout("EAGLE", (
    Entry("fc.weight|fusion_fc.weight", "fc.weight", "H 2H"),
    Entry("fc.bias|fusion_fc.bias", "fc.bias", "?H"),
    Entry("embed_tokens.weight", "", "?V H"),
    Entry("layers.0.*|transformer.*", "body.layers.0.*", decoder_layer(norms=("post_attention_layernorm",))),
    Entry("layers.{l+1}.*", "body.layers.{l+1}.*", decoder_layer()),
))  # fmt: skip
"""The layout of EAGLE-1 and EAGLE-2, and of EAGLE-1 in the format of speculators."""
FIRST_LAYER = "layers.0.{0}|midlayer.0.{0}|midlayer.{0}|transformer.{0}"
EAGLE3 = Layout("EAGLE-3", (
    Entry("layers.{l+1}.*|midlayer.{l+1}.*", "body.layers.{l+1}.*", decoder_layer()),
    Entry("fc.weight", "fc.weight", "?H R"),
    Entry("fc.bias", "fc.bias", "?H"),
    Entry(FIRST_LAYER.format("hidden_norm.weight"), "hidden_norm.weight", "H"),
    Entry(FIRST_LAYER.format("*"), "body.layers.0.*", decoder_layer("2H")),
    Entry("norm.weight", "norm.weight", "H"),
    Entry("input_norm.weight", "input_norm.weight", "?R"),
    Entry("fc_norm.{t}.weight", "fc_norm.{t}.weight", "?F"),
    Entry("lm_head.weight", "lm_head.weight", "?W H"),
    Entry("embed_tokens.weight", "embed_tokens.weight", "?V H"),
    Entry("d2t", "", "?"),
    Entry("t2d", "", "?"),
))  # fmt: skip
"""The layout of EAGLE-3 of its authors, SpecForge and SGLang (midlayer), and of speculators (layers.0)."""

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYERS = {
    *LAYER.read, "sliding_window", "use_sliding_window", "max_window_layers", "rope_is_neox_style", "is_neox_style",
    "original_max_position_embeddings",
}  # fmt: skip
OF_EAGLE3 = (False,), "it is a part of EAGLE-3, but the files hold an EAGLE-1 or EAGLE-2 head"
HEADS: Meanings = {
    "use_mtp_layernorm": ((False,), "norms of the inputs are not supported"),
    "parallel_draft_step": ((1,), "further heads of the same step are not supported"),
    "parallel_drafting": ((False,), "it is a P-EAGLE head: choose proposer=peagle"),
}
TOLD = dict.fromkeys(
    ("has_lm_head", "reuse_target_lm_head", "qkv_bias", "use_qk_norm"), "the tensors of the files tell"
)
NOT_READ = TOLD | {"parallel_draft_heads_num_layers": "concerns further heads, which are refused"}
OTHER_LAYERS = dict.fromkeys(
    (
        "num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token", "moe_intermediate_size",
        "norm_topk_prob", "swiglu_limit", "query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern",
        "hidden_activation", "router_aux_loss_coef", "output_router_logits", "embd_pdrop", "resid_pdrop",
        "use_bidirectional_attention", "mlp_only_layers", "initial_context_length",
    ),
    "describes layers of the target's family, and those of this architecture are Llama's",
)  # fmt: skip
"""Fields that a config may have kept of the target's where its layers are Llama's."""
EAGLE1_FIELDS = Fields(
    "an EAGLE head",
    {*LAYERS, "bias"},
    {
        **HEADS, **dict.fromkeys((*FLAGS, "use_aux_hidden_state"), OF_EAGLE3),
        "use_input_layernorm_in_first_layer": ((False,), "a norm before the first layer is not supported"),
        "use_last_layernorm": ((False,), "a norm after the last layer is not supported"),
    },
    NOT_READ | dict.fromkeys((TAPS, "draft_vocab_size", "target_hidden_size", "next_layer_regular"), OF_EAGLE3[1]),
)  # fmt: skip
"""Fields of EAGLE-1 and EAGLE-2, in the config and in its ``eagle_config``."""
EAGLE3_FIELDS = Fields(
    "an EAGLE-3 head",
    {*LAYERS, *FLAGS, TAPS, "draft_vocab_size", "target_hidden_size", "use_aux_hidden_state"},
    {
        **HEADS, "additional_fc": ((False,), "a second fc is not supported"),
        "use_input_layernorm_in_first_layer": ((True,), "a first layer without a norm is not supported"),
        "use_last_layernorm": ((True,), "an LM head without a norm before it is not supported"),
        "next_layer_regular": ((True,), "further layers that read the embedding are not supported"),
    },
    NOT_READ | {"bias": "the tensors of the files tell"},
    {*FLAGS, TAPS, "use_aux_hidden_state"},
)  # fmt: skip
"""Fields of EAGLE-3, in the config and in its ``eagle_config``."""
SPECULATORS = Fields(
    "a head in the format of speculators",
    {
        "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size", TAPS, *FLAGS,
        "fusion_bias", "layernorms",
    },
    {
        **HEADS, "eagle31": ((False,), "state norm_before_fc, fc_norm and norm_output instead"),
        "transformer_layer_architecture": (("LlamaDecoderLayer", "auto"), "layers of other classes are not supported"),
    },
    {"model_type": "speculators_model_type tells"},
)  # fmt: skip
"""Fields of EAGLE-1 and EAGLE-3 in the format of speculators, beside the layers."""


def read_eagle(
    path: str, target: Target, dtype: torch.dtype | None = None, options: Mapping[str, Any] | None = None
) -> Network:
    """Read a head for a target, onto its device.

    Args:
        path: folder of the head.
        dtype: of the head; None: the target's.
        options: by convention, how it is read (``DrafterFiles``).

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no EAGLE head; the config describes none that is supported; a tensor is missing,
            surplus, misshapen, NaN or infinite; ``d2t`` is no offset; the head is for another hidden size, another
            vocabulary or hidden states that the target does not have.
    """
    with DrafterFiles.open(path, "an EAGLE head", target, options=options) as opened:
        files, prefixed = unprefixed(opened)
        settings, interleaved = eagle_settings(files, prefixed)
        network: Network
        if isinstance(settings, EagleSettings):
            network = files.read(EAGLE, lambda: Eagle(settings), dtype)
        else:
            network = read_eagle3(files, EAGLE3, lambda: Eagle3(settings), dtype)
        if interleaved:
            read_interleaved(network.body)
        return network


def read_eagle3(files: DrafterFiles, layout: Layout, build: Callable[[], T], dtype: torch.dtype | None) -> T:
    """Read a network of the kind of EAGLE-3, which ``build`` makes without weights. Errors as in ``read_eagle``."""
    network = files.described(build)
    ids = draft_tokens(files, network.settings.vocab_size, network.settings.draft_vocab_size)
    left_out = unused(files)
    held = {name: tensor for name, tensor in files.held.items() if name not in left_out}
    network = replace(files, held=held).read(layout, lambda: network, dtype)
    network.ids = ids.to(files.target.lm.device)
    return network


def unprefixed(files: DrafterFiles) -> tuple[DrafterFiles, bool]:
    """Return the files with names of tensors without "model.", and whether any had this prefix.

    Raises:
        ValueError: two tensors have one name then.
    """
    held = {name.removeprefix("model."): tensor for name, tensor in files.held.items()}
    if len(held) < len(files.held):
        twice = min(name for name in held if {name, f"model.{name}"} <= files.held.keys())
        raise ValueError(f"{files.folder} holds both {brief(twice)} and {brief(f'model.{twice}')}: remove one")
    return replace(files, held=held), held.keys() != files.held.keys()


def eagle_settings(
    files: DrafterFiles, prefixed: bool, parallel: Collection[str] = ()
) -> tuple[EagleSettings | Eagle3Settings, bool]:
    """Return the settings of the head, and whether its rotary embedding turns neighbours.

    Args:
        prefixed: whether its tensors began with "model.".
        parallel: of a P-EAGLE head, the names of further fields that are read.

    Raises:
        ValueError: as in ``read_eagle``.
    """
    config, shapes, target = files.config, files.shapes, files.target
    kind = config.get("speculators_model_type")
    layer = config.get("transformer_layer_config") if kind is not None else config
    kinds = ("peagle",) if parallel else ("eagle", "eagle3")
    if kind not in (None, *kinds):
        known = " or ".join(kinds)
        raise ValueError(f"{files.file}: speculators_model_type {brief(kind)} is not supported: choose {known}")
    if not isinstance(layer, dict):
        raise ValueError(f"{files.file}: transformer_layer_config must be a mapping, not {brief(layer)}")
    is_eagle3 = (
        bool(parallel)
        or kind == "eagle3"
        or any(name.startswith("midlayer.") or name in TABLES or name.endswith("hidden_norm.weight") for name in shapes)
    )
    files.expect(is_eagle3 or bool({"fc.weight", "fusion_fc.weight"} & shapes.keys()), "fc.weight")
    fields, windows, anchored, interleaved = choose_layer(files, layer)
    if layer is config:
        table = EAGLE3_FIELDS if is_eagle3 else EAGLE1_FIELDS
        if is_llama(files):
            table = replace(table, irrelevant={**table.irrelevant, **OTHER_LAYERS})
        table.reading(parallel).check(files.file, config, "eagle_config")
    else:
        SPECULATORS.reading(parallel).check(files.file, config)
        replace(LAYER, read=LAYERS, irrelevant=TOLD).reading(parallel).check(files.file, layer)
    h, layers = layer["hidden_size"], files.whole("num_hidden_layers", 1, config=layer)
    v, wide = target.vocabulary, target.services.hidden_size
    files.check_target(vocabulary=layer.get("vocab_size"))
    if not is_eagle3:
        files.check_target(h)
        if kind == "eagle" and files.flag("layernorms"):
            raise ValueError(f"{files.file}: layernorms=true is not supported: choose a head without further norms")
        bias = bool({"fc.bias", "fusion_fc.bias"} & shapes.keys())
        if files.flag("fusion_bias" if kind == "eagle" else "bias") and not bias:
            raise ValueError(f"{files.folder} holds no fc.bias, but config.json states that there is one")
        taps = settle_last_state(files, "EAGLE-1 reads the state after the final norm")
        positions = choose_positions(files)
        return EagleSettings(fields, h, v, layers, bias, taps, windows, anchored, positions), interleaved
    files.check_target(files.whole("target_hidden_size", h))
    w = config.get("draft_vocab_size")
    if w is None and shapes.get("lm_head.weight"):
        w = shapes["lm_head.weight"][0]
    if w is not None and (isinstance(w, bool) or not isinstance(w, int) or not 0 < w <= v):
        raise ValueError(
            f"{files.file}: draft_vocab_size must lie between 1 and the target's {v} tokens, not {brief(w)}"
        )
    w, own_embedding = choose_ends(files, w, h)
    flags = {name: choose_norm(files, name) for name in NORMS}
    settings = Eagle3Settings(
        fields, h, wide, v, choose_taps(files), w, layers, choose_residual(files), **flags,
        norm_output=choose_norm_output(files, prefixed), own_embedding=own_embedding, windows=windows,
        anchored=anchored, positions=choose_positions(files),
        fc=reads_taps(files) or "fc.weight" in shapes, fc_bias="fc.bias" in shapes,
    )  # fmt: skip
    return settings, interleaved


def write_eagle3(
    network: Any,
    folder: Path,
    target: str,
    architecture: str,
    facts: Mapping[str, str],
    dtype: torch.dtype,
    layout: Layout = EAGLE3,
    more: Mapping[str, Any] = {},
) -> str:
    """Write an EAGLE-3 head in the format of speculators, which vLLM serves; return the SHA-256 of its weights.

    Args:
        network: ``drafters.eagle.network.Eagle3``.
        target: name or path of the target.
        architecture: of the target, as transformers names it.
        layout: of a head of another kind, ``PEAGLE``.
        more: fields of its config.
    """
    settings: Eagle3Settings = network.settings
    tensors = layout.named(network)
    if settings.draft_vocab_size is not None:
        tensors |= draft_tables(network.ids, settings.vocab_size)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
        "transformer_layer_config": dict(settings.layer)
        | {"num_hidden_layers": settings.layers, "vocab_size": settings.vocab_size}
        | window_fields(settings.windows),
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.target_hidden_size,
        TAPS: list(settings.taps),
        **{name: getattr(settings, name) for name in FLAGS[:3]},
        "norm_output": settings.norm_output == "feedback",
        **more,
    }
    return write_drafter(folder, config, tensors, facts, dtype)


def write_eagle(
    settings: EagleSettings,
    weights: Mapping[str, Tensor],
    folder: Path,
    embedding: Tensor,
    facts: Mapping[str, str],
    dtype: torch.dtype,
) -> str:
    """Write an EAGLE-1 or EAGLE-2 head in the official format; return the SHA-256 of its weights.

    Args:
        weights: by the network's own names.
        embedding: ``[V, H]`` of the target, which the official loader reads from the head's file.
    """
    tensors = {EAGLE.published(name)[0]: weight for name, weight in weights.items()}
    tensors["embed_tokens.weight"] = embedding[: settings.vocab_size]
    config = dict(settings.layer) | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": settings.layers, "vocab_size": settings.vocab_size,
        "bias": settings.bias,
    }  # fmt: skip
    return write_drafter(folder, config, tensors, facts, dtype)
