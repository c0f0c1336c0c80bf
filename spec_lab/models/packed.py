"""Linear layers on a CPU with weights in the layout that oneDNN's kernels read.

``torch.nn.functional.linear`` gets its weights row by row. For the few rows of a decoding step its kernels then read
memory at half the speed or less of those that read weights laid out for them once. The results agree up to rounding. It
is what torch's own compiler does with frozen weights (``torch._inductor.fx_passes.mkldnn_fusion``).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

READ = {"dt_proj"}
"""Names of linear layers whose weights the model's code reads itself: that of Mamba's mixers does."""
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
                "a packed linear layer has no gradients: call the model in torch.inference_mode(), or use "
                "packed.dense_copy"
            )
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def pack(module: nn.Module) -> int:
    """Pack the linear layers of a module in place; return how many.

    Left as they are: layers on other devices or split over ranks, of a dtype for which oneDNN has no kernels here, with
    hooks or another forward, those that are not plain ``nn.Linear`` (such as quantized ones), and those of ``READ``. A
    weight that is tied to an embedding is copied, since the embedding still reads its rows.
    """
    dtypes = packed_dtypes()

    def packed(layer: nn.Module) -> PackedLinear | None:
        return PackedLinear(layer) if type(layer) is nn.Linear and _plain(layer, dtypes) else None

    return _replace(module, packed)


def unpack(module: nn.Module) -> int:
    """Undo ``pack`` in place, for models whose code reads the weights of linear layers itself; return how many."""
    return _replace(module, lambda layer: dense_copy(layer) if isinstance(layer, PackedLinear) else None)


def _replace(module: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace layers by others, wherever they are shared; return how many. No more than one is held twice at a time."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, layer in parent._modules.items():
            if layer is not None and name not in READ:
                places.setdefault(id(layer), []).append((parent, name))
    changed = 0
    for shared in places.values():
        made = other(shared[0][0]._modules[shared[0][1]])  # type: ignore[arg-type]
        if made is not None:
            for parent, name in shared:
                setattr(parent, name, made)
            changed += 1
    return changed


def linear_of(weight: Tensor, bias: Tensor) -> nn.Module:
    """A layer of a weight ``[out, in]`` and a bias ``[out]``, packed where that is possible."""
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = (nn.Parameter(tensor, requires_grad=False) for tensor in (weight, bias))
    return PackedLinear(made) if _plain(made, packed_dtypes()) else made


def dense_copy(layer: nn.Module) -> nn.Module:
    """A copy of a layer, of a packed one as a plain linear layer. It shares no weights."""
    if not isinstance(layer, PackedLinear):
        return deepcopy(layer)
    weight = layer.weight.to_dense().clone()
    made = nn.Linear(weight.shape[1], weight.shape[0], layer.bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    return made


def packed_dtypes() -> set[torch.dtype]:
    """Return the dtypes for which oneDNN has kernels here."""
    if not torch.backends.mkldnn.is_available():
        return set()
    dtypes = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        dtypes.add(torch.float16)
    return dtypes


def _plain(layer: nn.Linear, dtypes: set[torch.dtype]) -> bool:
    weight = layer.weight
    whole = weight.dtype in dtypes and type(weight.data) is Tensor and weight.device.type == "cpu"
    return whole and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
