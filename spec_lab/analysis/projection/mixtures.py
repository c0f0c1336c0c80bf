"""The experts that the config of a published mixture of experts describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MEASURE = "use measured forwards (--costs FILE)"

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that hold E; 0 and null mean a dense model."""

KNOWN = (
    *EXPERTS, "num_experts_per_tok", "experts_per_token", "moe_intermediate_size", "n_shared_experts",
    "shared_expert_intermediate_size", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step",
    "moe_layer_freq", "mlp_layer_types",
)  # fmt: skip
"""Fields that describe experts and are read."""

NO_SIZES = (
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "router_z_loss_coef", "norm_topk_prob",
    "use_expert_bias", "moe_router_activation_func",
)  # fmt: skip
"""Fields on experts that say how a router is trained and how it weighs its choice, not what is read."""

OTHER_LAYERS = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_key_heads": "linear attention",
    "full_attention_interval": "linear attention",
    "mamba_d_state": "recurrent layers",
}
"""Fields of layers whose weights and keys are not modelled."""


@dataclass(frozen=True)
class Mixture:
    """The MLPs of a mixture of experts.

    Args:
        experts: E, of each layer that has several.
        per_row: k, that each row chooses.
        intermediate: size of one expert.
        shared: size of the experts that every row uses, together; 0 for none.
        dense_layers: layers with one MLP of the model's own size in their place.
    """

    experts: int
    per_row: int
    intermediate: int
    shared: int = 0
    dense_layers: int = 0


def check_layers(file: str, config: Mapping[str, Any]) -> None:
    """Refuse layers that are not modelled.

    Raises:
        ValueError: names the field.
    """
    for field, meaning in OTHER_LAYERS.items():
        if config.get(field) is not None:
            raise ValueError(f"{file}: {field} describes {meaning}, which is not modelled; {MEASURE}")
    kinds = config.get("layer_types") or ()
    if others := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise ValueError(f"{file}: layer_types has {others[0]}, which is not modelled; {MEASURE}")
    if not any(config.get(field) for field in EXPERTS):
        return
    for field, value in config.items():
        about = re.search("expert|moe|router|shared|sparse|dense|mlp_(only|layer)", field)
        if about and field not in (*KNOWN, *NO_SIZES) and value not in (None, False):
            raise ValueError(f"{file}: {field} is not understood, and may change which experts are read; {MEASURE}")


def mixture_of(file: str, config: Mapping[str, Any], size: Callable[..., int]) -> Mixture | None:
    """Return the experts that a config describes; None of a dense model.

    Args:
        file: for messages.
        config: fields of Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE, GPT-OSS, Phi-3.5-MoE, MiniMax-M2 or GLM-4.5.
        size: reads a field: ``size(key, otherwise, minimum)``.

    Raises:
        ValueError: a field without the values of these; names it.
    """
    field = next((field for field in EXPERTS if config.get(field)), None)
    if field is None:
        return None
    layers, experts = size("num_hidden_layers"), size(field)
    per_row = size("num_experts_per_tok", config.get("experts_per_token") and size("experts_per_token"))
    if per_row > experts:
        raise ValueError(f"{file}: num_experts_per_tok must be at most {field}, {experts}, not {per_row}")
    inner = size("moe_intermediate_size", size("intermediate_size"))
    shared = size("shared_expert_intermediate_size", 0, 0) + size("n_shared_experts", 0, 0) * inner
    first, step = size("first_k_dense_replace", 0, 0), size("decoder_sparse_step", 1)
    frequency = size("moe_layer_freq", 1)
    dense = {layer for layer in range(layers) if layer < first or (layer + 1) % step or layer % frequency}
    only, kinds = config.get("mlp_only_layers") or [], config.get("mlp_layer_types") or []
    if not isinstance(only, list) or any(layer not in range(layers) for layer in only):
        raise ValueError(f"{file}: mlp_only_layers must list numbers of layers, from 0 to {layers - 1}")
    if kinds and (len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}):
        raise ValueError(f"{file}: mlp_layer_types must state dense or sparse for each of {layers} layers")
    dense |= {*only, *(layer for layer, kind in enumerate(kinds) if kind == "dense")}
    return Mixture(experts, per_row, inner, shared, len(dense))
