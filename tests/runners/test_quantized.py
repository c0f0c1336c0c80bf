"""Which layers are quantized, how they are stored and counted, and what is recorded, with layers like the packages'."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from spec_lab.models import float32_copy
from spec_lab.models.merged import merge
from spec_lab.models.packed import PackedLinear, pack
from spec_lab.models.self_check import self_check
from spec_lab.models.support import Unsupported
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.model_work import parameters_of
from spec_lab.runners.quantized import (
    check_scales,
    in_dtype,
    is_plain,
    is_quantized,
    quantized_share,
    record,
    recorded,
    stored,
)  # fmt: skip
from tests.models.test_self_check import MUTANTS
from tests.tiny import tiny_model


class Scaled(Tensor):
    """A weight of int8 and one scale for each row, as a subclass of Tensor: as torchao has them."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scale)
        wide = [arg.numbers * arg.scale if isinstance(arg, Scaled) else arg for arg in args]
        return func(*wide, **(kwargs or {}))


class Packed(nn.Module):
    """A layer of 4 bits with weights and scales in buffers, as gptqmodel has them."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("qweight", torch.zeros(layer.in_features // 8, layer.out_features, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(1, layer.out_features, dtype=torch.float16))


class Blocks(nn.Linear):
    """A layer of 4 bits with a packed weight that has a state of its own, as bitsandbytes has them."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        weight = nn.Parameter(torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        inner = SimpleNamespace(absmax=torch.zeros(3, dtype=torch.float32))
        weight.quant_state = SimpleNamespace(absmax=torch.zeros(10, dtype=torch.uint8), state2=inner)
        self.weight = weight


def scaled(layer):
    weight = layer.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(Scaled((weight / scale).round().to(torch.int8), scale), requires_grad=False)
    return made


def quantized(make, dtype=torch.float32, **changes):
    """A tiny model with its MLPs quantized, and the plain one."""
    plain = tiny_model(dtype=dtype, **changes)
    model = copy.deepcopy(plain)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, make(getattr(layer.mlp, name)))
    return plain, model


MLP = 3 * 32 * 48
"""Weights of an MLP of the tiny model."""


@pytest.mark.parametrize(
    ("make", "scales"),
    [(scaled, 2 * (48 + 48 + 32) * 4 + 2 * MLP), (Packed, 2 * (48 + 48 + 32) * 2 + MLP), (Blocks, 2 * 3 * 22 + MLP)],
)
def test_quantized_weights_count_as_stored_and_their_flops_as_those_of_the_layer(make, scales):
    plain, model = quantized(make)
    before, work = CausalLM(plain).work, CausalLM(model).work
    assert work.row_flops == before.row_flops and work.logits_flops == before.logits_flops
    assert work.attention == before.attention
    assert work.weight_bytes == before.weight_bytes - 2 * MLP * 4 + scales
    assert parameters_of(model) == parameters_of(plain) == sum(parameter.numel() for parameter in plain.parameters())
    layers = 2 * (2 * 32 * 32 + 2 * 32 * 16) + 2 * MLP
    assert quantized_share(plain, model) == 2 * MLP / layers and quantized_share(plain, plain) == 0


def test_quantized_layers_are_neither_packed_nor_merged():
    plain, model = quantized(scaled)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        expected = model(tokens).logits
        assert (expected - plain(tokens).logits).abs().max() > 1e-3
        layers = [
            linear for layer in model.model.layers for linear in layer.mlp.children() if isinstance(linear, nn.Linear)
        ]
        assert merge(model) == 2, "attention only"
        pack(model)
        kept = [
            linear for layer in model.model.layers for linear in layer.mlp.children() if isinstance(linear, nn.Linear)
        ]
        assert kept == layers and all(type(linear.weight.data) is Scaled for linear in kept)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.backends.mkldnn.is_available() or type(model.lm_head) is PackedLinear
    assert self_check(model, "per_sequence").error < 1e-3


def test_kinds_of_layers_are_told_apart():
    layer = nn.Linear(8, 8)
    assert is_plain(layer) and not is_quantized(layer)
    for make in (scaled, Packed, Blocks):
        assert is_quantized(made := make(nn.Linear(8, 8, bias=False))) and not is_plain(made)
    layer.weight_scale = nn.Parameter(torch.ones(8, 1))  # as compressed-tensors has it
    assert is_quantized(layer) and len(stored(layer)) == 3
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    assert not is_plain(layer) and not is_quantized(layer)
    assert not is_quantized(nn.Embedding(3, 4)) and not is_quantized(nn.LayerNorm(4))
    assert not is_quantized(PackedLinear(nn.Linear(8, 8))) if torch.backends.mkldnn.is_available() else True


class Rounding(nn.Linear):
    """A layer that rounds its inputs to 8 bits, with a scale for each row, as LLM.int8() does."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


def rounding(layer):
    made = Rounding(layer.in_features, layer.out_features, bias=False)
    made.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    return made


@pytest.mark.parametrize(("make", "dtype"), [
    (scaled, torch.float32), (scaled, torch.bfloat16), (rounding, torch.float32), (rounding, torch.bfloat16),
])  # fmt: skip
def test_quantized_models_are_compared_with_their_weights_in_float32(make, dtype, monkeypatch):
    _, model = quantized(make, dtype)
    monkeypatch.setattr(
        float32_copy, "is_quantized", lambda module: isinstance(module, Rounding) or is_quantized(module)
    )
    record(model, {"method": make.__name__, "rounds": make is rounding})
    check = self_check(model, "per_sequence")
    exact = make is scaled and dtype == torch.float32
    assert check.error < 1e-5 and check.allowed == 1e-3 if exact else 1e-3 < check.error < check.allowed < 0.05
    assert CausalLM(model).facts["quantization"] == recorded(model)
    if make is rounding:  # a kernel that is wrong for single rows

        def wrong(layer, x):
            return right(layer, x) * (1.2 if x.shape[-2] == 1 else 1)

        right = Rounding.forward
        monkeypatch.setattr(Rounding, "forward", wrong)
        with pytest.raises(Unsupported, match=f"in {dtype} with quantization rounding: its logits") as caught:
            self_check(model, "per_sequence")
        assert "which works" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [scaled, rounding])
def test_a_deep_quantized_model_passes_and_faults_of_the_engine_are_refused(make, dtype, monkeypatch):
    _, model = quantized(make, dtype, num_hidden_layers=24)
    monkeypatch.setattr(
        float32_copy, "is_quantized", lambda module: isinstance(module, Rounding) or is_quantized(module)
    )
    record(model, {"method": make.__name__, "rounds": make is rounding})
    self_check(model, "per_sequence")
    for mutant in MUTANTS:
        with monkeypatch.context() as patch:
            mutant(patch)
            with pytest.raises(Unsupported, match="decodes forests wrongly"):
                self_check(model, "per_sequence")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [scaled, rounding])
def test_a_quantized_layer_is_copied_with_the_weight_that_it_multiplies_by(make, bias):
    made = make(nn.Linear(8, 6, bias=False))
    made.bias = nn.Parameter(torch.randn(6)) if bias else None
    copied, unit = float32_copy._dequantized(made, torch.float32), torch.eye(8)
    torch.testing.assert_close(copied(unit), made(unit))
    assert type(copied.weight.data) is Tensor and copied.weight.shape == (6, 8)


def test_what_is_not_quantized_gets_the_data_type_of_the_model():
    _, model = quantized(Blocks)
    state = model.model.layers[0].mlp.up_proj.weight.quant_state
    in_dtype(model, torch.bfloat16)
    assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8 and state.state2.absmax.dtype == torch.float32


class Slice(SimpleNamespace):
    """As safetensors shows a tensor before it is read."""

    def get_dtype(self):
        return self.kind


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
def test_quantized_weights_require_a_scale(scale):
    plain, eight = Slice(kind="BF16"), Slice(kind="F8_E4M3")
    check_scales("p", {"a.weight": plain, "b.weight": eight, f"b.{scale}": plain})
    with pytest.raises(ValueError, match=r"p do not fit .*b\.weight is F8_E4M3 and has no scale"):
        check_scales("p", {"a.weight": plain, "b.weight": eight, f"c.{scale}": plain})
