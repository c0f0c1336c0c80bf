"""The networks of EAGLE-1 and EAGLE-3 over whole sequences: plain PyTorch, no cache, written from the papers' sections
and the layouts of published files. Tensors go by their published names.
"""

import math

import torch
from torch.nn.functional import silu


def rms(x, weight, epsilon=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotated(x, positions, theta=10000.0, neighbours=False):  # [heads, n, d]
    """Rotary embedding of numbers i and i + d / 2, or of neighbours."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    both = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.stack(both, -1).flatten(-2) if neighbours else torch.cat(both, -1)


def attention(
    w, name, x, heads, shared, dim, theta=10000.0, neighbours=False, windows=None, computed=0, anchored=False, skip=0
):
    """Causal self-attention over inputs ``[n, X]`` at positions 0 to n - 1.

    windows: positions that a query attends to, by name of the layer.
    computed: rows before those that are drafted.
    anchored: whether drafted rows have the window of the last computed one, and attend to each other.
    skip: rotary positions that are left out before the drafted rows.
    """
    n = len(x)

    def split(kind, count):
        y = x @ w[f"{name}.self_attn.{kind}_proj.weight"].T + w.get(f"{name}.self_attn.{kind}_proj.bias", 0)
        y = y.view(n, count, dim)
        if f"{name}.self_attn.{kind}_norm.weight" in w:
            y = rms(y, w[f"{name}.self_attn.{kind}_norm.weight"])
        return y.transpose(0, 1)

    positions = torch.arange(n, dtype=torch.float64)
    turned = positions + skip * (positions >= computed)
    q, k = (rotated(split(kind, count), turned, theta, neighbours) for kind, count in (("q", heads), ("k", shared)))
    k, v = (tensor.repeat_interleave(heads // shared, 0) for tensor in (k, split("v", shared)))
    scores = q @ k.transpose(1, 2) / math.sqrt(dim)
    distance = positions[:, None] - positions
    ends = positions.clip(max=computed - 1) if anchored else positions
    far = ends[:, None] - positions >= (windows or {}).get(name, n)
    scores = scores.masked_fill((distance < 0) | far, -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, heads * dim)
    return mixed @ w[f"{name}.self_attn.o_proj.weight"].T


def mlp(w, name, x):
    x = rms(x, w[f"{name}.post_attention_layernorm.weight"])
    inner = silu(x @ w[f"{name}.mlp.gate_proj.weight"].T) * (x @ w[f"{name}.mlp.up_proj.weight"].T)
    return inner @ w[f"{name}.mlp.down_proj.weight"].T


def eagle1(w, embedding, tokens, features, sizes):
    """Predicted features ``[n, H]`` from tokens t_1 .. t_n and features f_0 .. f_{n-1}."""
    x = torch.cat([embedding[tokens], features], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    layer = 0
    while f"layers.{layer}.self_attn.q_proj.weight" in w:
        name = f"layers.{layer}"
        normed = x if layer == 0 else rms(x, w[f"{name}.input_layernorm.weight"])
        x = x + attention(w, name, normed, *sizes)
        x = x + mlp(w, name, x)
        layer += 1
    return x


def eagle3_features(w, taps, flags=()):
    """g ``[n, H]`` from the taps, a list of k ``[n, H_t]``."""
    if "fc_norm" in flags:
        taps = [rms(tap, w[f"fc_norm.{number}.weight"]) for number, tap in enumerate(taps)]
    x = torch.cat(taps, -1)
    if "norm_before_fc" in flags:
        x = rms(x, w["input_norm.weight"])
    return x @ w["fc.weight"].T + w.get("fc.bias", 0) if "fc.weight" in w else x


def eagle3(w, embedding, tokens, features, sizes, flags=(), **how):
    """Return features to feed back ``[n, H]`` and draft logits ``[n, W]``; ``how`` as in ``attention``."""
    embedding = w.get("embed_tokens.weight", embedding)
    normed = rms(features, w["midlayer.hidden_norm.weight"])
    both = torch.cat([rms(embedding[tokens], w["midlayer.input_layernorm.weight"]), normed], -1)
    x = (normed if "norm_before_residual" in flags else features) + attention(w, "midlayer", both, *sizes, **how)
    x = x + mlp(w, "midlayer", x)
    layer = 1
    while f"layers.{layer}.self_attn.q_proj.weight" in w:
        name = f"layers.{layer}"
        x = x + attention(w, name, rms(x, w[f"{name}.input_layernorm.weight"]), *sizes, **how)
        x = x + mlp(w, name, x)
        layer += 1
    final = x if "raw_output" in flags else rms(x, w["norm.weight"])
    return (final if "norm_output" in flags else x), final @ w["lm_head.weight"].T
