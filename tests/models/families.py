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
from tests.models import families_positions
from tests.tiny import COMMON, CONTEXT

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


def tiny_family(name: str, **changes: Any) -> Any:
    """A random model of a family in eval mode; its logits are spread so that the largest is unambiguous."""
    transformers.logging.set_verbosity_error()
    family = FAMILIES[name]
    torch.manual_seed(family.seed)
    config = AutoConfig.for_model(family.model_type or name, **family.fields | changes)
    model = AutoModelForCausalLM.from_config(config).to(family.dtype).eval()
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            if place.endswith("sinks"):
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
        dtype = str(family.dtype).removeprefix("torch.")
        rows.append(f"| `{family.model_type or name}` | {layers} | {family.remark} | {dtype} |")
    more = []
    for positions in families_positions.FAMILIES.values():
        dtype = str(positions.dtype).removeprefix("torch.")
        more.append(
            f"| `{positions.model_type}` | {positions.remark} | {'yes' if positions.dense else 'no'} | {dtype} |"
        )
    states = []
    for build in recurrent.FAMILIES.values():
        (kind, *given), single = build.args, torch.float32
        states.append(f"| `{kind}` | {'float32' if single in given else 'float64'} |")
    tables = (HEAD, rows), (POSITIONS, more), (RECURRENT, states)
    return "".join(head + "\n".join(dict.fromkeys(found)) + "\n" for head, found in tables)


HEAD = """# Families of models

The engine for models of transformers decodes causal language models whose layers attend to earlier tokens: to all of
them (full attention), to the last W (sliding window), or to those of their own chunk of C positions. Soft caps on
attention scores and attention sinks are supported. A self-check at load compares draft trees with plain forwards, with
windows and chunks shortened so that they matter, and refuses a model whose logits differ.

Of each family below a test (`tests/models/test_families.py`) builds a tiny random model whose windows and chunks are
shorter than its texts. Greedy decoding emits the tokens of transformers' own `generate`: with chains and trees, for one
request, a batch and with continuous batching, in shapes as they come and in fixed shapes (`target.graphs`), with
`target.attention=dense`, and where the model drafts for itself, with a draft model, `early_exit` and `skip`. The dtype
is that of the test. `python -m tests.models.families` writes this page.

| `model_type` | attention | besides | dtype |
|---|---|---|---|
"""
POSITIONS = """
Families with positions or attention of their own, of which `tests/models/test_position_families.py` checks the same:

| `model_type` | positions and attention | also with `target.attention=dense` | dtype |
|---|---|---|---|
"""
RECURRENT = """
Families with recurrent layers, which decode chains only (`tests/models/test_recurrent_families.py`): for a batch and
with continuous batching, with drafts of which any number of tokens is accepted, and with the proposers `ngram`,
`suffix` and `draft_chain`.

| `model_type` | dtype |
|---|---|
"""


if __name__ == "__main__":
    PAGE.write_text(page())
