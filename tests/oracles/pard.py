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
    wide = llama(w, torch.tensor([*text, *[mask] * (k - 1)]), layers, sizes)[-k:]
    logits = torch.full((k, vocabulary), -torch.inf, dtype=wide.dtype)
    logits[:, : wide.shape[1]] = wide[:, :vocabulary]
    if mask < vocabulary:
        logits[:, mask] = -torch.inf
    return logits
