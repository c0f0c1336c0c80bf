"""Random block drafters for tiny targets, written as their authors write them."""

import torch

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


def dspark(
    h, v, ids=(0, 1, 2), layers=1, size=4, mask=61, rank=6, confidence=True, kind="vanilla", layout="deepspec", seed=0,
    **config,
):  # fmt: skip
    """Config and tensors of a DSpark drafter as DeepSpec, SpecForge or ModelOpt writes it.

    DeepSpec's has an embedding with one token more than the target, and an LM head.
    """
    tensors, made = _drafter(h, len(ids), layers, "qwen3", seed)
    if layout == "deepspec":
        made("embed_tokens.weight", v + 1, h)
        made("lm_head.weight", v, h)
    prefix = "" if layout == "modelopt" else "markov_head."
    if rank:
        made(f"{prefix}markov_w1.weight", v, rank)
        made(f"{prefix}markov_w2.weight", v, rank)
        tensors[f"{prefix}markov_w1.weight"] *= 2  # so that the token before matters
    for name, read, rows in (("gate_proj", h + rank, rank), ("joint_proj", 2 * rank + h, 3 * rank)):
        if kind == {"gate_proj": "gated", "joint_proj": "rnn"}[name]:
            made(f"{prefix}{name}.weight", rows, read)
            made(f"{prefix}{name}.bias", rows)
    if confidence:
        name = "confidence_proj" if layout == "modelopt" else "confidence_head.proj"
        made(f"{name}.weight", 1, h + rank)
        made(f"{name}.bias", 1)
    inner = {"mask_token_id": mask, "target_layer_ids": list(ids), "markov_rank": rank, "markov_head_type": kind}
    if layout == "deepspec":
        inner |= {"enable_confidence_head": confidence, "confidence_head_with_markov": confidence}
        return _config(
            h, layers, **{"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "block_size": size, **inner}
            | config
        ), tensors  # fmt: skip
    if layout == "specforge":
        inner |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
        inner |= {"enable_confidence_head": confidence, "confidence_head_with_markov": confidence}
    else:
        inner |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": confidence}
    name = "DSparkDraftModel" if layout == "specforge" else "DFlashDraftModel"
    more = {"model_type": "qwen3", "architectures": [name], "block_size": size, "dflash_config": inner}
    return _config(h, layers, **more | config), tensors


def dflash2(h, v, size=5, taps=2, group=8, rank=6, candidates=5, seed=0, **config):
    """Config and tensors of a DFlash2 drafter."""
    config, tensors = dflash(h, layers=2, size=size, seed=seed, **config)
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = {
        "candidate_selector.predecessor_codebook": (v, rank), "candidate_selector.successor_codebook": (v, rank),
        "candidate_selector.hidden_projection.weight": (rank, h),
    }  # fmt: skip
    for layer in range(2):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{name}.base_kernel"] = (2, taps, h)
            shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * taps * (h // group), h)
    for name, shape in shapes.items():
        scale = 0.1 if "kernel_projection" in name else 0.5
        tensors[name] = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    inner = {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank, "selector_top_k": candidates}
    return config | {
        "architectures": ["DFlash2DraftModel"], "dflash_config": config["dflash_config"] | inner,
    }, tensors  # fmt: skip


def domino(h, v, state=7, width=6, shifted=True, uncorrected=1, seed=0, **config):
    """Config and tensors of a Domino drafter."""
    config, tensors = dflash(h, layers=1, seed=seed, **config)
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = {
        "prefix_gru.weight_ih_l0": (3 * state, h), "prefix_gru.weight_hh_l0": (3 * state, state),
        "embed_proj.0.weight": (width, h + state), "embed_proj.2.weight": (v, width),
    }  # fmt: skip
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    inner = {
        "projector_type": "domino", "shift_label": shifted, "pure_draft_prefix_len": uncorrected, "emb_dim": width,
        "gru_hidden_dim": state,
    }  # fmt: skip
    return config | {
        "architectures": ["DominoDraftModel"], "emb_dim": width, "dflash_config": config["dflash_config"] | inner,
    }, tensors  # fmt: skip


def speculators(drafter, kind, v, ids=None):
    """A drafter of DeepSpec's or z-lab's layout as speculators writes it, for the tokens ``ids``; None: all."""
    config, tensors = drafter
    inner = config.get("dflash_config", config)
    named = ("sample_from_anchor", "markov_rank", "markov_head_type")
    head = tensors["lm_head.weight"] if ids is None else tensors["lm_head.weight"][ids]
    tables, markov, rows = {}, {}, "markov_head.markov_w2.weight"
    if ids is not None:
        markov = {rows: tensors[rows][ids]} if rows in tensors else {}
        kept = torch.tensor(ids)
        tables["d2t"] = kept - torch.arange(len(ids))
        tables["t2d"] = torch.zeros(v, dtype=torch.bool).index_fill_(0, kept, True)
    outside = {"dflash_config", "block_size", "mask_token_id", "target_layer_ids", "architectures", *named}
    outside |= {"enable_confidence_head", "confidence_head_with_markov"}
    return {
        "speculators_model_type": kind, "speculators_version": "0.7.0", "architectures": ["DSparkSpeculator"],
        "speculators_config": {"algorithm": kind}, "draft_vocab_size": len(head), "target_hidden_size": None,
        "block_size": config["block_size"], "mask_token_id": inner["mask_token_id"], "sliding_window_non_causal": False,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in inner["target_layer_ids"]],
        "transformer_layer_config": {name: value for name, value in config.items() if name not in outside},
        **{name: inner[name] for name in named if name in inner},
    }, {**tensors, "lm_head.weight": head, **tables, **markov}  # fmt: skip
