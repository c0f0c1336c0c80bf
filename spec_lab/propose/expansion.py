"""Interface between a growing forest and the drafter: logits at its roots, and at further rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.probabilities import probs_dtype
from spec_lab.core.shape import Shape


class Computed(Protocol):
    """Logits at some rows of a forest: what a forward of a draft model returns, ``RowLogits`` or ``DraftedLogits``."""

    @property
    def logits(self) -> Tensor:
        """``[n, V]``, never written to."""
        ...

    @property
    def array(self) -> np.ndarray | None:
        """The same memory on the host, float32 or float64; None where there is no such view."""
        ...


class RowLogits(NamedTuple):
    """Logits ``[n, V]``, and the same memory as an array on the host or None. See ``Computed``."""

    logits: Tensor
    array: np.ndarray | None = None

    @staticmethod
    def of(logits: Tensor) -> RowLogits:
        """Logits with a view of them on the host where NumPy can have one."""
        on_host = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64)
        return RowLogits(logits, logits.numpy() if on_host else None)


@dataclass(eq=False)
class DraftedLogits:
    """Logits of a drafter that drafts some of the target's tokens; those of all others are -inf. See ``Computed``.

    Args:
        drafted: ``[n, W]``.
        ids: ``[W]`` the tokens.
        vocabulary: V.
    """

    drafted: Tensor
    ids: Tensor
    vocabulary: int
    array = None

    @cached_property
    def logits(self) -> Tensor:
        """See ``Computed``. Likeliest tokens are drawn without them on the host (``columns_on_host``)."""
        return over_all_tokens(self.drafted, self.ids, self.vocabulary)


def over_all_tokens(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Logits ``[n, W]`` of the tokens ``ids`` ``[W]`` -> ``[n, V]``, -inf of all others."""
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    return whole.index_copy_(1, ids, logits)


def columns_on_host(computed: Computed, width: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return logits that are on the CPU as an array, and the tokens that its columns stand for.

    Args:
        computed: the logits.
        width: how many columns are needed at least.

    Returns:
        ``[n, W]`` float32 or float64, and ``[W]`` tokens; None for all V, in order.
    """
    if isinstance(computed, DraftedLogits) and len(computed.ids) >= width:
        return _array(computed.drafted), computed.ids.numpy()
    return _array(computed.logits) if computed.array is None else computed.array, None


def _array(logits: Tensor) -> np.ndarray:
    return logits.to(probs_dtype(logits.dtype)).numpy()


Expand = Callable[[Shape, np.ndarray, np.ndarray], Computed]
"""Computes ``rows`` ``[n]`` of a forest (a Shape), nodes whose tokens are ``token`` ``[n]``: logits ``[n, V]`` below.

Their ancestors are computed: the parents are rows ``shape.parent[rows - shape.roots]``. The forest may have grown since
the last call, and may hold nodes that are never computed.
"""
