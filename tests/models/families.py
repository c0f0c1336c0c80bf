"""Families of models that the tests decode: a tiny random model of each, and the table of them in the documentation.

``python -m tests.models.families`` writes the table to ``docs/families.md``; ``test_families`` compares it with that
file, and decodes every family in every way that the table names.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from spec_lab.runners.attention import FULL, AttentionKind, layer_kinds
from tests import recurrent
from tests.tiny import COMMON, CONTEXT, GPT, VOCABULARY

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

WINDOW = AttentionKind(sliding_window=5)
CHUNK = AttentionKind(chunk=4)
SHARED = COMMON | dict(num_key_value_heads=2, tie_word_embeddings=False)  # tied, it would copy the last token
HEADS_OF_8 = SHARED | dict(head_dim=8)
GEMMA = HEADS_OF_8 | dict(query_pre_attn_scalar=8)
MIXTURE = dict(num_local_experts=4, num_experts_per_tok=2)


class Family(NamedTuple):
    """A family, by the type of model that its configs name.

    Args:
        fields: of the config.
        kinds: of its layers.
        remark: what else sets its layers apart.
        matters: fields of the config with which the texts are others: each checks that the tests would notice.
        dtype: float32 for mixtures of experts, whose router chooses in it.
        model_type: where it is not the family's name.
        seed: of its weights; one whose texts are no repetition of one token.
        context: maximum number of positions.
        dense: whether ``attention=dense_mask`` decodes it too.
        short: whether the short test run decodes it.
    """

    fields: dict[str, Any]
    kinds: set[AttentionKind]
    remark: str = ""
    matters: tuple[dict[str, Any], ...] = ()
    dtype: torch.dtype = torch.float64
    model_type: str = ""
    seed: int = 0
    short: bool = False
    context: int = CONTEXT
    dense: bool = True


NO_WINDOW = (dict(sliding_window=CONTEXT),)

FAMILIES: dict[str, Family] = {
    "mistral": Family(SHARED | dict(sliding_window=5), {WINDOW}, "", NO_WINDOW),
    "mixtral": Family(
        SHARED | MIXTURE | dict(sliding_window=5), {WINDOW}, "experts", NO_WINDOW, torch.float32, seed=1
    ),
    "phi3": Family(SHARED | dict(sliding_window=5), {WINDOW}, "", NO_WINDOW, seed=2),
    "starcoder2": Family(SHARED | dict(sliding_window=5), {WINDOW}, "", NO_WINDOW),
    "qwen2": Family(
        SHARED | dict(sliding_window=5, use_sliding_window=True, max_window_layers=1), {FULL, WINDOW}, "", NO_WINDOW
    ),
    "qwen3": Family(
        HEADS_OF_8 | dict(sliding_window=5, use_sliding_window=True, max_window_layers=1), {FULL, WINDOW}, "",
        NO_WINDOW,
    ),
    "gemma2": Family(
        GEMMA | dict(sliding_window=5, num_hidden_layers=4, attn_logit_softcapping=0.3),
        {FULL, WINDOW}, "soft caps on attention scores and logits",
        (*NO_WINDOW, dict(attn_logit_softcapping=None)), short=True,
    ),
    "vaultgemma": Family(
        GEMMA | dict(sliding_window=5, attn_logit_softcapping=0.3), {FULL, WINDOW},
        "soft caps on attention scores and logits", (*NO_WINDOW, dict(attn_logit_softcapping=None)),
        seed=1,
    ),
    "gemma3_text": Family(
        GEMMA | dict(sliding_window=5, num_hidden_layers=4, sliding_window_pattern=2),
        {FULL, WINDOW}, "a rotary embedding for each kind of layer", NO_WINDOW,
    ),
    "gemma4_text": Family(
        GEMMA | dict(sliding_window=5, global_head_dim=8, vocab_size_per_layer_input=61),
        {FULL, WINDOW}, "a rotary embedding for each kind of layer", NO_WINDOW,
    ),
    "gemma4_text with shared keys and values": Family(
        GEMMA | dict(sliding_window=5, global_head_dim=8, num_kv_shared_layers=2, vocab_size_per_layer_input=61)
        | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        {FULL, WINDOW}, "the last layers share keys and values (no `early_exit` or `skip`)",
        NO_WINDOW, model_type="gemma4_text", short=True,
    ),
    "gpt_oss": Family(
        HEADS_OF_8 | MIXTURE | dict(sliding_window=5), {FULL, WINDOW}, "attention sinks, experts", NO_WINDOW,
        torch.float32, short=True,
    ),
    "granite_swa": Family(SHARED | dict(sliding_window=5), {FULL, WINDOW}, "attention sinks", NO_WINDOW),
    "mimo_v2_flash": Family(
        HEADS_OF_8 | dict(sliding_window=5, v_head_dim=4, n_routed_experts=4, num_experts_per_tok=2)
        | dict(moe_intermediate_size=16),
        {FULL, WINDOW}, "attention sinks in layers with windows, experts", NO_WINDOW, torch.float32,
    ),
    "cohere2": Family(
        SHARED | dict(sliding_window=5, num_hidden_layers=4, sliding_window_pattern=2), {FULL, WINDOW},
        "no rotary embedding in layers with full attention", NO_WINDOW,
    ),
    "olmo3": Family(
        SHARED | dict(sliding_window=5, num_hidden_layers=4), {FULL, WINDOW}, "norms of queries and keys", NO_WINDOW
    ),
    "exaone4": Family(
        SHARED | dict(sliding_window=5, sliding_window_pattern=2), {FULL, WINDOW},
        "no rotary embedding in layers with full attention", NO_WINDOW,
    ),
    "ministral": Family(HEADS_OF_8 | dict(sliding_window=5), {WINDOW}, "", NO_WINDOW),
    "llama4_text": Family(
        HEADS_OF_8 | MIXTURE | dict(num_experts_per_tok=1, num_hidden_layers=4, attention_chunk_size=4)
        | dict(intermediate_size_mlp=48, floor_scale=3, attn_scale=0.5),
        {FULL, CHUNK},
        "layers without rotary embedding scale queries by position, experts",
        (dict(attention_chunk_size=CONTEXT), dict(attn_temperature_tuning=False)), torch.float32,
    ),
}  # fmt: skip


def positions(
    model_type: str, fields: dict[str, Any], remark: str, dtype: torch.dtype = torch.float64, **more: Any
) -> Family:
    """A family with positions or attention of its own."""
    return Family(fields, {FULL}, remark, dtype=dtype, model_type=model_type, **more)


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

POSITIONS: dict[str, Family] = {
    "bloom": positions("bloom", BLOOM, "ALiBi (no `skip`)", dense=False, short=True),
    "bloom-six-heads": positions("bloom", BLOOM | SIX, "ALiBi (no `skip`)", dense=False),
    "mpt": positions("mpt", MPT, "ALiBi", dense=False),
    "mpt-six-heads": positions("mpt", MPT | dict(d_model=48, n_heads=6), "ALiBi", dense=False),
    "falcon": positions("falcon", COMMON | dict(alibi=False), "attention of its own, one head of keys"),
    "falcon-grouped": positions(
        "falcon", COMMON | dict(alibi=False, new_decoder_architecture=True, num_kv_heads=2),
        "attention of its own, grouped heads",
    ),
    "falcon-sequential": positions(
        "falcon", COMMON | dict(alibi=False, multi_query=False, parallel_attn=False, bias=True), "attention of its own"
    ),
    "falcon-alibi": positions(
        "falcon", COMMON | dict(alibi=True, multi_query=False, parallel_attn=False), "ALiBi", dense=False
    ),
    "falcon-alibi-shared": positions("falcon", COMMON | dict(alibi=True), "ALiBi, one head of keys", dense=False),
    "falcon-alibi-grouped": positions(
        "falcon", COMMON | dict(alibi=True, new_decoder_architecture=True, num_kv_heads=2), "ALiBi, grouped heads",
        dense=False,
    ),
    "gptj": positions("gptj", GPT | dict(rotary_dim=4), "a table of rotations"),
    "codegen": positions("codegen", GPT | dict(rotary_dim=4), "a table of rotations"),
    "deepseek_v2": positions(
        "deepseek_v2", LATENT | EXPERTS | dict(topk_method="greedy"), "latent attention, complex rotations, experts",
        torch.float32,
    ),
    "deepseek_v2-dense": positions("deepseek_v2", LATENT | DENSE, "latent attention, complex rotations", short=True),
    "deepseek_v3": positions("deepseek_v3", LATENT | EXPERTS, "latent attention, experts", torch.float32),
    "deepseek_v3-dense": positions("deepseek_v3", LATENT | DENSE | dict(q_lora_rank=None), "latent attention"),
    "glm4_moe_lite": positions(
        "glm4_moe_lite", LATENT | EXPERTS | dict(mlp_layer_types=["dense", "sparse"]), "latent attention, experts",
        torch.float32,
    ),
    "longcat_flash": positions(
        "longcat_flash", LATENT | dict(
            num_hidden_layers=4, ffn_hidden_size=48, num_layers=2, moe_topk=2, n_routed_experts=4, zero_expert_num=1,
            expert_ffn_hidden_size=16,
        ), "latent attention, two of them in a layer, experts (no `early_exit` or `skip`)", torch.float32,
    ),
    "minicpm3": positions("minicpm3", LATENT, "latent attention"),
    "youtu": positions("youtu", LATENT, "latent attention"),
    "llama-dynamic": positions(
        "llama", COMMON | dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "dynamic RoPE"
    ),
    "phi3-longrope": positions("phi3", COMMON | LONGROPE, "LongRoPE", context=32),
    "minicpm3-longrope": positions(
        "minicpm3", LATENT | LONGROPE | dict(
            rope_parameters=LONGROPE["rope_parameters"] | dict(short_factor=[1.0, 2.0], long_factor=[2.0, 5.0])
        ), "latent attention, LongRoPE", context=32,
    ),
    "phimoe-longrope": positions(
        "phimoe", COMMON | LONGROPE | dict(
            num_key_value_heads=2, num_local_experts=4,
            rope_parameters=LONGROPE["rope_parameters"] | dict(short_mscale=1.2, long_mscale=1.3),
        ), "LongRoPE whose scale changes too, experts", torch.float32, context=32,
    ),
}  # fmt: skip

EVERY = FAMILIES | POSITIONS


def tiny_family(name: str, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    """A random model of a family in eval mode; its logits are spread so that the largest is unambiguous."""
    transformers.logging.set_verbosity_error()
    family = EVERY[name]
    torch.manual_seed(family.seed)
    config = AutoConfig.for_model(family.model_type or name, **family.fields | changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype or family.dtype).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def kinds_of(config: Any) -> set[AttentionKind]:
    """The kinds of a model's layers."""
    kinds = layer_kinds(config)
    return {kinds.get(layer, FULL) for layer in range(config.num_hidden_layers)}


def page() -> str:
    """The page of the documentation."""
    words = {FULL: "full", WINDOW: "sliding window", CHUNK: "chunks"}
    rows = []
    for name, family in FAMILIES.items():
        layers = ", ".join(called for kind, called in words.items() if kind in family.kinds)
        rows.append(f"| `{family.model_type or name}`{single(family.dtype)} | {layers} | {family.remark} |")
    more = []
    for family in POSITIONS.values():
        dense = "" if family.dense else " (no `dense_mask`)"
        more.append(f"| `{family.model_type}`{single(family.dtype)} | {family.remark}{dense} |")
    states = []
    for build in recurrent.FAMILIES.values():
        kind, *given = build.args
        states.append(f"`{kind}`{single(torch.float32 if torch.float32 in given else torch.float64)}")
    tables = (HEAD, rows), (POSITIONS_HEAD, more)
    text = "".join(head + "\n".join(dict.fromkeys(lines)) + "\n" for head, lines in tables)
    return f"{text}{RECURRENT}{', '.join(states)}.\n"


def single(dtype: torch.dtype) -> str:
    """The remark on a family that is tested in single precision."""
    return " (float32)" if dtype == torch.float32 else ""


HEAD = """# Families of models

The engine for models of transformers decodes causal language models whose layers attend to all earlier tokens (full
attention), to the last W (sliding window), or to those of their own chunk of C positions, with soft caps and attention
sinks. A self-check at load compares draft trees with plain forwards, with windows and chunks shortened so that they
matter, and refuses a model whose logits differ.

A test (`tests/models/test_families.py`) builds a tiny random model of each family, in float64 except where noted.
Greedy decoding emits the tokens of transformers' own `generate`: with chains and trees, for one request, a batch and
with continuous batching, in fixed shapes too (`target.graphs`), with `target.attention=dense_mask`, and with a draft
model, `early_exit` and `skip`. `python -m tests.models.families` writes this page.

| `model_type` | attention | besides |
|---|---|---|
"""
POSITIONS_HEAD = """
Families with positions or attention of their own, of which the same is checked:

| `model_type` | positions and attention |
|---|---|
"""
RECURRENT = """
Families with recurrent layers decode chains only (`tests/models/test_recurrent_families.py`: for a batch and with
continuous batching, with drafts of which any number of tokens is accepted, and with `ngram`, `suffix` and
`draft_chain`):
"""


if __name__ == "__main__":
    PAGE.write_text(page())
