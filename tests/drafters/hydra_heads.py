"""Random Hydra heads for tiny targets, written as their authors write them (but in safetensors)."""

import torch


def hydra(
    h, v, heads=4, layers=2, prefix=False, shared=False, copies=True, identity=False, seed=0, sizes=(4, 2, 8), inner=48
):
    """Config and tensors.

    ``sizes`` are the attention heads, shared heads and head dimension of the prefix layer, ``inner`` its MLP's width:
    those of the target. Without ``copies`` only the first of the repeated layers is there.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}

    def made(name, *shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        scale = 1.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        tensors[name] = scale * values + (name.endswith("norm.weight"))
        return tensors[name]

    def linear(name, out, read):
        return made(f"{name}.weight", out, read), made(f"{name}.bias", out)

    first, step = (1, 2) if prefix else (0, 1)
    if prefix:
        layer, (count, few, dim) = "prefix_embeding_layer.layers.0", sizes
        for kind, out, read in (
            ("self_attn.q_proj", count * dim, h), ("self_attn.k_proj", few * dim, h),
            ("self_attn.v_proj", few * dim, h), ("self_attn.o_proj", h, count * dim),
            ("mlp.gate_proj", inner, h), ("mlp.up_proj", inner, h), ("mlp.down_proj", h, inner),
        ):  # fmt: skip
            made(f"{layer}.{kind}.weight", out, read)
        for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "prefix_embeding_layer.norm"):
            made(f"{name}.weight", h)
        made("prefix_embeding_layer.embed_tokens.weight", v, h)
    for head in range(heads):
        linear(f"hydra_mlp.{head}.{first}.linear", h, (head + 2) * h)
        if not identity:
            linear(f"hydra_mlp.{head}.{first}.res_connection", h, (head + 2) * h)
        again = linear(f"hydra_mlp.{head}.{first + step}.linear", h, h) if layers > 1 else ()
        for layer in range(2, layers if copies else 0):
            for kind, tensor in zip(("weight", "bias"), again, strict=True):
                tensors[f"hydra_mlp.{head}.{first + layer * step}.linear.{kind}"] = tensor.clone()
        if not shared:
            linear(f"hydra_lm_head.{head}.1" if prefix else f"hydra_lm_head.{head}", v, h)
    config = {
        "hydra_num_heads": heads, "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "grounded_heads": True, "hidden_state_offset": 0,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }  # fmt: skip
    flags = {"shared_lm_head": shared, "identity_skip": identity}
    return config | {name: value for name, value in flags.items() if value}, tensors
