"""Models that this engine decodes correctly: kinds that are known to fail are refused by name.

They are refused before any weight is read. ``spec_lab.models.self_check`` checks every model that is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spec_lab.core.own_attention import own_attention
from spec_lab.runners.attention import RECURRENT, SPANS, WITHOUT_ATTENTION, layer_kinds, recurrent_layers
from spec_lab.runners.causal_lm import why_no_kv_dtype

LOG = logging.getLogger(__name__)

CHANGING_ROPE = {"dynamic", "longrope"}
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *RECURRENT, *WITHOUT_ATTENTION}
"""The types of layers, as transformers' configs name them, that this engine computes."""
NOT_FULL_ATTENTION = {"rwkv", "recurrent_gemma", "gpt_neo", "xlstm"}
OWN_CACHE = {
    "kimi_linear": "its attention computes keys and values from what the KV cache returns",
    "minimax": "its linear attention keeps its states in a cache of its own",
}
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors that a model's code raises where it does not fit the engine."""
NO_LIMIT = 2**20
"""The context of models that have recurrent layers only, which have no largest position."""


class Unsupported(ValueError):
    """A model that this engine does not decode correctly, or that lacks what an option requires."""


def model_context(config: Any) -> int:
    """Return the maximum number of positions of a model.

    With LongRoPE it is what ``one_rotation`` returns, if that is less.

    Raises:
        ValueError: the config's value is no count.
        Unsupported: the config names no maximum.
    """
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if value := getattr(config, name, None):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{config.model_type}: {name} must be a whole number of 1 or more, not {value!r}")
            return min(value, one_rotation(config) or value)
    if len(recurrent_layers(config)) == config.num_hidden_layers:
        return NO_LIMIT
    raise Unsupported(f"{config.model_type}: the config names no maximum context; set max_position_embeddings in it")


def one_rotation(config: Any) -> int | None:
    """Return up to how many positions a LongRoPE model rotates every token by the same factors; None for any number.

    Up to ``original_max_position_embeddings`` positions transformers uses ``short_factor``, beyond it ``long_factor``:
    for all tokens of a forward by the largest position among them, so that the same text has other logits in another
    batch, or with another draft. Where both are equal there is no such change. (Dynamic RoPE changes only beyond
    ``max_position_embeddings``.)

    Raises:
        ValueError: an original length that is no count.
    """
    limits = []
    for part in _rope_parts(config):
        if _rope_type(part) == "longrope" and part.get("short_factor") != part.get("long_factor"):
            longest = getattr(config, "max_position_embeddings", None)
            limit = part.get("original_max_position_embeddings") or longest
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise ValueError(
                    f"{config.model_type}: original_max_position_embeddings must be a whole number of 1 or more, not "
                    f"{limit!r}"
                )
            limits.append(limit)
    return min(limits, default=None)


def context_of(path: str, config: Any, context: int | None) -> int:
    """Return the maximum number of tokens of a sequence, which ``target.context`` may limit further.

    Raises:
        ValueError: it is less than 1, or more than ``model_context``.
    """
    limit = model_context(config)
    rotates = one_rotation(config) == limit
    if context is None:
        if rotates:
            LOG.warning(
                "%s: target.context is %d, original_max_position_embeddings: beyond it LongRoPE rotates all tokens "
                "otherwise",
                path, limit,
            )  # fmt: skip
        return limit
    if isinstance(context, bool) or not isinstance(context, int) or not 0 < context <= limit:
        why = ""
        if rotates:
            why = (
                ", beyond which its LongRoPE rotates all tokens otherwise: long_factor in place of short_factor in its "
                "config.json makes it one rotation at every length"
            )
        raise ValueError(f"target.context must lie between 1 and the model's own {limit}, not {context!r}{why}")
    return context


PAIRS = (
    ("tensor_parallel", "attention=dense_mask"), ("graphs", "attention=dense_mask"), ("graphs", "device_map"),
    ("graphs", "tensor_parallel"), ("kv_dtype", "tensor_parallel"),
)  # fmt: skip
"""Options of a target that do not go together."""

PLACEMENT = ("device", "device_map", "tensor_parallel")
"""Options of a target of which each decides where the model is placed."""


def refuse_pairs(options: Mapping[str, bool]) -> None:
    """Refuse options of a target that do not go together.

    Args:
        options: whether each of those in ``PAIRS`` and ``PLACEMENT`` is set.

    Raises:
        ValueError: names both.
    """
    for name, other in PAIRS:
        if options[name] and options[other]:
            raise ValueError(f"target.{name} does not support target.{other}: set only one of them")
    if len(both := [f"target.{name}" for name in PLACEMENT if options[name]]) > 1:
        raise ValueError(f"{' and '.join(both)} both decide where the model is placed: set only one of them")


def refuse_options(model: Any, options: Mapping[str, bool]) -> None:
    """Refuse options of a target that this model does not support. Arguments as in ``refuse_pairs``.

    Raises:
        Unsupported: names the option.
    """
    kind, recurrent = f"(model type '{model.config.model_type}')", ("attention=dense_mask", "tensor_parallel", "graphs")
    if is_recurrent(model.config) and (wrong := [name for name in recurrent if options[name]]):
        raise Unsupported(f"target.{wrong[0]} does not support models with recurrent layers {kind}: leave it out")
    if options["kv_dtype"] and (why := why_no_kv_dtype(model)):
        raise Unsupported(f"target.kv_dtype does not support {why} {kind}: set it to null")


def refuse_changing_rope(config: Any) -> None:
    """Refuse, for drafters, whose positions are those of another model, RoPE that changes beyond some position.

    Raises:
        Unsupported: dynamic RoPE or LongRoPE.
    """
    for part in _rope_parts(config):
        if _rope_type(part) in CHANGING_ROPE:
            raise Unsupported(
                f"model type '{config.model_type}' is not supported in a drafter with {_rope_type(part)} RoPE, which "
                "changes with the largest position of the batch"
            )


def _rope_parts(config: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of a config: of all layers, or of each type of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    return [part for part in parts if isinstance(part, dict)]


def _rope_type(part: dict[str, Any]) -> Any:
    return part.get("rope_type", part.get("type"))


def is_recurrent(config: Any) -> bool:
    """Return whether a model has recurrent layers, with which only chains can be drafted."""
    return bool(recurrent_layers(config))


def use_own_attention(model: Any) -> bool:
    """Let a model compute attention as transformers does; return whether it computed it over cells."""
    ours = model.config._attn_implementation == SPANS
    if ours:
        model.set_attn_implementation(own_attention(model))
    return bool(ours)


def refuse_by_name(config: Any) -> None:
    """Refuse kinds of models whose attention the engine does not compute.

    Raises:
        Unsupported: unknown types of layers, attention in both directions, encoder-decoders, multimodal models.
    """
    kind = config.model_type

    def refuse(why: str) -> None:
        raise Unsupported(f"model type '{kind}' is not supported: {why}")

    if kind == "xglm":
        refuse("its code in transformers supports neither attention=per_sequence nor attention=dense_mask")
    if kind in NOT_FULL_ATTENTION:
        refuse("it does not attend to all earlier tokens in every layer")
    if kind in OWN_CACHE:
        refuse(OWN_CACHE[kind])
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if getattr(config, "text_config", None) is not None:
        text = getattr(config.text_config, "model_type", "")
        refuse(f"it has more than a text model; only text models, here '{text}', are supported")
    if getattr(config, "use_bidirectional_attention", None):
        refuse("its layers attend to later tokens too (use_bidirectional_attention)")
    if other := set(getattr(config, "layer_types", None) or []) - LAYER_TYPES:
        refuse(f"it has layers of type {', '.join(sorted(other))}; supported are {', '.join(sorted(LAYER_TYPES))}")
    for layer_kind in set(layer_kinds(config).values()):
        size = layer_kind.chunk if layer_kind.sliding_window is None else layer_kind.sliding_window
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            refuse(f"its layers of type {layer_kind.layer_type} must reach 1 position or more, not {size!r}")
