"""Attention modules of transformers whose own code cannot read cells of the KV cache, and how they do.

Bloom, MPT and Falcon compute attention themselves instead of calling ``AttentionInterface``, and their ALiBi biases
come from the place of a row in the batch instead of its position. Multi-head latent attention (DeepSeek-V2 and later)
caches latents and expands those of all earlier tokens in every forward. Here methods of the loaded model's modules are
replaced, one module at a time. In a forward without cells they do what they did before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from spec_lab.core.cache_argument import cache_argument
from spec_lab.runners.attention import AttentionKind, CellCache, ReadsCells, cell_attention
from spec_lab.runners.softmax import Softmax


def adapt(model: Any) -> bool:
    """Let a model's attention modules read cells where their own code cannot. Harmless when repeated.

    Returns:
        Whether there are modules with attention of their own, for which ``AttentionInterface`` has no effect.
    """
    bypasses_interface = False
    for module in model.modules():
        name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"  # accelerate's hooks call the former
        kind = type(module).__name__
        if kind in OWN_ATTENTION:
            slopes, forward = OWN_ATTENTION[kind]
            setattr(module, name, partial(forward, module, slopes(module)))
            bypasses_interface = True
        elif "expand_kv" in vars(type(module)):
            setattr(module, name, partial(_latent_forward, module))
            module.expand_kv = partial(_expand, module, _unpacked(module.kv_b_proj))
        elif getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"  # the same up to the maximum context, without reading positions on the host
    return bypasses_interface


def has_alibi(model: Any) -> bool:
    """Return whether a model has ALiBi biases, which are computed for cells only, and not with a dense mask."""
    return model.config.model_type in ("bloom", "mpt") or bool(getattr(model.config, "alibi", False))


# Attention with ALiBi, and Falcon's with RoPE -------------------------------------------------------------------------

EXTRA = 8
"""Numbers added to each key for its bias: a multiple of 8, which fused kernels on GPUs require."""
PARTS = 3
"""How many of them hold the bias: three numbers in bfloat16 are as exact as one in float32."""


def _bloom(module: Any, slopes: Tensor, hidden_states: Tensor, residual: Tensor, *more: Any, **named: Any) -> Any:
    """``BloomAttention.forward``: biases are rounded to the dtype of the model."""
    cache = named.get("layer_past")
    if not isinstance(cache, CellCache) or cache.dense:
        return type(module).forward(module, hidden_states, residual, *more, **named)
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    bias = _bias(slopes, cache).to(query.dtype)
    scaling = module.inv_norm_factor
    attended = _attend(module, cache, query, key, value, scaling, bias.double() / scaling)
    return residual + module.dense(attended), None


def _mpt(module: Any, slopes: Tensor, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
    """``MptAttention.forward``: biases are in float32."""
    cache = named.get(cache_argument(module))
    if not isinstance(cache, CellCache) or cache.dense:
        return type(module).forward(module, hidden_states, *more, **named)
    joint, scaling = module.Wqkv(hidden_states), module.softmax_scale
    if module.clip_qkv:
        joint = joint.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (part.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for part in joint.chunk(3, 2))
    bias = _bias(slopes, cache).double() / scaling
    return module.out_proj(_attend(module, cache, query, key, value, scaling, bias)), None


def _falcon(module: Any, slopes: Tensor, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
    """``FalconAttention.forward``: biases are rounded to bfloat16 in every dtype, and scaled like dot products."""
    cache = named.get("layer_past")
    if not isinstance(cache, CellCache) or cache.dense:
        return type(module).forward(module, hidden_states, *more, **named)
    query, key, value = module._split_heads(module.query_key_value(hidden_states))  # [1, N, heads, dim]
    if module.new_decoder_architecture:  # repeated for the query heads that share them
        groups = module.num_heads // module.num_kv_heads
        key, value = key[:, :, ::groups], value[:, :, ::groups]
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    bias = None
    if module.config.alibi:
        bias = _bias(slopes, cache).to(query.dtype).double()
        groups = module.num_heads // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))  # each head has biases of its own
    else:
        query, key = _code_of(module).apply_rotary_pos_emb(query, key, *named["position_embeddings"])
    return module.dense(_attend(module, cache, query, key, value, module.inv_norm_factor, bias)), None


def _attend(
    module: Any,
    cache: CellCache,
    query: Tensor,  # [1, heads, N, dim]
    key: Tensor,
    value: Tensor,
    scaling: float,
    bias: Tensor | None,  # [heads, N] float64
) -> Tensor:  # [1, N, heads * dim]
    """Attention over cells; a key's bias is added to its dot products with queries before they are scaled.

    The bias of a key depends on its own position alone: a softmax does not change when the biases that are relative to
    the query's position, as ALiBi has them, are all larger by the same number. So it is stored in the key's cell, as
    further dimensions that every query multiplies by the same number.
    """
    dim = query.shape[-1]
    if bias is not None:
        unit = 2.0 ** math.ceil(-math.log2(scaling))  # a power of 2, so that biases fit into float16
        left, parts = bias / unit, []
        for _ in range(PARTS):
            parts.append(left.to(key.dtype))
            left = left - parts[-1].double()
        key = torch.cat((key, pad(torch.stack(parts, -1), (0, EXTRA - PARTS))[None]), -1)
        query = torch.cat((query, pad(query.new_full((*query.shape[:-1], PARTS), unit), (0, EXTRA - PARTS))), -1)
        value = pad(value, (0, EXTRA))  # fused kernels on CPUs require values of the size of keys
    attended, _ = cell_attention(module, query, *cache.update(key, value, module.layer_idx), None, scaling)
    return attended[..., :dim].flatten(2)


def _bias(slopes: Tensor, cache: CellCache) -> Tensor:
    """Slopes ``[heads]`` times the positions of the rows, ``[heads, N]``, in the dtype of the slopes."""
    return slopes[:, None] * cache.positions.to(slopes.device)


def _code_of(module: nn.Module) -> Any:
    """The file of transformers that defines a module."""
    return import_module(type(module).__module__)


def _bloom_slopes(module: Any) -> Tensor:
    mask = torch.ones(1, 2, dtype=torch.long, device=module.dense.weight.device)
    slopes: Tensor = _code_of(module).build_alibi_tensor(mask, module.num_heads, torch.float32)[:, 0, 1]
    return slopes


def _falcon_slopes(module: Any) -> Tensor:
    return _bloom_slopes(module).bfloat16()


def _mpt_slopes(module: Any) -> Tensor:
    biases = _code_of(module).build_mpt_alibi_tensor(module.n_heads, 2, device=module.out_proj.weight.device)
    slopes: Tensor = -biases[:, 0, 0]
    return slopes


OWN_ATTENTION: dict[str, tuple[Callable[[Any], Tensor], Callable[..., Any]]] = {
    "BloomAttention": (_bloom_slopes, _bloom),
    "MptAttention": (_mpt_slopes, _mpt),
    "FalconAttention": (_falcon_slopes, _falcon),
}
"""Classes of modules with attention of their own: ALiBi's slopes ``[heads]`` of such a module, and its forward."""


# Multi-head latent attention ------------------------------------------------------------------------------------------


class LatentCells(NamedTuple):
    """Stands in for the cache of a latent attention module: a cell holds the latent and the rotated key, joined.

    It holds both twice, as key and as value, since fused kernels require values of the size of keys.
    """

    cells: CellCache

    def update(self, latent: Tensor, key: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write new latents ``[1, 1, N, rank]`` and rotated keys ``[1, 1, N, dim]``; see ``CellCache``."""
        joint = torch.cat((latent, key), -1)
        return self.cells.update(joint, joint, layer_idx)


class LatentReader(NamedTuple):
    """Attention over cells of latents. An ``attention.ReadsCells``.

    Keys and values are linear in the latent c: a key is ``[K c, r]`` with the rotated part r, a value is ``V c``. So
    q . K c = (K^T q) . c, and the sum over p V c is V times the sum over p c: neither is computed for any earlier
    token. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, "absorbed" matrices.

    Args:
        up: ``[heads, K's rows + V's rows, rank]``.
        split: how many rows are K's.
    """

    cells: ReadsCells
    up: Tensor
    split: int

    @property
    def kind(self) -> AttentionKind:
        """The layer's kind."""
        return self.cells.kind

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """``[1, heads, N, K's rows + dim] -> [1, N, heads, V's rows]``."""
        up_key, up_value = self.up[:, : self.split], self.up[:, self.split :]
        absorbed = torch.cat((query[..., : self.split] @ up_key, query[..., self.split :]), -1)
        attended = self.cells.attend(absorbed, softmax)[..., : self.up.shape[-1]]  # [1, N, heads, rank]
        return (attended.transpose(1, 2) @ up_value.transpose(1, 2)).transpose(1, 2)


def _latent_forward(module: Any, *given: Any, **named: Any) -> Any:
    """The forward of a latent attention module."""
    name = cache_argument(module)
    cache = named.get(name)
    if isinstance(cache, CellCache) and not cache.dense:
        named[name] = LatentCells(cache)
    return type(module).forward(module, *given, **named)


def _expand(module: Any, unpacked: Tensor | None, latent: Any, key: Any) -> tuple[Any, Any]:
    """``expand_kv`` of such a module; of cells nothing is expanded."""
    if isinstance(latent, Tensor):
        return type(module).expand_kv(module, latent, key)
    weight = module.kv_b_proj.weight if unpacked is None else unpacked
    split = module.qk_nope_head_dim
    reader = LatentReader(latent, weight.unflatten(0, (-1, split + module.v_head_dim)), split)
    return reader, reader


def _unpacked(layer: Any) -> Tensor | None:
    """The weight of a packed linear layer (``models.packed``) row by row, or this rank's part of one that is split.

    Returns:
        None of a plain layer: its weight is read in every forward.
    """
    if layer.bias is not None:
        raise NotImplementedError("its latent attention has a bias in kv_b_proj")
    if layer.weight.is_mkldnn:
        return layer.weight.to_dense()
    return None if type(layer.weight.data) is Tensor else layer.weight.to_local()
