"""Random Medusa heads for tiny targets, written as their authors and vLLM write them."""

import torch

VICUNA = {
    "medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "transformers_version": "4.31.0",
}  # fmt: skip
"""The published config of heads of which the file holds five."""


def _maker(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5


def authors(h, v, heads=5, layers=1, seed=0, **config):
    """Config and tensors of FasterDecoding's heads; the layers of a head are one module, repeated."""
    made, tensors = _maker(seed), {}
    for head in range(heads):
        weight, bias = made(h, h), made(h)
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"] = weight, bias
        tensors[f"{head}.{layers}.weight"] = 3 * made(v, h)
    return VICUNA | {"medusa_num_layers": layers} | config, tensors


def vllm(h, v, heads=3, layers=1, bias=False, tokens=None, rows=None, shared=None, seed=0, **config):
    """Config and tensors of heads in vLLM's form, which draft ``tokens``; ``shared`` names one LM head for all."""
    made, tensors = _maker(seed), {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = made(h, h)
            if bias:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = made(h)
        tensors[shared or f"lm_heads.{head}.weight"] = 3 * made(rows or (v if tokens is None else len(tokens)), h)
    if tokens is not None:
        tensors["token_map"] = torch.tensor(tokens)
    return {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": h, "vocab_size": v, "num_heads": heads,
        "num_hidden_layers": layers, "medusa_fc_bias": bias, "original_lm_head": shared is not None,
        "truncated_vocab_size": v if tokens is None else len(tokens), "max_paths": 64, "topk": 10,
    } | config, tensors  # fmt: skip
