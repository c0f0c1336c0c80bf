"""The text part of a multimodal checkpoint: its config, and the names of its tensors.

Only the language model is built and read; vision and audio towers and projectors are left out. For text alone each
kind in ``KINDS`` computes what its text model computes as a causal LM: no image token, no attention mask of its own.
Qwen-VL's rotary embedding (M-RoPE, 2409.12191) has three axes, which have the same position for text, so that it is the
plain one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from transformers import CONFIG_MAPPING, PreTrainedConfig

from spec_lab.models.support import Unsupported

T = TypeVar("T")

KINDS = (
    "gemma3", "idefics3", "internvl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl", "smolvlm", "vipllava",
)  # fmt: skip
"""Kinds of multimodal models whose text part is supported, by model_type. Others differ for text: Cohere's and Aya's do
not scale their logits, PaliGemma's prompt attends in both directions, Mllama's layers attend to images.
"""

AS_TEXT = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models without a causal LM of their own in transformers, and the kind that computes the same for text."""

AXES = {"mrope_section", "mrope_interleaved", "type"}
"""Fields of a rotary embedding that only its three axes need; ``type`` is an older name of ``rope_type``."""

OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector|image_newline)(\.|$)"
)
"""Names of tensors that do not belong to the text part."""

PREFIXES = ("model.language_model.model.", "model.language_model.", "language_model.model.", "model.text_model.")
"""How the names of a text model's tensors begin in a multimodal checkpoint; ``model.`` by itself in others."""


def has_text_part(config: Any) -> bool:
    """Return whether a config is that of a multimodal model: whether it has a text model's inside."""
    return isinstance(vars(config).get("text_config"), PreTrainedConfig)


def text_config(config: Any) -> Any:
    """Return the config of a multimodal model's text model, as that of a causal LM.

    Raises:
        Unsupported: a kind that is not in ``KINDS``.
    """
    if config.model_type not in KINDS:
        raise Unsupported(
            f"model type '{config.model_type}' is not supported: of multimodal models the text part is loaded for "
            f"{', '.join(KINDS)}"
        )
    text = config.text_config
    if text.model_type in AS_TEXT:
        fields = {
            name: value for name, value in text.to_dict().items() if name not in ("model_type", "transformers_version")
        }
        fields["rope_parameters"] = {
            name: value for name, value in (fields.get("rope_parameters") or {}).items() if name not in AXES
        }
        text = CONFIG_MAPPING[AS_TEXT[text.model_type]].from_dict(fields)
    text.tie_word_embeddings = bool(config.tie_word_embeddings)
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    text.name_or_path = config.name_or_path
    return text


def text_name(name: str) -> str | None:
    """Return what a tensor or module of a multimodal checkpoint is called in the text model; None of other parts."""
    if OTHER_PARTS.match(name):
        return None
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the text model's tensors of a multimodal checkpoint under its own names.

    Raises:
        ValueError: two tensors have the same name.
    """
    text: dict[str, T] = {}
    before: dict[str, str] = {}
    for name, tensor in tensors.items():
        new_name = text_name(name)
        if new_name is None:
            continue
        if new_name in text:
            raise ValueError(
                f"the checkpoint holds {new_name} of its text model twice: as {before[new_name]} and as {name}"
            )
        text[new_name], before[new_name] = tensor, name
    return text


def text_modules(names: Iterable[str]) -> list[str]:
    """Return names of modules, or patterns of them, as the text model has them; those of other parts are left out."""
    renamed = (name if name.startswith("re:") else text_name(name) for name in names)
    return [name for name in renamed if name is not None]
