"""The published layouts of block drafters: tables of their tensors' names and of their configs' fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from spec_lab.drafters.config_fields import LAYER, Fields, Meanings
from spec_lab.drafters.layer_conventions import INTERLEAVED
from spec_lab.drafters.layouts import Entry, Layout

BLOCK = Layout("block drafter", (
    Entry("confidence_head.proj.*|confidence_proj.*|logit_head.confidence_head.proj.*", "confidence_head.*"),
    *(
        Entry(f"markov_head.{part}.*|{part}.*|logit_head.markov_head.{part}.*", f"head.{part}.*")
        for part in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")
    ),
    *(
        Entry(f"{old}|logit_head.{old}", f"head.{new}.weight")
        for old, new in (
            ("prefix_gru.weight_ih_l0", "gru_input"), ("prefix_gru.weight_hh_l0", "gru_state"),
            ("embed_proj.0.weight", "narrow"), ("embed_proj.2.weight", "widen"),
        )
    ),
    *(
        Entry(f"candidate_selector.{name}_codebook|candidate_selector.{name}_codebook.weight", f"head.{name}.weight")
        for name in ("predecessor", "successor")
    ),
    Entry("candidate_selector.hidden_projection.*", "head.hidden_projection.*"),
    *(Entry(f"layers.{{l}}.{name}.*", f"convolutions.{{l}}.{name}.*") for name in ("attention_conv", "mlp_conv")),
    Entry("layers.{l}.*", "body.layers.{l}.*"),
    Entry("d2t", "", "?"),
    Entry("t2d", "", "?"),
    Entry("*", "*"),  # fc, hidden_norm, norm, embed_tokens, lm_head
))  # fmt: skip
"""Names of z-lab, DeepSpec and SpecForge, those of ModelOpt, and those of early files of SpecForge."""
FAMILIES = ("llama", "qwen3")
Kind = Literal["dflash", "dflash2", "dspark", "domino"]
ARCHITECTURES: Mapping[str, Kind] = {
    "DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2", "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark", "Lfm2DSparkDraftModel": "dspark", "DominoDraftModel": "domino",
}  # fmt: skip
"""The kind of a drafter, by the class that its authors read it with."""
INNER = "dflash_config"
ANCHOR = {"sample_from_anchor": True, "shift_label": True, "dspark_bonus_anchor": False}
"""Fields that tell whether the pending token's row drafts the first level, and their value where it does."""
CAUSAL = {"is_causal": True, "causal": True}
"""Fields that tell whether the rows of a block attend to rows before them only, and their value where they do."""
NEIGHBOURS = "Lfm2DSparkDraftModel"
"""The class whose rotary embedding does unless a field tells otherwise."""
NESTED_FIELDS = {
    "block_size", "mask_token_id", "target_layer_ids", "projector_type", "final_logit_softcapping", "output_multiplier",
    "input_embedding_scale", "use_swa", "swa_window_size", "draft_vocab_size", "sliding_window_non_causal", *ANCHOR,
    *CAUSAL, *INTERLEAVED,
}  # fmt: skip
"""Fields that may stand at the top level or in ``dflash_config``."""
SPECULATORS, TAPS = "speculators_model_type", "aux_hidden_state_layer_ids"
SPECULATORS_FIELDS = (SPECULATORS, TAPS, "sliding_window_non_causal")
"""Fields of the format of speculators."""
CONFIDENCE = ("enable_confidence_head", "use_confidence_head")
DSPARK_FIELDS = {"markov_rank", "markov_head_type", *CONFIDENCE}
DOMINO_FIELDS = {"gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"}
DFLASH2_FIELDS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
MEANS: Meanings = {
    "attention_mode": (("gqa", "mha"), "latent attention is not supported"),
    "use_aux_hidden_state": ((True,), "drafters that read the last hidden state in place of taps are not supported"),
}
NOT_READ = {
    "num_target_layers": "the target has its own number of layers, with which the taps are compared",
    "confidence_head_with_markov": "the tensors of the files tell",
}
WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
COMMON = {*LAYER.read, *NESTED_FIELDS, *WINDOWS, "target_hidden_size"}
NO_HEADS = (False,), "projector_type or architectures of a drafter with DSpark's heads must say so"
FIELDS: Mapping[Kind, Fields] = {
    "dflash": Fields(
        "a DFlash drafter",
        COMMON,
        {**MEANS, **dict.fromkeys(CONFIDENCE, NO_HEADS), "markov_rank": ((0,), NO_HEADS[1])},
        NOT_READ,
        NESTED_FIELDS,
    ),
    "dspark": Fields("a DSpark drafter", COMMON | DSPARK_FIELDS, MEANS, NOT_READ, NESTED_FIELDS | DSPARK_FIELDS),
    "dflash2": Fields("a DFlash2 drafter", COMMON | DFLASH2_FIELDS, MEANS, NOT_READ, NESTED_FIELDS | DFLASH2_FIELDS),
    "domino": Fields("a Domino drafter", COMMON | DOMINO_FIELDS, MEANS, NOT_READ, NESTED_FIELDS | DOMINO_FIELDS),
}
"""At the top level of the config, and in its ``dflash_config``."""
OF_SPECULATORS: Mapping[Kind, Fields] = {
    kind: Fields(
        f"{fields.what} in the format of speculators",
        {
            *SPECULATORS_FIELDS, "transformer_layer_config", "draft_vocab_size", "target_hidden_size", "block_size",
            "mask_token_id", "sample_from_anchor", *({*fields.read} & (DSPARK_FIELDS | DFLASH2_FIELDS)),
        },
        {},
        {**NOT_READ, "model_type": "speculators_model_type tells"},
    )
    for kind, fields in FIELDS.items()
    if kind != "domino"
}  # fmt: skip
"""In the format of speculators, beside the layers."""
OF_LAYERS = Fields(LAYER.what, {*LAYER.read, *WINDOWS})
