"""Llama models with random weights, made on the device. They need no checkpoint: the text does not matter for time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spec_lab.core.machine_limits import measure
from spec_lab.core.roofline import Roofline
from spec_lab.models.target import Target
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.model_work import work_of

SHAPES: Mapping[str, Mapping[str, int]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512),
    "1B": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, vocab_size=128256
    ),
    "7B": dict(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    ),
    "8B": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, vocab_size=128256
    ),
    "14B": dict(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, vocab_size=152064
    ),
}
"""Sizes of Llama 3.2 1B, Llama 2 7B, Llama 3.1 8B and Qwen 2.5 14B; eight key-value heads, two of the smallest."""

WAYS = ("eager", "captured")
"""How decoding steps run: in shapes as they come, or in fixed shapes captured as CUDA graphs."""


def llama(sizes: Mapping[str, int], device: torch.device | str, dtype: torch.dtype, context: int) -> Any:
    """A Llama with random weights, the same in every call, made on the device.

    Args:
        sizes: fields of its config; ``num_key_value_heads`` is 8, or 2 where it has 4 attention heads.
        device: of the weights.
        dtype: of the weights.
        context: most positions.
    """
    shared = 2 if sizes["num_attention_heads"] == 4 else 8
    config = LlamaConfig(
        **{"num_key_value_heads": shared, **sizes}, max_position_embeddings=context,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def target_of(model: Any, name: str, captured: bool = False) -> Target:
    """The model as a target, with empty KV caches."""
    return Target(CausalLM(model, fixed=captured), None, name, model.config.max_position_embeddings, "", 0.0)


def both_ways(model: Any, name: str) -> dict[str, Target]:
    """Both ways of running the model, with empty KV caches: they are as large as the largest batch and context."""
    return {way: target_of(model, name, way == "captured") for way in WAYS}


def roofline_of(model: Any, dtype: torch.dtype, device: torch.device) -> Roofline:
    """Return the limits of the model's forwards; bandwidth and peak are measured, in some seconds."""
    work = work_of(model, {})
    assert work is not None
    return Roofline(work, measure(work.weight_bytes, dtype, device))
