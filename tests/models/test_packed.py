"""Linear layers packed for a CPU: the same numbers and shapes; no gradients, and no wrong use without an error."""

import copy

import pytest
import torch
from torch import nn

from spec_lab.models.fused import fuse
from spec_lab.models.merged import MergedLinear
from spec_lab.models.packed import PackedLinear, dense_copy, pack, unpack
from spec_lab.models.target import Target
from tests import checkpoints
from tests.tiny import FAMILIES, tiny_model

PACKABLE = torch.backends.mkldnn.is_available()
pytestmark = pytest.mark.skipif(not PACKABLE, reason="torch was built without oneDNN")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_has_the_logits_and_the_parameters_of_the_model(family):
    model = tiny_model(family, dtype=torch.float32)
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    with torch.inference_mode():
        expected, count = model(tokens).logits, sum(parameter.numel() for parameter in model.parameters())
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        layers = sum(type(module) is nn.Linear for module in model.modules())
        assert pack(model) == layers > 0
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    head = model.get_output_embeddings().weight
    assert sum(parameter.numel() for parameter in model.parameters()) == count + tied * head.numel()
    assert pack(model) == 0


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 17, 64, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_any_number_of_rows(rows, bias):
    torch.manual_seed(rows)
    layer, x = nn.Linear(48, 80, bias=bias), torch.randn(2, rows, 96)[..., :48]
    torch.testing.assert_close(PackedLinear(layer)(x.detach()), layer(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_are_the_weights(dtype):
    layers = nn.Sequential(nn.Linear(32, 24, dtype=dtype), nn.Linear(24, 40, bias=False, dtype=dtype))
    weights = [layer.weight.detach().clone() for layer in layers]
    bias = layers[0].bias.detach().clone()
    packed, x = pack(layers), torch.randn(3, 32).to(dtype)
    assert packed in (0, 2) and (packed or dtype != torch.float32)
    copies = [dense_copy(layer) for layer in layers]
    for layer, made, weight in zip(layers, copies, weights, strict=True):
        assert type(made) is nn.Linear and torch.equal(made.weight, weight)
        assert layer.weight.shape == weight.shape and layer.weight.dtype == dtype
        made.weight.data.zero_()  # a copy of its own
    assert torch.equal(copies[0].bias, bias) and copies[1].bias is None
    expected = nn.functional.linear(nn.functional.linear(x, weights[0], bias), weights[1])
    torch.testing.assert_close(layers(x).detach(), expected)


def test_a_packed_layer_refuses_what_it_cannot_do():
    packed = PackedLinear(nn.Linear(16, 16))
    with pytest.raises(RuntimeError, match="gradients"):
        packed(torch.zeros(2, 16, requires_grad=True))
    with torch.no_grad():
        packed(torch.zeros(2, 16, requires_grad=True))
    for wrong in (lambda: nn.functional.linear(torch.zeros(2, 16), packed.weight), lambda: copy.deepcopy(packed)):
        with pytest.raises((RuntimeError, NotImplementedError)):  # and never other numbers
            wrong()


def test_layers_that_are_not_plain_stay():
    class Low(nn.Linear):
        """A quantised layer would be such a class."""

    hooked, double = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64)
    hooked.register_forward_hook(lambda *_: None)
    layers = nn.ModuleList([Low(8, 8), hooked, double, nn.Linear(8, 8, device="meta"), nn.Linear(8, 8)])
    before = list(layers)
    assert pack(layers) == 1
    assert all(layer is other for layer, other in zip(layers[:4], before, strict=False))
    assert type(layers[4]) is PackedLinear


def test_a_shared_layer_stays_shared_and_unpacking_gives_the_weights_back():
    layer = nn.Linear(8, 8)
    weight, parents = layer.weight.detach().clone(), nn.ModuleList([nn.Sequential(layer, layer), nn.Sequential(layer)])
    assert pack(parents) == 1
    assert parents[0][0] is parents[0][1] is parents[1][0] and type(parents[0][0]) is PackedLinear
    assert unpack(parents) == 1 and unpack(parents) == 0
    assert parents[0][0] is parents[1][0] and torch.equal(parents[0][0].weight, weight)


def test_merged_layers_are_packed():
    model = tiny_model(dtype=torch.float32)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        expected = model(tokens).logits
        fuse(model)
        assert pack(model) > 0
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    kinds = {type(module.joint) for module in model.modules() if isinstance(module, MergedLinear)}
    assert kinds == {PackedLinear}


def test_a_model_whose_code_reads_the_weights_itself_is_not_packed(tmp_path):
    target = Target.load(str(checkpoints.checkpoint(tmp_path / "target")), dtype="float32")
    draft = tiny_model(dtype=torch.float32, seed=3)
    mlp = draft.model.layers[0].mlp
    mlp.forward = lambda x: x + nn.functional.linear(nn.functional.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)
    runner = target.draft_runner(draft, "")
    assert not runner.facts["packed"] and type(draft.model.layers[1].mlp.up_proj) is nn.Linear
