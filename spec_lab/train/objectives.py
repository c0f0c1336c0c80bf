"""Losses between a draft distribution q and the target's p, and the acceptance that q would have.

Letters: N rows, W draft vocabulary, V vocabulary, H hidden size. Rows are (text, position) pairs of which some count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Loss = Literal["kl", "reverse_kl", "tv"]


@dataclass(frozen=True, eq=False)
class Truth:
    """The target's distributions at some rows, restricted to the draft vocabulary.

    Args:
        p: ``[N, W]`` float32 probabilities at temperature 1 among all V tokens; a row sums to at most 1.
        best: ``[N]`` the place of the most probable token in the draft vocabulary; -1 where it is not in it.
    """

    p: Tensor
    best: Tensor

    @staticmethod
    def of(logits: Tensor, ids: Tensor | None = None) -> Truth:
        """From the target's logits ``[N, V]``, with the draft vocabulary's tokens ``ids`` ``[W]``; None for all."""
        logits = logits.float()
        p, top = logits.softmax(-1), logits.argmax(-1)
        if ids is None:
            return Truth(p, top)
        index = torch.full((logits.shape[-1],), -1, device=ids.device)
        index[ids] = torch.arange(len(ids), device=ids.device)
        return Truth(p[:, ids], index[top])

    def __getitem__(self, rows: slice | Tensor) -> Truth:
        return Truth(self.p[rows], self.best[rows])


class Measured(NamedTuple):
    """The loss and acceptance of one draft position.

    Args:
        loss: mean over the rows that count, in nats.
        accepted: mean chance that the drafted token is accepted at temperature 1: sum min(p, q) of one that is drawn
            from q, p of one that is always the most probable of q.
        agreed: share of rows at which the most probable tokens of p and q are the same.
        rows: how many count.
    """

    loss: Tensor
    accepted: float
    agreed: float
    rows: int


def measure(logits: Tensor, truth: Truth, counts: Tensor, kind: Loss = "kl", deterministic: bool = False) -> Measured:
    """Compare a draft's logits with the target.

    As in EAGLE-3's training, p is renormalised over the draft vocabulary, and rows whose most probable token is not in
    it have no loss. Their acceptance counts.

    Args:
        logits: ``[N, W]`` of the draft.
        truth: of the same rows.
        counts: ``[N]`` bool, which rows count.
        kind: "kl": KL(p || q) plus the entropy of p, a constant (cross-entropy); "reverse_kl": KL(q || p);
            "tv": -log sum min(p, q), whose minimum is that of the total variation.
        deterministic: the drafter always drafts the most probable token of q.
    """
    log_q = logits.float().log_softmax(-1)
    p = truth.p / truth.p.sum(-1, keepdim=True).clamp_min(1e-30)
    if kind == "kl":
        rows = -(p * log_q).sum(-1)
    elif kind == "reverse_kl":
        rows = (log_q.exp() * (log_q - p.clamp_min(1e-9).log())).sum(-1)
    else:
        rows = -torch.minimum(p, log_q.exp()).sum(-1).clamp_min(1e-9).log()
    learned = counts & (truth.best >= 0)
    loss = (rows * learned).sum() / learned.sum().clamp_min(1)
    with torch.no_grad():
        rows_counted = int(counts.sum())
        total = max(1, rows_counted)
        top = log_q.argmax(-1)
        both = truth.p.gather(1, top[:, None]) if deterministic else torch.minimum(truth.p, log_q.exp())
        chance = both.sum(-1)
        accepted, agreed = (chance * counts).sum() / total, ((top == truth.best) & counts).sum() / total
    return Measured(loss, float(accepted), float(agreed), rows_counted)


def expected_length(acceptance: list[float]) -> float:
    """Return the expected number of accepted tokens of a chain: sum over k of the product of the first k acceptances.

    It assumes that acceptances at different positions are independent. (The mean tokens per step, tau, is one more.)
    """
    total, product = 0.0, 1.0
    for chance in acceptance:
        product *= chance
        total += product
    return total
