"""What a forward of a model of transformers reads and computes, from its weights and its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from spec_lab.core.probabilities import probs_dtype
from spec_lab.core.roofline import AttentionWork, ForwardWork
from spec_lab.runners.adaptors import EXTRA, has_alibi
from spec_lab.runners.attention import FULL, AttentionKind, layers_without_cells
from spec_lab.runners.memory import ModelMemory, StateMemory
from spec_lab.runners.quantized import is_quantized, stored


def work_of(model: Any, kinds: Mapping[int, AttentionKind], kv_itemsize: int | None = None) -> ForwardWork | None:
    """Return what a forward of a causal LM reads and computes.

    Every matrix outside embedding tables multiplies each row once, the LM head those with logits. Experts are tensors
    of three dimensions, the first of which numbers them; their biases have it too. Quantized weights count with the
    bytes in which they are stored, scales included, and with the FLOPs of the layer.

    Args:
        model: a causal LM of transformers.
        kinds: of layers without full attention, by layer.
        kv_itemsize: bytes of a number of the KV cache; None: as of the weights.

    Returns:
        None of a model whose layers are split over ranks or differ in the shape of their attention heads, and where the
        config does not state the attention heads or the experts of a row.
    """
    config, head = model.config, model.get_output_embeddings().weight
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    per_row = getattr(config, "num_experts_per_tok", None)
    if not heads or not hidden or (getattr(model, "tp_size", None) or 1) > 1 or _differing_heads(model):
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
    key, value = _head_sizes(config)
    cached = _numbers_per_cell(model) * (head.element_size() if kv_itemsize is None else kv_itemsize)
    same = Counter(kinds.get(layer, FULL) for layer in _layers_with_cells(config))
    attention = [AttentionWork(count * cached, count * 2 * heads * (key + value), *one) for one, count in same.items()]
    return ForwardWork(round(weights), round(flops), 2 * head.numel(), tuple(attention))


def memory_of(
    model: Any,
    chunk: int,
    uniform: bool,
    kv_itemsize: int | None = None,
    dense: bool = False,
    recurrent: StateMemory | None = None,
) -> ModelMemory | None:
    """Return the sizes from which the memory of decoding with a causal LM follows.

    Args:
        model: a causal LM of transformers.
        chunk: most tokens of a prompt computed in one forward.
        uniform: whether all sequences have as many KV cells as the longest.
        kv_itemsize: as of ``work_of``.
        dense: whether attention reads one mask over all cells.
        recurrent: of a model with recurrent layers.

    Returns:
        None of a model on several devices or ranks, or whose layers differ in the shape of their attention heads, and
        where the config does not state the attention heads.
    """
    config, head = model.config, model.get_output_embeddings().weight
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    split = len({str(one) for one in (getattr(model, "hf_device_map", None) or {}).values()}) > 1
    if not heads or not hidden or split or (getattr(model, "tp_size", None) or 1) > 1 or _differing_heads(model):
        return None
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list | tuple) else inner  # one for each layer (Gemma 3n)
    layers = len(_layers_with_cells(config)) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return ModelMemory(
        weights=_weight_bytes(model),
        cell=layers * _numbers_per_cell(model, dense),
        kv_itemsize=head.element_size() if kv_itemsize is None else kv_itemsize,
        itemsize=head.element_size(),
        probabilities=probs_dtype(head.dtype).itemsize,
        vocabulary=int(head.shape[0]),
        width=4 * hidden + 3 * inner,
        hidden=hidden,
        chunk=chunk,
        uniform=uniform,
        recurrent=recurrent,
    )


def _weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights as they are stored."""
    total, seen = 0, set()
    for module in model.modules():
        if is_quantized(module):
            total += sum(one.numel() * one.element_size() for one in stored(module))
            continue
        own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
        seen |= {id(one) for one in own}
        total += sum(one.numel() * one.element_size() for one in own)
    return total


def _differing_heads(model: Any) -> bool:
    """Return whether a model's layers differ in the shape of their attention heads, as MiMo-V2-Flash and Gemma 4."""
    shapes = {
        (module.num_key_value_groups, module.head_dim)
        for module in model.modules() if hasattr(module, "num_key_value_groups") and hasattr(module, "head_dim")
    }  # fmt: skip
    return len(shapes) > 1


def _layers_with_cells(config: Any) -> list[int]:
    """Return the numbers of the layers that keep keys and values."""
    without = layers_without_cells(config)
    return [layer for layer in range(config.num_hidden_layers) if layer not in without]


def _head_sizes(config: Any) -> tuple[int, int]:
    """Return the numbers of a key and of a value that a query head reads; some models' differ."""
    if rank := getattr(config, "kv_lora_rank", None):  # latents, which all heads share (``adaptors``)
        return int(rank + config.qk_rope_head_dim), int(rank + config.qk_rope_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key, value = (getattr(config, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
    return int(key), int(value)


def _numbers_per_cell(model: Any, dense: bool = False) -> int:
    """Return how many numbers a KV cell has in one layer. Arguments as of ``memory_of``."""
    key, value = _head_sizes(model.config)
    if getattr(model.config, "kv_lora_rank", None):
        return key if dense else key + value  # one latent, twice for attention over spans (``adaptors``)
    return _cached_heads(model.config) * (key + value + 2 * EXTRA * has_alibi(model))


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
