"""Models that this engine decodes correctly: kinds that are known to fail are refused by name.

They are refused before any weight is read. ``spec_lab.models.self_check`` checks every model that is loaded.
"""

from __future__ import annotations

from typing import Any

from spec_lab.core.own_attention import own_attention
from spec_lab.runners.attention import RECURRENT, SPANS, WITHOUT_ATTENTION, layer_kinds, recurrent_layers

CHANGING_ROPE = {"dynamic", "longrope"}
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *RECURRENT, *WITHOUT_ATTENTION}
"""The types of layers, as transformers' configs name them, that this engine computes."""
NOT_FULL_ATTENTION = {"rwkv", "recurrent_gemma", "gpt_neo", "xlstm"}
OWN_CACHE = {
    "kimi_linear": "its attention computes keys and values from what the KV cache returns",
    "minimax": "its linear attention keeps its states in a cache of its own",
}
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
            own = getattr(config, "max_position_embeddings", None)
            limit = part.get("original_max_position_embeddings") or own
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise ValueError(
                    f"{config.model_type}: original_max_position_embeddings must be a whole number of 1 or more, not "
                    f"{limit!r}"
                )
            limits.append(limit)
    return min(limits, default=None)


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
    """Let a model compute attention as transformers does; return whether it computed it over spans of cells."""
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
        refuse("its code in transformers supports neither attention=spans nor attention=dense")
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
    for one in set(layer_kinds(config).values()):
        size = one.chunk if one.sliding_window is None else one.sliding_window
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            refuse(f"its layers of type {one.layer_type} must reach 1 position or more, not {size!r}")
