"""Whole steps in other libraries (``experiments/engines``): what is compared, and how it is summed up."""

import pandas as pd
import pytest
import torch

from experiments.engines import openvino_llama, whole_step
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.tasks.cost.timing import binary_tree
from tests.tiny import tiny_model

TOKENS, ROWS = list(range(3, 32)), 6


@pytest.fixture
def step():
    """Keys and values of the context, log-probabilities of a tree of rows, and its shape."""
    with torch.inference_mode():
        shape = binary_tree(ROWS - 1)
        past, wanted = whole_step.reference(tiny_model(dtype=torch.float32), TOKENS, shape)
        yield past, wanted, shape


def test_the_reference_computes_the_same_tree_as_the_lab(step):
    past, wanted, shape = step
    assert past.shape == (2 * 2, 2, len(TOKENS) - ROWS, 8)
    call = whole_step.LabStep(CausalLM(tiny_model(dtype=torch.float32)), TOKENS, shape)
    for _ in range(2):
        assert (call().log_softmax(-1) - wanted).abs().max() < 1e-2
    call.close()


@pytest.mark.parametrize("kind", ["full", "int8"])
def test_openvino_computes_the_same_tree(step, kind):
    pytest.importorskip("openvino")
    past, wanted, shape = step
    model = tiny_model(dtype=torch.float32)
    decoder = openvino_llama.Decoder(model, openvino_llama.matrices(model, kind), "f32", 40)
    call = openvino_llama.OpenVINOStep(decoder, past, TOKENS[-ROWS:], shape, len(TOKENS) + 2, 1)
    for _ in range(2):
        assert (call().log_softmax(-1) - wanted).abs().max() < (1e-2 if kind == "full" else 1.0)


@pytest.mark.parametrize(("kind", "shape"), [("int8", (3, 64)), ("int4", (3, 2, 32))])
def test_weights_are_rounded_to_the_next_level(kind, shape):
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    levels, scales = openvino_llama.quantized(weight, kind)
    assert levels.shape == shape and scales.shape == (*shape[:-1], 1)
    assert ((levels * scales.float() - weight.view(shape)).abs() <= 0.501 * scales.float()).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_openvino_multiplies_by_the_rounded_weights(kind):
    openvino = pytest.importorskip("openvino")
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    result = openvino.opset13.result(openvino_llama.matrix(weight, kind))
    levels, scales = openvino_llama.quantized(weight, kind)
    product = openvino.compile_model(openvino.Model([result], []), "CPU")([])[0]
    assert (torch.from_numpy(product).view(levels.shape) - levels * scales.float()).abs().max() < 1e-2


def test_steps_take_turns_and_are_timed_so_often():
    calls = []
    taken = whole_step.milliseconds([lambda: calls.append(0), lambda: calls.append(1)], 4)
    assert [len(samples) for samples in taken] == [6, 6]
    assert calls == [1] * 4 + [0] * 8 + [1] * 8 + [0] * 4


def test_speeds_are_relative_to_transformers():
    times = {("transformers", "bf16"): (30, 33), ("llama.cpp", "q4_1"): (10, 30), ("OpenVINO, bf16", "int8"): (15, 22)}
    lines = [
        {"context": 256, "library": library, "weights": weights, "rows": rows, "median": median}
        for (library, weights), medians in times.items()
        for rows, median in zip((1, 8), medians, strict=True)
    ]
    table = whole_step.speeds(pd.DataFrame(lines)).loc[256]
    assert table["speed at 1"].to_dict() == {
        ("OpenVINO, bf16", "int8"): 2, ("llama.cpp", "q4_1"): 3, ("transformers", "bf16"): 1
    }  # fmt: skip
    assert table[">= 1.5"].tolist() == [True, False, False]
    assert table["t(8)/t(1)"].to_dict()["llama.cpp", "q4_1"] == 3
