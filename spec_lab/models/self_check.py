"""The self-check of every model that is loaded: forests of draft trees against plain forwards over every path.

Windows and chunks are shortened meanwhile (``shortened``), so that a few tokens reach beyond them. ``plain_forwards``
says by how much logits may differ.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from math import inf
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.draft import empty
from spec_lab.core.process_cache import ProcessCache
from spec_lab.models.forests import Checked, Rows, decode_forests
from spec_lab.models.fused import fused_modules
from spec_lab.models.plain_forwards import EXACT, Mismatch, PlainForwards, plain_forward
from spec_lab.models.support import FAILURES, Unsupported, model_context
from spec_lab.runners.attention import Attention, layer_kinds
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.runner import Runner

LOG = logging.getLogger(__name__)

SHORT = 4
"""Positions of a window or chunk in the self-check."""
SIZES = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Attributes of transformers' attention that are sizes in positions. (Llama 4 scales by position // floor_scale.)"""


class MaybePacking(Unsupported):
    """A refusal for which the packed layers of a model may be the reason (``models.packed``)."""


def self_check(model: Any, attention: Attention, fixed: bool = False, kv_dtype: torch.dtype | None = None) -> Checked:
    """Decode a scattered forest of two draft trees and compare it with plain forwards over every path.

    Also check of every rotary embedding that a token's rotation does not change when a far position joins the batch,
    and of layers with windows that they ask for the windows that their config names.

    Returns:
        The error of the logits and the largest that is allowed: of the largest difference of a model in float32 or
        float64, of the root mean square otherwise.

    Raises:
        Unsupported: the error is larger, or the model raises an error (``MaybePacking`` if it may pass with unpacked
            layers). The message advises another setting only where that one passes the check.
    """
    kind = getattr(model.config, "model_type", type(model).__name__)
    kv_dtype = None if kv_dtype == model.dtype else kv_dtype
    _refuse_failing_model(model, kind)
    comparison = PlainForwards.of(model)
    try:
        checked = _check(model, comparison, attention, fixed, kv_dtype)
    except Mismatch as wrong:
        what = "cannot be checked" if wrong.plain else f"decodes forests wrongly with attention='{attention}'"
        cure = f"; set target.dtype={wrong.works}, which works" if wrong.works else ""
        if not (cure or wrong.plain):
            cure = _advice(model, comparison, attention, fixed, kv_dtype)
        refusal = MaybePacking if wrong.packed else Unsupported
        raise refusal(f"model type '{kind}' {what}{wrong}{cure}") from None
    except FAILURES as failure:
        raise MaybePacking(
            f"model type '{kind}' cannot decode forests with attention='{attention}' "
            f"({type(failure).__name__}: {failure}){_advice(model, comparison, attention, fixed, kv_dtype)}"
        ) from failure
    return checked


def _check(
    model: Any, comparison: PlainForwards, attention: Attention, fixed: bool, kv_dtype: torch.dtype | None
) -> Checked:
    """``self_check`` without its messages; errors of the model's code are not caught.

    Raises:
        Mismatch: as in ``PlainForwards.check``.
    """
    parallel = (getattr(model, "tp_size", None) or 1) > 1
    if layer_kinds(model.config) and not parallel:
        lm = CausalLM(model, attention)
        sequence = lm.open()
        lm.forward([sequence], [[0]], empty(1, lm.device))  # windows that differ from the config's raise
        sequence.close()
    if (change := _rotation_error(model)) > EXACT[torch.float32]:
        raise Mismatch(
            f": rotations of near positions change by {change:.2g} when a far position joins the batch", packed=False
        )

    def runner(computed: Any, stored: torch.dtype | None) -> CausalLM:
        return CausalLM(computed, attention, fixed=fixed, kv_dtype=stored)

    def decode(lm: Runner) -> list[Rows]:
        """Fixed shapes are captured with the first tokens, and replayed with others."""
        return [row for seed in range(1 + fixed) for row in decode_forests(lm, seed)]

    max_positions = None if parallel else SHORT
    with shortened(comparison.model, max_positions), shortened(comparison.exact, max_positions):
        return comparison.check(runner, decode, kv_dtype)


def _refuse_failing_model(model: Any, kind: str) -> None:
    """Refuse a model that transformers itself cannot compute."""
    try:
        plain_forward(model, [[0]])
    except FAILURES as failure:
        where, cure = "", ""
        if model.dtype == torch.float64:  # transformers' experts, say, have no float64
            try:
                plain_forward(deepcopy(model).float(), [[0]])
                where, cure = " in float64", "; set target.dtype=float32, which works"
            except FAILURES:
                pass
        raise MaybePacking(
            f"model type '{kind}' is not supported{where}: a plain forward by transformers' own code fails "
            f"({type(failure).__name__}: {failure}){cure}"
        ) from failure


def _advice(
    model: Any, comparison: PlainForwards, attention: Attention, fixed: bool, kv_dtype: torch.dtype | None
) -> str:
    """Return which other setting passes the check; empty if none does."""
    parallel = (getattr(model, "tp_size", None) or 1) > 1
    others: list[tuple[str, Attention, bool, torch.dtype | None]] = []
    if kv_dtype is not None:
        others.append(("target.kv_dtype=null", attention, fixed, None))
    if fixed:
        others.append(("target.graphs=false", attention, False, kv_dtype))
    if attention == "per_sequence" and not parallel:
        others.append(
            ("target.attention=dense_mask" + " and target.graphs=false" * fixed, "dense_mask", False, kv_dtype)
        )
    for name, other, shapes, stored in others:
        LOG.info("The self-check failed: trying %s", name)
        try:
            _check(model, comparison, other, shapes, stored)
        except (Mismatch, *FAILURES):
            continue
        return f"; set {name}, which works"
    return ""


@contextmanager
def shortened(model: Any, max_positions: int | None) -> Iterator[None]:
    """Within the block no window or chunk of a model exceeds ``max_positions`` positions; None leaves all as they are.

    The engine and transformers read the same sizes, so that the text of the self-check, which is shorter than most
    windows, tests both sides' masks, conventions and layer types. Masks are functions of positions only.
    """
    limit = max_positions or inf
    owners = [] if model is None else [*model.modules(), model.config]
    owners += [config for owner in owners if (config := vars(owner).get("config")) is not None]
    before = {
        (id(owner), name): (owner, size)
        for owner in owners for name in SIZES
        if isinstance(size := getattr(owner, name, None), int) and not isinstance(size, bool) and size > limit
    }  # fmt: skip
    try:
        for (_, name), (owner, _) in before.items():
            setattr(owner, name, max_positions)
        yield
    finally:
        for (_, name), (owner, size) in before.items():
            setattr(owner, name, size)


def checked(
    model: Any,
    attention: Attention,
    sha256: str,
    cache: ProcessCache,
    fixed: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Checked:
    """Return ``self_check``'s result, measured once for the same weights in the same setting.

    Args:
        attention: how it computes attention.
        sha256: of its weights (``checkpoint.weights_hash``); empty where it is not known: then it is always measured.
        cache: results that were measured before; a new one is added.
        fixed: whether decoding steps run in fixed shapes.
        kv_dtype: in which keys and values are stored; None for the model's.

    Raises:
        Unsupported: as ``self_check``.
    """
    places = f"{model.device} {getattr(model, 'hf_device_map', None)} {getattr(model, 'tp_size', None)}"
    packed = any(parameter.is_mkldnn for parameter in model.parameters())
    setting = (
        sha256, model.config.to_json_string(), str(model.dtype), places, attention, str(fixed), str(packed),
        str(kv_dtype), str(bool(fused_modules(model))),
    )  # fmt: skip
    if sha256 and setting in cache.self_checks:
        return Checked(*cache.self_checks[setting])
    LOG.info("Self-check: a forest of draft trees against plain forwards")
    measured = self_check(model, attention, fixed, kv_dtype)
    gc.collect()  # modules refer to each other: the copy in float32 would stay until the next collection
    if sha256:
        cache.self_checks[setting] = measured
    return measured


@torch.inference_mode()
def _rotation_error(model: Any) -> float:
    """Return how much the rotations of near positions change when the largest position joins the batch."""
    errors = [0.0]
    near = torch.arange(4, device=model.device)[None]
    both = torch.cat([near, torch.tensor([[model_context(model.config) - 1]], device=model.device)], dim=1)
    for module in model.modules():
        buffers = [name for name, _ in module.named_buffers(recurse=False)]
        types = [name.removesuffix("_inv_freq") for name in buffers if name.endswith("_inv_freq")]
        types = [name for name in types if not name.endswith("original")]  # Gemma 3 has several
        if not (types or hasattr(module, "inv_freq")) or "position_ids" not in signature(module.forward).parameters:
            continue
        like = torch.zeros(1, 1, 1, device=model.device)
        for layer_type in [{"layer_type": name} for name in types] or [dict[str, str]()]:
            alone, joined = (
                _rotations(module(like, position_ids=positions, **layer_type)) for positions in (near, both)
            )
            errors += [float((a - b[:, :4]).abs().max()) for a, b in zip(alone, joined, strict=True)]
    return max(errors)


def _rotations(output: Any) -> Sequence[Tensor]:
    """Return the tensors of a rotary embedding: cosines and sines, or one complex one (Llama 4, DeepSeek-V2)."""
    return [output] if isinstance(output, Tensor) else output
