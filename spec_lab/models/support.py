"""Which models this engine decodes correctly: refusals by name, and the self-check of every model that is loaded.

The self-check decodes a scattered forest of two draft trees and compares its logits with those of plain forwards over
every path. A model whose logits differ is refused with the measured error. Kinds of models that are known to fail are
refused by name before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.core.draft import Draft, Shape
from spec_lab.core.process_cache import ProcessCache
from spec_lab.engine.attention import SPANS, Attention
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.runner import Runner

LOG = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest error of a logit that the self-check allows, in standard deviations of the plain forward's logits."""

ROUNDING = {torch.float32: 0.0, torch.float16: 0.01, torch.bfloat16: 0.03, torch.float8_e4m3fn: 0.25}
"""The same where keys and values are rounded to a dtype: two that differ by rounding may be rounded apart."""

CHANGING_ROPE = {"dynamic", "longrope"}
ALIBI = {"bloom", "mpt"}
NOT_FULL_ATTENTION = {"mamba", "mamba2", "rwkv", "falcon_mamba", "recurrent_gemma", "jamba", "gpt_neo", "zamba"}


Plain = Callable[[list[int], int], Tensor]
"""Returns the logits ``[n, V]`` of the last n tokens of a text, computed without drafts."""


class Unsupported(ValueError):
    """A model that this engine does not decode correctly, or that lacks what an option requires."""


def model_context(config: Any) -> int:
    """Return the maximum number of positions of a model.

    Raises:
        ValueError: the config's value is no count.
        Unsupported: the config names no maximum.
    """
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if value := getattr(config, name, None):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{config.model_type}: {name} must be a whole number of 1 or more, not {value!r}")
            return int(value)
    raise Unsupported(f"{config.model_type}: the config names no maximum context; set max_position_embeddings in it")


def refuse_by_name(config: Any) -> None:
    """Refuse kinds of models whose positions or attention depend on other rows of the packed batch.

    Raises:
        Unsupported: dynamic or longrope RoPE, ALiBi, sliding windows, linear attention, encoder-decoders.
    """
    kind = config.model_type

    def refuse(why: str) -> None:
        raise Unsupported(f"model type '{kind}' is not supported: {why}")

    rope = getattr(config, "rope_parameters", None) or {}
    parts = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for part in parts:
        if isinstance(part, dict) and part.get("rope_type", part.get("type")) in CHANGING_ROPE:
            refuse(f"its {part.get('rope_type', part.get('type'))} RoPE changes with the largest position of the batch")
    if kind in ALIBI or getattr(config, "alibi", False):
        refuse("ALiBi biases depend on rows of the batch, not on positions")
    if kind == "xglm":
        refuse("its code in transformers supports neither attention=spans nor attention=dense")
    if kind in NOT_FULL_ATTENTION:
        refuse("it does not attend to all earlier tokens in every layer")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    layers = set(getattr(config, "layer_types", None) or [])
    if layers - {"full_attention"}:
        refuse(f"it has layers of type {', '.join(sorted(layers - {'full_attention'}))}; trees require full attention")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) and not layers:
        refuse(f"it has a sliding window of {config.sliding_window} tokens; null in its config means full attention")


def self_check(
    model: nn.Module, attention: Attention, fixed: bool = False, kv_dtype: torch.dtype | None = None
) -> float:
    """Decode a scattered forest of two draft trees and compare it with plain forwards over every path.

    Also check of every rotary embedding that a token's rotation does not change when a far position joins the batch.
    With a ``kv_dtype``, decode a second time with keys and values in it, and compare with plain forwards in which they
    are rounded.

    Returns:
        The largest error of a logit, in standard deviations of the plain logits.

    Raises:
        Unsupported: the error exceeds the tolerance of the model's dtype, or the model raises an error.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    try:
        lm = CausalLM(model, attention, fixed=fixed)
        error = max(forest_error(lm, partial(_plain_forward, model)), _rotation_error(model))
        rounded = CausalLM(model, attention, fixed=fixed, kv_dtype=kv_dtype)
        rounded_error = 0.0 if rounded.kv_dtype is None else forest_error(rounded, rounded.plain_logits)
    except Unsupported:
        raise
    except (
        ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
    ) as failure:  # fmt: skip
        advice = "; try target.attention=dense" if attention == "spans" else ""
        advice = "; try target.graphs=false" if fixed else advice
        raise Unsupported(
            f"model type '{kind}' cannot decode forests with attention='{attention}' "
            f"({type(failure).__name__}: {failure}){advice}"
        ) from failure
    allowed = TOLERANCE[model.dtype]  # type: ignore[index]
    if not error <= allowed:
        raise Unsupported(
            f"model type '{kind}' decodes forests wrongly with attention='{attention}': its logits differ from a plain "
            f"forward's by {error:.2g} standard deviations, allowed are {allowed:g} in {model.dtype}"
        )
    allowed = max(allowed, 0.0 if kv_dtype is None else ROUNDING[kv_dtype])
    if not rounded_error <= allowed:
        raise Unsupported(
            f"model type '{kind}' decodes forests wrongly with keys and values in {kv_dtype}: its logits differ from "
            f"those of a plain forward with the same rounding by {rounded_error:.2g} standard deviations, allowed are "
            f"{allowed:g}; set target.kv_dtype=null"
        )
    return max(error, rounded_error)


def checked(
    model: Any,
    attention: Attention,
    sha256: str,
    cache: ProcessCache,
    fixed: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> float:
    """Return ``self_check``'s error, measured once for the same weights in the same setting.

    Args:
        model: the model.
        attention: how it computes attention.
        sha256: of its weights (``checkpoint.weights_hash``); empty where it is not known: then it is always measured.
        cache: errors that were measured before; a new one is added.
        fixed: whether decoding steps run in fixed shapes.
        kv_dtype: in which keys and values are stored; None for the model's.

    Raises:
        Unsupported: as ``self_check``.
    """
    places = f"{model.device} {getattr(model, 'hf_device_map', None)} {getattr(model, 'tp_size', None)}"
    setting = (sha256, model.config.to_json_string(), str(model.dtype), places, attention, str(fixed), str(kv_dtype))
    if sha256 and setting in cache.self_checks:
        return cache.self_checks[setting]
    LOG.info("Self-check: a forest of draft trees against plain forwards")
    error = self_check(model, attention, fixed, kv_dtype)
    if sha256:
        cache.self_checks[setting] = error
    return error


TREES = ((0, 0, 3, 1, 5), (1, 2)), ((0, 0, 2, 1, 1, 6), ())
CHAINS = ((0, 1, 2, 3, 4), (0, 1)), ((1, 0, 2, 4), ())
"""Two forests of two trees: the parents of their nodes, and those of the first tree that are accepted."""


@torch.inference_mode()
def forest_error(lm: Runner, plain: Plain) -> float:
    """Return the largest error of two steps: a first forest whose nodes are partly rejected, and a second one.

    Args:
        lm: decodes the forests, of chains if it requires them.
        plain: returns the expected logits.
    """
    generator = np.random.default_rng(0)

    def random_tokens(count: int) -> list[int]:
        return generator.integers(0, lm.vocabulary, count).tolist()

    pending, worst = [random_tokens(7), random_tokens(4)], 0.0
    sequences, tokens = [lm.open() for _ in pending], [list[int]() for _ in pending]
    # The rejected nodes leave holes in the KV cache, so the cells of the second forest are scattered.
    for parents, accepted in TREES if lm.capabilities.rollback is None else CHAINS:
        draft = Draft(Shape(2, np.array(parents)), torch.tensor(random_tokens(len(parents)), device=lm.device))
        output = lm.run(lm.prepare(sequences, pending, draft))
        tokens = [done + more for done, more in zip(tokens, pending, strict=True)]
        worst = max(worst, _compare(plain, tokens, draft, output.logits.clone()))
        sequences[0].accept(accepted)
        sequences[1].accept()
        tokens[0] = tokens[0] + draft.token[draft.shape.trees[0][1:][[*accepted]] - 2].tolist()
        pending = [random_tokens(1), random_tokens(2)]
    for sequence in sequences:
        sequence.close()
    return worst


@torch.inference_mode()
def _rotation_error(model: Any) -> float:
    """Return how much the rotations of near positions change when the largest position joins the batch."""
    errors = [0.0]
    near = torch.arange(4, device=model.device)[None]
    both = torch.cat([near, torch.tensor([[model_context(model.config) - 1]], device=model.device)], dim=1)
    for module in model.modules():
        if hasattr(module, "inv_freq") and "position_ids" in signature(module.forward).parameters:
            like = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
            alone, joined = module(like, position_ids=near), module(like, position_ids=both)
            for a, b in zip(alone, joined, strict=True):
                errors.append(float((a - b[:, :4]).abs().max()))
    return _largest(errors)


@torch.inference_mode()
def _plain_forward(model: Any, tokens: list[int], rows: int) -> Tensor:  # [rows, V]
    """Return the logits of the last rows of a plain forward, with transformers' own attention."""
    ours = model.config._attn_implementation
    if ours == SPANS:
        model.set_attn_implementation("sdpa")
    logits: Tensor = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -rows:]
    if ours == SPANS:
        model.set_attn_implementation(SPANS)
    return logits


def _compare(plain: Plain, tokens: Sequence[list[int]], draft: Draft, logits: Tensor) -> float:
    """Return the largest error of any row against plain forwards over paths."""
    errors = []
    for leaf in (row for row in range(draft.shape.rows) if not len(draft.shape.children[row])):
        nodes = [int(node) for node in draft.shape.path(leaf)]
        path = [int(draft.token[node - draft.shape.roots]) for node in nodes]
        root = int(draft.shape.root[leaf])
        expected = plain(tokens[root] + path, len(path) + 1).double()
        for row, one in zip([root, *nodes], expected, strict=True):
            errors.append(float((logits[row].double() - one).abs().max() / one.std()))
    return _largest(errors)


def _largest(errors: Sequence[float]) -> float:
    """Return the largest error; infinity where one of them is NaN."""
    largest = float(np.max(errors))
    return largest if np.isfinite(largest) else float("inf")
