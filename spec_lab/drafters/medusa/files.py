"""Files of Medusa heads: this package's layout, that of Medusa's authors, and vLLM's.

A folder holds ``config.json`` and weights in safetensors; both are untrusted input (``models.checkpoint``). The names
of the tensors tell the layout. K heads, L layers, H hidden size, V vocabulary, W width of a trunk, D drafted tokens:

- This package's: ``weight [K, L, H, H]``, ``bias [K, L, H]``, and the target's LM head; of a trunk (``medusa.network``)
  ``trunk_in.weight [W, 2H]``, ``trunk_in.bias [W]``, ``trunk_out.weight [H, W]`` and ``trunk_out.bias [H]``. The config
  has hidden_size, vocab_size, num_heads, num_layers, shared_lm_head, target_sha256 and, with a trunk, trunk_size.
- FasterDecoding's: ``{k}.{l}.linear.weight [H, H]``, ``{k}.{l}.linear.bias [H]`` and an LM head for each head,
  ``{k}.{L}.weight [V, H]``. Configs of the heads for Vicuna state two heads where the files hold five, so the tensors
  are counted.
- vLLM's: ``blocks.{k}.layers.{l}.weight [H, H]``, with biases where the file has them, ``lm_heads.{k}.weight [D, H]``
  (with ``original_lm_head`` one for all heads) and, where D < V, ``token_map [D]``: the target's token of each row.
  Rows of all V tokens are reduced to those of the map.

Fields of a config that are not known are refused by name (``OWN_FIELDS``, ``PUBLISHED``).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.options import brief
from spec_lab.drafters.drafter_files import Fields, flag, misfits, read_weight, refuse
from spec_lab.drafters.drafter_layouts import INDEX, MEDUSA, MedusaLayout, Shapes, matrix, medusa_layout
from spec_lab.models.checkpoint import open_weights, read_drafter_config, weight_files
from spec_lab.models.target import Target

log = logging.getLogger(__name__)

VLLM = re.compile(
    rf"(?:blocks\.{INDEX}\.layers\.{INDEX}\.(weight|bias)|lm_heads\.{INDEX}\.weight|lm_head\.weight|token_map)"
)
OWN = re.compile(r"weight|bias|trunk.*")
OWN_FIELDS = Fields(
    "Medusa heads in this package's layout",
    {"hidden_size", "vocab_size", "num_heads", "num_layers", "trunk_size", "shared_lm_head", "target_sha256"},
)
PUBLISHED = Fields(
    "Medusa heads",
    {
        "hidden_size", "vocab_size", "medusa_num_layers", "num_heads", "num_hidden_layers", "medusa_fc_bias",
        "original_lm_head", "truncated_vocab_size",
    },
    {"logit_scale": ((1.0,), "logits that are scaled are not supported")},
    {
        "medusa_num_heads": "published configs state it wrongly, so heads are counted",
        "model_type": "the names of the tensors tell the layout",
        **dict.fromkeys(("max_paths", "topk", "max_seq_len"), "proposer.tree states the tree"),
    },
)  # fmt: skip
"""Fields of the layouts of Medusa's authors and of vLLM."""


@dataclass(frozen=True, eq=False)
class MedusaWeights:
    """Heads that were read.

    Args:
        weight: ``[K, L, H, H]``; bias: ``[K, L, H]``.
        lm_heads: of the heads' own, ``[K, D, H]``; None: they share the target's.
        tokens: ``[D]`` the target's token of each row of ``lm_heads``; None: row i is token i.
        trunk: weight and bias of its inner and its outer layer; empty without one.
    """

    weight: Tensor
    bias: Tensor
    lm_heads: Tensor | None = None
    tokens: Tensor | None = None
    trunk: tuple[Tensor, ...] = ()


def _vllm_layout(held: Shapes, shared: bool) -> MedusaLayout:
    """The layout of heads in vLLM's form, which all have one LM head if it is ``shared``.

    Raises:
        ValueError: there is no LM head.
    """
    found = [match for name in held if (match := VLLM.fullmatch(name))]
    heads = len({match[1] or match[4] for match in found} - {None})
    layers = len({match[2] for match in found} - {None})
    bias = "blocks.{k}.layers.{l}.bias" if any(match[3] == "bias" for match in found) else None
    lm_head = "lm_heads.{k}.weight"
    if shared:
        lm_head = "lm_head.weight" if "lm_head.weight" in held else "lm_heads.0.weight"
    rows, hidden = matrix(held, lm_head.format(k=0))
    mapped = math.prod(held["token_map"]) if "token_map" in held else None
    return MedusaLayout(heads, layers, hidden, rows, "blocks.{k}.layers.{l}.weight", bias, lm_head, mapped)


def read_medusa(path: str, target: Target) -> MedusaWeights:
    """Read heads for a target, into its dtype and onto its device.

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no Medusa heads; a setting or tensor is missing, surplus or malformed; the heads
            are for another hidden size or vocabulary; a weight is NaN or infinite.
    """
    folder, config = read_drafter_config(path, "Medusa heads")
    with open_weights(weight_files(folder)) as held:
        files = _Files(folder, config, target, held, {name: tuple(one.get_shape()) for name, one in held.items()})
        if any(OWN.fullmatch(name) for name in held):
            OWN_FIELDS.check(folder / "config.json", config)
            return _read_own(files)
        PUBLISHED.check(folder / "config.json", config)
        shared = files.flag("original_lm_head")
        try:
            if any(MEDUSA.fullmatch(name) for name in held):
                layout = medusa_layout(files.shapes)
            elif any(VLLM.fullmatch(name) for name in held):
                layout = _vllm_layout(files.shapes, shared)
            else:
                some = brief(", ".join(sorted(held)[:5]))
                raise ValueError(
                    "Medusa's authors name the tensors of heads 0.0.linear.weight, vLLM blocks.0.layers.0.weight, but "
                    f"here they are {some}"
                )
        except ValueError as error:
            raise ValueError(f"{folder} holds no Medusa heads of a known layout: {error}") from None
        return _read_published(files, layout)


@dataclass(frozen=True, eq=False)
class _Files:
    """A folder that is being read.

    Args:
        config: its config.json.
        held: its tensors, not yet read; shapes: theirs.
    """

    folder: Path
    config: Mapping[str, Any]
    target: Target
    held: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def flag(self, name: str) -> bool:
        """The value of a flag of the config, false if it is missing."""
        return flag(self.folder / "config.json", self.config, name)

    def size(self, name: str, least: int = 1, default: int | None = None) -> int:
        """A size in the config; one that is missing and has no default is an error."""
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "positive whole number" if least else "whole number, 0 for none"
            raise ValueError(f"{self.folder / 'config.json'}: {name} must be a {kind}, not {brief(value)}")
        return value

    def check_target(self, hidden: int, vocabulary: int) -> None:
        """Refuse heads for another target."""
        target = self.target
        if hidden != target.services.hidden_size:
            raise ValueError(
                f"the Medusa heads at {self.folder} are for hidden size {hidden}, the target {target.name} has hidden "
                f"size {target.services.hidden_size}"
            )
        if vocabulary != target.vocabulary:
            raise ValueError(
                f"the Medusa heads at {self.folder} are for a vocabulary of {vocabulary} tokens, the target "
                f"{target.name} has {target.vocabulary}"
            )

    def check_count(self, name: str, stated: int, held: int, what: str = "heads") -> None:
        """Refuse a config that states another number of heads, or of layers, than the files hold."""
        if stated != held:
            raise ValueError(
                f"{self.folder / 'config.json'}: {name} is {stated}, but the weight files hold {held} {what}: it is "
                "the config of other heads"
            )

    def check_shapes(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse missing, misshapen and surplus tensors."""
        refuse(self.folder, misfits(wanted, self.shapes))

    def tensor(self, name: str) -> Tensor:
        """A tensor in the target's dtype and on its device."""
        lm = self.target.lm
        return read_weight(self.folder, self.held, name, lm.dtype).to(lm.device)


def _read_own(files: _Files) -> MedusaWeights:
    """Heads in this package's layout. Errors as of ``read_medusa``."""
    heads, layers, h = files.size("num_heads"), files.size("num_layers", 0), files.size("hidden_size")
    width = files.size("trunk_size", 0, 0)
    files.check_target(h, files.size("vocab_size"))
    if files.config.get("shared_lm_head", True) is not True:
        raise ValueError(
            f"{files.folder / 'config.json'}: shared_lm_head is not true, but the tensors are those of heads that "
            "share the target's LM head"
        )
    trained_on, target = files.config.get("target_sha256", ""), files.target
    if trained_on and target.sha256 and trained_on not in (target.sha256, target.source_sha256):
        log.warning(
            "the Medusa heads at %s were trained on other weights than %s: the output distribution is still the "
            "target's, but fewer tokens will be accepted", files.folder, target.name,
        )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"weight": (heads, layers, h, h), "bias": (heads, layers, h)}
    if width:
        shapes |= {"trunk_in.weight": (width, 2 * h), "trunk_in.bias": (width,)}
        shapes |= {"trunk_out.weight": (h, width), "trunk_out.bias": (h,)}
    elif any(name.startswith("trunk") for name in files.shapes):
        raise ValueError(f"{files.folder} holds a trunk, but config.json has no trunk_size")
    if len(held := files.shapes.get("weight", ())) == 4:
        files.check_count("num_heads", heads, held[0])
        files.check_count("num_layers", layers, held[1], "layers of a head")
    files.check_shapes(shapes)
    weight, bias, *trunk = map(files.tensor, shapes)
    return MedusaWeights(weight, bias, trunk=tuple(trunk))


def _read_published(files: _Files, layout: MedusaLayout) -> MedusaWeights:
    """Heads with LM heads of their own. Errors as of ``read_medusa``."""
    files.check_shapes(layout.shapes())
    for name in ("medusa_num_layers", "num_hidden_layers"):
        if name in files.config:
            files.check_count(name, files.size(name, 0), layout.layers, "layers of a head")
    if "num_heads" in files.config:
        files.check_count("num_heads", files.size("num_heads"), layout.heads)
    if files.flag("medusa_fc_bias") and layout.layers and layout.bias is None:
        raise ValueError(f"{files.folder} holds no biases of its layers, but config.json has medusa_fc_bias")
    tokens = _token_map(files, layout)
    v = files.target.vocabulary if layout.rows == layout.mapped else layout.rows
    files.check_target(layout.hidden, v)
    files.check_target(files.size("hidden_size", default=layout.hidden), files.size("vocab_size", default=v))
    lm, (k, h) = files.target.lm, (layout.heads, layout.hidden)
    weight = torch.empty(k, layout.layers, h, h, device=lm.device, dtype=lm.dtype)
    bias = torch.zeros(k, layout.layers, h, device=lm.device, dtype=lm.dtype)
    for head, layer in product(range(k), range(layout.layers)):
        weight[head, layer] = files.tensor(layout.weight.format(k=head, l=layer))
        if layout.bias:
            bias[head, layer] = files.tensor(layout.bias.format(k=head, l=layer))
    names = list(dict.fromkeys(layout.lm_head.format(k=head) for head in range(k)))
    rows = layout.rows if tokens is None else len(tokens)
    lm_heads = torch.empty(len(names), rows, h, device=lm.device, dtype=lm.dtype)
    for number, name in enumerate(names):
        one = files.tensor(name)
        lm_heads[number] = one if len(one) == rows else one[tokens]
    return MedusaWeights(weight, bias, lm_heads.expand(k, -1, -1), tokens)


def _token_map(files: _Files, layout: MedusaLayout) -> Tensor | None:  # [D]
    """The target's tokens that vLLM's heads draft; None for all."""
    stated = files.config.get("truncated_vocab_size")
    if layout.mapped is None:
        if stated is not None and stated != layout.rows:
            raise ValueError(
                f"{files.folder / 'config.json'}: truncated_vocab_size is {brief(stated)}, but no token_map states "
                "which tokens the rows of the LM heads are"
            )
        return None
    tokens: Tensor = files.held["token_map"][:]
    v = files.target.vocabulary
    whole = tokens.dtype in (torch.int64, torch.int32) and len(tokens)
    if not whole or int(tokens.min()) < 0 or int(tokens.max()) >= v or len(tokens.unique()) != len(tokens):
        raise ValueError(
            f"{files.folder}: token_map must hold different tokens of the target {files.target.name}, numbers from 0 "
            f"to {v - 1}"
        )
    if stated not in (None, len(tokens)):
        raise ValueError(
            f"{files.folder / 'config.json'}: truncated_vocab_size is {brief(stated)}, but token_map has {len(tokens)} "
            "tokens"
        )
    return tokens.long().to(files.target.lm.device) if len(tokens) < v else None  # vLLM ignores a map of all tokens
