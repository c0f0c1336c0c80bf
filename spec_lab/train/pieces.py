"""Sums over many rows that are computed in pieces, so that the logits of all rows are never in memory together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

CHUNK = 2**24
"""Maximum number of logits that are computed at a time."""
CACHED = 2**22
"""The same on a CPU, whose caches hold them, but for at least ``LEAST`` rows."""
LEAST = 64
"""Fewer rows at a time would read an LM head more often than they use it."""


UNCOUNTED = torch.Tensor.detach, lambda kept: kept
"""Hooks of saved tensors instead of those around them. A result that a node saves must be detached: otherwise node and
result hold each other, and stay in memory where the loss does not depend on them."""


def rows_at_once(width: int, device: torch.device) -> int:
    """Return how many rows of logits of this width are computed at a time."""
    whole = max(1, CHUNK // width)
    return min(whole, max(LEAST, CACHED // width)) if device.type == "cpu" else whole


R = TypeVar("R", bound=tuple[Tensor, ...])
"""Results about rows: a named tuple of tensors ``[n, ..]``."""


def again(run: Callable[..., R], *arguments: Tensor) -> R:
    """Call a function; what it computes is not kept, but computed again for the gradients."""
    if not torch.is_grad_enabled():
        return run(*arguments)
    kept = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast(R, kept)


def joined(pieces: Sequence[R]) -> R:
    """The rows of several pieces."""
    kind: Any = type(pieces[0])
    return pieces[0] if len(pieces) == 1 else cast(R, kind(*map(torch.cat, zip(*pieces, strict=True))))


def summed(
    run: Callable[..., tuple[Tensor, R]],
    states: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor]],
    parameters: Sequence[Tensor],
    size: int,
) -> tuple[Tensor, list[R]]:
    """Sum a loss over the pieces of several tensors, and compute its gradients piece by piece as well.

    Unlike with ``again`` nothing is computed twice; but the weight of each row in the loss must be known beforehand.

    Args:
        run: called with the number of a tensor, some of its rows, and the same rows of what belongs to it; returns
            their share of the sum, and what is known of the rows.
        states: tensors ``[n, ..]`` whose gradients are computed.
        rows: what belongs to each of them, ``[n, ..]``, without gradients.
        parameters: that ``run`` uses and whose gradients are computed; it may use fewer.
        size: rows of a piece.

    Returns:
        The sum, and what is known of the rows of each tensor, without gradients.
    """
    every: list[list[R]] = [[] for _ in states]

    def pieces(number: int, tensor: Tensor) -> list[tuple[Tensor, ...]]:
        return list(zip(*(part.split(size) for part in (tensor, *rows[number])), strict=True))

    def compute(number: int, piece: Sequence[Tensor]) -> Tensor:
        loss, known = run(number, *piece)
        every[number].append(type(known)(*(part.detach() for part in known)))
        return loss

    if not torch.is_grad_enabled():
        states, parameters = [tensor.detach() for tensor in states], ()
    total = cast(Tensor, _Summed.apply(compute, pieces, len(states), *states, *parameters))
    return total, [joined(known) for known in every]


class _Summed(torch.autograd.Function):
    """See ``summed``. The gradients of the parameters are no saved tensors: they are due in any case."""

    @staticmethod
    def forward(ctx: Any, compute: Any, pieces: Any, count: int, *tensors: Tensor) -> Tensor:
        needed = [number for number, tensor in enumerate(tensors) if ctx.needs_input_grad[3 + number]]
        weights = [tensors[number] for number in needed if number >= count]
        total, d_states = 0.0, list[Tensor]()
        d_weights: list[Tensor | None] = [None] * len(weights)
        for number, tensor in enumerate(tensors[:count]):
            learned, of_pieces = int(number in needed), list[Tensor]()
            for x, *rest in pieces(number, tensor):
                x = x.detach().requires_grad_(bool(learned))
                with torch.set_grad_enabled(bool(needed)), saved_tensors_hooks(*UNCOUNTED):
                    loss = compute(number, (x, *rest))
                total = total + loss.detach()
                if not needed:
                    continue
                gradients = torch.autograd.grad(loss, [x, *weights][1 - learned :], allow_unused=True)
                of_pieces += [torch.zeros_like(x) if d is None else d for d in gradients[:learned]]
                for index, d in enumerate(gradients[learned:]):
                    if d is not None:
                        before = d_weights[index]
                        d_weights[index] = d.clone() if before is None else before.add_(d)
            if learned:
                d_states.append(torch.cat(of_pieces))
        ctx.needed, ctx.weights, ctx.count = needed, d_weights, len(tensors)
        ctx.save_for_backward(*d_states)
        return cast(Tensor, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given: list[Tensor | None] = [None] * ctx.count
        for number, d in zip(ctx.needed, (*ctx.saved_tensors, *ctx.weights), strict=True):
            given[number] = None if d is None else d * gradient.to(d.dtype)
        return None, None, None, *given
