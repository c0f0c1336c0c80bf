"""Tiny randomly initialised models, in float64 unless asked otherwise."""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from spec_lab.models.target import Target
from spec_lab.runners.attention import Attention
from spec_lab.runners.causal_lm import CausalLM

VOCABULARY = 61
CONTEXT = 256

COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
GPT = dict(
    vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=None, eos_token_id=None,
)  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON | dict(num_key_value_heads=2),
    "qwen2": COMMON | dict(num_key_value_heads=2),
    "qwen3": COMMON | dict(num_key_value_heads=2, head_dim=8),
    "mistral": COMMON | dict(num_key_value_heads=2, sliding_window=None),
    "gpt2": GPT,
    "gpt_neox": COMMON,
    "gpt_bigcode": GPT,
    "phi": COMMON,
    "phi3": COMMON | dict(sliding_window=None),
    "opt": COMMON | dict(ffn_dim=48, word_embed_proj_dim=32, pad_token_id=1),
    "stablelm": COMMON | dict(num_key_value_heads=2),
    "gemma": COMMON | dict(num_key_value_heads=2, head_dim=8),
    "olmo2": COMMON,
    "cohere": COMMON,
    "granite": COMMON,
    "starcoder2": COMMON | dict(num_key_value_heads=2, sliding_window=None),
    "biogpt": COMMON | dict(pad_token_id=1),
    "gptj": GPT | dict(rotary_dim=4),
    "falcon": COMMON | dict(alibi=False),
}
"""Families that read cells: by transformers' AttentionInterface (GPT-J since 5.24), or adapted (Falcon)."""

DENSE_ONLY: dict[str, dict[str, Any]] = {
    "gpt_neox_japanese": COMMON,
}
"""Families with attention of their own that is not adapted, which run under the dense mask only."""

WINDOWED: dict[str, dict[str, Any]] = {
    "qwen2-windows": COMMON
    | dict(num_key_value_heads=2, sliding_window=5, use_sliding_window=True, max_window_layers=1),
    "mistral-windows": COMMON | dict(num_key_value_heads=2, sliding_window=4),
    "llama4_text": COMMON
    | dict(num_key_value_heads=2, head_dim=8, num_hidden_layers=4, attention_chunk_size=4)
    | dict(intermediate_size_mlp=48, num_local_experts=2, moe_layers=[]),
}
"""Families with layers of other kinds than full attention."""


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family; its logits are spread so that the largest is unambiguous."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    settings = (FAMILIES | DENSE_ONLY | WINDOWED)[family] | changes
    config = AutoConfig.for_model(family.removesuffix("-windows"), **settings)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def tiny_target(
    family: str = "llama",
    attention: Attention = "per_sequence",
    chunk: int = 512,
    context: int = CONTEXT,
    **changes: Any,
) -> Target:
    """A target around a tiny model; it has no tokenizer."""
    model = tiny_model(family, **changes)
    return Target(CausalLM(model, attention, chunk=chunk), None, f"tiny-{family}", context, "", 0.0)


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": COMMON | dict(num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2),
    "gpt_oss": COMMON | dict(num_key_value_heads=2, head_dim=8, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": COMMON | dict(num_key_value_heads=2, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2),
}
"""Mixtures of 8 experts, of which each row chooses 2, in both layers."""


def tiny_mixture(family: str = "mixtral", seed: int = 0, **changes: Any) -> Any:
    """A random mixture of experts in float32, which transformers' experts require."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(MIXTURES[family] | changes))
    return AutoModelForCausalLM.from_config(config).eval()
