"""A multi-token-prediction module over whole sequences: plain PyTorch, no cache, written from section 2.2 of the paper
of DeepSeek-V3 and the layouts of published files, for a decoder layer of Llama or Qwen3.
"""

import torch

from tests.oracles.eagle import attention, mlp, rms

DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "embed_tokens", "lm_head")
"""Names of the norms of the embedding and of the hidden state, the projection, the last norm, embedding and head."""


def module(w, number, layout, depth):
    """Return the prefixes of the names of a module and of its layer, and its other names."""
    if layout == "qwen":
        return "mtp.", f"mtp.layers.{number}", QWEN
    return f"model.layers.{depth + number}.", f"model.layers.{depth + number}", DEEPSEEK


def mtp(w, number, layout, depth, embedding, tokens, hidden, sizes):
    """Predicted hidden states ``[n, H]`` from tokens t_1 .. t_n and hidden states h_0 .. h_{n-1}.

    Args:
        w: tensors by their published names.
        number: of the module.
        layout: "deepseek" or "qwen".
        depth: number of the target's layers.
        embedding: the target's ``[V, H]``.
        tokens, hidden: the inputs.
        sizes: numbers of heads and of shared heads, and their width.
    """
    outer, layer, (enorm, hnorm, project, norm, head_norm, _) = module(w, number, layout, depth)
    embedded = w.get(f"{outer}{head_norm}.weight", embedding)[tokens]
    both = [rms(embedded, w[f"{outer}{enorm}.weight"]), rms(hidden, w[f"{outer}{hnorm}.weight"])]
    x = torch.cat(both, -1) @ w[f"{outer}{project}.weight"].T
    x = x + attention(w, layer, rms(x, w[f"{layer}.input_layernorm.weight"]), *sizes)
    return rms(x + mlp(w, layer, x), w[f"{outer}{norm}.weight"])


def head(w, number, layout, depth, hidden, lm_head):
    """Logits ``[n, V]`` of predicted hidden states."""
    outer, _, names = module(w, number, layout, depth)
    return hidden @ w.get(f"{outer}{names[-1]}.weight", lm_head).T
