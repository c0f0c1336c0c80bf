"""Random EAGLE heads for tiny targets, written as their authors write them."""

import json

import torch
from safetensors.torch import save_file

from spec_lab.drafters.eagle.network import Eagle, Eagle3, EagleSettings

HEADS, SHARED, DIM, INNER = 4, 2, 8, 24
SIZES = HEADS, SHARED, DIM


def _layer(name, read, h, made, norms):
    q, kv = HEADS * DIM, SHARED * DIM
    shapes = {
        "self_attn.q_proj": (q, read), "self_attn.k_proj": (kv, read), "self_attn.v_proj": (kv, read),
        "self_attn.o_proj": (h, q), "mlp.gate_proj": (INNER, h), "mlp.up_proj": (INNER, h), "mlp.down_proj": (h, INNER),
    }  # fmt: skip
    for kind, shape in shapes.items():
        made(f"{name}.{kind}.weight", *shape)
    for kind in ("post_attention_layernorm", *norms):
        made(f"{name}.{kind}.weight", h)


def _maker(seed):
    generator, tensors = torch.Generator().manual_seed(seed), {}

    def made(name, *shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = 1 + 0.3 * values if len(shape) == 1 else 1.5 * values * shape[-1] ** -0.5

    return tensors, made


def network_of(settings):
    """The network of EAGLE settings of either kind, without weights."""
    return (Eagle if isinstance(settings, EagleSettings) else Eagle3)(settings)


def _config(h, layers, **more):
    return {
        "model_type": "llama", "hidden_size": h, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 16, "head_dim": DIM, "rope_theta": 10000.0, "vocab_size": 61,
    } | more  # fmt: skip


def eagle1(h, v, layers=1, bias=True, seed=0):
    """Config and tensors of an EAGLE-1 head."""
    tensors, made = _maker(seed)
    made("embed_tokens.weight", v, h)
    made("fc.weight", h, 2 * h)
    if bias:
        made("fc.bias", h)
    for layer in range(layers):
        _layer(f"layers.{layer}", h, h, made, ("input_layernorm",) if layer else ())
    return _config(h, layers, **({} if bias else {"bias": False})), tensors


def eagle3(h, v, ids=None, taps=3, layers=1, flags=(), wide=None, embedding=False, norms=False, seed=0, **config):
    """Config and tensors of an EAGLE-3 head that drafts the tokens ``ids``; None: all."""
    wide = wide or h
    tensors, made = _maker(seed)
    made("fc.weight", h, taps * wide)
    _layer("midlayer", 2 * h, h, made, ("hidden_norm", "input_layernorm"))
    for layer in range(1, layers):
        _layer(f"layers.{layer}", h, h, made, ("input_layernorm",))
    made("norm.weight", h)
    kept = torch.arange(v) if ids is None else torch.tensor(ids)
    made("lm_head.weight", len(kept), h)
    if "norm_before_fc" in flags:
        made("input_norm.weight", taps * wide)
    for tap in range(taps if "fc_norm" in flags else 0):
        made(f"fc_norm.{tap}.weight", wide)
    if embedding:
        made("embed_tokens.weight", v, h)
    if norms:
        for layer in ("midlayer", *(f"layers.{n}" for n in range(1, layers))):
            made(f"{layer}.self_attn.q_norm.weight", DIM)
            made(f"{layer}.self_attn.k_norm.weight", DIM)
    if ids is not None:
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(v, dtype=torch.bool).index_fill_(0, kept, True)
    more = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(kept), **dict.fromkeys(flags, True)}
    if wide != h:
        more["target_hidden_size"] = wide
    return _config(h, layers, **more, **config), tensors


def written(folder, config, tensors, name="model.safetensors"):
    """The folder, with the head in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    return str(folder)


def speculators(config, tensors):
    """The same EAGLE-3 head as speculators writes it."""
    fields = {
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    }
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return {
        "speculators_model_type": "eagle3", "speculators_version": "0.3.0", "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": {key: value for key, value in config.items() if key not in fields},
        "target_hidden_size": None, "norm_before_fc": None,
        **{key: value for key, value in config.items() if key in fields},
    }, named  # fmt: skip
