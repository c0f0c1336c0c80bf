"""Attention of training: rows that attend to keys which many rows share, and to private ones.

The shares of the two kinds of keys are merged by their log-sum-exps, so the scores of the shared keys are never kept:
they are those of torch's fused attention, forward and backward. The fused backward computes ``exp(score - L)``, so with
the merged output and the merged L of each row it returns the gradients of the shared part of the merged attention.

Letters: B texts, h heads, g of them share keys and values, C shared keys, A groups of r rows each, m keys that a group
has for itself, d width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

HIDDEN = -1e30
"""Additive mask of a key that is not attended to: finite, so that a row may attend to none of the shared keys."""


def merged_attention(
    query: Tensor,
    shared: tuple[Tensor, Tensor],
    private: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    mask: Tensor | None = None,
    private_mask: Tensor | None = None,
) -> Tensor:
    """Attention over shared keys and each group's private ones, computed in float32 at least.

    In bfloat16 the gradients of queries and keys are differences of rounded numbers: mostly noise.

    Args:
        query: ``[B, h, A * r, d]``.
        shared: keys and values ``[B, h / g, C, d]``.
        private: keys and values of the groups, ``[B, h / g, A, m, d]`` each.
        mask: additive, ``[B, 1, A * r, C]``, with ``HIDDEN``; None: row i attends to shared keys 0 to i.
        private_mask: additive, ``[r, m]``, of all keys in ``private``; None: rows attend to all of them.

    Returns:
        ``[B, h, A * r, d]``, in the dtype of the query.
    """
    flat = [*(key for key, _ in private), *(value for _, value in private)]
    return cast(Tensor, _Merged.apply(scale, mask, private_mask, query, *shared, *flat))


class _Merged(torch.autograd.Function):
    """See ``merged_attention``. What is kept for the gradients grows with the rows, not with their square."""

    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        mask: Tensor | None,
        private_mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *private: Tensor,
    ) -> Tensor:
        with full_precision(query):
            q, k, v = _widened(query, key, value)
            output, total, _ = _fused(q, k, v, mask, scale)
            if private:
                keys, values = _joined(private, q)
                scores = _private_scores(q, keys, private_mask, scale)
                merged = torch.logaddexp(total, scores.logsumexp(-1).view_as(total))
                shares = (scores - merged.view(scores.shape[:-1])[..., None]).exp()
                output = output * (total - merged).exp()[..., None] + (shares @ values[:, :, None]).reshape(q.shape)
                total = merged
        ctx.scale = scale
        ctx.save_for_backward(mask, private_mask, query, key, value, output, total, *private)
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mask, private_mask, query, key, value, output, total, *private = ctx.saved_tensors
        scale, heads = ctx.scale, key.shape[1]
        with full_precision(query):
            q, k, v = _widened(query, key, value)
            gradient = gradient.to(q.dtype)
            d_query, d_key, d_value = _fused_backward(gradient, q, k, v, output, total, mask, scale)
            d_key, d_value = (d.unflatten(1, (heads, -1)).sum(2) for d in (d_key, d_value))
            d_private: list[Tensor] = []
            if private:
                keys, values = _joined(private, q)
                scores = _private_scores(q, keys, private_mask, scale)
                shares = (scores - total.view(scores.shape[:-1])[..., None]).exp()  # [B, h / g, g, A, r, m]
                rows = gradient.view(*scores.shape[:-1], -1)
                constant = (gradient * output).sum(-1).view(scores.shape[:-1])[..., None]
                d_scores = shares * (rows @ values[:, :, None].transpose(-1, -2) - constant) * scale
                d_query = d_query + (d_scores @ keys[:, :, None]).reshape(q.shape)
                sizes = [tensor.shape[3] for tensor in private[: len(private) // 2]]
                d_keys = (d_scores.transpose(-1, -2) @ q.view_as(rows)).sum(2)
                d_values = (shares.transpose(-1, -2) @ rows).sum(2)
                d_private = [*d_keys.split(sizes, 3), *d_values.split(sizes, 3)]
        given = (query, key, value, *private)
        return (
            None,
            None,
            None,
            *(d.to(tensor.dtype) for d, tensor in zip((d_query, d_key, d_value, *d_private), given, strict=True)),
        )


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the tensor's device."""
    kind = tensor.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _widened(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The same in float32 at least, with keys and values repeated for the heads that share them."""
    wide, groups = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value))
    return query.to(wide), key.to(wide), value.to(wide)


def _joined(private: Sequence[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """The groups' keys and values, ``[B, h / g, A, m, d]``, from the keys and then the values of each piece."""
    half = len(private) // 2
    keys, values = torch.cat(tuple(private[:half]), 3), torch.cat(tuple(private[half:]), 3)
    return keys.to(query.dtype), values.to(query.dtype)


def _private_scores(query: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scores of the groups' private keys, ``[B, h / g, g, A, r, m]``."""
    heads, groups = keys.shape[1], keys.shape[2]
    rows = query.unflatten(2, (groups, -1)).unflatten(1, (heads, -1))
    scores = rows @ keys[:, :, None].transpose(-1, -2) * scale
    return scores if mask is None else scores + mask


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Fused attention over shared keys: its output, the log-sum-exp of each row, and what its backward needs."""
    if q.device.type == "cuda":
        bias = _bias(q, k, mask)
        output, total, *seeds = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
        return output, total.narrow(2, 0, q.shape[2]), seeds
    output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return output, total, None


def _fused_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    total: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``_fused`` where its rows' outputs and log-sum-exps are those of the merged attention."""
    if q.device.type == "cuda":
        none = torch.zeros((), dtype=torch.long, device=q.device)  # seeds of dropout, which there is not
        more = -total.shape[-1] % 32  # rows of the log-sum-exps are aligned
        d_query, d_key, d_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, _bias(q, k, mask), output, pad(total, (0, more), value=torch.inf).contiguous(),
            none, none, 0.0, [True, True, True, False], scale=scale,
        )  # fmt: skip
        return d_query, d_key, d_value
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, output, total, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return gradients


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The mask for all heads, with aligned rows, as memory-efficient attention reads it."""
    rows, columns = q.shape[2], k.shape[2]
    if mask is None:
        mask = torch.full((1, 1, rows, columns), HIDDEN, dtype=q.dtype, device=q.device).triu(1)
    aligned = pad(mask, (0, -columns % 16)).narrow(3, 0, columns)
    return aligned.expand(len(q), q.shape[1], rows, columns)
