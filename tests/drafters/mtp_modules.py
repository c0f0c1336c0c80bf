"""Random MTP modules for tiny targets, written as published checkpoints hold them."""

from tests.drafters.eagle_heads import DIM, HEADS, SHARED, _config, _layer, _maker
from tests.oracles.mtp import module

SIZES = HEADS, SHARED, DIM
COUNTS = {"deepseek": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}


def modules(h, v, layout, depth, count=1, embedding=False, head=False, norms=False, seed=0):
    """Config and tensors of some modules for a target with ``depth`` layers."""
    tensors, made = _maker(seed)
    for number in range(count):
        outer, layer, (*normed, own_norm, own_embedding, own_head) = module(None, number, layout, depth)
        _layer(layer, h, h, made, ("input_layernorm",))
        for kind in ("q_norm", "k_norm") if norms else ():
            made(f"{layer}.self_attn.{kind}.weight", DIM)
        if layout == "qwen" and number:
            continue
        for kind in (*normed[:2], own_norm):
            made(f"{outer}{kind}.weight", h)
        made(f"{outer}{normed[2]}.weight", h, 2 * h)
        if embedding:
            made(f"{outer}{own_embedding}.weight", v, h)
        if head:
            made(f"{outer}{own_head}.weight", v, h)
    more = {"model_type": "qwen3" if norms else "llama", COUNTS[layout]: count}
    return _config(h, depth, **more), tensors
