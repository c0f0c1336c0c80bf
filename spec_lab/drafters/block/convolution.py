"""The convolutions of DFlash2: rows of a block read the rows just before them, around attention and around the MLP.

Source: DFlash2 (inco.ai/blog/dflash2, 2026). Letters: B blocks of b rows, H hidden size, k taps, g channels of a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class GroupedDynamicConvolution(nn.Module):
    """Convolves the input and the output of a sublayer with kernels that depend on its input.

    Row i of a block becomes ``sum_t kernel_i[t] * x_{i-t}`` over taps t < k, in each channel, where rows before the
    block are zero. ``kernel_i = base + delta_i``, and the delta, a projection of the input, is the same for g channels.

    Args:
        hidden_size: H.
        taps: k.
        group_size: g, which divides H.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size, device="meta"))
        rows = 2 * taps * (hidden_size // group_size)
        self.kernel_projection = nn.Linear(hidden_size, rows, bias=False, device="meta")

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The normed input ``[B, b, H]`` of a sublayer ``[B, b, H] -> [B, b, H]`` -> its output, both convolved."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group_size, -1)
        before, after = (self.base_kernel + delta).unbind(2)  # [B, b, k, H] each
        return self._convolve(sublayer(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        shifted = [pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(self.taps)]
        return (torch.stack(shifted, 2) * kernel).sum(2)
