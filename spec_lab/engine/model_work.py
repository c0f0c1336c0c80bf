"""What a forward of a model of transformers reads and computes, from its weights and its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from spec_lab.core.probabilities import probs_dtype
from spec_lab.core.roofline import AttentionWork, ForwardWork
from spec_lab.engine.attention import FULL, AttentionKind
from spec_lab.engine.memory import ModelMemory


def work_of(model: Any, kinds: Mapping[int, AttentionKind], kv_itemsize: int | None = None) -> ForwardWork | None:
    """Return what a forward of a causal LM reads and computes.

    Every matrix outside embedding tables multiplies each row once, the LM head those with logits. Experts are tensors
    of three dimensions, the first of which numbers them; their biases have it too.

    Args:
        model: a causal LM of transformers.
        kinds: of layers without full attention, by layer.
        kv_itemsize: bytes of a number of the KV cache; None: as of the weights.

    Returns:
        None of a model whose layers are split over ranks, and where the config does not state the attention heads or
        the experts of a row.
    """
    config, head = model.config, model.get_output_embeddings().weight
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    per_row = getattr(config, "num_experts_per_tok", None)
    if not heads or not hidden or (getattr(model, "tp_size", None) or 1) > 1:
        return None
    weights, flops, seen = 0.0, 0.0, set()
    for module in model.modules():
        own = [one for one in module.parameters(recurse=False) if id(one) not in seen]
        if isinstance(module, nn.Embedding):
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
    cached = _numbers_per_cell(config) * (head.element_size() if kv_itemsize is None else kv_itemsize)
    windows = Counter(_window(kinds.get(layer, FULL)) for layer in range(config.num_hidden_layers))
    attention = [
        AttentionWork(count * cached, count * 2 * heads * (key + value), one) for one, count in windows.items()
    ]
    return ForwardWork(round(weights), round(flops), 2 * head.numel(), tuple(attention))


def memory_of(model: Any, chunk: int, uniform: bool, kv_itemsize: int | None = None) -> ModelMemory | None:
    """Return the sizes from which the memory of decoding with a causal LM follows.

    Args:
        model: a causal LM of transformers.
        chunk: most tokens of a prompt computed in one forward.
        uniform: whether all sequences have as many KV cells as the longest.
        kv_itemsize: as of ``work_of``.

    Returns:
        None of a model on several devices or ranks, and where the config does not state the attention heads.
    """
    config, head = model.config, model.get_output_embeddings().weight
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    split = len({str(one) for one in (getattr(model, "hf_device_map", None) or {}).values()}) > 1
    if not heads or not hidden or split or (getattr(model, "tp_size", None) or 1) > 1:
        return None
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return ModelMemory(
        weights=sum(one.numel() * one.element_size() for one in model.parameters()),
        cell=config.num_hidden_layers * _numbers_per_cell(config),
        kv_itemsize=head.element_size() if kv_itemsize is None else kv_itemsize,
        itemsize=head.element_size(),
        probabilities=probs_dtype(head.dtype).itemsize,
        vocabulary=int(head.shape[0]),
        width=4 * hidden + 3 * inner,
        chunk=chunk,
        uniform=uniform,
    )


def _head_sizes(config: Any) -> tuple[int, int]:
    """Return the size of an attention head's keys, and of its values; DeepSeek's differ."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key, value = (getattr(config, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
    return int(key), int(value)


def _numbers_per_cell(config: Any) -> int:
    """Return how many numbers a KV cell has in one layer."""
    return int((getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * sum(_head_sizes(config)))


def _window(kind: AttentionKind) -> int | None:
    """Return the most positions that a row of such a layer attends to. In a chunk there may be fewer."""
    return kind.sliding_window or kind.chunk
