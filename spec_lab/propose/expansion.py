"""Interface between a growing forest and the drafter: logits at its roots, and at further rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.shape import Shape


class Computed(Protocol):
    """Logits at some rows of a forest: what a forward of a draft model returns, or ``RowLogits``."""

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


Expand = Callable[[Shape, np.ndarray, np.ndarray], Computed]
"""Computes ``rows`` ``[n]`` of a forest (a Shape), nodes whose tokens are ``token`` ``[n]``: logits ``[n, V]`` below.

Their ancestors are computed: the parents are rows ``shape.parent[rows - shape.roots]``. The forest may have grown since
the last call, and may hold nodes that are never computed.
"""
