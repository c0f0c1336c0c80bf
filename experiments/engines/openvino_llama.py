"""A step of a Llama in OpenVINO's operators, for ``whole_step``: from token ids and a KV cache to logits.

The KV cache is torch's memory, read where it is. Before products with int8 and int4 weights OpenVINO rounds activations
to 8 bits, in groups of 32 (its default of DYNAMIC_QUANTIZATION_GROUP_SIZE). Importing this module does not require
openvino.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.shape import Shape

if find_spec("openvino"):
    import openvino
    import openvino.opset13 as op
    from openvino.op import Constant

LINEARS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")

GROUP = 32
"""Inputs of a row of int4 weights that have one scale."""

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
"""The precisions of a step."""

TYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16", torch.int8: "i8", torch.int32: "i32"}
"""OpenVINO's names of data types."""

MASKED = -1e9
"""The mask of a position that a row does not attend to: finite, since kernels may compute NaN from infinity."""


def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the levels (int8) and the scales (float16) of a matrix ``[out, in]``.

    Returns:
        ``[out, in]`` and ``[out, 1]`` for "int8"; ``[out, in / 32, 32]`` and ``[out, in / 32, 1]`` for "int4".
    """
    blocks, largest = (weight.unflatten(1, (-1, GROUP)), 7) if kind == "int4" else (weight, 127)
    scales = (blocks.abs().amax(-1, keepdim=True) / largest).half().clamp_min(2.0**-24)
    return (blocks / scales.float()).round().clamp(-largest, largest).to(torch.int8), scales


def shared(tensor: Tensor) -> Any:
    """Return OpenVINO's tensor over the memory of a contiguous one, which must outlive it."""
    array = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # NumPy has no bfloat16
    return openvino.Tensor(array.numpy(), list(tensor.shape), getattr(openvino.Type, TYPES[tensor.dtype]))


def constant(tensor: Tensor) -> Any:
    """Return a constant with a copy of a tensor."""
    return Constant(shared(tensor), shared_memory=False)


def matrix(weight: Tensor, kind: str) -> Any:
    """Return a matrix ``[out, in]`` in the operators that OpenVINO's CPU plugin knows as compressed weights."""
    if kind == "full":
        return constant(weight)
    levels, scales = quantized(weight, kind)
    if kind == "int8":
        return op.convert(op.multiply(op.convert(constant(levels), "f16"), constant(scales)), "f32")
    low, high = levels.flatten().view(-1, 2).bitwise_and(15).unbind(1)  # a byte's low half holds the first of two
    packed = openvino.Tensor((low + high * 16).numpy().view(np.uint8), list(levels.shape), openvino.Type.i4)
    blocks = op.multiply(op.convert(Constant(packed, shared_memory=False), "f16"), constant(scales))
    return op.convert(op.reshape(blocks, list(weight.shape), False), "f32")


def matrices(model: Any, kind: str) -> dict[str, Any]:
    """Return the linear layers of a Llama: those with the same input are joined, queries are scaled for attention."""
    state, scale = model.state_dict(), model.config.head_dim**-0.5
    joined = {"head": state["lm_head.weight"]}
    for layer in range(model.config.num_hidden_layers):
        weights = (state[f"model.layers.{layer}.{name}_proj.weight"] for name in LINEARS)
        query, key, value, out, gate, up, down = weights
        joined |= {f"qkv {layer}": torch.cat([query * scale, key, value]), f"out {layer}": out}
        joined |= {f"gate, up {layer}": torch.cat([gate, up]), f"down {layer}": down}
    return {name: matrix(weight, kind) for name, weight in joined.items()}


class Decoder:
    """A Llama in OpenVINO's operators.

    Args:
        model: of transformers, in float32.
        linears: its ``matrices``.
        precision: of activations between products, and of the KV cache, one of ``DTYPES``.
        positions: how many it knows.
    """

    def __init__(self, model: Any, linears: Mapping[str, Any], precision: str, positions: int) -> None:
        config, state, dtype = model.config, model.state_dict(), DTYPES[precision]
        self.linears, self.precision, self.type = linears, precision, getattr(openvino.Type, precision)
        self.layers, self.epsilon = config.num_hidden_layers, np.float32(config.rms_norm_eps)
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.widths = config.vocab_size, config.hidden_size
        self.embedding = constant(state["model.embed_tokens.weight"].to(dtype))
        self.norms = {name: constant(weight) for name, weight in state.items() if "norm" in name}
        angles = model.model.rotary_emb(torch.zeros(1), torch.arange(positions)[None])
        self.angles = [constant(table[0].to(dtype)) for table in angles]  # cosines, sines

    def graph(self, rows: int, capacity: int) -> Any:
        """Return the model of a step of n rows over a KV cache of S positions.

        Its inputs are token ids ``[n]``, positions ``[n]``, an additive mask ``[n, S + n]``, and each layer's keys and
        values ``[1, heads, S, size]``. Its outputs are logits ``[n, V]``, the hidden states after the final norm
        ``[n, H]``, and the rows' keys and values ``[2 * layers, heads, n, size]``.
        """
        tokens, positions = (op.parameter([rows], np.int32) for _ in range(2))
        mask = op.parameter([rows, capacity + rows], np.float32)
        shape = [1, self.kv_heads, capacity, self.size]
        cache = [op.parameter(shape, self.type) for _ in range(2 * self.layers)]
        masks = op.convert(op.concat([mask] * (self.heads // self.kv_heads), 0), self.precision)
        angles = [op.unsqueeze(op.gather(table, positions, 0), [0, 1]) for table in self.angles]
        x, new = op.convert(op.gather(self.embedding, tokens, 0), "f32"), []
        for layer in range(self.layers):
            normed = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
            qkv = op.convert(self._product(normed, f"qkv {layer}"), self.precision)
            attended, added = self._attention(qkv, angles, masks, cache[2 * layer : 2 * layer + 2], capacity)
            x = op.add(x, self._product(attended, f"out {layer}"))
            normed = self._norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
            gate, up = op.split(self._product(normed, f"gate, up {layer}"), 1, 2).outputs()
            x = op.add(x, self._product(op.multiply(op.swish(gate), up), f"down {layer}"))
            new += added
        hidden = self._norm(x, "model.norm.weight")
        results = [self._product(hidden, "head"), hidden, op.convert(op.concat(new, 0), "f32")]
        return openvino.Model(results, [tokens, positions, mask, *cache])

    def _product(self, x: Any, name: str) -> Any:
        return op.matmul(x, self.linears[name], False, True)

    def _norm(self, x: Any, name: str) -> Any:
        mean = op.reduce_mean(op.power(x, np.float32(2)), [-1], keep_dims=True)
        inverse = op.divide(np.float32(1), op.sqrt(op.add(mean, self.epsilon)))
        return op.multiply(op.multiply(x, inverse), self.norms[name])

    def _attention(
        self, qkv: Any, angles: Sequence[Any], masks: Any, cache: Sequence[Any], capacity: int
    ) -> tuple[Any, list[Any]]:
        """Return what attention returns for the rows ``[n, heads * size]``, and their keys and values.

        The queries of all heads with the same keys are rows of one product. Scores are joined instead of keys, so that
        the cache is not copied.
        """
        rotary = self.heads + self.kv_heads
        parts = op.reshape(qkv, [1, -1, rotary + self.kv_heads, self.size], False)
        parts = op.transpose(parts, [0, 2, 1, 3])  # [1, heads, n, size]
        turned, values = op.variadic_split(parts, 1, [rotary, self.kv_heads]).outputs()
        queries, keys = op.variadic_split(self._rotated(turned, *angles), 1, [self.heads, self.kv_heads]).outputs()
        queries = op.reshape(queries, [1, self.kv_heads, -1, self.size], False)
        scores = op.concat([op.matmul(queries, each, False, True) for each in (cache[0], keys)], 3)
        shares = op.variadic_split(op.softmax(op.add(scores, masks), 3), 3, [capacity, -1]).outputs()
        held, added = (op.matmul(*pair, False, False) for pair in zip(shares, (cache[1], values), strict=True))
        mixed = op.transpose(op.reshape(op.add(held, added), [1, self.heads, -1, self.size], False), [0, 2, 1, 3])
        return op.convert(op.reshape(mixed, [-1, self.heads * self.size], False), "f32"), [keys, values]

    def _rotated(self, x: Any, cosines: Any, sines: Any) -> Any:
        """Return queries and keys ``[1, heads, n, size]`` rotated by position, in operators that OpenVINO fuses."""
        first, second = op.variadic_split(x, 3, [self.size // 2] * 2).outputs()
        minus = Constant(self.type, openvino.Shape([]), [-1.0])
        turned = op.concat([op.multiply(second, minus), first], 3)
        return op.add(op.multiply(x, cosines), op.multiply(turned, sines))


class OpenVINOStep:
    """A step of a ``Decoder``, compiled for its number of rows.

    Args:
        decoder: the model.
        past: keys and values of the context, ``[2 * layers, heads, context, size]``.
        tokens: of the rows.
        shape: the tree of the rows.
        capacity: positions that the KV cache has room for.
        threads: of the CPU.
    """

    def __init__(
        self, decoder: Decoder, past: Tensor, tokens: Sequence[int], shape: Shape, capacity: int, threads: int
    ) -> None:
        rows, context = shape.rows, past.shape[2]
        hints = {"INFERENCE_PRECISION_HINT": decoder.precision, "INFERENCE_NUM_THREADS": threads}
        hints["PERFORMANCE_HINT"] = "LATENCY"
        compiled = openvino.compile_model(decoder.graph(rows, capacity), "CPU", hints)
        self.request = compiled.create_infer_request()
        cache = torch.zeros(*past.shape[:2], capacity, past.shape[3], dtype=DTYPES[decoder.precision])
        cache[:, :, :context] = past
        self.end = cache[:, :, context : context + rows]  # where the rows are appended
        mask = torch.full((rows, capacity + rows), MASKED)
        mask[:, :context] = 0
        mask[:, capacity:] = torch.from_numpy(shape.tree_masks[0]).clamp_min(MASKED)
        positions = torch.from_numpy(shape.depth + context)
        self.inputs = [torch.tensor(tokens).int(), positions.int(), mask, *cache.split(1)]
        self.outputs = [torch.zeros(rows, width) for width in decoder.widths]
        self.outputs.append(torch.zeros(*past.shape[:2], rows, past.shape[3]))
        for number, tensor in enumerate(self.inputs):
            self.request.set_input_tensor(number, shared(tensor))
        for number, tensor in enumerate(self.outputs):
            self.request.set_output_tensor(number, shared(tensor))

    def __call__(self) -> Tensor:
        """Compute the rows, and append them to the KV cache behind the context. Return their logits ``[n, V]``."""
        self.request.infer(share_outputs=True)
        self.end.copy_(self.outputs[2])
        return self.outputs[0]

    def close(self) -> None:
        """Free the compiled model."""
        del self.request
