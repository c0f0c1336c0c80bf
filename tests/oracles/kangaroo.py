"""The adapter of Kangaroo over whole sequences: plain PyTorch, no cache, written from the paper's section 3.2 and the
names of published files.
"""

from tests.oracles.eagle import attention, rms


def adapter(w, exits, sizes):
    """Normed states ``[n, H]`` of exit states ``[n, H]``; the target's LM head reads them."""
    x, layer = exits, 0
    while f"layers.{layer}.self_attn.q_proj.weight" in w:
        name = f"layers.{layer}"
        x = x + attention(w, name, rms(x, w[f"{name}.input_layernorm.weight"]), *sizes)
        layer += 1
    return rms(x, w["norm.weight"])
