"""Attention by torch's ``scaled_dot_product_attention``, and with a softmax that it lacks: soft caps and sinks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.functional import scaled_dot_product_attention


class Softmax(NamedTuple):
    """How a layer turns scores into shares of the values. Names are those of transformers' attention functions.

    Args:
        scaling: of the products of queries and keys; None for dim ** -0.5.
        softcap: c; scores s are capped to c * tanh(s / c) (Gemma 2, 2408.00118). None for no cap.
        sinks: ``[heads]`` a score of each head that takes its share of the softmax and has no value (GPT-OSS). None for
            none.
    """

    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's ``scaled_dot_product_attention`` computes it."""
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention in plain operations, without repeating keys for query heads that share them.

        Args:
            query: ``[b, heads, n, dim]``.
            keys: ``[b, kv heads, C, dim]``.
            values: ``[b, kv heads, C, value dim]``.
            mask: additive, ``[n, C]``, or ``[b, 1, 1, n, C]``; None: everything is visible.

        Returns:
            ``[b, heads, n, value dim]``.
        """
        shares = self.shares(query, keys, mask).to(values.dtype)
        return (shares.flatten(2, 3) @ values).reshape(*query.shape[:3], -1)

    def shares(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Return the share of each key in each row, by a softmax in float32 at least.

        Arguments as of ``attend``.

        Returns:
            ``[b, kv heads, groups, n, C]``, where query head h is head (h // groups, h % groups).
        """
        batch, heads, rows, dim = query.shape
        groups, wide = heads // keys.shape[1], torch.promote_types(query.dtype, torch.float32)
        scores = query.reshape(batch, -1, groups * rows, dim) @ keys.transpose(2, 3)
        scores = scores.unflatten(2, (groups, rows)).to(wide)  # [b, kv heads, groups, n, C]
        scores = scores * (dim**-0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores = scores + mask
        total = scores.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            total = torch.logaddexp(total, self.sinks.to(wide).view(1, -1, groups, 1, 1))
        return (scores - total).exp()


def causal_mask(query: Tensor) -> Tensor:  # [.., n, dim] -> [n, n]
    """The additive mask of rows of which each attends to those before it."""
    rows = query.shape[-2]
    return torch.full((rows, rows), -torch.inf, dtype=query.dtype, device=query.device).triu(1)


def torch_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    causal: bool = False,
    shared: bool = False,
) -> Tensor:
    """Return torch's ``scaled_dot_product_attention``, by any of its implementations but cuDNN's.

    torch prefers that one on GPUs since the H100. It plans anew for each number of keys, and decoding has a new one in
    every step: on an H200 an eager step of a model of 1B parameters took 48 ms with new lengths, and 12 ms with lengths
    that had been planned. The switch is the process's, so it is set back: other code keeps its choice. The three calls
    take 0.3 microseconds.

    Args:
        query: ``[b, heads, n, dim]``.
        keys: ``[b, kv heads, C, dim]``.
        values: ``[b, kv heads, C, value dim]``.
        mask: additive, of a shape that broadcasts to ``[b, heads, n, C]``; None: everything is visible, or causal.
        scaling: of the products of queries and keys; None for dim ** -0.5.
        causal: whether row i attends to keys up to i only.
        shared: whether several query heads share a key-value head.
    """
    by_cudnn = query.is_cuda and cudnn_sdp_enabled()
    if by_cudnn:
        enable_cudnn_sdp(False)
    try:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=shared
        )
    finally:
        if by_cudnn:
            enable_cudnn_sdp(True)
