"""The training kernels against PyTorch's own."""

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from scripts.zoo import kernels
from scripts.zoo import soft_losses as fast


@pytest.mark.parametrize("length", [1, 7, 64])
def test_blocked_attention_is_causal_attention(length):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ours, _ = kernels.blocked_attention(None, q, k, v, None, scaling=8**-0.5)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    ours_gradient = torch.autograd.grad(ours.square().sum(), (q, k, v), retain_graph=True)
    theirs_gradient = torch.autograd.grad(theirs.square().sum(), (q, k, v))
    torch.testing.assert_close(ours_gradient, theirs_gradient)


@pytest.mark.parametrize("rows", [1, 64, 130])
def test_the_chunked_cross_entropy_equals_torch_s(rows):
    torch.manual_seed(0)
    logits = torch.randn(rows, 50, requires_grad=True)
    target = torch.randint(0, 50, (rows,))
    probabilities = torch.randn(rows, 50).softmax(-1)
    for ours, theirs in (
        (kernels.cross_entropy(logits, target), cross_entropy(logits, target)),
        (fast.soft_cross_entropy(logits, probabilities), cross_entropy(logits, probabilities)),
    ):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(3 * loss, logits)[0] for loss in (ours, theirs)))


@pytest.mark.parametrize("rows", [1, 128, 300])
def test_cross_entropy_of_states_in_front_of_a_frozen_unembedding(rows):
    torch.manual_seed(0)
    states, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(50, 8)
    for truth in (torch.randint(0, 50, (rows,)), torch.randn(rows, 50).softmax(-1)):
        ours = fast.unembedded_cross_entropy(states, weight, truth)
        theirs = cross_entropy(states @ weight.T, truth)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(3 * loss, states)[0] for loss in (ours, theirs)))
