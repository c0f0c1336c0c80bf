"""Decoder layers for drafters, taken from transformers: Llama's, Qwen's or those of any family built like them.

The layers are described on torch's meta device, where they need no memory, until weights are read or made. Attention is
that of the engine (``engine.attention.SPANS``), so that ``engine.feature_lm`` can run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from spec_lab.engine.attention import SPANS, layer_kinds
from spec_lab.models.checkpoint import one_line
from spec_lab.models.support import Unsupported

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
"""What a decoder layer must consist of."""


class DraftLayers(nn.Module):
    """The decoder layers and rotary embedding that a config of transformers describes.

    Args:
        fields: of a config, ``model_type`` among them; what concerns embedding and output is not used.
        count: number of layers.

    Raises:
        ValueError: fields that describe no model.
        Unsupported: a family whose layers are built otherwise, or that has layers without full attention.
    """

    def __init__(self, fields: Mapping[str, Any], count: int) -> None:
        super().__init__()
        kind = fields.get("model_type")
        try:
            more = {name: value for name, value in fields.items() if name not in ("model_type", "layer_types")}
            config = AutoConfig.for_model(kind, **more | {"num_hidden_layers": count, "vocab_size": 1})
            config._attn_implementation = SPANS
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).model
            rotary = type(model.rotary_emb)(config=config)
            windows = layer_kinds(config)
        except Exception as error:  # transformers raises errors of many types
            raise ValueError(
                f"transformers {transformers.__version__} cannot build layers of model_type {kind!r} from this config "
                f"({one_line(error)})"
            ) from error
        children = {name for layer in model.layers for name, _ in layer.named_children()}
        if children != {*PARTS} or windows:
            raise Unsupported(
                f"layers of model_type '{kind}' are not supported in a drafter: they need full attention, and to "
                f"consist of {', '.join(PARTS)}"
            )
        self.config, self.rotary, self.layers = config, rotary, model.layers
        for parent in list(model.layers.modules()):
            for name, norm in list(parent.named_children()):
                if _is_plain_norm(norm):
                    setattr(parent, name, rms_norm(len(norm.weight), self))

    def widen(self, width: int) -> None:
        """Let queries, keys and values of the first layer read inputs of this width."""
        attention = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            setattr(attention, name, nn.Linear(width, old.out_features, old.bias is not None, device="meta"))

    def attend(self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, mask: Any = None) -> Tensor:
        """Self-attention of one layer over inputs ``[1, N, X]`` -> ``[1, N, H]``.

        Args:
            layer: its number.
            x: normed.
            rotation: as of ``rotate``.
            cache: ``engine.attention.Pack``, or anything with its ``update``.
            mask: for attention that is not over cells.
        """
        out: Tensor = self.layers[layer].self_attn(
            hidden_states=x, position_embeddings=rotation, attention_mask=mask, past_key_values=cache
        )[0]
        return out

    def rotate(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding at ``positions`` ``[1, N]``, in the dtype of ``x``."""
        found: tuple[Tensor, Tensor] = self.rotary(x, positions)
        return found

    def rest(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        """What follows attention in one layer: both residual connections and the MLP."""
        own, hidden = self.layers[layer], residual + attended
        found: Tensor = hidden + own.mlp(own.post_attention_layernorm(hidden))
        return found

    def run(self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, mask: Any = None) -> Tensor:
        """One whole layer as its family defines it, ``[1, N, H] -> [1, N, H]``."""
        return self.rest(layer, x, self.attend(layer, self.layers[layer].input_layernorm(x), rotation, cache, mask))


def rms_norm(width: int, layers: DraftLayers) -> nn.RMSNorm:
    """An RMSNorm of this width, on the meta device, with the layers' epsilon."""
    return nn.RMSNorm(width, eps=float(layers.config.rms_norm_eps), device="meta")


def random_weights(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights for a module's parameters: matrices normal with variance 1 / inputs, norms 1, biases 0."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            found[name] = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        else:
            found[name] = torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
    return found


def small_layer(hidden_size: int) -> dict[str, Any]:
    """The config of a small Llama layer, for toys and tests."""
    return {
        "model_type": "llama", "hidden_size": hidden_size, "intermediate_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether a module of transformers is an RMSNorm times its weight, which torch computes faster and in float64.

    (transformers computes it in float32 whatever the dtype; some families add one to the weight.)
    """
    epsilon = getattr(module, "variance_epsilon", None)
    if epsilon is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return False
    probe: Any = type(module)(4, eps=epsilon)
    x, weight = torch.tensor([0.5, -1.0, 2.0, 0.1]), torch.tensor([0.3, 1.2, -0.7, 2.0])
    with torch.no_grad():
        probe.weight.copy_(weight)
        return torch.allclose(probe(x), nn.functional.rms_norm(x, (4,), weight, epsilon))
