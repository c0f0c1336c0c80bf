"""Linear layers on a CPU with weights in the layout that oneDNN's kernels read.

``torch.nn.functional.linear`` gets its weights row by row. For the few rows of a decoding step the kernels then read
memory at half the speed or less; weights that were laid out for them once take no more memory, and the same
arithmetic. It is what torch's own compiler does with frozen weights (``torch._inductor.fx_passes.mkldnn_fusion``).
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

ROWS = 8
"""Rows of an input, as a hint for the layout; it makes no measurable difference."""


class PackedLinear(nn.Module):
    """Stands in for a linear layer in inference; it has no gradients.

    Args:
        layer: its weight is copied into the other layout, its bias is shared and gets no gradients.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
        self.weight = nn.Parameter(packed, requires_grad=False)  # [out, in]; only ``to_dense`` reads its numbers
        self.bias = None if layer.bias is None else layer.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., in] -> [.., out]``.

        Raises:
            RuntimeError: the input requires a gradient.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a packed linear layer has no gradients: call the model in torch.inference_mode(), or use packed.dense"
            )
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def pack(module: nn.Module) -> int:
    """Pack the linear layers of a module in place; return how many.

    Left as they are: layers on other devices or split over ranks, of a dtype for which this CPU has no instructions,
    with hooks, and those that are not plain ``nn.Linear`` (quantised ones, say).
    """
    changed, dtypes = 0, _dtypes()
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer.weight.dtype in dtypes and _plain(layer):
                setattr(parent, name, PackedLinear(layer))
                changed += 1
    return changed


def linear_of(weight: Tensor, bias: Tensor) -> nn.Module:
    """A layer of a weight ``[out, in]`` and a bias ``[out]``, packed where that is possible."""
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = (nn.Parameter(one, requires_grad=False) for one in (weight, bias))
    return PackedLinear(made) if weight.dtype in _dtypes() and _plain(made) else made


def dense(layer: nn.Module) -> nn.Module:
    """A copy of a layer, of a packed one as a plain linear layer. It shares no weights."""
    if not isinstance(layer, PackedLinear):
        return deepcopy(layer)
    weight = layer.weight.to_dense().clone()
    made = nn.Linear(weight.shape[1], weight.shape[0], layer.bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    return made


def _dtypes() -> set[torch.dtype]:
    if not torch.backends.mkldnn.is_available():
        return set()
    found = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        found.add(torch.float16)
    return found


def _plain(layer: nn.Linear) -> bool:
    whole = type(layer.weight.data) is Tensor and layer.weight.device.type == "cpu"
    return whole and not (layer._forward_hooks or layer._forward_pre_hooks or "_hf_hook" in vars(layer))
