"""Cross-entropies for training on CPUs. The forward computes the gradient and keeps nothing else."""

from typing import Any

import torch
from torch import Tensor

ROWS = 128  # rows of logits computed at a time


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        gradient = torch.empty_like(logits)
        total = torch.zeros(())
        for z, p, g in zip(logits.split(64), target.split(64), gradient.split(64), strict=True):
            log_q = z.float().log_softmax(-1)
            p = p.float()
            total -= torch.dot(p.flatten(), log_q.flatten())
            g.copy_(log_q.exp_().sub_(p).mul_(1 / len(target)))
        ctx.save_for_backward(gradient)
        return total / len(target)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(upstream), None  # in place: fresh pages cost more than the product


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of ``logits [N, V]`` against the probabilities ``target [N, V]``.

    It is the KL divergence plus the entropy of ``target``.
    """
    return _SoftCrossEntropy.apply(logits, target)


class _UnembeddedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, truth: Tensor) -> Tensor:
        gradient = torch.empty_like(states)
        total = torch.zeros(())
        for x, y, g in zip(states.split(ROWS), truth.split(ROWS), gradient.split(ROWS), strict=True):
            log_q = (x @ weight.T).float().log_softmax(-1)
            if truth.ndim == 1:
                total -= log_q.gather(1, y[:, None]).sum()
                difference = log_q.exp_().scatter_add_(1, y[:, None], torch.full((len(y), 1), -1.0))
            else:
                p = y.float()
                total -= torch.dot(p.flatten(), log_q.flatten())
                difference = log_q.exp_().sub_(p)
            torch.mm(difference.mul_(1 / len(states)).to(weight.dtype), weight, out=g)
        ctx.save_for_backward(gradient)
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(upstream), None, None


def unembedded_cross_entropy(states: Tensor, weight: Tensor, truth: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of the logits ``states @ weight.T``.

    The logits are computed in blocks of ``ROWS`` rows, which stay in the processor's cache.

    Args:
        states: ``[N, H]``.
        weight: ``[V, H]``; it receives no gradient.
        truth: probabilities ``[N, V]`` or token ids ``[N]``.
    """
    return _UnembeddedCrossEntropy.apply(states, weight, truth)
