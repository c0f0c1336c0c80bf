"""What a forward of a model of transformers reads and computes, from its weights and its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from spec_lab.core.roofline import AttentionWork, ForwardWork
from spec_lab.engine.attention import FULL, AttentionKind
from spec_lab.models.quantized import is_quantized, stored


def work_of(model: Any, kinds: Mapping[int, AttentionKind]) -> ForwardWork | None:
    """Return what a forward of a causal LM reads and computes.

    Every matrix outside embedding tables multiplies each row once, the LM head those with logits. Experts are tensors
    of three dimensions, the first of which numbers them; their biases have it too. Quantized weights count with the
    bytes in which they are stored, scales included, and with the FLOPs of the layer.

    Args:
        model: a causal LM of transformers.
        kinds: of layers without full attention, by layer.

    Returns:
        None of a model whose layers are split over ranks or differ in the shape of their attention heads, and where the
        config does not state the attention heads or the experts of a row.
    """
    config, head = model.config, model.get_output_embeddings().weight
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    per_row = getattr(config, "num_experts_per_tok", None)
    if not heads or not hidden or (getattr(model, "tp_size", None) or 1) > 1:
        return None
    shapes = {
        (module.num_key_value_groups, module.head_dim)
        for module in model.modules() if hasattr(module, "num_key_value_groups") and hasattr(module, "head_dim")
    }  # fmt: skip
    if len(shapes) > 1:  # MiMo-V2-Flash, Gemma 4
        return None
    weights, flops, seen = 0.0, 0.0, set()
    for module in model.modules():
        own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
        if isinstance(module, nn.Embedding):
            continue
        if is_quantized(module):
            seen |= {id(one) for one in own}
            weights += sum(one.numel() * one.element_size() for one in stored(module))
            flops += 2 * in_times_out(module)
            continue
        share, several = 1.0, any(one.dim() > 2 for one in own)
        if several:
            if not (experts and per_row and all(one.shape[0] == experts for one in own)):
                return None
            share = per_row / experts
        for one in own:
            seen.add(id(one))
            weights += share * one.numel() * one.element_size()
            if one is not head and one.dim() == (3 if several else 2):
                flops += share * 2 * one.numel()
    width = getattr(config, "head_dim", None) or hidden // heads
    cached_heads = _cached_heads(config)
    key, value = (getattr(config, name, None) or width for name in ("qk_head_dim", "v_head_dim"))  # some differ
    if rank := getattr(config, "kv_lora_rank", None):  # latents, which all heads share (``adaptors``)
        cached_heads, key = 1, rank + config.qk_rope_head_dim
        value = key
    cached = cached_heads * (key + value) * head.element_size()
    same = Counter(kinds.get(layer, FULL) for layer in range(config.num_hidden_layers))
    attention = [AttentionWork(count * cached, count * 2 * heads * (key + value), *one) for one, count in same.items()]
    return ForwardWork(round(weights), round(flops), 2 * head.numel(), tuple(attention))


def _cached_heads(config: Any) -> int:
    """Return how many heads of keys and values a model has."""
    if config.model_type == "falcon":  # with ALiBi every query head has keys of its own (``adaptors``)
        shared = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else None
        return int(config.num_attention_heads if config.alibi or shared is None else shared)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def parameters_of(model: Any) -> int:
    """Return the number of a model's parameters; quantized weights count as many as they stand for."""
    total, seen = 0, set()
    for module in model.modules():
        quantized = is_quantized(module)
        total += in_times_out(module) if quantized else 0
        for name, one in module.named_parameters(recurse=False):
            if id(one) not in seen and not (quantized and name != "bias"):
                total += one.numel()
            seen.add(id(one))
    return total


def in_times_out(module: Any) -> int:
    """Return the number of weights that a linear layer stands for, however they are stored."""
    return int(module.in_features) * int(module.out_features)
