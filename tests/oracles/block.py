"""A block drafter over whole sequences: plain PyTorch, no cache, written from the papers' sections and the layouts of
published files. Tensors go by their published names.
"""

import math

import torch
from torch.nn.functional import silu

from tests.oracles.eagle import mlp, rms, rotated


def rows(
    w,
    embedding,
    head,
    taps,
    pending,
    mask,
    size,
    sizes,
    theta,
    scale=1.0,
    multiplier=1.0,
    cap=None,
    kinds=(),
    interleaved=False,
    anchored=False,
    skip=0,
):
    """Normed outputs ``[size, H]`` and logits ``[size, V]`` of every row of a block, of the layers alone.

    taps: ``[n, k * H]`` the hidden states of the n computed positions, side by side.
    kinds: of each layer, its window (None: full attention) and whether rows attend to rows before them only.
    anchored: whether all rows have the window of the last computed position, and attend to each other.
    skip: rotary positions that are left out before the block.
    """
    heads, shared, dim = sizes
    embedding, head = w.get("embed_tokens.weight", embedding), w.get("lm_head.weight", head)
    n = len(taps)
    context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = scale * embedding[torch.tensor([pending] + [mask] * (size - 1))]
    layer = 0
    while f"layers.{layer}.self_attn.q_proj.weight" in w:
        name = f"layers.{layer}"
        block = rms(x, w[f"{name}.input_layernorm.weight"])
        kernels = None
        if f"{name}.attention_conv.base_kernel" in w:
            kernels = dynamic_kernels(w, f"{name}.attention_conv", block)
            block = convolved(block, kernels[0])

        def split(kind, rows, count, name=name):
            y = (rows @ w[f"{name}.self_attn.{kind}_proj.weight"].T).view(len(rows), count, dim)
            if f"{name}.self_attn.{kind}_norm.weight" in w:
                y = rms(y, w[f"{name}.self_attn.{kind}_norm.weight"])
            return y.transpose(0, 1)

        both, everywhere = torch.cat([context, block]), torch.arange(n + size, dtype=torch.float64)
        everywhere[n:] += skip
        turned = turned_neighbours if interleaved else rotated
        q = turned(split("q", block, heads), everywhere[n:], theta)
        k, v = turned(split("k", both, shared), everywhere, theta), split("v", both, shared)
        k, v = (tensor.repeat_interleave(heads // shared, 0) for tensor in (k, v))
        window, causal = kinds[layer] if kinds else (None, False)
        hidden = torch.zeros(size, n + size, dtype=torch.bool)
        for row in range(size):
            for key in range(n + size):
                away = n - 1 - key if anchored else abs(n + row - key)
                far = window is not None and away >= window
                hidden[row, key] = far or (causal and key > n + row)
        scores = (q @ k.transpose(1, 2) / math.sqrt(dim)).masked_fill(hidden, -torch.inf)
        mixed = scores.softmax(-1) @ v
        attended = mixed.transpose(0, 1).reshape(size, heads * dim) @ w[f"{name}.self_attn.o_proj.weight"].T
        if kernels is None:
            x = x + attended
            x = x + mlp(w, name, x)
        else:
            x = x + convolved(attended, kernels[1])
            normed = rms(x, w[f"{name}.post_attention_layernorm.weight"])
            kernels = dynamic_kernels(w, f"{name}.mlp_conv", normed)
            inner = convolved(normed, kernels[0])
            inner = silu(inner @ w[f"{name}.mlp.gate_proj.weight"].T) * (inner @ w[f"{name}.mlp.up_proj.weight"].T)
            x = x + convolved(inner @ w[f"{name}.mlp.down_proj.weight"].T, kernels[1])
        layer += 1
    normed = rms(x, w["norm.weight"])
    logits = multiplier * (normed @ head.T)
    return normed, logits if cap is None else cap * torch.tanh(logits / cap)


def dynamic_kernels(w, name, x):
    """The kernels ``[2, size, taps, H]`` of DFlash2's convolutions before and after a sublayer with input ``x``."""
    base, projected = w[f"{name}.base_kernel"], x @ w[f"{name}.kernel_projection.weight"].T
    sides, taps, h = base.shape
    kernels = torch.zeros(sides, len(x), taps, h, dtype=x.dtype)
    groups = projected.shape[1] // (sides * taps)
    for side in range(sides):
        for tap in range(taps):
            for channel in range(h):
                column = (side * taps + tap) * groups + channel // (h // groups)
                kernels[side, :, tap, channel] = base[side, tap, channel] + projected[:, column]
    return kernels


def convolved(x, kernel):
    """Row i of a block: the sum of its kernel's taps times the rows before it."""
    output = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(kernel.shape[1], row + 1)):
            output[row] += x[row - tap] * kernel[row, tap]
    return output


def turned_neighbours(x, places, theta):
    """``[heads, n, dim]`` turned by a rotary embedding whose pairs are neighbours, as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angles = places[:, None] * theta ** (-2 * torch.arange(pairs.shape[-1], dtype=x.dtype) / x.shape[-1])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def level(w, hidden, logits, path, next_row, embedding=None, uncorrected=0, candidates=0):
    """Logits ``[V]`` after ``path``, whose first token is the pending one.

    next_row: whether row i of the block drafts the token after its position.
    uncorrected: levels that Domino's head leaves as they are.
    candidates: of DFlash2's selector.
    """
    row, w = len(path) - next_row, {name.removeprefix("markov_head."): tensor for name, tensor in w.items()}
    if "prefix_gru.weight_ih_l0" in w:
        if len(path) <= uncorrected:
            return logits[row]
        gru = torch.nn.GRU(hidden.shape[1], w["prefix_gru.weight_hh_l0"].shape[1], bias=False, dtype=hidden.dtype)
        gru.load_state_dict({name: w[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
        state = gru(embedding[torch.tensor(path)])[0][-1]
        narrow = silu(w["embed_proj.0.weight"] @ torch.cat([hidden[row], state]))
        return logits[row] + w["embed_proj.2.weight"] @ narrow
    if "candidate_selector.predecessor_codebook" in w:
        read = w["candidate_selector.hidden_projection.weight"] @ hidden[row]
        scores = w["candidate_selector.successor_codebook"] @ (
            w["candidate_selector.predecessor_codebook"][path[-1]] * read
        )
        kept = logits[row].argsort(descending=True)[:candidates]
        corrected = torch.full_like(logits[row], -torch.inf)
        corrected[kept] = (logits[row] + scores)[kept]
        return corrected
    if "markov_w1.weight" not in w:
        return logits[row]
    latent, state = w["markov_w1.weight"][path[-1]], torch.zeros(w["markov_w1.weight"].shape[1], dtype=torch.float64)

    def projected(name, *parts):
        return w[f"{name}.weight"] @ torch.cat(parts) + w[f"{name}.bias"]

    if "gate_proj.weight" in w:
        latent = latent * torch.sigmoid(projected("gate_proj", hidden[row], latent))
    if "joint_proj.weight" in w:
        read = path if next_row else [path[0], *path]
        for step, token in enumerate(read):
            embedded = w["markov_w1.weight"][token]
            gate, candidate, output = projected("joint_proj", state, embedded, hidden[step]).chunk(3)
            gate = torch.sigmoid(gate)
            state, latent = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
    return logits[row] + w["markov_w2.weight"] @ latent


def confidence(w, hidden, token):
    """The confidence of one row, with ``token`` one level above."""
    w = {name.replace("confidence_head.proj", "confidence_proj"): tensor for name, tensor in w.items()}
    w = {name.removeprefix("markov_head."): tensor for name, tensor in w.items()}
    read = torch.cat([hidden, w["markov_w1.weight"][token]])
    return torch.sigmoid(w["confidence_proj.weight"] @ read + w["confidence_proj.bias"])
