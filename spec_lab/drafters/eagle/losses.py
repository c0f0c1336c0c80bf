"""The losses of EAGLE: training-time test of EAGLE-3 heads, and regression of features of EAGLE-1 heads.

Sources: EAGLE-3 (2503.01840, section 3.2: unrolled steps, soft cross-entropy on the draft vocabulary, no feature loss)
and EAGLE-1 (2401.15077, section 4: regression of features plus 0.1 of the cross-entropy, noise on features).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spec_lab.drafters.eagle.network import Eagle, Eagle3
from spec_lab.train.objectives import Loss, Measured, Truth, measure
from spec_lab.train.texts import Texts
from spec_lab.train.unroll import Unrolls


def eagle3_losses(
    network: Eagle3, text: Texts, truth: Truth, embedded: Tensor, unrolls: int, kind: Loss = "kl"
) -> list[Measured]:
    """Return what each unroll achieves on some texts.

    Args:
        network: in training.
        text: with the taps as its hidden states ``[B, T, k * H_t]``.
        truth: the target's distributions after each token, ``[B * T]`` rows.
        embedded: ``[B, T, H]`` the embeddings of the tokens.
        unrolls: how many tokens are drafted.
        kind: of loss.
    """
    assert text.hidden is not None
    (batch, length), device = text.ids.shape, text.ids.device
    rows = torch.arange(batch * length, device=device).view(batch, length)
    cache, found = Unrolls(), []
    feature = network.features(text.hidden[:, : length - 1])
    for unroll in range(unrolls):
        columns = length - 1 - unroll
        x = torch.cat([embedded[:, 1 + unroll :], feature[:, :columns]], -1)
        positions = torch.arange(unroll, unroll + columns, device=device)[None]
        hidden = network(x, positions, cache)
        normed = network.norm(hidden)
        feature = normed if network.settings.norm_output else hidden
        assert network.lm_head is not None
        # Column j predicts the distribution after t_{j+1+unroll}; the last column's next token is not in the text.
        logits = network.lm_head(normed).flatten(0, 1)
        counts = torch.zeros(batch, columns, dtype=torch.bool, device=device)
        counts[:, :-1] = text.counts(2 + unroll)
        found.append(measure(logits, truth[rows[:, 1 + unroll :].flatten()], counts.flatten(), kind))
    return found


def eagle1_losses(
    network: Eagle,
    text: Texts,
    truth: Truth,
    embedded: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    noise: Tensor | None = None,
    kind: Loss = "kl",
) -> tuple[Tensor, list[Measured]]:
    """Return the loss of features, and what the first draft position achieves.

    Args:
        network: in training.
        text: with the states after the final norm as its hidden states ``[B, T, H]``.
        truth, embedded, kind: as of ``eagle3_losses``.
        lm_head: of the target.
        noise: ``[B, T, H]`` added to what the network reads; None for none.
    """
    assert text.hidden is not None
    (batch, length), device = text.ids.shape, text.ids.device
    rows = torch.arange(batch * length, device=device).view(batch, length)
    read = text.hidden if noise is None else text.hidden + noise
    x = network.fc(torch.cat([embedded[:, 1:], read[:, : length - 1]], -1))
    predicted = network(x, torch.arange(length - 1, device=device)[None], Unrolls())
    counts = torch.zeros(batch, length - 1, dtype=torch.bool, device=device)
    counts[:, :-1] = text.counts(2)
    distance = torch.nn.functional.smooth_l1_loss(predicted, text.hidden[:, 1:], reduction="none").mean(-1)
    features = (distance * counts).sum() / counts.sum().clamp_min(1)
    logits = lm_head(predicted).flatten(0, 1)
    return features, [measure(logits, truth[rows[:, 1:].flatten()], counts.flatten(), kind)]
