"""Time linear layers and a whole layer for few rows in other libraries: python -m experiments.engines.linears.

A step of speculative decoding multiplies 1 to 16 rows with every weight. Which library does that fast for one row and
for eight, with weights that no cache holds? Each call follows one that reads 256 MiB of other memory. Libraries
that are not installed are left out: pip install openvino nncf onnx onnxruntime onnxscript. Writes ``linears.csv``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from experiments import runs
from spec_lab.models.packed import pack

WIDTH, INNER, KEYS, VOCABULARY = 576, 1536, 192, 49152
"""Of SmolLM2-135M: hidden size, width of the MLP, of the keys, and the number of tokens."""

SHAPES = {"query": (WIDTH, WIDTH), "up": (WIDTH, INNER), "down": (INNER, WIDTH), "LM head": (WIDTH, VOCABULARY)}
"""Inputs and outputs of the linear layers."""

ROWS = (1, 2, 4, 8, 16)

Call = Callable[[], Any]


class Layer(nn.Module):
    """The products of a Llama layer, with its norms and activation; without attention over a cache."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, KEYS), "v": (WIDTH, KEYS), "o": (WIDTH, WIDTH)}
        shapes |= {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
        self.linears = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows ``[n, WIDTH]`` after the layer."""
        normed = self.normed(x, 0)
        queries, keys, values = (self.linears[name](normed) for name in "qkv")
        mixed = queries * keys.repeat(1, WIDTH // KEYS) + values.repeat(1, WIDTH // KEYS)
        x = x + self.linears["o"](mixed)
        normed = self.normed(x, 1)
        inner = nn.functional.silu(self.linears["gate"](normed)) * self.linears["up"](normed)
        return x + self.linears["down"](inner)

    def normed(self, x: Tensor, number: int) -> Tensor:
        """Return the rows after an RMS norm, in operators that every library converts."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norms[number]


def in_torch(module: nn.Module, dtype: torch.dtype, packed: bool) -> Callable[[int], Call]:
    """Return calls of torch, with weights as they are or in oneDNN's layout as spec_lab holds them."""
    computed = nn.Sequential(deepcopy(module)).to(dtype)
    if packed:
        pack(computed)
    return lambda rows: _bound(computed, torch.randn(rows, _inputs(module), dtype=dtype))


def in_torch_int8(linear: nn.Module) -> Callable[[int], Call]:
    """Return calls of torch's product of bfloat16 rows with int8 weights, a scale for each output."""
    weight = linear.get_parameter("weight").detach()
    scales = weight.abs().amax(1) / 127
    levels, factors = (weight / scales[:, None]).round().to(torch.int8), scales.bfloat16()
    return lambda rows: _bound(
        lambda x: torch.ops.aten._weight_int8pack_mm(x, levels, factors),
        torch.randn(rows, weight.shape[1], dtype=torch.bfloat16),
    )


def in_torch_int4(linear: nn.Module, group: int = 32) -> Callable[[int], Call]:
    """Return calls of torch's product of bfloat16 rows with int4 weights, a scale and a zero for each group."""
    outputs, inputs = linear.get_parameter("weight").shape
    levels = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    scales = torch.rand(inputs // group, outputs, 2).bfloat16()
    return lambda rows: _bound(
        lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales),
        torch.randn(rows, inputs, dtype=torch.bfloat16),
    )


def in_openvino(module: nn.Module, weights: str, threads: int) -> Callable[[int], Call]:
    """Return calls of OpenVINO: weights in bf16, int8 or int4 (groups of 32), products in bfloat16 where it can."""
    import nncf
    import openvino

    converted = openvino.convert_model(module.eval(), example_input=torch.randn(2, _inputs(module)))
    if weights != "bf16":
        mode = nncf.CompressWeightsMode.INT8_SYM if weights == "int8" else nncf.CompressWeightsMode.INT4_SYM
        converted = nncf.compress_weights(converted, mode=mode, **({} if weights == "int8" else {"group_size": 32}))
    hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}

    def of_rows(rows: int) -> Call:
        converted.reshape([rows, _inputs(module)])
        request = openvino.compile_model(converted, "CPU", hints).create_infer_request()
        request.set_input_tensor(openvino.Tensor(torch.randn(rows, _inputs(module)).numpy()))
        return request.infer

    return of_rows


def in_onnxruntime(module: nn.Module, bits: int, threads: int) -> Callable[[int], Call]:
    """Return calls of ONNX Runtime: float32, or weights of 4 or 8 bits in groups of 32 with float32 sums."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization import matmul_nbits_quantizer

    file = io.BytesIO()
    example = (torch.randn(2, _inputs(module)),)
    torch.onnx.export(module.eval(), example, file, input_names=["x"], dynamic_axes={"x": {0: "rows"}}, dynamo=False)
    model = onnx.load_from_string(file.getvalue())
    if bits < 32:
        quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
            model, block_size=32, is_symmetric=True, accuracy_level=4, bits=bits
        )
        quantizer.process()
        model = quantizer.model.model
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda rows: _bound(lambda x: session.run(None, {"x": x}), torch.randn(rows, _inputs(module)).numpy())


def libraries(module: nn.Module, threads: int) -> dict[str, Callable[[int], Call]]:
    """Return what computes the module, by name; a call for each number of rows."""
    linear = isinstance(module, nn.Linear)
    made = {
        "torch float32": in_torch(module, torch.float32, False),
        "torch bf16": in_torch(module, torch.bfloat16, False),
        "torch float32, packed": in_torch(module, torch.float32, True),
        "torch bf16, packed": in_torch(module, torch.bfloat16, True),
    }
    if linear:
        made |= {"torch int8": in_torch_int8(module), "torch int4": in_torch_int4(module)}
    if find_spec("openvino") and find_spec("nncf"):
        made |= {f"OpenVINO {weights}": in_openvino(module, weights, threads) for weights in ("bf16", "int8", "int4")}
    if find_spec("onnxruntime") and find_spec("onnx"):
        made |= {f"ONNX Runtime, {bits} bits": in_onnxruntime(module, bits, threads) for bits in (4, 8, 32)}
    return made


def _inputs(module: nn.Module) -> int:
    return int(module.in_features) if isinstance(module, nn.Linear) else WIDTH


def _bound(function: Callable[[Any], Any], x: Any) -> Call:
    return lambda: function(x)


def seconds(calls: Sequence[Call], times: int) -> list[float]:
    """Return the median seconds of each call, with cold caches; calls take turns."""
    other = torch.zeros(64 * 2**20)
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(times):
        for call, samples in zip(calls, taken, strict=True):
            other.sum()
            began = perf_counter()
            call()
            samples.append(perf_counter() - began)
    return [median(samples[times // 4 :]) for samples in taken]  # the first calls set up


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = runs.parser(__doc__, str(Path(__file__).parent), 30)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    modules = {name: nn.Linear(*shape, bias=False) for name, shape in SHAPES.items()} | {"layer": Layer()}
    lines = []
    for name, module in modules.items():
        made = libraries(module, chosen.threads)
        calls = [of_rows(rows) for of_rows, rows in product(made.values(), ROWS)]
        taken = seconds(calls, chosen.limit)
        for (library, rows), spent in zip(product(made, ROWS), taken, strict=True):
            lines.append({"module": name, "library": library, "rows": rows, "microseconds": spent * 1e6})
        table = pd.DataFrame(lines).pivot_table(index=["module", "library"], columns="rows", values="microseconds")
        print(table.loc[[name]].round(0).to_string())
    pd.DataFrame(lines).to_csv(chosen.out / "linears.csv", index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
