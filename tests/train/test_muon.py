"""Muon against torch's, which rounds to bfloat16."""

import pytest
import torch

from spec_lab.train.muon import Muon, orthogonal


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_it_is_torch_s_up_to_rounding(shape, products):
    start = torch.randn(shape)
    parameter, other = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    usual = torch.optim.Muon([other], momentum=0.95, ns_steps=4, adjust_lr_fn="match_rms_adamw", weight_decay=0.01)
    made = Muon([parameter], weight_decay=0.01, products=products)
    for optimiser in (usual, made):
        optimiser.param_groups[0]["lr"] = 0.02
    for _ in range(5):
        parameter.grad = torch.randn(shape)
        other.grad = parameter.grad.clone()
        made.step(), usual.step()
    moved = (parameter - start).detach().norm()
    assert float((parameter - other).detach().norm() / moved) < 0.03
    torch.testing.assert_close(made.state[parameter]["momentum_buffer"], usual.state[other]["momentum_buffer"])


def test_singular_values_become_about_one():
    values = torch.linalg.svdvals(orthogonal(torch.randn(12, 30)))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
