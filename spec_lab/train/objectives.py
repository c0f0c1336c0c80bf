"""Losses between a draft distribution q and the target's p, and the acceptance that q would have.

Letters: N rows, W draft vocabulary, V vocabulary, X width of what a drafter computes before its logits, n chains of K
draft positions. Rows are (text, position) pairs. alpha = sum min(p, q) is the chance that a token drawn from q is
accepted, one less the total variation of p and q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from spec_lab.core.probabilities import argmax
from spec_lab.train.pieces import again, joined, rows_at_once, summed

Loss = Literal["kl", "reverse_kl", "tv", "nla", "hybrid_lk", "ce"]
"""Losses of a row: see ``row_loss``."""
ChainLoss = Literal["kl", "reverse_kl", "tv", "nla", "hybrid_lk", "ce", "tau"]
"""Losses of a chain: those of its rows, or "tau", see ``chain_loss``."""
Weights = Literal["decay", "dpace"]
"""How the losses of draft positions are weighted: see ``chain_loss``."""
TV = "1 - alpha"
"""Definition of the loss "tv". It was the name of -log alpha, which now is "nla"."""


@dataclass(frozen=True, eq=False)
class Truth:
    """The target's distributions at some rows, restricted to the draft vocabulary.

    Args:
        p: ``[N, W]`` probabilities at temperature 1 among all V tokens, in float32 at least; a row sums to at most 1.
        best: ``[N]`` the place of the most probable token in the draft vocabulary; -1 where it is not in it.
        token: ``[N]`` that of the text's own token.
    """

    p: Tensor
    best: Tensor
    token: Tensor

    @staticmethod
    def of(hidden: Tensor, lm_head: Callable[[Tensor], Tensor], token: Tensor, ids: Tensor | None = None) -> Truth:
        """Compute the target's distributions in chunks of rows.

        Args:
            hidden: ``[N, H]`` of the target after its final norm.
            lm_head: of the target, ``[n, H] -> [n, V]``.
            token: ``[N]`` the text's own token after each.
            ids: ``[W]`` the tokens of the draft vocabulary; None for all.
        """
        vocabulary = lm_head(hidden[:0]).shape[-1]
        p, best = [], []
        for rows in hidden.split(rows_at_once(vocabulary, hidden.device)):
            logits = lm_head(rows).detach()
            logits = logits.to(_wide(logits))
            total = logits.logsumexp(-1, keepdim=True)
            p.append(((logits if ids is None else logits[:, ids]) - total).exp_())
            best.append(argmax(logits))
        if ids is None:
            return Truth(torch.cat(p), torch.cat(best), token)
        index = torch.full((vocabulary,), -1, device=ids.device)
        index[ids] = torch.arange(len(ids), device=ids.device)
        return Truth(torch.cat(p), index[torch.cat(best)], index[token])

    def learned(self, kind: ChainLoss) -> Tensor:
        """Return whether each row has a loss of a kind, ``[N]``."""
        return (self.token if kind == "ce" else self.best) >= 0

    def __getitem__(self, rows: slice | Tensor) -> Truth:
        return Truth(self.p[rows], self.best[rows], self.token[rows])


class ComparedRows(NamedTuple):
    """A draft compared with the target at N rows. Everything is ``[N]``.

    Args:
        loss: in nats; 0 where the loss is that of distributions over the draft vocabulary, and the target's most
            probable token is not in it, as in EAGLE-3's training, or that of the text's token, which is not in it.
        alpha: sum min(p, q) over all tokens.
        true: q of the text's own token, without gradient.
        accepted: the chance that the drafted token is accepted: alpha of one that is drawn from q, p of one that is
            always the most probable of q.
        agreed: whether the most probable tokens of p and q are the same.
        learned: whether the row has a loss.
    """

    loss: Tensor
    alpha: Tensor
    true: Tensor
    accepted: Tensor
    agreed: Tensor
    learned: Tensor

    def measured(self) -> Measured:
        """Return the means over the rows."""
        loss = self.loss.sum() / self.learned.sum().clamp_min(1)
        total = max(1, len(self.loss))
        return Measured(loss, self.accepted.sum() / total, self.agreed.sum() / total, len(self.loss))


class Measured(NamedTuple):
    """The loss and acceptance of one draft position.

    Args:
        loss: mean over the rows that have one.
        accepted: mean of ``ComparedRows.accepted``.
        agreed: share of rows at which the most probable tokens of p and q are the same.
        rows: how many there are.
    """

    loss: Tensor
    accepted: Tensor
    agreed: Tensor
    rows: int


def row_loss(kind: ChainLoss, log_q: Tensor, p: Tensor, token: Tensor) -> Tensor:
    """Return the loss of each row, ``[N]``.

    Args:
        kind: "kl": KL(p || q) plus the entropy of p, a constant (cross-entropy); "reverse_kl": KL(q || p); "tv":
            1 - alpha, the total variation, as is "tau"; "nla": -log alpha (LK, 2602.23881); "hybrid_lk":
            ``l KL(p || q) + (1 - l) (1 - alpha)``, where ``l = exp(-3 alpha)`` has no gradient (LK); "ce": -log q of
            the text's own token.
        log_q: ``[N, W]``.
        p: ``[N, W]``, which sum to 1.
        token: ``[N]``; of "ce". 0 stands for one that is not in the draft vocabulary.
    """
    if kind == "kl":
        return -(p * log_q).sum(-1)
    if kind == "ce":
        return -log_q.gather(1, token.clamp_min(0)[:, None])[:, 0]
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - p.clamp_min(1e-9).log())).sum(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "nla":
        return -alpha.clamp_min(1e-9).log()
    if kind == "hybrid_lk":
        share = (-3 * alpha.detach()).exp()
        return share * (torch.xlogy(p, p) - p * log_q).sum(-1) + (1 - share) * (1 - alpha)
    return 1 - alpha


def compare(logits: Tensor, truth: Truth, kind: ChainLoss = "kl", deterministic: bool = False) -> ComparedRows:
    """Compare a draft's logits with the target. For losses p is renormalised over the draft vocabulary, as in EAGLE-3.

    Args:
        logits: ``[N, W]`` of the draft.
        truth: of the same rows.
        deterministic: the drafter always drafts the most probable token of q.
    """
    log_q = logits.log_softmax(-1, dtype=_wide(logits))
    p = truth.p / truth.p.sum(-1, keepdim=True).clamp_min(1e-30)
    learned = truth.learned(kind)
    loss = row_loss(kind, log_q, p, truth.token) * learned
    alpha = torch.minimum(truth.p, log_q.exp()).sum(-1)
    with torch.no_grad():
        top = argmax(log_q.detach())
        accepted = truth.p.gather(1, top[:, None])[:, 0] if deterministic else alpha.detach()
        true = log_q.gather(1, truth.token.clamp_min(0)[:, None])[:, 0].exp() * (truth.token >= 0)
    return ComparedRows(loss, alpha, true, accepted, top == truth.best, learned)


def compare_states(
    states: Tensor,
    logits: Callable[[Tensor], Tensor],
    truth: Truth,
    rows: Tensor,
    kind: ChainLoss = "kl",
    deterministic: bool = False,
) -> ComparedRows:
    """Compare a draft with the target, in pieces whose logits are computed again for the gradients.

    Args:
        states: ``[N, X]`` of the drafter.
        logits: ``[n, X] -> [n, W]``.
        truth: of some rows.
        rows: ``[N]`` numbers of those to compare with.
        deterministic: see ``compare``.
    """

    def run(states: Tensor, p: Tensor, best: Tensor, token: Tensor, rows: Tensor) -> ComparedRows:
        return compare(logits(states), Truth(p, best, token)[rows], kind, deterministic)

    size = rows_at_once(truth.p.shape[1], states.device)
    given = truth.p, truth.best, truth.token
    return joined([again(run, x, *given, of) for x, of in zip(states.split(size), rows.split(size), strict=True)])


def mean_losses(
    states: Sequence[Tensor],
    logits: Sequence[Callable[[Tensor], Tensor]],
    parameters: Sequence[Tensor],
    truth: Truth,
    rows: Sequence[Tensor],
    weights: Sequence[float],
    kind: Loss = "kl",
    deterministic: bool = False,
) -> tuple[Tensor, list[ComparedRows]]:
    """Return the sum of the mean losses of several draft positions, times their weights, and the rows of each.

    It is that of ``compare_states``, but nothing is computed twice, and the rows have no gradients.

    Args:
        states: of each draft position, ``[N_k, X]``.
        logits: of each, ``[n, X] -> [n, W]``.
        parameters: that ``logits`` use and whose gradients are computed; they may use fewer.
        truth, rows, kind, deterministic: see ``compare_states``; rows of each position, ``[N_k]``.
        weights: of the positions.
    """
    learned = [truth.learned(kind)[of].sum().clamp_min(1) for of in rows]

    def run(position: int, x: Tensor, of: Tensor) -> tuple[Tensor, ComparedRows]:
        compared = compare(logits[position](x), truth[of], kind, deterministic)
        return compared.loss.sum() * (weights[position] / learned[position]), compared

    size = rows_at_once(truth.p.shape[1], truth.p.device)
    return summed(run, states, [(of,) for of in rows], parameters, size)


class Chains(NamedTuple):
    """The rows of n chains of K draft positions. Everything is ``[n, K]``, 0 where a chain has no such position.

    Args:
        loss: of each row.
        alpha: of each row.
        true: of each row, see ``ComparedRows``.
        learned: whether the row has a loss.
        present: whether the chain has the position.
    """

    loss: Tensor
    alpha: Tensor
    true: Tensor
    learned: Tensor
    present: Tensor


def chain_loss(chains: Chains, kind: ChainLoss, weights: Weights, decay: Sequence[float]) -> Tensor:
    """Return the loss of chains.

    - Of "tau" it is -E[tau] = ``- sum_k prod_{j<=k} alpha_j`` for each chain, the mean over chains; weights are not
      used.
    - With weights "decay" it is the sum over positions of ``decay_k`` times the mean loss at the position.
    - With "dpace" (D-PACE) the loss of a row is multiplied by ``sum_{j>=k} P_j`` before that, where
      ``P_k = prod_{j<=k} (q(true)_j + 1) / 2`` has no gradient, and ``decay`` is not used.
    """
    if kind == "tau":
        return -chains.alpha.cumprod(-1).sum() / chains.present[:, 0].sum().clamp_min(1)
    loss = chains.loss
    if weights == "dpace":
        reached = ((chains.true.detach() + 1) / 2 * chains.present).cumprod(-1)
        loss, decay = loss * reached.flip(-1).cumsum(-1).flip(-1), [1.0] * len(decay)
    means = loss.sum(0) / chains.learned.sum(0).clamp_min(1)
    return sum((scale * mean for scale, mean in zip(decay, means, strict=True)), loss.new_zeros(()))


def expected_length(acceptance: list[float]) -> float:
    """Return the expected number of accepted tokens of a chain: sum over k of the product of the first k acceptances.

    It assumes that acceptances at different positions are independent. (The mean tokens per step, tau, is one more.)
    """
    total, product = 0.0, 1.0
    for chance in acceptance:
        product *= chance
        total += product
    return total


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
