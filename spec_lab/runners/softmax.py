"""Attention whose softmax is not that of torch's ``scaled_dot_product_attention``: soft caps and attention sinks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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

        The softmax is computed in float32 at least.

        Args:
            query: ``[b, heads, n, dim]``.
            keys: ``[b, kv heads, C, dim]``.
            values: ``[b, kv heads, C, value dim]``.
            mask: additive, ``[n, C]``, or ``[b, 1, 1, n, C]``; None: everything is visible.

        Returns:
            ``[b, heads, n, value dim]``.
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
        shares = (scores - total).exp().to(values.dtype)
        return (shares.flatten(2, 3) @ values).reshape(batch, heads, rows, -1)


def causal_mask(query: Tensor) -> Tensor:  # [.., n, dim] -> [n, n]
    """The additive mask of rows of which each attends to those before it."""
    rows = query.shape[-2]
    return torch.full((rows, rows), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
