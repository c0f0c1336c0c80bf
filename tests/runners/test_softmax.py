"""Attention by torch's own kernels."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.backends.cuda import cudnn_sdp_enabled

from spec_lab.runners import softmax


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cudnn_computes_no_attention_and_other_code_may_still_choose_it(device, monkeypatch):
    chosen = []

    def attention(*_, **__):
        chosen.append(cudnn_sdp_enabled())
        raise RuntimeError

    monkeypatch.setattr(softmax, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        rows = torch.empty(1, 2, 3, 8, device=device)
        with pytest.raises(RuntimeError):
            softmax.torch_attention(rows, rows, rows, None, None)
    assert chosen == [device == "cpu"] and cudnn_sdp_enabled()
