"""Hydra heads over whole sequences: plain PyTorch, no cache, written from the layout of published files. Tensors go by
their published names.
"""

import torch
from torch.nn.functional import silu

from tests.oracles.eagle import attention, mlp, rms


def prefix(w, states, sizes):
    """The prefix layer: hidden states after the final norm ``[n, H]`` of positions 0 to n - 1 -> ``[n, H]``."""
    name = "prefix_embeding_layer.layers.0"
    x = states + attention(w, name, rms(states, w[f"{name}.input_layernorm.weight"]), *sizes)
    return rms(x + mlp(w, name, x), w["prefix_embeding_layer.norm.weight"])


def logits(w, embedding, states, after, sizes, layers, lm_head=None):
    """Logits ``[V]`` of the head that reads the last of ``states`` ``[n, H]`` and the tokens after it.

    ``lm_head`` stands in for the head's own.
    """

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    head, deep = len(after) - 1, "prefix_embeding_layer.norm.weight" in w
    state = (prefix(w, states, sizes) if deep else states)[-1]
    x = torch.cat([state, *(embedding[token] for token in after)])
    for layer in range(layers):
        name = f"hydra_mlp.{head}.{2 * layer + 1 if deep else layer}"
        skip = x
        if layer == 0:
            published = f"{name}.res_connection.weight" in w
            skip = linear(f"{name}.res_connection", x) if published else x[: states.shape[1]]
        x = skip + silu(linear(f"{name}.linear", x))
    if lm_head is not None:
        return lm_head(x)
    return linear(f"hydra_lm_head.{head}.1" if deep else f"hydra_lm_head.{head}", x)
