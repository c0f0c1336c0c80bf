"""Sampling of siblings, rank by rank, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Drawn
from spec_lab.core.randomness import Draws, Key
from spec_lab.core.upload import upload


def how_many(support: np.ndarray, width: int, drawn: Drawn) -> np.ndarray:  # [n] -> [n]
    """Return how many of ``width`` siblings are drawn at parents whose q has mass on ``support`` tokens.

    Without replacement and from the top k, one for each token with mass. Further iid siblings would repeat the first
    where q is one-hot.
    """
    most = np.minimum(support, width)
    return np.where(support > 1, width, most) if drawn == "iid" else most


def allow_(logits: Tensor, allowed: np.ndarray) -> Tensor:  # [n] bool
    """Mask logits ``[n, V]`` in place with what a constraint allows ``[n, V]``; return which rows have a token left.

    A row without one becomes one-hot; what is drawn from it is dropped.
    """
    logits.masked_fill_(upload(logits.device, ~allowed)[0], -torch.inf)
    possible = logits.amax(-1) > -torch.inf
    logits[:, 0].masked_fill_(~possible, 0.0)
    return possible


def sample_siblings(
    draws: Draws,
    drawn: Drawn,
    q: Tensor,
    support: Tensor | None,
    ranks: Sequence[tuple[np.ndarray, Sequence[Key]]],
) -> Tensor:  # [n, K]
    """Sample siblings, iid or without replacement.

    On a device nothing is read: a sibling that does not exist (``how_many``) is drawn from a one-hot distribution, for
    the host to drop. On the CPU it is not drawn.

    Args:
        draws: samples them.
        drawn: "iid" or "without_replacement".
        q: ``[n, V]`` the draft distributions at the parents.
        support: ``[n]`` how many tokens have mass; None where all siblings exist.
        ranks: for each rank the places of the parents in q, ascending, and the key of each sibling.

    Returns:
        The tokens of each parent's children by rank. Those of siblings that do not exist mean nothing.
    """
    left = q.clone() if drawn == "without_replacement" and len(ranks) > 1 else q
    on_host, tokens = q.device.type == "cpu", []
    uploaded = upload(q.device, *(places for places, _ in ranks))
    for rank, (rows, (_, keys)) in enumerate(zip(uploaded, ranks, strict=True)):
        every = rows.shape[0] == left.shape[0]
        weights = left if every else left[rows]
        alive = None
        if support is not None and rank:
            alive = (support > (1 if drawn == "iid" else rank))[rows]
        if not len(rows):
            picked = rows
        elif alive is None or (on_host and alive.all()):
            picked = draws.pick(weights, keys)
        elif on_host:
            picked, some = torch.zeros_like(rows), alive.tolist()
            if any(some):
                picked[alive] = draws.pick(
                    weights[alive], [key for key, exists in zip(keys, some, strict=True) if exists]
                )
        else:
            first = torch.arange(q.shape[-1], device=q.device) == 0
            picked = draws.pick(torch.where(alive[:, None], weights, first.to(q.dtype)), keys)
        if left is not q and len(rows):
            left[rows, picked] = 0.0
        tokens.append(picked if every else torch.zeros_like(q[:, 0], dtype=torch.int64).index_copy_(0, rows, picked))
    return torch.stack(tokens, -1) if len(tokens) > 1 else tokens[0][:, None]
