"""Tiny random models with recurrent layers, of every family that transformers' engine supports."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import COMMON, VOCABULARY

HYBRID = COMMON | dict(num_hidden_layers=4, num_key_value_heads=2)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=8,
    layer_types=["linear_attention", "full_attention"] * 2,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
CONV = dict(layer_types=["conv", "full_attention"] * 2)
MAMBA = dict(
    vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
SHARED = dict(layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8)


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any) -> Any:
    """A random model of a family; its states matter, and its logits are spread."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and name.endswith("weight") and "dt_proj" not in name:
                parameter.mul_(4.0 if parameter.std() > 0.1 else 0.25 / parameter.std())
    return model


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3_next": partial(
        build, "qwen3_next", torch.float32, **HYBRID | DELTA | EXPERTS, shared_expert_intermediate_size=16
    ),
    "qwen3_5_moe": partial(
        build, "qwen3_5_moe_text", torch.float32, **HYBRID | DELTA | EXPERTS, shared_expert_intermediate_size=16
    ),
    "qwen3_5": partial(build, "qwen3_5_text", **HYBRID | DELTA),
    "olmo_hybrid": partial(build, "olmo_hybrid", **HYBRID | DELTA),
    "lfm2": partial(build, "lfm2", **HYBRID | CONV, block_multiple_of=8),
    "lfm2_moe": partial(build, "lfm2_moe", torch.float32, **HYBRID | CONV | EXPERTS, num_dense_layers=1),
    "lfm3": partial(build, "lfm3", **HYBRID | CONV),
    "bamba": partial(build, "bamba", **HYBRID | MAMBA2, attn_layer_indices=[1, 3]),
    "falcon_h1": partial(build, "falcon_h1", **HYBRID | MAMBA2, mamba_d_ssm=64, head_dim=8),
    "granitemoehybrid": partial(
        build, "granitemoehybrid", torch.float32, **HYBRID | MAMBA2, layer_types=["mamba", "attention"] * 2,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16,
    ),
    "nemotron_h": partial(
        build, "nemotron_h", **HYBRID, layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=8,
        mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8, head_dim=8,
    ),
    "zamba2": partial(
        build, "zamba2", **HYBRID | SHARED, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=2, chunk_size=8,
        num_mem_blocks=1,
    ),
    "mamba2": partial(build, "mamba2", **MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "jamba": partial(
        build, "jamba", torch.float32, **HYBRID | EXPERTS, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "zamba": partial(build, "zamba", **HYBRID | SHARED, n_mamba_heads=2, mamba_dt_rank=4),
    "mamba": partial(build, "mamba", **MAMBA),
    "falcon_mamba": partial(build, "falcon_mamba", **MAMBA),
}  # fmt: skip
"""By family, what builds a model, in float32 where its experts require it."""

TOKENWISE = {"jamba", "zamba", "mamba", "falcon_mamba"}
"""Families whose mixers continue from a state with one token only."""
