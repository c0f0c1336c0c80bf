"""Sums over pieces of rows: what a piece has computed is freed with it."""

import gc
import weakref
from typing import NamedTuple

import torch

from spec_lab.train.estimate import kept_bytes
from spec_lab.train.pieces import summed


class Known(NamedTuple):
    y: torch.Tensor


def saving(nodes):
    """An exponential that keeps its result for the gradients, and notes its node."""

    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            nodes.append(weakref.ref(ctx))
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    return Exponential.apply


def test_pieces_free_what_the_loss_does_not_depend_on():
    nodes = []
    exponential = saving(nodes)

    def run(number, x):
        return exponential(x).sum(), Known(exponential(x))  # the loss does not depend on what is known

    states = torch.zeros(6, 3, requires_grad=True)
    total, _ = summed(run, [states], [()], (), 2)
    total.backward()
    assert torch.equal(states.grad, torch.ones(6, 3)) and len(nodes) == 6
    del total
    gc.collect()
    assert not any(node() for node in nodes)


def test_counting_what_a_loss_keeps_frees_it():
    nodes = []
    exponential, x = saving(nodes), torch.zeros(5, requires_grad=True)
    count, loss = kept_bytes(lambda: exponential(x).sum(), [x])
    assert count == 20 and len(nodes) == 1
    del loss
    gc.collect()
    assert nodes[0]() is None
