"""A block drafter over whole sequences: plain PyTorch, no cache, written from the papers' sections and the layouts of
published files. Tensors go by their published names.
"""

import math

import torch

from tests.oracles.eagle import mlp, rms, rotated


def base_logits(w, embedding, head, taps, pending, mask, size, sizes, theta):
    """Logits ``[size, V]`` of every row of a block, without the Markov head.

    taps: ``[n, k * H]`` the hidden states of the n computed positions, side by side.
    """
    heads, shared, dim = sizes
    embedding, head = w.get("embed_tokens.weight", embedding), w.get("lm_head.weight", head)
    n = len(taps)
    context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = embedding[torch.tensor([pending] + [mask] * (size - 1))]
    layer = 0
    while f"layers.{layer}.self_attn.q_proj.weight" in w:
        name = f"layers.{layer}"
        own = rms(x, w[f"{name}.input_layernorm.weight"])

        def split(kind, rows, count, name=name):
            y = (rows @ w[f"{name}.self_attn.{kind}_proj.weight"].T).view(len(rows), count, dim)
            if f"{name}.self_attn.{kind}_norm.weight" in w:
                y = rms(y, w[f"{name}.self_attn.{kind}_norm.weight"])
            return y.transpose(0, 1)

        both, everywhere = torch.cat([context, own]), torch.arange(n + size, dtype=torch.float64)
        q = rotated(split("q", own, heads), everywhere[n:], theta)
        k, v = rotated(split("k", both, shared), everywhere, theta), split("v", both, shared)
        k, v = (one.repeat_interleave(heads // shared, 0) for one in (k, v))
        mixed = (q @ k.transpose(1, 2) / math.sqrt(dim)).softmax(-1) @ v
        x = x + mixed.transpose(0, 1).reshape(size, heads * dim) @ w[f"{name}.self_attn.o_proj.weight"].T
        x = x + mlp(w, name, x)
        layer += 1
    return rms(x, w["norm.weight"]) @ head.T


def level(w, rows, depth, previous, predicts_next):
    """Logits ``[V]`` of the tokens ``depth`` levels below the pending token, after the token ``previous``."""
    found = rows[depth - 1 if predicts_next else depth]
    if "markov_head.markov_w1.weight" in w:
        found = found + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][previous]
    return found
