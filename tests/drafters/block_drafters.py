"""Random block drafters for tiny targets, written as their authors write them."""

from tests.drafters.eagle_heads import _config, _layer, _maker

DIM = 8


def _drafter(h, taps, layers, family, seed):
    tensors, made = _maker(seed)
    made("fc.weight", h, taps * h)
    made("hidden_norm.weight", h)
    made("norm.weight", h)
    for layer in range(layers):
        _layer(f"layers.{layer}", h, h, made, ("input_layernorm",))
        if family == "qwen3":
            made(f"layers.{layer}.self_attn.q_norm.weight", DIM)
            made(f"layers.{layer}.self_attn.k_norm.weight", DIM)
    return tensors, made


def dflash(h, ids=(0, 2), layers=2, size=5, mask=60, family="qwen3", head=None, seed=0, **config):
    """Config and tensors of a DFlash drafter; ``head`` is the number of tokens of an LM head of its own."""
    tensors, made = _drafter(h, len(ids), layers, family, seed)
    if head:
        made("lm_head.weight", head, h)
    inner = {"mask_token_id": mask, "target_layer_ids": list(ids)}
    return _config(h, layers, **{"model_type": family, "block_size": size, "dflash_config": inner} | config), tensors


def dspark(h, v, ids=(0, 1, 2), layers=1, size=4, mask=61, rank=6, confidence=True, seed=0, **config):
    """Config and tensors of a DSpark drafter, whose embedding has one token more than the target."""
    tensors, made = _drafter(h, len(ids), layers, "qwen3", seed)
    made("embed_tokens.weight", v + 1, h)
    made("lm_head.weight", v, h)
    if rank:
        made("markov_head.markov_w1.weight", v, rank)
        made("markov_head.markov_w2.weight", v, rank)
        tensors["markov_head.markov_w1.weight"] *= 2  # so that the token before matters
    if confidence:
        made("confidence_head.proj.weight", 1, h + rank)
        made("confidence_head.proj.bias", 1)
    more = {
        "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "block_size": size, "mask_token_id": mask,
        "target_layer_ids": list(ids), "markov_rank": rank, "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
    }  # fmt: skip
    return _config(h, layers, **more | config), tensors
