"""Random adapters of Kangaroo for tiny targets, under their authors' names of tensors."""

from tests.drafters.eagle_heads import DIM, HEADS, SHARED, _config, _maker


def adapter(h, exit_layer=1, layers=1, seed=0):
    """Config and tensors of an adapter; no exit layer: as published."""
    tensors, made = _maker(seed)
    q, kv = HEADS * DIM, SHARED * DIM
    for layer in range(layers):
        for kind, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q))):
            made(f"layers.{layer}.self_attn.{kind}_proj.weight", *shape)
        made(f"layers.{layer}.input_layernorm.weight", h)
    made("norm.weight", h)
    return _config(h, layers, **({} if exit_layer is None else {"exit_layer": exit_layer})), tensors
