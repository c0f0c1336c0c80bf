"""Attention of training against the same attention with all scores in one tensor, and what it keeps."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from spec_lab.runners.softmax import Softmax
from spec_lab.train import attention
from spec_lab.train.attention import HIDDEN, merged_attention
from spec_lab.train.unroll import UnrollAttention
from tests.oracles import unroll as oracle

FLOAT = torch.float64


def random(*shape, seed=0, dtype=FLOAT):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT).to(dtype).requires_grad_()


def unrolls(count, heads=4, shared_heads=2, columns=7, width=4):
    """The query of the last of several unrolls, keys and values of the first, and of the others."""
    pairs = [
        (random(2, shared_heads, columns, width, seed=i), random(2, shared_heads, columns, width, seed=20 + i))
        for i in range(1, count + 1)
    ]
    return random(2, heads, columns, width), pairs


def blocks(contexts=((0, 2, 5), (1, 3, 5)), size=3, columns=6, windows=100):
    """Queries of blocks ``[2, 4, A * r, d]`` that attend to so many shared keys; the blocks' keys, and masks."""
    groups = len(contexts[0])
    query, private = random(2, 4, groups * size, 4), [(random(2, 2, groups, size, 4, seed=i) for i in (3, 4))]
    after = torch.tensor(contexts).repeat_interleave(size, 1)[:, None, :, None]
    near = torch.arange(size).repeat(groups)[:, None] + after - torch.arange(columns) < windows
    mask = torch.where((torch.arange(columns) < after) & near, 0.0, HIDDEN).to(FLOAT)
    return query, (random(2, 2, columns, 4, seed=1), random(2, 2, columns, 4, seed=2)), [tuple(private[0])], mask


CASES = {
    "one unroll": lambda: (unrolls(1)[0], unrolls(1)[1][0], []),
    "four unrolls": lambda: (
        unrolls(4)[0], unrolls(4)[1][0], [(k.unsqueeze(3), v.unsqueeze(3)) for k, v in unrolls(4)[1][1:]]
    ),
    "blocks": lambda: (*blocks()[:3], 0.5, blocks()[3]),
    "blocks with windows": lambda: (*blocks(windows=2)[:3], 0.5, blocks(windows=2)[3]),
    "causal blocks": lambda: (*blocks()[:3], 0.5, blocks()[3], torch.full((3, 3), -torch.inf, dtype=FLOAT).triu(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_over_all_keys_and_so_are_its_gradients(name):
    query, shared, private, *rest = CASES[name]()
    rest = rest or [0.5]
    leaves = [query, *shared, *(tensor for pair in private for tensor in pair)]
    ours, plain = (
        merged_attention(query, shared, private, *rest),
        oracle.merged_attention(query, shared, private, *rest),
    )
    torch.testing.assert_close(ours, plain)
    weights = random(*ours.shape, seed=9).detach()
    both = [torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True) for out in (ours, plain)]
    for computed in zip(*both, strict=True):
        torch.testing.assert_close(*computed)


def test_gradients_by_finite_differences():
    query, shared, private, scale, mask = CASES["blocks"]()
    leaves = [query, *shared, *private[0]]
    assert gradcheck(lambda q, k, v, *pair: merged_attention(q, (k, v), [pair], scale, mask), leaves)


def test_gradients_are_exact_in_bfloat16():
    """Values share a large part, which cancels in the gradients of queries and keys."""
    shape = 1, 2, 24, 8
    given = [random(*shape, seed=seed).detach().bfloat16() for seed in range(3)]
    given[2] = given[2] + 30
    gradients_of = []
    for dtype in (torch.bfloat16, FLOAT):
        query, key, value = (tensor.to(dtype).requires_grad_() for tensor in given)
        mixed = UnrollAttention([key], [value]).attend(query, Softmax())
        assert mixed.dtype == dtype and mixed.shape == (1, 24, 2, 8)
        weights = random(*mixed.shape, seed=5).detach().bfloat16().to(dtype)
        gradients_of.append(torch.autograd.grad((mixed * weights).sum(), (query, key, value)))
    for gradient, exact in zip(*gradients_of, strict=True):
        assert float((gradient.double() - exact).norm() / exact.norm()) < 0.01


def test_no_autocast_inside():
    query, pairs = unrolls(2)
    attend = UnrollAttention([key for key, _ in pairs], [value for _, value in pairs]).attend
    with torch.autocast("cpu", torch.bfloat16):
        inside = attend(query.float(), Softmax())
    torch.testing.assert_close(inside, attend(query, Softmax()).float(), rtol=1e-5, atol=1e-6)


def test_what_is_kept_grows_with_the_columns_and_not_with_their_square():
    def kept(columns):
        query, pairs = unrolls(3, columns=columns)
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            UnrollAttention([key for key, _ in pairs], [value for _, value in pairs]).attend(query, Softmax())
        return sum(storages.values())

    assert kept(64) == 2 * kept(32)


@pytest.mark.parametrize("masked", [False, True])
def test_a_cuda_device_is_given_what_its_attention_reads(masked):
    """Shapes only: there is no device."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 7, 8, device="cuda") for _ in range(3))
        mask = torch.empty(2, 1, 7, 7, device="cuda") if masked else None
        output, total, _ = attention._fused(q, k, v, mask, 0.5)
        gradients = attention._fused_backward(output, q, k, v, output, total, mask, 0.5)
    assert output.shape == q.shape and total.shape == q.shape[:3]
    assert [gradient.shape for gradient in gradients] == [q.shape] * 3
