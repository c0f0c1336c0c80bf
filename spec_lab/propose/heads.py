"""Medusa heads: residual layers on the target's hidden state, followed by the target's LM head.

Source: Medusa (2401.10774, section 2.1.1). The paper's heads do not read the pending token, although it is known when
they draft. A trunk, if the folder holds one, adds the token's embedding to the state before all heads, as Hydra
(2402.05109) and the first step of DeepSeek-V3's multi-token prediction (2412.19437, section 2.2) do. The heads remain
independent of each other, and the tree static.

A folder of heads holds ``config.json`` (hidden_size, vocab_size, num_heads, num_layers, shared_lm_head, target_sha256,
trunk_size if there is a trunk) and ``model.safetensors`` (``weight [K, L, H, H]``, ``bias [K, L, H]``; of the trunk
``trunk_in.weight [W, 2H]``, ``trunk_in.bias [W]``, ``trunk_out.weight [H, W]``, ``trunk_out.bias [H]``). Letters: K
heads, L layers, H hidden size, V vocabulary, W width of the trunk, B sequences.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as File
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear, silu

from spec_lab.core import files
from spec_lab.core.options import brief
from spec_lab.models.checkpoint import one_line, weights_hash
from spec_lab.models.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Trunk:
    """Combines a state h with the embedding e of the next token: ``h + W2 silu(W1 [h; e] + b1) + b2``.

    Args:
        inner: W1 ``[W, 2H]`` and b1 ``[W]``; outer: W2 ``[H, W]`` and b2 ``[H]``.
        embed: the target's embedding, ``[B] -> [B, H]``.
    """

    inner: tuple[Tensor, Tensor]
    outer: tuple[Tensor, Tensor]
    embed: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor, token: Tensor) -> Tensor:
        """States ``[B, H]`` and tokens ``[B]`` -> ``[B, H]``."""
        both = torch.cat([hidden, self.embed(token)], -1)
        return hidden + linear(silu(linear(both, *self.inner)), *self.outer)


@dataclass(frozen=True, eq=False)
class Heads:
    """K heads that share the target's LM head. Head k predicts the token k + 1 places after the target's own choice.

    Args:
        weight: ``[K, L, H, H]``, ``bias``: ``[K, L, H]``.
        lm_head: the target's, ``[n, H] -> [n, V]``.
        trunk: before all heads; None for the paper's heads, which read the state alone.
        sha256: of the weight file and of every calibration*.json of the folder, which determine calibrated trees.
    """

    weight: Tensor
    bias: Tensor
    lm_head: Callable[[Tensor], Tensor]
    trunk: Trunk | None = None
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.weight)

    @staticmethod
    def random(target: Target, count: int, trunk: bool, seed: int = 0) -> Heads:
        """Return ``count`` heads of one layer with random weights, in the target's sizes."""
        generator = torch.Generator().manual_seed(seed)
        h = target.services.hidden_size

        def weights(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(target.lm.device, target.lm.dtype)

        inner, outer = (weights(2 * h, 2 * h), weights(2 * h)), (weights(h, 2 * h), weights(h))
        mixing = Trunk(inner, outer, target.services.embed) if trunk else None
        return Heads(weights(count, 1, h, h), weights(count, 1, h), target.services.lm_head, mixing)

    def first(self, count: int) -> Heads:
        """Return the first ``count`` heads."""
        return Heads(self.weight[:count], self.bias[:count], self.lm_head, self.trunk, self.sha256)

    def __call__(self, hidden: Tensor, token: Tensor) -> Tensor:
        """Return logits ``[B, K, V]``: x + silu(W x + b) for each layer, then the LM head.

        The first layer has one input for all heads and runs as one stacked matrix. (4 heads of 512 and a vocabulary of
        4096 in bfloat16, one state, two CPU cores: 0.22 ms in all; 0.30 head by head; with ``baddbmm`` within 2 %.)

        Args:
            hidden: ``[B, H]`` hidden states.
            token: ``[B]`` the tokens after them; only a trunk reads these.
        """
        count, layers, width, _ = self.weight.shape
        batch = len(hidden)
        if self.trunk is not None:
            hidden = self.trunk(hidden, token)
        x = hidden[:, None].expand(batch, count, width)
        if layers:
            x = x + silu(linear(hidden, *self._stacked)).view(batch, count, width)
        for weight, bias in self._later:
            inner = torch.baddbmm(bias, x.transpose(0, 1), weight.transpose(1, 2))  # [K, B, H]
            x = x + silu(inner).transpose(0, 1)
        return self.lm_head(x.reshape(batch * count, width)).view(batch, count, -1).to(hidden.device)

    @cached_property
    def _stacked(self) -> tuple[Tensor, Tensor]:  # [K * H, H], [K * H]
        """The heads' first layers as one matrix and one bias."""
        return self.weight[:, 0].flatten(0, 1).contiguous(), self.bias[:, 0].flatten().contiguous()

    @cached_property
    def _later(self) -> list[tuple[Tensor, Tensor]]:
        """Each later layer, ``[K, H, H]`` and ``[K, 1, H]``, in contiguous memory.

        (As slices of ``weight`` they cost four times as much: 0.93 against 0.24 ms for 5 heads of 512 in bfloat16.)
        """
        layers = range(1, self.weight.shape[1])
        return [(self.weight[:, layer].contiguous(), self.bias[:, layer, None].contiguous()) for layer in layers]

    @staticmethod
    def read(path: str, target: Target) -> Heads:
        """Read heads from a folder, into the target's dtype and onto its device.

        Raises:
            OSError: a file is missing.
            ValueError: the heads are for another hidden size or vocabulary, a setting or tensor is malformed or
                missing, or a weight is NaN or infinite.
        """
        if not isinstance(path, str) or not path:
            raise ValueError(f"path must name a folder of Medusa heads, not {path!r}")
        folder = File(path)
        config = read_json(folder / "config.json", "Medusa heads")
        sizes = {name: config.get(name) for name in ("hidden_size", "vocab_size", "num_heads", "num_layers")}
        sizes["trunk_size"] = config.get("trunk_size", 0)
        for name, size in sizes.items():
            least = name not in ("num_layers", "trunk_size")
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                kind = "positive whole number" if least else "whole number, 0 for none"
                raise ValueError(f"{folder / 'config.json'}: {name} must be a {kind}, not {brief(size)}")
        vocabulary, hidden = target.vocabulary, target.services.hidden_size
        if sizes["hidden_size"] != hidden:
            raise ValueError(
                f"the Medusa heads at {path} are for hidden size {sizes['hidden_size']}, "
                f"the target {target.name} has hidden size {hidden}"
            )
        if sizes["vocab_size"] != vocabulary:
            raise ValueError(
                f"the Medusa heads at {path} are for a vocabulary of {sizes['vocab_size']} tokens, "
                f"the target {target.name} has {vocabulary}"
            )
        if config.get("shared_lm_head", True) is not True:
            raise ValueError(
                f"the Medusa heads at {path} have LM heads of their own (shared_lm_head is not true), which are not "
                "supported: use heads that share the target's"
            )
        trained_on = config.get("target_sha256", "")
        if trained_on and target.sha256 and trained_on not in (target.sha256, target.source_sha256):
            log.warning(
                "the Medusa heads at %s were trained on other weights than %s: the output distribution is still the "
                "target's, but fewer tokens will be accepted", path, target.name,
            )  # fmt: skip
        file = folder / "model.safetensors"
        if not file.is_file():
            raise OSError(f"no Medusa heads at {path}: model.safetensors is missing")
        count, layers = sizes["num_heads"], sizes["num_layers"]
        shapes: dict[str, tuple[Any, ...]] = {
            "weight": (count, layers, hidden, hidden),
            "bias": (count, layers, hidden),
        }
        if width := sizes["trunk_size"]:
            shapes |= {"trunk_in.weight": (width, 2 * hidden), "trunk_in.bias": (width,)}
            shapes |= {"trunk_out.weight": (hidden, width), "trunk_out.bias": (hidden,)}
        try:
            with safe_open(file, framework="pt") as opened:
                _check_shapes(file, {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}, shapes)  # noqa: SIM118
                tensors = {name: opened.get_tensor(name) for name in shapes}
        except SafetensorError as error:
            raise ValueError(
                f"{file} cannot be read ({one_line(error)}): truncated or corrupt; copy or download it again"
            ) from error
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{file}: '{name}' holds NaN or infinite values")
        weight, bias, *trunk = (tensors[name].to(target.lm.device, target.lm.dtype) for name in shapes)
        mixing = Trunk((trunk[0], trunk[1]), (trunk[2], trunk[3]), target.services.embed) if trunk else None
        return Heads(weight, bias, target.services.lm_head, mixing, _hash(folder))


def _check_shapes(file: File, held: dict[str, tuple[Any, ...]], wanted: dict[str, tuple[Any, ...]]) -> None:
    """Compare the tensors of a weight file with those that ``config.json`` describes.

    Raises:
        ValueError: a tensor is missing, has another shape, or is unknown.
    """
    if "trunk_in.weight" not in wanted and any(name.startswith("trunk") for name in held):
        raise ValueError(f"{file} holds a trunk, but config.json has no trunk_size")
    for name, shape in wanted.items():
        if name not in held:
            raise ValueError(f"{file} holds no tensor '{name}' (it holds: {', '.join(sorted(held))[:300] or 'none'})")
        if held[name] != shape:
            raise ValueError(f"{file}: '{name}' has shape {held[name]}, but config.json describes {shape}")
    if more := sorted(held.keys() - wanted.keys()):
        raise ValueError(f"{file}: {brief(more[0])} is not a tensor of heads as config.json describes them")


def _hash(folder: File) -> str:
    """Return ``Heads.sha256`` of a folder."""
    weights, calibrations = weights_hash(str(folder)), sorted(folder.glob("calibration*.json"))
    digest = hashlib.sha256(weights.encode())
    for file in calibrations:
        digest.update(file.name.encode() + files.read_text(file).encode())
    return digest.hexdigest() if calibrations else weights


def read_json(file: File, what: str) -> dict[str, Any]:
    """Return the JSON object in ``file``, within the limits of ``files.read_json``.

    Raises:
        OSError: there is no such file.
        ValueError: it holds no JSON object.
    """
    value = files.read_json(file)
    if value is None:
        where = "" if file.parent.is_dir() else ", as is the folder"
        raise OSError(f"no {what} at {file.parent}: {file.name} is missing{where}")
    return value
