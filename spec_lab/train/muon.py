"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) with its matrix products in a given data type.

``torch.optim.Muon`` computes them in bfloat16, which takes some 20 times as long on CPUs without instructions for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.775, 2.0315
STEPS = 4


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's correction, orthogonalised; the rate is that of AdamW (``match_rms_adamw`` of torch).

    Args:
        weight_decay: decoupled.
        products: data type of the matrix products.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        weight_decay: float,
        momentum: float = 0.95,
        products: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(matrices, {"lr": 1e-3, "weight_decay": weight_decay, "momentum": momentum})
        self.products = products

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                kept = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(matrix.grad.lerp(kept, momentum), self.products)
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor, products: torch.dtype = torch.float32) -> Tensor:
    """Return a matrix with the same singular vectors and singular values of about 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = (x / x.norm().clamp_min(1e-7)).to(products)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrix.dtype)
    return x if wide else x.T
