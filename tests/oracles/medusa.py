"""Published Medusa heads, one head and one state at a time: plain PyTorch, written from the papers' section and the
layouts of published files. Tensors go by their published names.
"""

import torch
from torch.nn.functional import silu


def of_authors(w, state, head):
    """Logits ``[V]`` of a head of FasterDecoding's from a state ``[H]`` that enters the target's LM head."""
    layer = 0
    while f"{head}.{layer}.linear.weight" in w:
        inner = w[f"{head}.{layer}.linear.weight"] @ state + w[f"{head}.{layer}.linear.bias"]
        state = state + silu(inner)
        layer += 1
    return w[f"{head}.{layer}.weight"] @ state


def of_vllm(w, state, head, vocabulary, shared=None):
    """The same of a head in vLLM's form; ``shared`` names the LM head of all heads."""
    layer = 0
    while f"blocks.{head}.layers.{layer}.weight" in w:
        inner = w[f"blocks.{head}.layers.{layer}.weight"] @ state
        if f"blocks.{head}.layers.{layer}.bias" in w:
            inner = inner + w[f"blocks.{head}.layers.{layer}.bias"]
        state = state + silu(inner)
        layer += 1
    rows = w[shared or f"lm_heads.{head}.weight"]
    if "token_map" not in w:
        return rows @ state
    logits = torch.full((vocabulary,), -torch.inf, dtype=rows.dtype)
    for number, token in enumerate(w["token_map"].tolist()):
        logits[token] = rows[token if len(rows) == vocabulary else number] @ state
    return logits
