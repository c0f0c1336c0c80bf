"""Which models this engine decodes correctly: refusals by name, and the self-check of every model that is loaded.

The self-check decodes a scattered forest of two draft trees and compares its logits with those of plain forwards over
every path. A model whose logits differ is refused with the measured error. Windows and chunks are shortened meanwhile
(``shortened``), so that a few tokens reach beyond them. Kinds of models that are known to fail are refused by name
before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Shape, empty
from spec_lab.core.own_attention import own_attention
from spec_lab.core.process_cache import ProcessCache
from spec_lab.engine.attention import RECURRENT, SPANS, WITHOUT_ATTENTION, Attention, layer_kinds, recurrent_layers
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.runner import Runner
from spec_lab.models.quantized import recorded

LOG = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest error of a logit that the self-check allows, in standard deviations of the plain forward's logits.

In float64 too some models compute norms, rotations or softmax in float32.
"""

ROUNDED = 0.25
"""That of models whose layers round activations, or compute in another data type than the model's: LLM.int8() and other
quantized activations, bitsandbytes' and gptqmodel's kernels. A difference of rounding in the last bit can move an
activation to the next of its 256 values."""

ROUNDING = {torch.float32: 0.0, torch.float16: 0.01, torch.bfloat16: 0.03, torch.float8_e4m3fn: 0.25}
"""The same where keys and values are rounded to a dtype: two that differ by rounding may be rounded apart."""

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


Plain = Callable[[list[int], int], Tensor]
"""Returns the logits ``[n, V]`` of the last n tokens of a text, computed without drafts."""


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


def tolerance(model: Any, kv_dtype: torch.dtype | None = None) -> float:
    """Return the largest error that the self-check allows of a model, by its data type and quantization.

    Args:
        model: the model.
        kv_dtype: in which keys and values are stored; None for the model's.
    """
    facts = recorded(model)
    allowed = max(TOLERANCE[model.dtype], 0.0 if kv_dtype is None else ROUNDING[kv_dtype])
    if is_recurrent(model.config):  # recurrent layers compute in float32 in any dtype
        allowed = max(allowed, TOLERANCE[torch.float32])
    return max(allowed, ROUNDED) if facts is not None and facts["rounds"] else allowed


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


FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What a model's code raises where it does not fit the engine."""


def self_check(model: Any, attention: Attention, fixed: bool = False, kv_dtype: torch.dtype | None = None) -> float:
    """Decode a scattered forest of two draft trees and compare it with plain forwards over every path.

    Also check of every rotary embedding that a token's rotation does not change when a far position joins the batch,
    and of layers with windows that they ask for the windows that their config names. With a ``kv_dtype``, decode a
    second time with keys and values in it, and compare with plain forwards in which they are rounded.

    Returns:
        The largest error of a logit, in standard deviations of the plain logits.

    Raises:
        Unsupported: the error exceeds the ``tolerance`` of the model, or the model raises an error. The message
            advises another setting only where that one passes the check.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    try:
        error = _measured(model, attention, fixed)
    except Unsupported:
        raise
    except FAILURES as failure:
        _refuse_failing_model(model, kind)
        raise Unsupported(
            f"model type '{kind}' cannot decode forests with attention='{attention}' "
            f"({type(failure).__name__}: {failure}){_advice(model, attention, fixed)}"
        ) from failure
    if not _allowed(model, error):
        raise Unsupported(
            f"model type '{kind}' decodes forests wrongly with attention='{attention}': its logits differ from a plain "
            f"forward's by {error:.2g} standard deviations, allowed are {tolerance(model):g} in "
            f"{model.dtype}{_quantized(model)}{_advice(model, attention, fixed)}"
        )
    return error if kv_dtype is None else max(error, _rounded_check(model, attention, fixed, kv_dtype))


def _measured(model: Any, attention: Attention, fixed: bool) -> float:
    """``self_check`` without its bound; errors of the model's code are not caught."""
    parallel = (getattr(model, "tp_size", None) or 1) > 1
    if layer_kinds(model.config) and not parallel:
        lm = CausalLM(model, attention)
        one = lm.open()
        lm.forward([one], [[0]], empty(1, lm.device))  # windows that differ from the config's raise
        one.close()
    with shortened(model, None if parallel else SHORT):
        lm = CausalLM(model, attention, fixed=fixed)
        return max(forest_error(lm, partial(_plain_forward, model)), _rotation_error(model))


def _rounded_check(model: Any, attention: Attention, fixed: bool, kv_dtype: torch.dtype) -> float:
    """``self_check`` with keys and values in another data type.

    Raises:
        Unsupported: as of ``self_check``.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    try:
        with shortened(model, SHORT):
            lm = CausalLM(model, attention, fixed=fixed, kv_dtype=kv_dtype)
            error = 0.0 if lm.kv_dtype is None else forest_error(lm, lm.plain_logits)
    except FAILURES as failure:
        raise Unsupported(
            f"model type '{kind}' cannot decode forests with keys and values in {kv_dtype} "
            f"({type(failure).__name__}: {failure}); set target.kv_dtype=null"
        ) from failure
    allowed = tolerance(model, kv_dtype)
    if not error <= allowed:
        raise Unsupported(
            f"model type '{kind}' decodes forests wrongly with keys and values in {kv_dtype}: its logits differ from "
            f"those of a plain forward with the same rounding by {error:.2g} standard deviations, allowed are "
            f"{allowed:g}; set target.kv_dtype=null"
        )
    return error


def _allowed(model: Any, error: float) -> bool:
    return error <= tolerance(model)


def _refuse_failing_model(model: Any, kind: str) -> None:
    """Refuse a model that transformers itself cannot compute.

    Raises:
        Unsupported: its plain forward fails.
    """
    try:
        _plain_forward(model, [0], 1)
    except FAILURES as failure:
        where, cure = "", ""
        if model.dtype == torch.float64:  # transformers' experts, say, have no float64
            try:
                _plain_forward(deepcopy(model).float(), [0], 1)
                where, cure = " in float64", "; set target.dtype=float32, which works"
            except FAILURES:
                pass
        raise Unsupported(
            f"model type '{kind}' is not supported{where}: a plain forward by transformers' own code fails "
            f"({type(failure).__name__}: {failure}){cure}"
        ) from failure


def _advice(model: Any, attention: Attention, fixed: bool) -> str:
    """Return which other setting passes the check; empty if none does."""
    parallel = (getattr(model, "tp_size", None) or 1) > 1
    others: list[tuple[str, Attention]] = [("target.graphs=false", attention)] if fixed else []
    if attention == "spans" and not parallel:
        others.append(("target.attention=dense" + " and target.graphs=false" * fixed, "dense"))
    for name, other in others:
        try:
            if _allowed(model, _measured(model, other, False)):
                return f"; set {name}, which works"
        except (Unsupported, *FAILURES):
            continue
    return ""


SHORT = 4
"""Positions of a window or chunk in the self-check."""
SIZES = ("sliding_window", "attention_chunk_size", "floor_scale")
"""What attention of transformers calls sizes in positions. Llama 4 scales queries by position // ``floor_scale``."""


@contextmanager
def shortened(model: Any, most: int | None) -> Iterator[None]:
    """Within the block no window or chunk of a model exceeds ``most`` positions; None leaves all as they are.

    The engine and transformers read the same sizes, so that the text of the self-check, which is shorter than most
    windows, tests both sides' masks, conventions and layer types. Masks are functions of positions only.
    """
    owners = [*model.modules(), *(vars(module).get("config") for module in model.modules()), model.config]
    before = {
        (id(owner), name): (owner, size)
        for owner in owners for name in SIZES
        if isinstance(size := getattr(owner, name, None), int) and not isinstance(size, bool) and size > (most or size)
    }  # fmt: skip
    try:
        for (_, name), (owner, _) in before.items():
            setattr(owner, name, most)
        yield
    finally:
        for (_, name), (owner, size) in before.items():
            setattr(owner, name, size)


def _quantized(model: Any) -> str:
    """How a model is quantized, for messages."""
    facts = recorded(model)
    return "" if facts is None else f" with quantization {facts['method']}"


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
    packed = any(one.is_mkldnn for one in model.parameters())
    setting = (
        sha256, model.config.to_json_string(), str(model.dtype), places, attention, str(fixed), str(packed),
        str(kv_dtype),
    )  # fmt: skip
    if sha256 and setting in cache.self_checks:
        return cache.self_checks[setting]
    LOG.info("Self-check: a forest of draft trees against plain forwards")
    error = self_check(model, attention, fixed, kv_dtype)
    if sha256:
        cache.self_checks[setting] = error
    return error


TREES = (2, (0, 0, 3, 1, 5), (1, 2)), (2, (0, 0, 2, 1, 1, 6), ()), (1, (), ()), (1, (0, 0, 1), ())
CHAINS = (2, (0, 1, 2, 3, 4), ()), (2, (0, 2, 1, 3), (0, 1)), (2, (1, 0), ()), (1, (), ()), (1, (0, 1), ())
"""Forests: how many trees, the parents of their nodes, and the nodes of the first tree that are accepted."""
LONG = 24
"""Tokens before a chain, more than recurrent layers compute again after a rejection."""


@torch.inference_mode()
def forest_error(lm: Runner, plain: Plain) -> float:
    """Return the largest error of some steps whose nodes are partly rejected.

    Args:
        lm: decodes the forests, of chains if it requires them.
        plain: returns the expected logits.
    """
    generator = np.random.default_rng(0)

    def random_tokens(count: int) -> list[int]:
        return generator.integers(0, lm.vocabulary, count).tolist()

    chains = lm.capabilities.rollback is not None
    pending, worst = [random_tokens(LONG if chains else 7), random_tokens(4)], 0.0
    opened = [lm.open() for _ in pending]
    sequences, tokens = opened, [list[int]() for _ in pending]
    # The rejected nodes leave holes in the KV cache, so the cells of the second forest are scattered.
    # Then one sequence alone is decoded, without a draft and with one: fewer rows get logits, in other ways.
    for trees, parents, accepted in CHAINS if chains else TREES:
        sequences, tokens, pending = sequences[:trees], tokens[:trees], pending[:trees]
        draft = Draft(
            Shape(trees, np.array(parents, dtype=np.int64)),
            torch.tensor(random_tokens(len(parents)), dtype=torch.int64, device=lm.device),
        )
        output = lm.run(lm.prepare(sequences, pending, draft))
        tokens = [done + more for done, more in zip(tokens, pending, strict=True)]
        worst = max(worst, _compare(plain, tokens, draft, output.logits.clone()))
        for sequence, nodes in zip(sequences, (accepted, ()), strict=False):
            sequence.accept(nodes)
        tokens[0] = tokens[0] + draft.token[draft.shape.trees[0][1:][[*accepted]] - trees].tolist()
        pending = [random_tokens(1), random_tokens(2)]
    for sequence in opened:
        sequence.close()
    return worst


@torch.inference_mode()
def _rotation_error(model: Any) -> float:
    """Return how much the rotations of near positions change when the largest position joins the batch."""
    errors = [0.0]
    near = torch.arange(4, device=model.device)[None]
    both = torch.cat([near, torch.tensor([[model_context(model.config) - 1]], device=model.device)], dim=1)
    for module in model.modules():
        buffers = [name for name, _ in module.named_buffers(recurse=False)]
        types = [name.removesuffix("_inv_freq") for name in buffers if name.endswith("_inv_freq")]
        types = [one for one in types if not one.endswith("original")]  # Gemma 3 has several
        if not (types or hasattr(module, "inv_freq")) or "position_ids" not in signature(module.forward).parameters:
            continue
        like = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
        for own in [{"layer_type": one} for one in types] or [dict[str, str]()]:
            alone, joined = (_rotations(module(like, position_ids=one, **own)) for one in (near, both))
            errors += [float((a - b[:, :4]).abs().max()) for a, b in zip(alone, joined, strict=True)]
    return _largest(errors)


def _rotations(output: Any) -> Sequence[Tensor]:
    """What a rotary embedding returns: cosines and sines, or both as one complex tensor (Llama 4, DeepSeek-V2)."""
    return [output] if isinstance(output, Tensor) else output


@torch.inference_mode()
def _plain_forward(model: Any, tokens: list[int], rows: int) -> Tensor:  # [rows, V]
    """Return the logits of the last rows of a plain forward, with transformers' own attention."""
    ours = use_own_attention(model)
    logits: Tensor = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -rows:]
    if ours:
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
