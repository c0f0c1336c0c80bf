"""Decoder layers in fewer kernels, for GPUs and fixed shapes: merged linear layers, norms, and rotary attention.

A forward of few rows takes as long as its kernels, or as their launches where it is not captured, and most of them read
next to nothing: a Llama's layer with merged linear layers has 37 operators in transformers' code, of which four read
matrices. Here it has 16. A module is changed only if the replacement computes the same on random inputs, up to
rounding: families that do something else stay as they are. The self-check compares with plain forwards of the modules
as they were (``unfused``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from spec_lab.core.cache_argument import cache_argument
from spec_lab.models.merged import MergedLinear, merge
from spec_lab.models.support import FAILURES
from spec_lab.runners.attention import AttentionKind, CellCache, Pack, cell_attention, spans
from spec_lab.runners.graphs import FixedPack
from spec_lab.runners.softmax import Softmax

LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}
"""Names that transformers gives to the parts of rotary attention; norms over a head are optional."""
PROBED = 3
"""Rows of the inputs on which replacements are compared."""
LARGE = 256.0
"""The largest number of queries, keys and values in the second comparison: some families clamp them (OLMo at 8)."""


def fuse(model: Any) -> int:
    """Replace what can be computed in fewer kernels, in place, linear layers included (``merged``).

    Args:
        model: of transformers, on its device and in its dtype.

    Returns:
        How many modules were changed.
    """
    changed = merge(model)
    for module in model.modules():
        if epsilon := epsilon_of(module):
            setattr(module, "forward", partial(_norm, module, epsilon))  # noqa: B010 (mypy: a method is assigned)
            changed += 1
    if not _candidates(model) or not getattr(model, "_can_set_attn_implementation", lambda: True)():
        return changed
    before = model.config._attn_implementation
    model.set_attn_implementation(spans())
    try:
        return changed + fuse_attention(model)
    finally:
        model.set_attn_implementation(before)


def fuse_attention(model: nn.Module) -> int:
    """Replace attention whose linear layers are merged, and which is ``attention.SPANS``; return how many changed."""
    changed = 0
    for module in _candidates(model):
        attention = FusedAttention.of(module)
        if attention is None:
            continue
        if attention.is_right():
            module.forward = attention
            changed += 1
        elif attention.epsilon is not None:
            del module.query_key_weight
    return changed


def _candidates(model: nn.Module) -> list[Any]:
    return [
        module for module in model.modules()
        if isinstance(getattr(module, "q_proj", None), MergedLinear) and "forward" not in vars(module)
    ]  # fmt: skip


def fused_modules(model: Any) -> dict[Any, Any]:
    """Return the modules whose forwards are replaced, with these; linear layers that are merged are not among them."""
    forwards = {module: vars(module).get("forward") for module in model.modules()}
    return {
        module: forward for module, forward in forwards.items()
        if isinstance(forward, FusedAttention) or (isinstance(forward, partial) and forward.func is _norm)
    }  # fmt: skip


def unfuse(model: Any) -> int:
    """Let a model's modules compute as transformers' own do; linear layers stay merged. Return how many changed."""
    modules = fused_modules(model)
    for module in modules:
        del module.forward
    return len(modules)


@contextmanager
def unfused(model: Any) -> Iterator[None]:
    """Within the block a model's modules compute as transformers' own do; linear layers stay merged."""
    modules = fused_modules(model)
    unfuse(model)
    try:
        yield
    finally:
        for module, forward in modules.items():
            module.forward = forward


def on_one_gpu(model: Any) -> bool:
    """Return whether all of a model is on one GPU: there fewer launches are faster in every forward."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    whole = len(devices) <= 1 and (getattr(model, "tp_size", None) or 1) == 1
    return model.device.type == "cuda" and whole


# Norms ----------------------------------------------------------------------------------------------------------------


def epsilon_of(module: nn.Module) -> float | None:
    """Return the epsilon of a norm that torch's ``rms_norm`` computes, compared on random rows; None of others.

    Some families add one to the weight. transformers computes norms in float32 whatever the dtype, which those of a
    model in float64 differ by.
    """
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if epsilon is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or "forward" in vars(module):
        return None
    if len(signature(module.forward).parameters) != 1:  # such as a gate
        return None
    rows = _random(weight, PROBED, len(weight))
    rows[1] *= epsilon**0.5  # a row of which the epsilon is a large part
    try:
        with torch.inference_mode():
            return epsilon if _equal(module(rows), rms_norm(rows, weight.shape, weight, epsilon)) else None
    except FAILURES:  # a norm of another kind
        return None


def _norm(module: Any, epsilon: float, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight.shape, module.weight, epsilon)


def _random(like: Tensor, *shape: int) -> Tensor:
    """Normal random numbers, the same in every call."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(like.device, like.dtype)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether norms are equal up to the last two roundings; in float32 those of the mean are seen as well."""
    rounding = (16 if one.dtype == torch.float32 else 2) * torch.finfo(one.dtype).eps
    return one.shape == other.shape and torch.allclose(one, other, rtol=rounding, atol=rounding * 1e-3)


# Attention ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FusedAttention:
    """The forward of an attention module with rotary embedding: queries and keys are normed and rotated together.

    Args:
        module: the attention module of transformers, its projections merged into one layer.
        heads: number of query heads.
        shared: number of key-value heads.
        epsilon: epsilon of the norms over each head of queries and keys; None without them. The weights of the norms
            are a buffer of the module, ``[heads + shared, dim]``.
    """

    module: Any
    heads: int
    shared: int
    epsilon: float | None

    @staticmethod
    def of(module: Any) -> FusedAttention | None:
        """The replacement of a module; None where its parts are others."""
        children, epsilon = dict(module.named_children()), None
        if children.keys() - NORMS != LAYERS or not all(hasattr(module, name) for name in ("head_dim", "scaling")):
            return None
        counts = [size // module.head_dim for size in module.q_proj.sizes]
        if [count * module.head_dim for count in counts] != module.q_proj.sizes or counts[1] != counts[2]:
            return None
        if norms := children.keys() & NORMS:
            both = [getattr(children[name], "forward", None) for name in sorted(NORMS & norms)]
            epsilons = {forward.args[1] for forward in both if isinstance(forward, partial) and forward.func is _norm}
            weights = [children[name].weight for name in sorted(norms, reverse=True)]
            if norms != NORMS or len(epsilons) != 1 or {weight.shape for weight in weights} != {(module.head_dim,)}:
                return None
            epsilon = epsilons.pop()
            rows = [weight.detach().expand(count, -1) for weight, count in zip(weights, counts, strict=False)]
            module.register_buffer("query_key_weight", torch.cat(rows), persistent=False)
        return FusedAttention(module, counts[0], counts[1], epsilon)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Compute a forward over cells; others are those of the module's class."""
        pack, rotation = named.get(cache_argument(self.module)), named.get("position_embeddings")
        if isinstance(pack, Pack | FixedPack) and not pack.dense and rotation is not None and not given:
            cos, sin = rotation
            if cos.shape[-1] == self.module.head_dim and "hidden_states" in named:
                factors = pack.once(sin, lambda: turning(cos, sin, pack.streams))
                return self.attend(named["hidden_states"], factors, pack), None
        return type(self.module).forward(self.module, *given, **named)

    def attend(self, hidden: Tensor, factors: tuple[Tensor, Tensor], pack: CellCache) -> Tensor:
        """Attention of rows ``[1, N, H] -> [1, N, H]``.

        Args:
            hidden: the rows, n of each of S streams.
            factors: as ``turning`` returns them.
        """
        cos, sin = factors
        module, dim, rotated = self.module, self.module.head_dim, self.heads + self.shared
        streams, rows = cos.shape[:2]
        joint = module.q_proj.joint(hidden).view(streams, rows, rotated + self.shared, dim)
        x = joint  # all heads, since a part of them would be copied
        if self.epsilon is not None:
            x = rms_norm(joint, (dim,), None, self.epsilon)[:, :, :rotated] * module.query_key_weight
        swapped = x.roll(dim // 2, -1)[:, :, :rotated]
        products = x[:, :, :rotated] * cos
        turned = products.new_empty(streams, rotated, rows, dim)  # in the order in which attention reads it
        torch.addcmul(products, swapped, sin, out=turned.transpose(1, 2))
        query, key = turned.split([self.heads, self.shared], 1)
        layer, _ = pack.update(key, joint[:, :, rotated:].transpose(1, 2), module.layer_idx)
        attended, _ = cell_attention(module, query, layer, layer, None, module.scaling)
        return module.o_proj(attended.reshape(1, streams * rows, -1))

    @torch.inference_mode()
    def is_right(self) -> bool:
        """Whether the module's own forward writes the same into cells, queries the same and returns the same."""
        hidden = _random(self.module.o_proj.weight, 1, PROBED, self.module.q_proj.joint.in_features)
        largest = self.module.q_proj.joint(hidden).abs().max()
        return self._is_right(hidden) and self._is_right(hidden * (LARGE / largest))

    def _is_right(self, hidden: Tensor) -> bool:
        module = self.module
        angles = _random(hidden, 1, PROBED, module.head_dim // 2).repeat(1, 1, 2)
        rotation, probes = (angles.cos(), angles.sin()), (Probe(module), Probe(module))
        try:
            theirs = type(module).forward(
                module, hidden_states=hidden, position_embeddings=rotation, attention_mask=None,
                **{cache_argument(module): probes[0]},
            )  # fmt: skip
            ours = self.attend(hidden, turning(*rotation, 1), probes[1])
        except FAILURES:  # its forward is of another kind
            return False
        tensors = zip((*probes[0].seen, theirs[0]), (*probes[1].seen, ours), strict=True)
        return len(theirs) == 2 and all(_close(their_tensor, our_tensor) for their_tensor, our_tensor in tensors)


def turning(cos: Tensor, sin: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """Return factors ``[S, n, 1, dim]`` of a head and of its halves in the other order, whose sum is the rotated head.

    Args:
        cos, sin: ``[1, N, dim]`` of the angles, as transformers' rotary embeddings return them.
        streams: S.
    """
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    shape = (streams, -1, 1, 2 * half)
    return cos.reshape(shape), signed.reshape(shape)


class Probe(CellCache):
    """Keeps what a module writes and reads in place of cells; attention returns the queries.

    Attributes:
        seen: keys, values and queries.
    """

    def __init__(self, module: Any) -> None:
        self.kind = AttentionKind(getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)))
        self.layer_idx, self.scaling = module.layer_idx, module.scaling
        self.seen: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """See ``attention.CellCache``."""
        if layer_idx != self.layer_idx:
            raise ValueError(f"layer {layer_idx}")
        self.seen += [key, value]
        return self, self

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """See ``attention.ReadsCells``."""
        if softmax != Softmax(self.scaling):
            raise ValueError(f"{softmax}")
        self.seen.append(query)
        return query.transpose(1, 2)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether sums of products are equal up to rounding, relative to the largest number."""
    rounding = 4 * torch.finfo(one.dtype).eps
    return one.shape == other.shape and float((one - other).abs().max()) <= rounding * float(one.abs().max())
