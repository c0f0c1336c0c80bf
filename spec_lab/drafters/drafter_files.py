"""Checks that the readers of drafters' files share: of fields of a config, of names and shapes, and of weights.

All of it is untrusted input (``models.checkpoint``). Every message names the file or folder, and the field or tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.files import write_json
from spec_lab.core.options import brief
from spec_lab.core.tensors import save_tensors
from spec_lab.drafters.drafter_layouts import Shapes
from spec_lab.models.checkpoint import SINGLE, weights_hash

OF_LAYERS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Fields of a config that describe the decoder layers of Llama and Qwen."""


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


IRRELEVANT: Mapping[str, str] = (
    _each("names classes or files of other packages", "architectures auto_map name_or_path _name_or_path _commit_hash")
    | _each("the target's name", "base_model_name_or_path target_model_type")
    | _each("a version", "transformers_version speculators_version version")
    | _each("the run has its own data type", "dtype torch_dtype")
    | _each("quantized weights are refused by their data types", "quantization_config compression_config")
    | _each(
        "the run has its own attention implementation and KV cache",
        "attn_implementation _attn_implementation _attn_implementation_autoset use_cache",
    )
    | _each(
        "a drafter's tokens are the target's",
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class",
    )
    | _each("the tensors of the files tell", "tie_word_embeddings")
    | _each(
        "concerns training",
        "initializer_range initializer_factor attention_dropout hidden_dropout dropout_rate pretraining_tp ttt_steps "
        "embed_requires_grad enable_sp_ulysses confidence_head_alpha max_anchors num_anchors gradient_checkpointing",
    )
    | _each(
        "has no effect without layers with windows, which are refused",
        "sliding_window swa_window_size max_window_layers sliding_window_non_causal",
    )
    | _each(
        "the run's own options state how much is drafted and how it is sampled",
        "num_speculative_tokens n_predict speculators_config max_length min_length max_new_tokens do_sample "
        "temperature top_k top_p typical_p num_beams num_beam_groups diversity_penalty early_stopping length_penalty "
        "repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
        "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens remove_invalid_values "
        "exponential_decay_length_penalty",
    )
    | _each(
        "bookkeeping of transformers",
        "output_attentions output_hidden_states output_scores return_dict return_dict_in_generate use_return_dict "
        "torchscript use_bfloat16 tf_legacy_loss is_decoder is_encoder_decoder add_cross_attention "
        "cross_attention_hidden_size tie_encoder_decoder pruned_heads prefix problem_type finetuning_task "
        "task_specific_params num_labels id2label label2id chunk_size_feed_forward has_no_defaults_at_init",
    )
)
"""Fields of a config that change nothing in what any drafter computes, and why."""

MEANINGS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_sliding_window": ((False,), "layers with windows are not supported"),
    "use_swa": ((False,), "layers with windows are not supported"),
    "attention_sink_bias": ((False,), "attention sinks are not supported"),
    "rope_is_neox_style": ((True,), "rotary embeddings of interleaved numbers are not supported"),
    "is_neox_style": ((True,), "rotary embeddings of interleaved numbers are not supported"),
    "partial_rotary_factor": ((1.0,), "rotary embeddings of a part of the numbers are not supported"),
    "qkv_bias": ((False,), "biases of queries, keys and values alone are not supported"),
    "decoder_sparse_step": ((1,), "layers with experts are not supported"),
}
"""Fields of which one meaning is supported, which is that of a config without the field: its values, and why no other.
"""


@dataclass(frozen=True)
class Fields:
    """The known fields of a family's configs; any other field is refused, as a surplus tensor is.

    Args:
        what: they describe.
        read: names of the fields whose values are used or checked.
        meanings: as ``MEANINGS``, beside these.
        irrelevant: as ``IRRELEVANT``, beside these.
    """

    what: str
    read: Collection[str]
    meanings: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    irrelevant: Mapping[str, str] = field(default_factory=dict)

    def check(self, file: Path, config: Mapping[str, Any], inside: str = "") -> None:
        """Refuse fields that may change what is computed, and of which that is not known or not supported.

        Args:
            file: the config.
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
            if value is None or name in self.read:
                continue
            if name in meanings:
                allowed, why = meanings[name]
                if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed):
                    only = " or ".join(map(brief, allowed)) or "null"
                    problems.append(f"{path} is {brief(value)}, and only {only} is supported ({why})")
            elif name not in IRRELEVANT and name not in self.irrelevant:
                unknown.append(f"{path} ({brief(value)})")
        if unknown:
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            problems.append(f"it is not known what {', '.join(unknown[:8])}{more} mean")
        if problems:
            raise ValueError(
                f"{file}: of {self.what} {'; '.join(problems)}. Read otherwise than its authors mean it, it would "
                "draft worse tokens: choose another drafter, or remove from the file what changes nothing"
            )


LAYER = Fields(
    "a drafter's layers",
    {*OF_LAYERS, "num_hidden_layers", "max_position_embeddings", "vocab_size", "layer_types"},
)
"""Fields of a mapping that describes decoder layers."""
MOST_TAPS = 64
"""Most hidden states of the target that a drafter reads."""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Data types of weights, as safetensors names them."""


@contextmanager
def named_by(folder: Path) -> Iterator[None]:
    """Name the folder of the config in errors about layers, which do not know it.

    Raises:
        ValueError: of the same type as the one that was raised inside; names the folder.
    """
    try:
        yield
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise type(error)(f"{folder / 'config.json'}: {error}") from error


def whole(
    file: Path, config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1
) -> int:
    """A whole number in a config.

    Raises:
        ValueError: it is none from ``least`` to ``most``, or is missing (or null) and has no default.
    """
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{file}: {name} must be a whole number from {least} to {most}, not {brief(value)}")
    return value


def flag(file: Path, config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A flag in a config; null is the default.

    Raises:
        ValueError: it is neither true nor false.
    """
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {name} must be true or false, not {brief(value)}")
    return value


def refuse_windows(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that names layers without full attention.

    Raises:
        ValueError: ``layer_types`` does.
    """
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(one != "full_attention" for one in types)):
        raise ValueError(f"{file}: layer_types must be full_attention in every layer, not {brief(types)}")


def taps(file: Path, where: str, named: Any, shift: int, last: int, target: str) -> tuple[int, ...]:
    """The numbers of the hidden states that a drafter reads, as in ``runner.Capabilities``.

    Args:
        file: the config.
        where: the field.
        named: its value, a list of layers.
        shift: what is added to each: 0 for numbers of hidden states, 1 for numbers of layers whose outputs are read.
        last: the target's last hidden state, which is its number of layers.
        target: its name.

    Raises:
        ValueError: no list of layers, or a layer that the target does not have.
    """
    plain = isinstance(named, list) and 0 < len(named) <= MOST_TAPS
    if not plain or any(isinstance(one, bool) or not isinstance(one, int) for one in named):
        raise ValueError(f"{file}: {where} must be a list of layers, not {brief(named)}")
    if wrong := [one for one in named if not 0 <= one + shift <= last]:
        raise ValueError(
            f"{file}: {where} names layer {wrong[0]}, but the target {target} has {last} layers, of which {-shift} to "
            f"{last - shift} can be named here: the drafter is for another target"
        )
    return tuple(one + shift for one in named)


def misfits(wanted: Shapes, held: Shapes) -> list[str]:
    """Name each tensor of the files that is missing, surplus or misshapen.

    Args:
        wanted: the shapes of a network's tensors, by the names that the files should hold.
        held: those in the files.
    """
    found = [f"{name} is missing" for name in wanted if name not in held]
    for name, shape in held.items():
        if name not in wanted:
            found.append(f"{brief(name)} is in no layer of the network")
        elif wanted[name] != shape:
            found.append(f"{name} is {list(shape)}, not {list(wanted[name])}")
    return found


def refuse(folder: Path, problems: Sequence[str]) -> None:
    """Refuse weights that do not fit.

    Raises:
        ValueError: there are ``problems``; names three of them.
    """
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"the weights of {folder} do not fit its config.json: {'; '.join(sorted(problems)[:3])}{more}")


def read_weight(folder: Path, held: Mapping[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    """Read a tensor of finite numbers, in this data type.

    Raises:
        ValueError: a quantized tensor; a number that is NaN or infinite, or becomes infinite in ``dtype``.
    """
    if (kind := held[name].get_dtype()) not in FLOATS:
        raise ValueError(
            f"{folder}: '{name}' has data type {kind}; quantized weights are not supported: save them as "
            f"{', '.join(sorted(FLOATS))}"
        )
    read: Tensor = held[name][:].to(dtype)
    if not torch.isfinite(read).all():
        raise ValueError(f"{folder}: '{name}' holds NaN or infinite values")
    return read


def write_drafter(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: Mapping[str, str]
) -> str:
    """Write the weights of a drafter and then its config; return the SHA-256 of the weights.

    Args:
        folder: is made.
        config: for config.json.
        tensors: the weights, by their published names.
        facts: for the metadata of the weights.

    Raises:
        OSError: a file cannot be written; names it. None is left incomplete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / SINGLE, {"format": "pt", **facts})
    write_json(folder / "config.json", config)
    return weights_hash(str(folder))
