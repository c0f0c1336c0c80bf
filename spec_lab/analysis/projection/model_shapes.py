"""The sizes of a model, what its forwards read and compute, and the configs of transformers that describe them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spec_lab.core.options import brief, whole
from spec_lab.core.roofline import AttentionWork, ExpertWork, ForwardWork

MAX_SIZE = 10**7
"""Maximum of any size of a model."""

MEASURE = "use measured forwards (--costs FILE)"

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that hold E; 0 and null mean a dense model."""

EXPERT_FIELDS = (
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
class Precision:
    """How the numbers of a model are stored and multiplied.

    Args:
        name: on the command line.
        weight_bytes: of a weight. Scales of quantized weights are left out.
        factors: dtype of the products, whose peak bounds computing.
        kv_bytes: of a number of the KV cache.
    """

    name: str
    weight_bytes: float
    factors: str
    kv_bytes: float = 2.0


@dataclass(frozen=True)
class Mixture:
    """The MLPs of a mixture of experts.

    Args:
        experts: E, of each layer that has several.
        per_row: k, that each row chooses.
        intermediate: size of one expert.
        shared: size of the experts that every row uses, together; 0 for none.
        dense_layers: layers with one MLP of the model's own size in their place.
        effective: as in ``ExpertWork``.
    """

    experts: int
    per_row: int
    intermediate: int
    shared: int = 0
    dense_layers: int = 0
    effective: float | None = None


@dataclass(frozen=True)
class ModelShape:
    """A transformer with gated MLPs, as Llama and Qwen are, or with experts; biases and norms are left out.

    Args:
        name: on the command line.
        hidden, intermediate: sizes of the residual stream and of dense MLPs.
        heads, kv_heads, head_dim: of attention.
        vocabulary: V.
        tied: whether embedding and LM head share their weights.
        mixture: of its experts; None of a dense model.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    source: str = ""
    mixture: Mixture | None = None

    @property
    def layer_weights(self) -> int:
        """Weights of one dense layer."""
        return self._attention_weights + 3 * self.hidden * self.intermediate

    @property
    def _attention_weights(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def weights_of_layers(self, every: bool = False) -> int:
        """Return the weights of all layers that a row is multiplied with, or all of them, with a router in each layer
        that has experts.

        Args:
            every: all experts, not only those of one row.
        """
        mixture = self.mixture
        if mixture is None:
            return self.layers * self.layer_weights
        sparse = self.layers - mixture.dense_layers
        return mixture.dense_layers * self.layer_weights + sparse * self.expert_layer_weights(every)

    def expert_layer_weights(self, every: bool = False) -> int:
        """Return the weights of a layer with experts, as ``weights_of_layers``."""
        assert self.mixture is not None, "of a mixture of experts"
        chosen = self.mixture.experts if every else self.mixture.per_row
        inner = chosen * self.mixture.intermediate + self.mixture.shared
        return self._attention_weights + self.hidden * (3 * inner + self.mixture.experts)

    def expert_work(self, layers: int, precision: Precision) -> ExpertWork | None:
        """Return the work of the experts of so many layers; None of a dense model."""
        if self.mixture is None:
            return None
        mixture, weights = self.mixture, 3 * self.hidden * self.mixture.intermediate
        each = weights * precision.weight_bytes
        return ExpertWork(layers, mixture.experts, mixture.per_row, each, mixture.effective)

    def choosing(self, effective: float) -> ModelShape:
        """Return the same model with another effective number of experts.

        Raises:
            ValueError: it has no experts, or not so many; names the option.
        """
        if self.mixture is None:
            raise ValueError(f"--experts {effective:g} is of mixtures of experts, and --model {self.name} is none")
        if not self.mixture.per_row <= effective <= self.mixture.experts:
            raise ValueError(
                f"--experts must be a number from {self.mixture.per_row}, the experts of a row of --model {self.name}, "
                f"to {self.mixture.experts}, those of a layer (got {effective:g})"
            )
        return replace(self, mixture=replace(self.mixture, effective=effective))

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """All weights, embeddings included."""
        return self.weights_of_layers(every=True) + self.head_weights * (1 if self.tied else 2)

    def work(self, precision: Precision, head_share: float = 1.0) -> ForwardWork:
        """Return what a forward reads and computes, with this share of the LM head's rows."""
        head = round(self.head_weights * head_share)
        sparse = 0 if self.mixture is None else self.layers - self.mixture.dense_layers
        experts = self.expert_work(sparse, precision)
        return work(self.weights_of_layers(), head, self.attention(self.layers), precision, experts)

    def attention(self, layers: int) -> tuple[int, int]:
        """Return keys and values of one position, and FLOPs of one row over one position, of so many layers."""
        return 2 * layers * self.kv_heads * self.head_dim, 4 * layers * self.heads * self.head_dim

    def memory(self, precision: Precision) -> float:
        """Return the bytes of all weights."""
        return self.weights * precision.weight_bytes


def work(
    matrices: int,
    head: int,
    attention: tuple[int, int],
    precision: Precision,
    experts: ExpertWork | None = None,
) -> ForwardWork:
    """Return the work of a forward.

    Args:
        matrices: weights that multiply every row, without the LM head's.
        head: weights of the LM head.
        attention: of ``ModelShape.attention``.
        precision: of weights and KV cache.
        experts: of which ``matrices`` counts those of one row; None for none.
    """
    kv, flops = attention
    return ForwardWork(
        weight_bytes=round((matrices + head) * precision.weight_bytes),
        row_flops=2 * matrices,
        logits_flops=2 * head,
        attention=(AttentionWork(round(kv * precision.kv_bytes), flops),) if kv else (),
        experts=experts,
    )


def of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config of transformers describes.

    Raises:
        ValueError: layers that are not modelled, experts that are described by fields of another meaning, or a config
            without the sizes of a decoder; names file and field.
    """
    file = f"{name}/config.json"
    _check_layers(file, config)

    def size(key: str, otherwise: int | None = None, minimum: int = 1) -> int:
        if config.get(key) is None:
            if otherwise is None:
                raise ValueError(f"{file} has no '{key}': it is not the config of a decoder")
            return otherwise
        return whole(f"{file}: {key}", config[key], minimum, maximum=MAX_SIZE)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    if hidden < heads and config.get("head_dim") is None:
        raise ValueError(f"{file}: hidden_size must be at least num_attention_heads, {heads}, not {hidden}")
    return ModelShape(
        name=name,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        vocabulary=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        source=file,
        mixture=_mixture(file, config, size),
    )


def _check_layers(file: str, config: Mapping[str, Any]) -> None:
    """Refuse layers that are not modelled."""
    for field, meaning in OTHER_LAYERS.items():
        if config.get(field) is not None:
            raise ValueError(f"{file}: {field} describes {meaning}, which is not modelled; {MEASURE}")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"{file}: layer_types must be a list, not {brief(kinds)}")
    if others := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise ValueError(f"{file}: layer_types has {others[0]}, which is not modelled; {MEASURE}")
    mixture = any(config.get(field) for field in EXPERTS)
    for field, value in config.items():
        about = re.search("expert|moe|router|shared|sparse|dense|mlp_(only|layer)", field)
        if not about or field in (*EXPERT_FIELDS, *NO_SIZES):
            continue
        # a dense model may have such fields too: switches that are off, sizes of 0, coefficients of a router's loss
        each = value if isinstance(value, list) else [value]
        several = any(isinstance(number, int | float) and number > 1 for number in each)
        if several or (mixture and value not in (None, False)):
            raise ValueError(f"{file}: {field} is not understood, and may change what a forward reads; {MEASURE}")


def _mixture(file: str, config: Mapping[str, Any], size: Callable[..., int]) -> Mixture | None:
    """Return the experts that a config describes; None of a dense model.

    Args:
        file: for messages.
        config: fields of Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE, GPT-OSS, Phi-3.5-MoE, MiniMax-M2 or GLM-4.5.
        size: reads a field: ``size(key, otherwise, minimum)``.
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
    stated = isinstance(kinds, list) and len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds)
    if kinds and not stated:
        raise ValueError(f"{file}: mlp_layer_types must state dense or sparse for each of {layers} layers")
    dense |= {*only, *(layer for layer, kind in enumerate(kinds) if kind == "dense")}
    return Mixture(experts, per_row, inner, shared, len(dense))
