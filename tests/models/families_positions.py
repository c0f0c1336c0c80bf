"""Families of models with positions or attention of their own that the tests decode: a tiny random model of each."""

from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import COMMON, CONTEXT, GPT, VOCABULARY

NO_TOKENS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
BLOOM = NO_TOKENS | dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, seq_length=CONTEXT)
MPT = NO_TOKENS | dict(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT)
SIX = dict(hidden_size=48, n_head=6)
"""Six heads: ALiBi's slopes of a number that is no power of two."""
LATENT = COMMON | dict(
    q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8, head_dim=4
)  # fmt: skip
EXPERTS = dict(
    n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16, n_shared_experts=1,
    first_k_dense_replace=1,
)  # fmt: skip
DENSE = dict(first_k_dense_replace=2)
LONGROPE = dict(
    sliding_window=None, original_max_position_embeddings=32,
    rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[2.0, 3.0, 5.0, 9.0],
        original_max_position_embeddings=32,
    ),
)  # fmt: skip


class Family(NamedTuple):
    """A family, by its name in tests.

    Args:
        model_type: that its configs name.
        fields: of the config.
        remark: what sets it apart.
        dtype: float32 for mixtures of experts, whose code in transformers has no float64.
        context: maximum number of positions.
        dense: whether ``attention=dense`` decodes it too.
        short: whether the short test run decodes it.
    """

    model_type: str
    fields: dict[str, Any]
    remark: str
    dtype: torch.dtype = torch.float64
    context: int = CONTEXT
    dense: bool = True
    short: bool = False


FAMILIES: dict[str, Family] = {
    "bloom": Family("bloom", BLOOM, "ALiBi (no `skip`)", dense=False, short=True),
    "bloom-six-heads": Family("bloom", BLOOM | SIX, "ALiBi (no `skip`)", dense=False),
    "mpt": Family("mpt", MPT, "ALiBi", dense=False),
    "mpt-six-heads": Family("mpt", MPT | dict(d_model=48, n_heads=6), "ALiBi", dense=False),
    "falcon": Family("falcon", COMMON | dict(alibi=False), "attention of its own, one head of keys"),
    "falcon-grouped": Family(
        "falcon", COMMON | dict(alibi=False, new_decoder_architecture=True, num_kv_heads=2),
        "attention of its own, grouped heads",
    ),
    "falcon-sequential": Family(
        "falcon", COMMON | dict(alibi=False, multi_query=False, parallel_attn=False, bias=True), "attention of its own"
    ),
    "falcon-alibi": Family(
        "falcon", COMMON | dict(alibi=True, multi_query=False, parallel_attn=False), "ALiBi", dense=False
    ),
    "falcon-alibi-shared": Family("falcon", COMMON | dict(alibi=True), "ALiBi, one head of keys", dense=False),
    "falcon-alibi-grouped": Family(
        "falcon", COMMON | dict(alibi=True, new_decoder_architecture=True, num_kv_heads=2), "ALiBi, grouped heads",
        dense=False,
    ),
    "gptj": Family("gptj", GPT | dict(rotary_dim=4), "a table of rotations"),
    "codegen": Family("codegen", GPT | dict(rotary_dim=4), "a table of rotations"),
    "deepseek_v2": Family(
        "deepseek_v2", LATENT | EXPERTS | dict(topk_method="greedy"), "latent attention, complex rotations, experts",
        torch.float32,
    ),
    "deepseek_v2-dense": Family("deepseek_v2", LATENT | DENSE, "latent attention, complex rotations", short=True),
    "deepseek_v3": Family("deepseek_v3", LATENT | EXPERTS, "latent attention, experts", torch.float32),
    "deepseek_v3-dense": Family("deepseek_v3", LATENT | DENSE | dict(q_lora_rank=None), "latent attention"),
    "glm4_moe_lite": Family(
        "glm4_moe_lite", LATENT | EXPERTS | dict(mlp_layer_types=["dense", "sparse"]), "latent attention, experts",
        torch.float32,
    ),
    "longcat_flash": Family(
        "longcat_flash", LATENT | dict(
            num_hidden_layers=4, ffn_hidden_size=48, num_layers=2, moe_topk=2, n_routed_experts=4, zero_expert_num=1,
            expert_ffn_hidden_size=16,
        ), "latent attention, two of them in a layer, experts (no `early_exit` or `skip`)", torch.float32,
    ),
    "minicpm3": Family("minicpm3", LATENT, "latent attention"),
    "youtu": Family("youtu", LATENT, "latent attention"),
    "llama-dynamic": Family(
        "llama", COMMON | dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "dynamic RoPE"
    ),
    "phi3-longrope": Family("phi3", COMMON | LONGROPE, "LongRoPE", context=32),
    "minicpm3-longrope": Family(
        "minicpm3", LATENT | LONGROPE | dict(
            rope_parameters=LONGROPE["rope_parameters"] | dict(short_factor=[1.0, 2.0], long_factor=[2.0, 5.0])
        ), "latent attention, LongRoPE", context=32,
    ),
    "phimoe-longrope": Family(
        "phimoe", COMMON | LONGROPE | dict(
            num_key_value_heads=2, num_local_experts=4,
            rope_parameters=LONGROPE["rope_parameters"] | dict(short_mscale=1.2, long_mscale=1.3),
        ), "LongRoPE whose scale changes too, experts", torch.float32, 32,
    ),
}  # fmt: skip


def tiny_family(name: str, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    """A random model of a family in eval mode; its logits are spread so that the largest is unambiguous."""
    transformers.logging.set_verbosity_error()
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **family.fields | changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype or family.dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model
