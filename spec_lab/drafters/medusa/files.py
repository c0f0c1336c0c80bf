"""Files of Medusa heads: this package's layout, that of Medusa's authors, and vLLM's.

A folder holds ``config.json`` and weights in safetensors; both are untrusted input (``models.checkpoint``). The names
of the tensors tell the layout. K heads, L layers, H hidden size, V vocabulary, W width of a trunk, D drafted tokens:

- This package's: ``weight [K, L, H, H]``, ``bias [K, L, H]``, and the target's LM head; of a trunk (``medusa.network``)
  ``trunk_in.weight [W, 2H]``, ``trunk_in.bias [W]``, ``trunk_out.weight [H, W]`` and ``trunk_out.bias [H]``. The config
  has hidden_size, vocab_size, num_heads, num_layers, shared_lm_head, target_sha256 and, with a trunk, trunk_size.
  With draft_vocab_size, ``token_map [D]`` holds the tokens that are drafted, by those rows of the target's LM head.
- FasterDecoding's, in ``model.safetensors`` or ``medusa_lm_head.safetensors``: ``{k}.{l}.linear.weight [H, H]``,
  ``{k}.{l}.linear.bias [H]`` and an LM head for each head, ``{k}.{L}.weight [V, H]``. Configs of the heads for Vicuna
  state two heads where the files hold five, so the tensors are counted.
- vLLM's: ``blocks.{k}.layers.{l}.weight [H, H]``, with biases where the file has them, ``lm_heads.{k}.weight [D, H]``
  (with ``original_lm_head`` one for all heads) and, where D < V, ``token_map [D]``: the target's token of each row.
  Rows of all V tokens are reduced to those of the map.

Fields of a config that are not known are refused by name (``OWN_FIELDS``, ``PUBLISHED``).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.files import read_text
from spec_lab.core.options import brief
from spec_lab.drafters.config_fields import Fields
from spec_lab.drafters.drafter_files import DrafterFiles
from spec_lab.drafters.layer_conventions import settle_last_state
from spec_lab.drafters.layouts import Entry, Layout, Tensors, misfits
from spec_lab.drafters.medusa.network import Heads, OwnLMHeads, Trunk
from spec_lab.models.checkpoint import refuse_misfits, weights_hash
from spec_lab.models.target import Target

log = logging.getLogger(__name__)

MEDUSA = Layout("Medusa", (
    Entry("{k}.{l}.linear.weight", "weight.{k}.{l}", "H H"),
    Entry("{k}.{l}.linear.bias", "bias.{k}.{l}", "H"),
    Entry("{k}.{L}.weight", "lm_heads.{k}", "V H"),
))  # fmt: skip
"""The layout of Medusa's authors."""
HEADS = (Entry("weight", "weight", "K L H H"), Entry("bias", "bias", "K L H"))
TRUNK = (
    Entry("trunk_in.weight", "trunk.0", "W 2H"), Entry("trunk_in.bias", "trunk.1", "W"),
    Entry("trunk_out.weight", "trunk.2", "H W"), Entry("trunk_out.bias", "trunk.3", "H"),
)  # fmt: skip
TOKEN_MAP = Entry("token_map", "", "D")
OWN_FIELDS = Fields(
    "Medusa heads in this package's layout",
    {
        "hidden_size",
        "vocab_size",
        "num_heads",
        "num_layers",
        "trunk_size",
        "shared_lm_head",
        "target_sha256",
        "draft_vocab_size",
    },
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


def vllm_layout(shared: bool, bias: bool) -> Layout:
    """The table of vLLM's heads: with one LM head for all if it is ``shared``, and with or without biases."""
    lm_head = Entry("lm_head.weight|lm_heads.0.weight", "lm_heads.0", "V H")
    return Layout("Medusa", (
        Entry("blocks.{k}.layers.{l}.weight", "weight.{k}.{l}", "H H"),
        *((Entry("blocks.{k}.layers.{l}.bias", "bias.{k}.{l}", "H"),) if bias else ()),
        lm_head if shared else Entry("lm_heads.{k}.weight", "lm_heads.{k}", "V H"),
        Entry("token_map", "", "?D"),
    ))  # fmt: skip


def read_medusa(path: str, target: Target, options: Mapping[str, Any] | None = None) -> Heads:
    """Read heads for a target, into its dtype and onto its device.

    Args:
        options: by convention, how it is read (``DrafterFiles``).

    Raises:
        OSError: a file is missing, truncated or corrupt.
        ValueError: the folder holds no Medusa heads; a setting or tensor is missing, surplus or malformed; the heads
            are for another hidden size or vocabulary; a weight is NaN or infinite.
    """
    with DrafterFiles.open(path, "Medusa heads", target, options=options) as files:
        if {"weight", "bias", "trunk_in.weight"} & files.held.keys():
            OWN_FIELDS.check(files.file, files.config)
            heads = _read_own(files)
            return replace(heads, sha256=_hash(files.folder), reading=files.reading)
        PUBLISHED.check(files.file, files.config)
        layout = vllm_layout(files.flag("original_lm_head"), any(name.endswith(".bias") for name in files.held))
        if any(MEDUSA.network_name(name) for name in files.held):
            layout = MEDUSA
        wanted = layout.of_file(files.shapes)
        known = wanted.sizes["K"] > 0
        files.expect(known, "0.0.linear.weight (of Medusa's authors) or blocks.0.layers.0.weight (of vLLM)")
        heads = _read_published(files, wanted)
        return replace(heads, sha256=_hash(files.folder), reading=files.reading)


def _read_own(files: DrafterFiles) -> Heads:
    """Heads in this package's layout. Errors as in ``read_medusa``."""
    sizes = {"K": files.whole("num_heads"), "L": files.whole("num_layers", minimum=0), "H": files.whole("hidden_size")}
    sizes["W"] = files.whole("trunk_size", 0, minimum=0)
    files.check_target(sizes["H"], files.whole("vocab_size"))
    if files.config.get("shared_lm_head", True) is not True:
        raise ValueError(
            f"{files.file}: shared_lm_head is not true, but the tensors are those of heads that share the target's LM "
            "head"
        )
    trained_on, target = files.config.get("target_sha256", ""), files.target
    if trained_on and target.sha256 and trained_on not in (target.sha256, target.source_sha256):
        log.warning(
            "the Medusa heads at %s were trained on other weights than %s: the output distribution is still the "
            "target's, but fewer tokens will be accepted", files.folder, target.name,
        )  # fmt: skip
    sizes["D"] = files.whole("draft_vocab_size", 0, minimum=0)
    more = (*(TRUNK if sizes["W"] else ()), *((TOKEN_MAP,) if sizes["D"] else ()))
    wanted = Layout("Medusa", HEADS + more).of_file(files.shapes, **sizes)
    refuse_misfits(files.folder, misfits(wanted.shapes, files.shapes))
    lm = target.lm
    weight, bias, *trunk = (files.tensor(name, lm.dtype).to(lm.device) for name in wanted.shapes if name != "token_map")
    services = target.services
    mixing = Trunk((trunk[0], trunk[1]), (trunk[2], trunk[3]), services.embed) if trunk else None
    heads = Heads(weight, bias, services.lm_head, mixing)
    tokens = _token_map(files, sizes["D"])
    return heads if tokens is None else heads.trimmed(tokens.cpu(), target)


def _read_published(files: DrafterFiles, wanted: Tensors) -> Heads:
    """Heads with LM heads of their own. Errors as in ``read_medusa``."""
    refuse_misfits(files.folder, misfits(wanted.shapes, files.shapes))
    heads, layers, h, rows = (wanted.sizes[letter] for letter in "KLHV")
    for name, held, what in (
        ("medusa_num_layers", layers, "layers of a head"), ("num_hidden_layers", layers, "layers of a head"),
        ("num_heads", heads, "heads"),
    ):  # fmt: skip
        if name in files.config and (stated := files.whole(name, minimum=0)) != held:
            raise ValueError(
                f"{files.file}: {name} is {stated}, but the weight files hold {held} {what}: it is the config of other "
                "heads"
            )
    biases = any(name.startswith("bias.") for name in wanted.names)
    if files.flag("medusa_fc_bias") and layers and not biases:
        raise ValueError(f"{files.folder} holds no biases of its layers, but config.json has medusa_fc_bias")
    tokens = _token_map(files, rows)
    v = files.target.vocabulary if rows == wanted.sizes.get("D") else rows
    files.check_target(h, v)
    files.check_target(files.whole("hidden_size", h), files.whole("vocab_size", v))
    lm = files.target.lm
    weight = torch.empty(heads, layers, h, h, device=lm.device, dtype=lm.dtype)
    bias = torch.zeros(heads, layers, h, device=lm.device, dtype=lm.dtype)
    count = sum(name.startswith("lm_heads.") for name in wanted.names)
    lm_heads = torch.empty(count, rows if tokens is None else len(tokens), h, device=lm.device, dtype=lm.dtype)
    parts = {"weight": weight, "bias": bias, "lm_heads": lm_heads}
    for key, (name, *_) in wanted.names.items():
        part, *index = key.split(".")
        if part in parts:
            tensor = files.tensor(name, lm.dtype)
            whole = part != "lm_heads" or len(tensor) == lm_heads.shape[1]
            parts[part][tuple(map(int, index))] = tensor if whole else tensor[tokens]
    taps = settle_last_state(files, "Medusa's heads read the state after the final norm")
    ends = {"the target's": "target"} if tokens is None else {}
    read = OwnLMHeads(lm_heads.expand(heads, -1, -1), files.target.vocabulary, tokens)
    if files.choose("lm_head", "own", "file", "the files hold LM heads", ends) == "target":
        return Heads(weight, bias, files.target.services.lm_head, taps=taps)
    return Heads(weight, bias, read, taps=taps)


def _token_map(files: DrafterFiles, rows: int) -> Tensor | None:  # [D]
    """The target's tokens that vLLM's heads draft; None for all."""
    stated = files.config.get("truncated_vocab_size")
    if "token_map" not in files.held:
        if stated is not None and stated != rows:
            raise ValueError(
                f"{files.file}: truncated_vocab_size is {brief(stated)}, but no token_map states which tokens the rows "
                "of the LM heads are"
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
            f"{files.file}: truncated_vocab_size is {brief(stated)}, but token_map has {len(tokens)} tokens"
        )
    return tokens.long().to(files.target.lm.device) if len(tokens) < v else None  # vLLM ignores a map of all tokens


def _hash(folder: Path) -> str:
    """Return ``Heads.sha256`` of a folder."""
    weights, calibrations = weights_hash(str(folder)), sorted(folder.glob("calibration*.json"))
    digest = hashlib.sha256(weights.encode())
    for file in calibrations:
        digest.update(file.name.encode() + read_text(file).encode())
    return digest.hexdigest() if calibrations else weights
