"""Bytes and operations of a forward of a model of transformers, from its weights and its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from spec_lab.core.probabilities import probs_dtype
from spec_lab.core.roofline import AttentionWork, ExpertWork, ForwardWork
from spec_lab.runners.adaptors import EXTRA, has_alibi
from spec_lab.runners.attention import FULL, AttentionKind, layers_without_cells
from spec_lab.runners.memory_need import ModelMemory, StateMemory
from spec_lab.runners.quantized import is_quantized, stored


def work_of(model: Any, kinds: Mapping[int, AttentionKind], kv_itemsize: int | None = None) -> ForwardWork | None:
    """Return what a forward of a causal LM reads and computes.

    Every matrix outside embedding tables multiplies each row once, the LM head those with logits. Experts are tensors
    of three dimensions, the first of which numbers them; their biases have it too. Quantized weights count with the
    bytes in which they are stored, scales included, and with the FLOPs of the layer.

    Args:
        model: a causal LM of transformers.
        kinds: of layers without full attention, by layer.
        kv_itemsize: bytes of a number of the KV cache; None: that of the weights.

    Returns:
        None of a model whose layers are split over ranks or differ in the shape of their attention heads, and where the
        config does not state the attention heads or the experts of a row.
    """
    config, head, sizes = model.config, model.get_output_embeddings().weight, _sizes(model)
    experts: int = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    per_row: int = getattr(config, "num_experts_per_tok", None) or 0
    if sizes is None:
        return None
    weights, flops, stacked, layers = 0.0, 0.0, 0, 0
    for module, parameters, quantized in _weights(model, without=nn.Embedding):
        if quantized:
            flops += 2 * in_times_out(module)
        share, several = 1.0, not quantized and any(parameter.dim() > 2 for parameter in parameters)
        if several:
            if not (experts and per_row and all(parameter.shape[0] == experts for parameter in parameters)):
                return None
            share = per_row / experts
            stacked, layers = stacked + _bytes(parameters), layers + 1
        weights += share * _bytes(parameters)
        for parameter in parameters:
            if not quantized and parameter is not head and parameter.dim() == (3 if several else 2):
                flops += share * 2 * parameter.numel()
    key, value = _head_sizes(config)
    cached = _numbers_per_cell(model) * (head.element_size() if kv_itemsize is None else kv_itemsize)
    same = Counter(kinds.get(layer, FULL) for layer in _layers_with_cells(config))
    attention = [
        AttentionWork(count * cached, count * 2 * sizes[0] * (key + value), kind.sliding_window, kind.chunk)
        for kind, count in same.items()
    ]
    mixture = ExpertWork(layers, experts, per_row, stacked / (layers * experts)) if layers else None
    return ForwardWork(round(weights), round(flops), 2 * head.numel(), tuple(attention), mixture)


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
        kv_itemsize: as in ``work_of``.
        dense: whether attention reads one mask over all cells.
        recurrent: of a model with recurrent layers.

    Returns:
        None of a model on several devices or ranks, or whose layers differ in the shape of their attention heads, and
        where the config does not state the attention heads.
    """
    config, head, sizes = model.config, model.get_output_embeddings().weight, _sizes(model)
    if sizes is None or len({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
        return None
    hidden = sizes[1]
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list | tuple) else inner  # one for each layer (Gemma 3n)
    layers = len(_layers_with_cells(config)) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return ModelMemory(
        weights=sum(_bytes(parameters) for _, parameters, _ in _weights(model)),
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


def _weights(model: Any, without: type | tuple[()] = ()) -> Iterator[tuple[nn.Module, list[Tensor], bool]]:
    """Each module with its own parameters, as they are stored and each once, and whether they are quantized.

    Args:
        without: modules that are left out; their parameters count where they are used again.
    """
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, without):
            continue
        parameters = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in parameters}
        quantized = is_quantized(module)
        yield module, stored(module) if quantized else parameters, quantized


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _sizes(model: Any) -> tuple[int, int] | None:
    """Return the numbers of attention heads and of a hidden state.

    Returns:
        None where the config does not state them, and of a model on several ranks, or whose layers differ in the shape
        of their attention heads.
    """
    heads, hidden = (getattr(model.config, name, None) for name in ("num_attention_heads", "hidden_size"))
    if not heads or not hidden or (getattr(model, "tp_size", None) or 1) > 1 or _differing_heads(model):
        return None
    return heads, hidden


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
    """Return how many numbers a KV cell has in one layer. Arguments as in ``memory_of``."""
    key, value = _head_sizes(model.config)
    if getattr(model.config, "kv_lora_rank", None):
        return key if dense else key + value  # one latent, twice for attention over cells (``adaptors``)
    return _cached_heads(model.config) * (key + value + 2 * EXTRA * has_alibi(model))


def _cached_heads(config: Any) -> int:
    """Return how many heads of keys and values a model has."""
    if config.model_type == "falcon":  # with ALiBi every query head has keys of its own (``adaptors``)
        shared = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else None
        return int(config.num_attention_heads if config.alibi or shared is None else shared)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def parameters_of(model: Any) -> int:
    """Return the number of a model's parameters; quantized weights count as many as they stand for."""
    total = 0
    for module, parameters, quantized in _weights(model):
        if quantized:
            bias = module._parameters.get("bias")
            total += in_times_out(module) + (0 if bias is None else bias.numel())
        else:
            total += sum(parameter.numel() for parameter in parameters)
    return total


def in_times_out(module: Any) -> int:
    """Return the number of weights that a linear layer stands for, however they are stored."""
    return int(module.in_features) * int(module.out_features)
