"""Attention of training with all scores in one tensor: the twin of ``train.attention.merged_attention``."""

import torch
from torch import Tensor


def merged_attention(
    query: Tensor,
    shared: tuple[Tensor, Tensor],
    private: list[tuple[Tensor, Tensor]],
    scale: float,
    mask: Tensor | None = None,
    private_mask: Tensor | None = None,
) -> Tensor:
    """Arguments as in the twin."""
    groups, columns = query.shape[1] // shared[0].shape[1], shared[0].shape[2]
    (keys, values), pairs = (
        [tensor.repeat_interleave(groups, 1) for tensor in shared],
        [tuple(tensor.repeat_interleave(groups, 1) for tensor in pair) for pair in private],
    )
    scores = query @ keys.transpose(2, 3) * scale
    scores = scores + (torch.full(scores.shape[2:], -torch.inf).triu(1) if mask is None else mask)
    if not pairs:
        return scores.softmax(-1) @ values
    private_keys, private_values = (torch.cat(tensors, 3) for tensors in zip(*pairs, strict=True))
    rows = query.unflatten(2, (private_keys.shape[2], -1))
    private_scores = rows @ private_keys.transpose(3, 4) * scale + (0 if private_mask is None else private_mask)
    shares = torch.cat([scores, private_scores.flatten(2, 3)], -1).softmax(-1)
    private_shares = shares[..., columns:].unflatten(2, rows.shape[2:4])
    return shares[..., :columns] @ values + (private_shares @ private_values).flatten(2, 3)
