"""Decoder layers in fewer kernels: the same logits, and only modules that compute what their replacement does."""

from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from spec_lab.core.draft import Draft, empty
from spec_lab.core.process_cache import ProcessCache
from spec_lab.core.shape import chain, forest
from spec_lab.models import fused, target
from spec_lab.models.fused import FusedAttention, fuse, fused_modules, on_one_gpu, unfuse
from spec_lab.models.merged import merge
from spec_lab.models.self_check import self_check
from spec_lab.runners.causal_lm import CausalLM
from tests.recurrent import FAMILIES as RECURRENT
from tests.recurrent import build
from tests.runners.replays import replayed
from tests.runners.test_causal_lm import TREE, life, random_draft
from tests.tiny import COMMON, FAMILIES, WINDOWED, tiny_model

ROTARY = {"llama", "qwen2", "mistral", "gemma", "granite", "starcoder2", "qwen2-windows", "mistral-windows"}
"""Families whose attention is replaced in float64, in which no norm is. Cohere's interleaves the rotated halves."""
OPERATORS = {"llama": (37, 16), "qwen3": (53, 18)}
"""Of a layer that computes one row: merged only, and fused."""


def replaced(model):
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), FusedAttention)]


def fixed(model):
    lm = CausalLM(model, fixed=True)
    lm.graphs.capture = replayed
    return lm


@pytest.mark.parametrize("runner", [CausalLM, fixed])
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
@pytest.mark.one_in(8)
def test_every_family_decodes_scattered_forests_exactly(family, runner):
    model, oracle = tiny_model(family), tiny_model(family)
    fuse(model)
    assert bool(replaced(model)) == (family in ROTARY)
    life(runner(model), oracle)


def test_a_model_is_given_back_the_code_of_transformers():
    model, plain = tiny_model("qwen3", torch.float32), tiny_model("qwen3", torch.float32)
    merge(plain)
    fuse(model)
    unfuse(model)
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(model(tokens).logits, plain(tokens).logits) and not replaced(model)


def test_modules_with_another_forward_stay():
    """As hooks of accelerate replace it, and as it is where a model is fused already."""
    model = tiny_model("llama", torch.float32)
    first = model.model.layers[0]
    for module in (first.self_attn, first.input_layernorm):
        module.forward = before = type(module).forward.__get__(module)
        fuse(model)
        assert module.forward is before
    assert len(replaced(model)) == 1 and fuse(model) == 0


def test_dense_attention_stays():
    model = tiny_model()
    fuse(model)
    life(CausalLM(model, "dense_mask"), tiny_model())


def test_a_model_on_one_gpu_is_one_that_is_not_split():
    model = SimpleNamespace(device=torch.device("cuda"))
    assert on_one_gpu(model) and not on_one_gpu(tiny_model())
    assert on_one_gpu(SimpleNamespace(**vars(model), hf_device_map={"": 0}))
    assert not on_one_gpu(SimpleNamespace(**vars(model), hf_device_map={"model.layers.0": 0, "lm_head": 1}))
    assert not on_one_gpu(SimpleNamespace(**vars(model), tp_size=2))


@pytest.mark.parametrize("runner", [CausalLM, fixed])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_norms_and_attention_in_float32_have_the_logits_of_transformers(family, runner):
    logits, generator = [], torch.Generator().manual_seed(0)
    draft = random_draft(forest((TREE, chain(3))), np.random.default_rng(5))
    for change in (merge, fuse):
        model = tiny_model(family, torch.float32)
        for parameter in model.parameters():  # weights of norms, which are ones
            if parameter.dim() == 1:
                parameter.data.uniform_(0.5, 2.0, generator=generator.manual_seed(len(parameter)))
        change(model)
        lm = runner(model)
        sequences = [lm.open(), lm.open()]
        lm.forward(sequences, [[1, 2, 3], [5, 6, 7, 8]], empty(2))
        logits.append(lm.forward(sequences, [[9], [4, 2]], draft).logits)
    assert len(replaced(model)) == 2
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


class OneMore(LlamaRMSNorm):
    """A norm whose weight is one larger, as Gemma's."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) + hidden_states


def test_a_norm_that_computes_something_else_stays():
    model = tiny_model("llama", torch.float32)
    first, second = (layer.input_layernorm for layer in model.model.layers)
    first.__class__ = OneMore
    fuse(model)
    assert "forward" not in vars(first) and "forward" in vars(second)


@pytest.mark.parametrize("family", RECURRENT)
def test_models_with_recurrent_layers_pass_the_self_check(family):
    """Some have norms with a gate, or multiply by the output of gate_proj last."""
    model = RECURRENT[family]()
    fuse(model)
    assert self_check(model, "per_sequence").passed


class Refuses(LlamaRMSNorm):
    """A norm whose code cannot compute rows of this shape."""

    def forward(self, hidden_states):
        raise IndexError("rows")


def test_a_norm_that_raises_an_error_stays():
    model = tiny_model("llama", torch.float32)
    first = model.model.layers[0].input_layernorm
    first.__class__ = Refuses
    fuse(model)
    assert "forward" not in vars(first)


@pytest.mark.parametrize("clip", [None, 0.8, 8.0])
def test_attention_that_clamps_stays(clip):
    model = build("olmo", **COMMON, clip_qkv=clip)
    fuse(model)
    assert len(replaced(model)) == (2 if clip is None else 0)


class Doubled(Qwen3Attention):
    """Attention that returns twice as much."""

    def forward(self, *given, **named):
        attended, weights = super().forward(*given, **named)
        return 2 * attended, weights

    forward.__signature__ = signature(Qwen3Attention.forward)


def test_attention_that_stays_keeps_nothing_of_its_replacement():
    model = tiny_model("qwen3", torch.float32)
    first, second = (layer.self_attn for layer in model.model.layers)
    first.__class__ = Doubled
    fuse(model)
    assert replaced(model) == [second]
    assert [hasattr(attention, "query_key_weight") for attention in (first, second)] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_a_wrong_norm_is_unfused_and_checked_again(dtype, monkeypatch, caplog):
    monkeypatch.setattr(fused, "_equal", lambda norm, other: True)
    model = tiny_model("llama", dtype)
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = OneMore
    fuse(model)
    assert fused_modules(model)
    check = target._fuse_checked(model, lambda: target._pack_checked(model, "per_sequence", "weights", ProcessCache()))
    assert check.passed and not fused_modules(model)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "without fused norms" in warning and "standard deviations" in warning


NO_KERNEL = ("aten::_unsafe_view", "aten::empty", "aten::new_empty")


class Operators(TorchDispatchMode):
    """Counts operators that compute something: a kernel each, or more."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, given=(), named=None):
        if operator._schema.name not in ("aten::rms_norm", "aten::linear", "aten::scaled_dot_product_attention"):
            with self:
                result = operator.decompose(*given, **named or {})
            if result is not NotImplemented:
                return result
        views = any(result.alias_info and not result.alias_info.is_write for result in operator._schema.returns)
        self.count += not views and operator._schema.name not in NO_KERNEL
        return operator(*given, **named or {})


@pytest.mark.parametrize("family", OPERATORS)
def test_a_layer_has_fewer_operators(family):
    counts = []
    for change in (merge, fuse):
        of_layers = []
        for layers in (2, 3):
            model = tiny_model(family, torch.bfloat16, num_hidden_layers=layers)
            change(model)
            lm, operators = CausalLM(model, fixed=True), Operators()
            sequence = lm.open()
            lm.forward([sequence], [[1, 2, 3]], empty(1))
            with operators:
                lm.forward([sequence], [[4]], Draft(chain(0), torch.empty(0, dtype=torch.long)))
            of_layers.append(operators.count)
        counts.append(of_layers[1] - of_layers[0])
    assert tuple(counts) == OPERATORS[family]
