"""Which fields of drafters' configs are known: those of published files are, and others are refused by name."""

import json
from pathlib import Path

import pytest

from spec_lab.drafters.block.layout import FIELDS as BLOCK
from spec_lab.drafters.block.layout import OF_SPECULATORS
from spec_lab.drafters.config_fields import IRRELEVANT, LAYER, MEANINGS, Fields
from spec_lab.drafters.eagle.files import EAGLE1_FIELDS, EAGLE3_FIELDS, SPECULATORS
from spec_lab.drafters.hydra.files import FIELDS as HYDRA
from spec_lab.drafters.kangaroo.files import FIELDS as KANGAROO
from spec_lab.drafters.medusa.files import OWN_FIELDS, PUBLISHED
from tests.gguf_files import ZOO

FILE = Path("config.json")
FAMILIES = (
    *BLOCK.values(),
    *OF_SPECULATORS.values(),
    EAGLE1_FIELDS,
    EAGLE3_FIELDS,
    SPECULATORS,
    LAYER,
    HYDRA,
    KANGAROO,
    OWN_FIELDS,
    PUBLISHED,
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 32,
    "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN3 = LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dtype": "bfloat16", "head_dim": 128, "layer_types": ["full_attention"] * 5, "max_window_layers": 5,
    "model_type": "qwen3", "num_hidden_layers": 5, "num_target_layers": 36, "rope_theta": 1000000, "block_size": 16,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
SPECULATORS_EAGLE3 = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 32000, "eagle_aux_hidden_state_layer_ids": None, "embed_requires_grad": False,
    "fc_norm": False, "has_no_defaults_at_init": False, "model_type": "speculators", "norm_before_fc": False,
    "norm_before_residual": True, "norm_output": False, "speculators_config": {"algorithm": "eagle3"},
    "speculators_model_type": "eagle3", "speculators_version": "0.5.0", "target_hidden_size": None,
    "tie_word_embeddings": False, "transformer_layer_config": LLAMA, "transformers_version": "4.57.1",
    "dtype": "bfloat16",
}  # fmt: skip
PUBLISHED_CONFIGS = {  # as their authors and tools write them
    "EAGLE for Llama 2": (EAGLE1_FIELDS, LLAMA),
    "EAGLE for Llama 3": (EAGLE1_FIELDS, LLAMA | {"bias": False, "attention_bias": False, "rope_theta": 500000.0}),
    "EAGLE of ModelOpt": (EAGLE1_FIELDS, LLAMA | {"eagle_config": {
        "use_aux_hidden_state": False, "use_input_layernorm_in_first_layer": False, "use_last_layernorm": False,
        "use_mtp_layernorm": False, "eagle_aux_hidden_state_layer_ids": [], "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
    }, "mlp_bias": False, "draft_vocab_size": 128256}),
    "EAGLE-3 of its authors": (EAGLE3_FIELDS, LLAMA | {"draft_vocab_size": 32000}),
    "EAGLE-3.1 of SpecForge": (EAGLE3_FIELDS, LLAMA | {
        "fc_norm": True, "norm_output": True, "max_window_layers": 48, "sliding_window": None,
        "use_sliding_window": False, "draft_vocab_size": 32000,
    }),
    "EAGLE-3 of SpecForge for Gemma 3": (EAGLE3_FIELDS, LLAMA | {
        "sliding_window": 512, "use_sliding_window": False, "target_model_type": "gemma3_text",
        "draft_vocab_size": 32000, "decoder_sparse_step": 1,
    }),
    "EAGLE-3 of SpecForge for Kimi": (EAGLE3_FIELDS, LLAMA | {"eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True,
    }}),
    "EAGLE-3 of ModelOpt": (EAGLE3_FIELDS, LLAMA | {"eagle_config": {
        "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False, "eagle_aux_hidden_state_layer_ids": [1, 17, 32], "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1, "norm_before_fc": True,
    }}),
    "EAGLE-3 of speculators": (SPECULATORS, SPECULATORS_EAGLE3),
    "its layers": (LAYER, LLAMA | {"_attn_implementation": "simple_flex_attention", "head_dim": 128}),
    "EAGLE of speculators": (SPECULATORS, {
        "speculators_model_type": "eagle", "transformer_layer_architecture": "LlamaDecoderLayer", "fusion_bias": False,
        "layernorms": False, "speculators_config": {}, "transformer_layer_config": LLAMA,
    }),
    "DFlash": (BLOCK["dflash"], QWEN3 | {"dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17]}}),
    "DFlash of ModelOpt": (BLOCK["dflash"], QWEN3 | {"sliding_window": 4096, "dflash_config": {
        "mask_token_id": 151669, "target_layer_ids": [1, 9, 17], "causal": False, "use_swa": True,
        "swa_window_size": 4096,
    }}),
    "DFlash with windows": (BLOCK["dflash"], QWEN3 | {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048,
        "use_sliding_window": True, "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31]},
    }),
    "DSpark": (BLOCK["dspark"], QWEN3 | {
        "mask_token_id": 163839, "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "target_layer_ids": [1, 7, 13], "num_anchors": 512,
        "confidence_head_alpha": 1.0,
    }),
    "DSpark of SpecForge": (BLOCK["dspark"], QWEN3 | {"architectures": ["DSparkDraftModel"], "dflash_config": {
        "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
        "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 256, "mask_token_id": 151669,
        "projector_type": "dspark", "target_layer_ids": [1, 9, 17, 25, 33],
    }}),
    "DSpark of ModelOpt": (BLOCK["dspark"], QWEN3 | {"architectures": ["DFlashDraftModel"], "dflash_config": {
        "mask_token_id": 151669, "target_layer_ids": [1, 9, 17], "projector_type": "dspark", "shift_label": True,
        "markov_rank": 256, "markov_head_type": "rnn", "use_confidence_head": True,
    }}),
    "DSpark of speculators": (OF_SPECULATORS["dspark"], {
        "architectures": ["DSparkSpeculator"], "aux_hidden_state_layer_ids": [2, 10, 18], "block_size": 7,
        "confidence_head_with_markov": True, "draft_vocab_size": 32000, "dtype": "bfloat16",
        "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 256, "mask_token_id": 151669,
        "sample_from_anchor": True, "sliding_window_non_causal": False, "speculators_config": {"algorithm": "dspark"},
        "speculators_model_type": "dspark", "speculators_version": "0.7.0", "target_hidden_size": None,
        "tie_word_embeddings": False, "transformer_layer_config": QWEN3, "transformers_version": "4.57.1",
    }),
    "DFlash2": (BLOCK["dflash2"], QWEN3 | {
        "architectures": ["DFlash2DraftModel"], "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
        "use_sliding_window": True, "is_causal": False, "draft_vocab_size": 248320, "sample_from_anchor": False,
        "dflash_config": {
            "block_size": 16, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
            "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61],
        },
    }),
    "Domino of SpecForge": (BLOCK["domino"], QWEN3 | {
        "architectures": ["DominoDraftModel"], "emb_dim": 256, "dflash_config": {
            "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "domino",
            "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True,
        },
    }),
    "Medusa": (PUBLISHED, {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    }),
    "Medusa of vLLM": (PUBLISHED, {
        "model_type": "medusa", "architectures": ["MedusaModel"], "dtype": "bfloat16", "hidden_size": 4096,
        "vocab_size": 32000, "num_heads": 3, "num_hidden_layers": 1, "truncated_vocab_size": 32000, "max_paths": 64,
        "topk": 10, "max_seq_len": 2**20, "original_lm_head": False, "medusa_fc_bias": True, "logit_scale": 1.0,
        "torch_dtype": "float16",
    }),
    "Hydra": (HYDRA, {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "grounded_heads": True, "hidden_state_offset": 0,
        "hydra_head_arch": "prefix-mlp", "hydra_num_heads": 4, "hydra_num_layers": 4, "transformers_version": "4.34.1",
        "dropout_rate": 0.0,
    }),
    "Kangaroo": (KANGAROO, LLAMA),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_published_configs_are_known(name):
    fields, config = PUBLISHED_CONFIGS[name]
    inside = next((key for key in ("eagle_config", "dflash_config") if key in config), "")
    fields.check(FILE, config, inside)


@pytest.mark.parametrize(("name", "fields"), [("medusa", OWN_FIELDS), ("hydra", HYDRA), ("eagle3", SPECULATORS)])
def test_the_bundled_drafters_are_known(name, fields):
    fields.check(FILE, json.loads((ZOO.parent / name / "config.json").read_text()))


def test_every_unknown_and_every_unsupported_field_is_named_with_its_value():
    fields = Fields("a thing", {"a", "g"}, {"b": ((1, 2), "others are not")}, {"c": "a reason"}, {"a"})
    inner = {"a": 1, "d": None, "g": 3}
    fields.check(FILE, {"a": 0, "b": 2.0, "c": 0, "d": None, "g": 3, "architectures": ["X"], "inner": inner}, "inner")
    with pytest.raises(ValueError, match="inner.g is 3, but g is read at the top level of the file only"):
        fields.check(FILE, {"g": 4, "inner": inner}, "inner")
    with pytest.raises(ValueError, match="config.json: fields of a thing are not supported") as caught:
        fields.check(FILE, {"b": True, "e": [1], "inner": {"b": 3, "f": "x", "use_sliding_window": True}}, "inner")
    for said in (
        "b is true, and only 1 or 2 is supported (others are not)", "inner.b is 3", "e ([1])", "inner.f ('x')",
        "inner.use_sliding_window is true, and only false",
    ):  # fmt: skip
        assert said in str(caught.value)
    with pytest.raises(ValueError, match="inner must be a mapping, not 'x'"):
        fields.check(FILE, {"inner": "x"}, "inner")
    many = {f"x{number}": number for number in range(20)}
    with pytest.raises(ValueError, match=r"x7 \(7\) and 12 more"):
        fields.check(FILE, many)


def test_no_field_is_in_two_tables():
    for fields in FAMILIES:
        named = {*fields.read}, {*fields.meanings}, {*fields.irrelevant}  # which come before those of all families
        assert sum(map(len, named)) == len(set().union(*named)) and not named[1] & {*IRRELEVANT}, fields.what
    assert not {*MEANINGS} & {*IRRELEVANT}
