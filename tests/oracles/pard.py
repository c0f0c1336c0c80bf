"""PARD over whole sequences: a Llama model in plain PyTorch, without a cache, that reads the text and mask tokens."""

import torch

from tests.oracles.eagle import attention, mlp, rms


def llama(w, tokens, layers, sizes):
    """Logits ``[n, V]`` after each of the tokens. Tensors go by the names of transformers."""
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(layers):
        name = f"model.layers.{layer}"
        x = x + attention(w, name, rms(x, w[f"{name}.input_layernorm.weight"]), *sizes)
        x = x + mlp(w, name, x)
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def levels(w, text, mask, k, vocabulary, layers, sizes):
    """Logits ``[k, vocabulary]`` of the k levels drafted after ``text``."""
    own = llama(w, torch.tensor([*text, *[mask] * (k - 1)]), layers, sizes)[-k:]
    found = torch.full((k, vocabulary), -torch.inf, dtype=own.dtype)
    found[:, : own.shape[1]] = own[:, :vocabulary]
    if mask < vocabulary:
        found[:, mask] = -torch.inf
    return found
