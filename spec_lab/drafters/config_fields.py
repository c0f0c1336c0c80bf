"""The known fields of drafters' configs; any other field is refused by name, as a surplus tensor is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spec_lab.core.options import brief

OF_LAYERS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Fields of a config that describe the decoder layers of Llama and Qwen."""


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


IRRELEVANT: Mapping[str, str] = (
    _because(
        "names classes or files of other packages", "architectures auto_map name_or_path _name_or_path _commit_hash"
    )
    | _because("the target's name", "base_model_name_or_path target_model_type")
    | _because("a version", "transformers_version speculators_version version")
    | _because("the run has its own data type", "dtype torch_dtype")
    | _because("quantized weights are refused by their data types", "quantization_config compression_config")
    | _because(
        "the run has its own attention implementation and KV cache",
        "attn_implementation _attn_implementation _attn_implementation_autoset use_cache",
    )
    | _because(
        "a drafter's tokens are the target's",
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class",
    )
    | _because("the tensors of the files tell", "tie_word_embeddings")
    | _because(
        "concerns training",
        "initializer_range initializer_factor attention_dropout hidden_dropout dropout_rate pretraining_tp ttt_steps "
        "embed_requires_grad enable_sp_ulysses confidence_head_alpha max_anchors num_anchors gradient_checkpointing",
    )
    | _because(
        "has no effect on layers with full attention; a family that supports layers with windows reads it",
        "sliding_window swa_window_size max_window_layers sliding_window_non_causal",
    )
    | _because(
        "the run's own options state how much is drafted and how it is sampled",
        "num_speculative_tokens n_predict speculators_config max_length min_length max_new_tokens do_sample "
        "temperature top_k top_p typical_p num_beams num_beam_groups diversity_penalty early_stopping length_penalty "
        "repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
        "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens remove_invalid_values "
        "exponential_decay_length_penalty",
    )
    | _because(
        "bookkeeping of transformers",
        "output_attentions output_hidden_states output_scores return_dict return_dict_in_generate use_return_dict "
        "torchscript use_bfloat16 tf_legacy_loss is_decoder is_encoder_decoder add_cross_attention "
        "cross_attention_hidden_size tie_encoder_decoder pruned_heads prefix problem_type finetuning_task "
        "task_specific_params num_labels id2label label2id chunk_size_feed_forward has_no_defaults_at_init",
    )
)
"""Fields of a config that change nothing in what any drafter computes, and why."""

Meanings = Mapping[str, tuple[tuple[Any, ...], str]]
"""By field, the values that are supported, and why others are not."""
MEANINGS: Meanings = {
    "use_sliding_window": ((False,), "layers with windows are not supported"),
    "use_swa": ((False,), "layers with windows are not supported"),
    "attention_sink_bias": ((False,), "attention sinks are not supported"),
    "rope_is_neox_style": ((True,), "rotary embeddings of interleaved numbers are not supported"),
    "is_neox_style": ((True,), "rotary embeddings of interleaved numbers are not supported"),
    "partial_rotary_factor": ((1.0,), "rotary embeddings of a part of the numbers are not supported"),
    "qkv_bias": ((False,), "biases of queries, keys and values alone are not supported"),
    "decoder_sparse_step": ((1,), "layers with experts are not supported"),
}
"""Fields with one supported meaning, which a config without the field has too, by their values of that meaning."""


@dataclass(frozen=True)
class Fields:
    """The known fields of a family's configs; any other field is refused, as a surplus tensor is.

    Args:
        what: what they describe, for messages: "an EAGLE head".
        read: names of the fields that the family's reader uses or checks itself, whatever ``MEANINGS`` and
            ``IRRELEVANT`` say.
        meanings: further ``MEANINGS`` of the family.
        irrelevant: further ``IRRELEVANT`` fields of the family, whatever ``MEANINGS`` says.
        read_inside: those of ``read`` that may also stand in a mapping inside the config; the others may only repeat
            there what the top level states.
    """

    what: str
    read: Collection[str]
    meanings: Meanings = field(default_factory=dict)
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    read_inside: Collection[str] = ()

    def reading(self, more: Collection[str]) -> Fields:
        """Return these fields with further names in ``read``."""
        return replace(self, read={*self.read, *more})

    def check(self, file: Path, config: Mapping[str, Any], inside: str = "") -> None:
        """Refuse fields that are unknown, and values that are not supported.

        Args:
            config: its fields; null is a missing field.
            inside: a mapping in it, whose fields are checked as well.

        Raises:
            ValueError: names the fields and their values.
        """
        inner = config.get(inside)
        if not isinstance(inner, dict | None):
            raise ValueError(f"{file}: {inside} must be a mapping, not {brief(inner)}")
        fields = [(name, name, value) for name, value in config.items() if name != inside]
        fields += [(f"{inside}.{name}", name, value) for name, value in (inner or {}).items()]
        problems, unknown, meanings = [], [], {**MEANINGS, **self.meanings}
        for path, name, value in fields:
            if value is None or name in self.irrelevant:
                continue
            if name in self.read:
                if path != name and name not in self.read_inside and value != config.get(name):
                    problems.append(f"{path} is {brief(value)}, but {name} is read at the top level of the file only")
            elif name in meanings:
                allowed, why = meanings[name]
                if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed):
                    only = " or ".join(map(brief, allowed)) or "null"
                    problems.append(f"{path} is {brief(value)}, and only {only} is supported ({why})")
            elif name not in IRRELEVANT:
                unknown.append(f"{path} ({brief(value)})")
        if unknown:
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            problems.append(f"unknown: {', '.join(unknown[:8])}{more}")
        if problems:
            raise ValueError(
                f"{file}: fields of {self.what} are not supported: {'; '.join(problems)}. A drafter that is read "
                "without them may draft worse tokens: choose another drafter, or remove fields that change nothing "
                "from the file"
            )


LAYER = Fields(
    "a drafter's layers",
    {*OF_LAYERS, "num_hidden_layers", "max_position_embeddings", "vocab_size", "layer_types"},
)
"""Fields of a mapping that describes decoder layers."""
